"""The kernels of ppo_fast.kernels, and something else in their place where a test looks at how they are launched."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import triton

import ppo_fast.kernels

MODULES = [
    importlib.import_module(f"ppo_fast.kernels.{module.name}")
    for module in pkgutil.iter_modules(ppo_fast.kernels.__path__)
]


def replace_kernels(patch: pytest.MonkeyPatch, by: Callable[[str, Any], object]) -> None:
    """Put ``by(name, kernel)`` in the place of every kernel, in every module that launches it."""
    for module in MODULES:
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.KernelInterface) and name.endswith("kernel"):
                patch.setattr(module, name, by(name.strip("_"), kernel))
