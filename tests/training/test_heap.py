"""Freed memory stays in the heap within a phase and goes back to the system between phases."""

import ctypes
import subprocess
import sys

import pytest
import torch

from ppo_fast.training.heap import gradients_before_graphs, return_freed_memory


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no heap of glibc here"
)


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_freed_within_a_phase_stays_until_it_is_returned(kept):
    """In a process of its own: what glibc has adjusted by then, and where other tensors lie, would decide with us."""
    code = f"""
import torch
from ppo_fast.training.heap import keep_freed_memory, return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

if {kept}:
    keep_freed_memory()
before = resident()
tensors = [torch.ones(4 << 20) for _ in range(10)]
held = resident()
del tensors
freed = resident()
return_freed_memory()
print(before, held, freed, resident())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, held, freed, returned = map(int, done.stdout.split())  # MiB
    assert held - before > 150
    assert (freed - before > 150) is kept
    assert returned - before < 20


def test_what_a_phase_leaves_in_the_heap_goes_back():
    size = 16 << 10  # too small for mappings of their own, whatever the threshold has become
    kept = [torch.ones(size // 4) for _ in range(8192)]
    before = resident()
    kept = kept[::64]  # holes between those that stay: nothing at the end of the heap is free
    return_freed_memory()
    assert before - resident() > 8192 * size * 3 // 4
    assert all(bool((x == 1).all()) for x in kept)


def test_gradients_lie_where_they_are_from_the_start_or_not_at_all():
    used, unused, frozen, earlier = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
    frozen.requires_grad_(False)
    earlier.grad = before = torch.full((3,), 5.0)
    with gradients_before_graphs([used, unused, frozen, earlier]):
        place = used.grad.data_ptr()
        assert not used.grad.any()
        for _ in range(2):
            (2 * used + 3 * earlier + frozen).sum().backward()
    assert used.grad.tolist() == [4, 4, 4]
    assert used.grad.data_ptr() == place
    assert unused.grad is None
    assert frozen.grad is None
    assert earlier.grad is before
    assert earlier.grad.tolist() == [11, 11, 11]


def test_a_gradient_of_zero_is_one():
    """A fresh adapter's A has none but zeros, and its optimizer counts the step."""
    parameter = torch.nn.Parameter(torch.ones(3))
    with gradients_before_graphs([parameter]):
        (0 * parameter).sum().backward()
    assert parameter.grad.tolist() == [0, 0, 0]


def test_an_exception_leaves_no_gradients_of_nothing():
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))

    def interrupted():
        with gradients_before_graphs([used, unused]):
            (2 * used).sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert used.grad.tolist() == [2, 2, 2]
    assert unused.grad is None
