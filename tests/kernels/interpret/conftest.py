"""Error measures for the interpreter tests: a tolerance is a multiple of what PyTorch gets wrong in the same dtype."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))  # its modules import each other as scripts do


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
