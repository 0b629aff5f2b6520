"""Triton kernels, one file per family. Installed and imported only as ``ppo_fast.kernels``."""
