"""Runs cases: values, then times, then memory; and gathers what came out as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.bars import why_absent
from harness.case import DTYPES, Case
from harness.check import WrongValuesError, check_values
from harness.floors import Floors
from harness.memory import AVAILABLE, peak_bytes_in_fresh_process
from harness.timing import Rotation, call, time_rounds

Say = Callable[[str], None]


def say_at_once(line: str) -> None:
    print(line, flush=True)


def run_case(case: Case, floors: Floors, say: Say, *, seconds: float | None = None, rounds: int | None = None) -> Any:
    """Check every variant of the case, then time those that computed the right thing.

    A wrong one is not timed: it has ``refused``, the reason, in place of times, as one that can't run has ``missing``.
    The call that is checked is the warm-up, compilation included. ``seconds`` and ``rounds`` replace the case's own.
    """
    rotation = Rotation(case.inputs, case.copies)
    reference = case.reference(rotation.sets[0])
    variants: dict[str, Any] = {v.name: {"missing": v.missing} for v in case.variants if v.missing is not None}
    present = []
    for variant in case.variants:
        if variant.missing is not None:
            continue
        _, results = call(variant, rotation.sets[0])
        try:
            variants[variant.name] = {"relative_error": check_values(case, variant, results, reference)}
            present.append(variant)
        except WrongValuesError as error:
            variants[variant.name] = {"refused": str(error)}
        del results
    del reference
    limits = (case.seconds if seconds is None else seconds, case.rounds if rounds is None else rounds)
    times = time_rounds(case, present, rotation, *limits)
    for variant in present:
        floor = floors.seconds(variant.work, DTYPES[case.dtype])
        median = statistics.median(times[variant.name])
        variants[variant.name] |= {
            "seconds": median,
            "seconds_by_round": times[variant.name],
            "floor_seconds": floor or None,
        }
        note = f", {median / floor:5.2f} x its floor" if floor else ""
        say(f"  {variant.name:<42} {1e3 * median:10.3f} ms{note}")
    for name, variant in variants.items():
        why = why_absent(variant)
        if why is not None:
            say(f"  {name:<42}    {why}")
    return {"dtype": DTYPES[case.dtype], "variants": variants}


def add_memory(case: Case, result: Any, script: Path, threads: int, say: Say) -> None:
    """Measure the peak memory of the case's ``memory`` variants, each in its own process."""
    for name in case.memory:
        variant = result["variants"][name]
        if AVAILABLE and why_absent(variant) is None:
            variant["peak_bytes"] = peak_bytes_in_fresh_process(script, case.key, name, threads)
            say(f"  {name:<42} {variant['peak_bytes'] / 1e6:10.1f} MB extra at the peak")


def select(cases: Sequence[Case], only: Sequence[str], long: bool) -> list[Case]:
    """The cases whose key contains one of the words (all, if there are none), long ones only where asked for."""
    chosen = [case for case in cases if not only or any(word in case.key for word in only)]
    return [case for case in chosen if long or not case.long]
