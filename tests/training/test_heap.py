"""Freed memory stays in the heap within a phase and goes back to the system between phases."""

import ctypes
import resource
import sys

import pytest
import torch

from ppo_fast.training.heap import keep_freed_memory, return_freed_memory


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no heap of glibc here"
)


def test_freed_memory_is_had_again_without_a_page_fault():
    keep_freed_memory()
    size = 24 << 20  # above the threshold of mappings at first, and far above that of giving back the heap's end

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size // 4)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return_freed_memory()
    assert faults() > size // 4096 // 2
    assert faults() < 100
    held = resident()
    return_freed_memory()
    assert held - resident() > size // 2


def test_what_a_phase_leaves_in_the_heap_goes_back():
    size = 16 << 10  # too small for mappings of their own, whatever the threshold has become
    kept = [torch.ones(size // 4) for _ in range(8192)]
    before = resident()
    kept = kept[::64]  # holes between those that stay: nothing at the end of the heap is free
    return_freed_memory()
    assert before - resident() > 8192 * size * 3 // 4
    assert all(bool((x == 1).all()) for x in kept)
