"""Named ranges around every phase and op, seen by torch.profiler and, on CUDA, by NVIDIA's tools."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


@functools.cache
def _nvtx() -> tuple[Callable[[str], Any], Callable[[], Any]] | None:
    """How to push and pop an NVTX range, or None on a machine where no NVIDIA tool could read it."""
    if not torch.cuda.is_available():
        return None
    try:
        import nvtx
    except ImportError:
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    return nvtx.push_range, nvtx.pop_range


@contextlib.contextmanager
def _annotated(name: str) -> Iterator[None]:
    nvtx = _nvtx()
    with torch.profiler.record_function(name):
        if nvtx is None:
            yield
            return
        push, pop = nvtx
        push(name)
        try:
            yield
        finally:
            pop()


def annotate(name: str) -> contextlib.AbstractContextManager[None]:
    """Mark the enclosed work as ``name``, e.g. ``ppo_fast/rollout`` or ``ppo_fast::gae``. Nothing while compiling."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _annotated(name)
