"""What this machine can do, measured in the same run: memory bandwidth, and the rate of torch's GEMM per dtype."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.case import DTYPES, Work

_BYTES = 512 * 2**20
_SIDE = 2048
_REPEATS = 15


@dataclass(frozen=True)
class Floors:
    """Rates in bytes and operations a second."""

    read: float
    copy: float
    gemm: dict[str, float]

    def seconds(self, work: Work, dtype: str) -> float:
        """The least time for the work: the slower of arithmetic and memory, at the better of the two bandwidths."""
        return max(work.flops / self.gemm[dtype], work.bytes / max(self.read, self.copy))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _least(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)  # what the machine can do, not what it does on average


def measure_floors() -> Floors:
    """A sum and a copy over half a GiB, and square GEMMs into a buffer that is there."""
    source = torch.ones(_BYTES // 4)
    target = torch.zeros_like(source)
    read = _BYTES / _least(source.sum)
    copy = 2 * _BYTES / _least(lambda: target.copy_(source))
    gemm = {}
    for dtype, name in DTYPES.items():
        a, b = torch.randn(2, _SIDE, _SIDE).to(dtype).unbind(0)
        out = torch.empty_like(a)
        gemm[name] = 2 * _SIDE**3 / _least(lambda a=a, b=b, out=out: torch.mm(a, b.t(), out=out))
    return Floors(read, copy, gemm)
