"""Where the ops are timed, and what a variant takes there: a GPU, or a CPU that only shows that every line runs."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from head import Head, make_head

Result = tuple[Tensor, ...]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """Where it runs: a GPU, or with ``dry`` a CPU that only shows that every line runs."""

    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16  # Triton's interpreter multiplies bfloat16 as integers

    @property
    def rounds(self) -> int:
        return 1 if self.dry else 7

    @property
    def heads(self) -> list[tuple[int, int, int]]:
        """(tokens, H, V)"""
        return [(12, 32, 301)] if self.dry else [(8192, 4096, 151_936), (4096, 896, 151_936)]

    @property
    def rows(self) -> tuple[int, int]:
        """[B, T] of the row ops."""
        return (2, 40) if self.dry else (512, 1024)

    @property
    def scored(self) -> tuple[int, ...]:
        return (1, 20) if self.dry else (1, 16, 64, 256, 1024, 2048)

    def make_head(self, shape: tuple[int, int, int]) -> Head:
        tokens, hidden_size, vocabulary = shape
        return make_head(tokens, self.dtype, vocabulary, hidden_size, self.device)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False, backend="aot_eager" if self.dry else "inductor")

    def milliseconds(self, call: Callable[[], object]) -> float:
        if self.dry:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_of(self, call: Callable[[], object]) -> int | None:
        """Bytes that a call has allocated at most, beside what was there; None without a GPU."""
        if self.dry:
            call()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def setting(**variables: str) -> Iterator[None]:
    """Environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def measure(machine: Machine, variants: dict[str, Callable[[], object]]) -> dict[str, Numbers]:
    """Median time and peak memory of each variant, timed in turns after two calls to warm up."""
    found: dict[str, Numbers] = {}
    for name, call in variants.items():
        try:
            call()
            peak = machine.peak_of(call)
        except torch.OutOfMemoryError:
            found[name] = {"ms": None, "peak_bytes": None, "why": "out of memory"}
            continue
        found[name] = {"ms": None, "peak_bytes": peak}
    times: dict[str, list[float]] = {name: [] for name, row in found.items() if "why" not in row}
    for _ in range(machine.rounds):
        for name, rounds in times.items():
            rounds.append(machine.milliseconds(variants[name]))
    for name, rounds in times.items():
        found[name]["ms"] = round(statistics.median(rounds), 4)
    return found


def require_as_exact(what: str, ours: Result, theirs: Result, exact: Result, times: float = 1.0) -> list[float]:
    """Our largest errors; exits where one is over ``times`` PyTorch's in that dtype, and over two roundings of it."""
    errors = []
    for mine, plain, truth in zip(ours, theirs, exact, strict=True):
        error = float((mine.double() - truth).abs().max())
        rounding = 2 * torch.finfo(mine.dtype).eps * max(1.0, float(truth.abs().max()))
        if not error <= max(times * float((plain.double() - truth).abs().max()), rounding):
            sys.exit(f"{what}: the error against float64 is {error:.3g}, more than PyTorch's; not timed")
        errors.append(error)
    return errors
