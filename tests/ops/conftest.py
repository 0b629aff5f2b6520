"""Shared by the tests of the ops: every CPU path through the public ops, and one way to judge an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ppo_fast.ops import backends


@pytest.fixture(params=[name for name in backends.available() if name != "triton"])
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on plain PyTorch and once at each instruction set of the C++ extension that is here."""
    with backends.force(request.param):
        yield request.param


@pytest.fixture(params=[name for name in backends.available() if name not in ("eager", "triton")])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once at each instruction set of the C++ extension that is here."""
    with backends.force(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for the length of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def gemm_flops() -> Callable[[Callable[[], object]], int]:
    """Counts the multiplications and additions in all matrix products that run inside a call, whoever makes them.

    On the plain PyTorch path: the profiler doesn't see the products that C++ makes.
    """

    def count(function: Callable[[], object]) -> int:
        with backends.force("eager"), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
            function()
        total = 0
        for event in record.events():
            name = event.name.removeprefix("aten::").removesuffix("_")
            if name in ("mm", "bmm"):
                a, b = event.input_shapes[:2]
            elif name in ("addmm", "baddbmm"):
                a, b = event.input_shapes[1:3]
            else:
                continue
            total += 2 * torch.Size(a).numel() * b[-1]
        return total

    return count


@pytest.fixture
def calls() -> Callable[[Callable[[], object], str], int]:
    """Counts the calls of one operator that a call makes."""

    def count(function: Callable[[], object], name: str) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as record:
            function()
        return sum(event.name == name for event in record.events())

    return count


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def as_exact_as() -> Callable[..., None]:
    """Asserts that ``got`` is about as near to the float64 result as PyTorch is in the same precision.

    The largest error may be ``times`` that of ``baseline``, PyTorch's own result, but is never asked to be below
    ``times`` roundings of ``scale``, by default the largest exact value: PyTorch may be exact by luck. Infinities must
    be at the same places.
    """

    def check(got: Tensor, baseline: Tensor, exact: Tensor, times: float = 4.0, scale: float | None = None) -> None:
        assert exact.dtype == torch.float64
        assert got.dtype == baseline.dtype
        assert got.shape == exact.shape
        finite = exact.isfinite()
        assert torch.equal(got.double()[~finite], exact[~finite])
        wrong = (got.double() - exact)[finite].abs()
        allowed = (baseline.double() - exact)[finite].abs()
        if wrong.numel() == 0:
            return
        rounding = torch.finfo(got.dtype).eps * (float(exact[finite].abs().max()) if scale is None else scale)
        error, bound = float(wrong.max()), times * max(float(allowed.max()), rounding)
        assert error <= bound, f"error {error:.3e}, allowed {bound:.3e}"

    return check


@pytest.fixture
def opcheck(cpu_backend: str) -> Callable[[Any, tuple[Any, ...]], None]:
    """``torch.library.opcheck`` on every CPU path; tracing, slow and blind to the path, on plain PyTorch alone."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if cpu_backend == "eager":
        tests.append("test_aot_dispatch_dynamic")

    def check(op: Any, arguments: tuple[Any, ...]) -> None:
        torch.library.opcheck(op, arguments, test_utils=tests)

    return check
