"""Seconds and peak memory of each phase of an iteration."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ppo_fast.profiling import annotate
from ppo_fast.training.heap import keep_freed_memory, return_freed_memory

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class Meter:
    """Times phases and reads their peak memory: of the device on CUDA, of the process elsewhere."""

    def __init__(self, device: torch.device) -> None:
        keep_freed_memory()
        self._device = device
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the body as phase ``name``, which begins without what the phase before has freed."""
        gc.collect()  # what refers to itself, and holds a cache or activations, is there until then
        return_freed_memory()
        _reset_peak(self._device)
        start = time.perf_counter()
        with annotate(f"ppo_fast/{name}"):
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = time.perf_counter() - start
        self.peak_bytes[name] = _peak(self._device)

    def metrics(self) -> dict[str, float]:
        """``time/*`` in seconds and ``perf/peak_memory_*`` in bytes."""
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return times | {f"perf/peak_memory_{name}": float(peak) for name, peak in self.peak_bytes.items()}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        with contextlib.suppress(OSError):  # a sandbox may forbid it; the peak is then the process's so far
            _CLEAR_REFS.write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
