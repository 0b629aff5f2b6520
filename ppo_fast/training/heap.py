"""What the C library keeps of freed memory, and how to make it give that back."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def return_freed_memory() -> None:
    """Gives the memory that this process has freed back to the system, where that takes asking (glibc).

    glibc serves tensors of up to 32 MB from its heap and keeps what they leave for the next ones of their size. The
    phases of an iteration have tensors of other sizes: each phase's heap would stay beside the next one's.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
