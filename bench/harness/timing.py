"""Interleaved rounds: every variant once a round, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.case import Case, Variant

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SUFFIX = {"K": 2**10, "M": 2**20, "G": 2**30}
MOST_ROUNDS = 201


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 32 MiB where the system doesn't say."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) * _SUFFIX[size[-1]] for size in sizes), default=32 * 2**20)


def copies_beyond_cache(nbytes: int, cache: int | None = None) -> int:
    """Sets of inputs of ``nbytes`` each after which a set has left the cache: twice its size lies in between."""
    return 2 + 2 * (last_level_cache() if cache is None else cache) // nbytes


class Rotation:
    """Sets of inputs, handed out in turn."""

    def __init__(self, make: Callable[[int], Any], copies: int) -> None:
        self.sets = [make(seed) for seed in range(copies)]
        self._turn = 0

    def next(self) -> Any:
        """The set that was used longest ago."""
        self._turn += 1
        return self.sets[self._turn % len(self.sets)]


def call(variant: Variant, inputs: Any) -> tuple[float, dict[str, Any]]:
    """Seconds of one call, and its results. Results are released outside of the clock."""
    argument = variant.prepare(inputs)
    start = time.perf_counter()
    results = variant.run(argument)
    return time.perf_counter() - start, results


def time_rounds(
    case: Case, variants: Sequence[Variant], rotation: Rotation, seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each variant in each round: as many rounds as fit into ``seconds``, but at least ``rounds``.

    The order moves on by one each round, so that nobody always follows the same neighbour.
    """
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        done = 0
        while variants and done < MOST_ROUNDS and (done < rounds or time.perf_counter() - start < seconds):
            first = done % len(variants)
            for variant in [*variants[first:], *variants[:first]]:
                taken, results = call(variant, rotation.next())
                del results
                times[variant.name].append(taken)
            done += 1
    finally:
        gc.enable()
    return times
