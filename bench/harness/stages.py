"""Seconds and peak memory of the stages of an iteration of training, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.memory import status, track_peak


@dataclass
class Stages:
    """Seconds of each stage, and the bytes that the process had resident at its peak, weights included."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    _name: str | None = None
    _started: float = 0.0

    def begin(self, name: str) -> None:
        """Ends the stage before, if one goes on."""
        self.end()
        track_peak()
        self._name, self._started = name, time.perf_counter()

    def end(self) -> None:
        """Of the stage that goes on."""
        if self._name is not None:
            self.seconds[self._name] = time.perf_counter() - self._started
            self.peak_bytes[self._name] = status("VmHWM")
            self._name = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the body as stage ``name``."""
        self.begin(name)
        yield
        self.end()

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {"seconds": self.seconds, "peak_bytes": self.peak_bytes}
