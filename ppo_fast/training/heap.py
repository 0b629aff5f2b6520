"""What the C library does with freed memory, and how to make it keep or give back what a phase of training needs.

glibc serves tensors of up to 32 MB from its heap. It gives the heap's free end back to the system whenever that grows,
and gets it again for the next layer: up to a tenth of a forward pass was page faults. And what it doesn't give back it
keeps for tensors of the sizes that were, where the phases of an iteration have tensors of other sizes: each phase's
heap would stay beside the next one's.
"""

from __future__ import annotations

import ctypes
import functools
import sys

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


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None  # musl has none
