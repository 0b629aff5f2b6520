"""What the C library does with freed memory, and how to make it keep or give back what a phase of training needs.

glibc serves tensors of up to 32 MB from its heap. It gives the heap's free end back to the system whenever that grows,
and gets it again for the next layer: up to a tenth of a forward pass was page faults. And what it doesn't give back it
keeps for tensors of the sizes that were, where the phases of an iteration have tensors of other sizes: each phase's
heap would stay beside the next one's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc takes, and where its own adjustment ends
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes the heap of this process (glibc) keep what is freed, until `return_freed_memory`."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Gives the memory that this process has freed back to the system, where that takes asking (glibc)."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@contextlib.contextmanager
def gradients_before_graphs(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters that get a gradient inside have its memory from the start; the others have none afterwards either.

    A gradient that is made during a backward pass lies among activations, and stays there when they are freed: the next
    graph finds holes, and takes a third more memory. For few parameters, whose gradients are small.
    """
    made = {p: torch.zeros_like(p) for p in parameters if p.requires_grad and p.grad is None}
    fresh = {p: grad._version for p, grad in made.items()}
    for p, grad in made.items():
        p.grad = grad
    del made
    try:
        yield
    finally:
        for p, version in fresh.items():
            if p.grad is not None and p.grad._version == version:  # nothing was added to it
                p.grad = None


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None  # musl has none
