"""Error measures for the interpreter tests: a tolerance is a multiple of what PyTorch gets wrong in the same dtype."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session", autouse=True)
def hardware_bfloat16() -> Iterator[None]:
    """bfloat16 as GPUs have it. The interpreter keeps it as 16-bit integers: it rounds towards zero, and multiplies the
    integers in tl.dot."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast, convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def rounded(value: Any) -> Any:
        as_torch = torch.from_numpy(value.data.copy()).to(torch.bfloat16)
        return TensorHandle(as_torch.view(torch.uint16).numpy(), tl.bfloat16)

    def is_rounding(source: Any, target: Any) -> bool:
        return source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16

    def widened(self: Any, x: Any) -> Any:
        return self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *rest: dot(self, widened(self, a), widened(self, b), *rest),
        )
        patch.setattr(
            InterpreterBuilder, "cast_impl", lambda self, x, to: rounded(x) if is_rounding(x, to) else cast(self, x, to)
        )
        patch.setattr(
            InterpreterBuilder,
            "create_fp_to_fp",
            lambda self, x, to, mode: rounded(x) if is_rounding(x, to) else convert(self, x, to, mode),
        )
        yield


def max_error(actual: Tensor, exact: Tensor) -> float:
    """Largest |actual - exact|. NaN must meet NaN and infinity the same infinity, else the error is infinite."""
    actual, exact = actual.double(), exact.double()
    assert actual.shape == exact.shape
    odd = ~exact.isfinite() | ~actual.isfinite()
    same = torch.where(exact.isnan(), actual.isnan(), actual == exact)
    if not bool(same[odd].all()):
        return float("inf")
    return float((actual - exact)[~odd].abs().max()) if bool((~odd).any()) else 0.0


@pytest.fixture(scope="session")
def accurate() -> Callable[..., None]:
    """``accurate(actual, exact, torch_result)``: at most three times PyTorch's own error in that dtype.

    Where PyTorch happens to be exact, two units in the last place of the largest finite value are allowed instead
    (of 1, if that is larger, where ``unit``: a log-prob near 0 is the logarithm of a rounded number near 1). In float64
    ``exact`` is no better than PyTorch: there it is 128 units, two of the 16 digits. ``inherited`` is an error that the
    op's inputs carry already, and that it can't undo.
    """

    def check(
        actual: Tensor, exact: Tensor, torch_result: Tensor, *, unit: bool = False, inherited: float = 0.0
    ) -> None:
        assert actual.dtype == torch_result.dtype
        finite = exact[exact.isfinite()].abs()
        largest = max(float(finite.max()) if finite.numel() else 0.0, 1.0 if unit else 0.0)
        units = 128 if actual.dtype == torch.float64 else 2
        allowed = max(3 * max_error(torch_result, exact), units * torch.finfo(actual.dtype).eps * largest, inherited)
        assert max_error(actual, exact) <= allowed

    return check
