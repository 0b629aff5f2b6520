"""Bars against figures: which were met, which were missed, and by how much."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.case import Bar

MB = 1e6
_UNITS = {"time": "x", "memory": " MB", "ratio growth": "x", "memory growth": " MB"}


def paired_ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> float:
    """Median over rounds of (sum of ``above``) / (sum of ``below``), each a list of seconds by round.

    Both parts of a ratio are of one round: what slows the machine for a while slows both.
    """
    sums = zip(map(sum, zip(*above, strict=True)), map(sum, zip(*below, strict=True)), strict=True)
    return statistics.median(a / b for a, b in sums)


def _times(case: Mapping[str, Any], names: Sequence[str]) -> list[list[float]]:
    return [case["variants"][name]["seconds_by_round"] for name in names]


def _figure(bar: Bar, case: Mapping[str, Any], to: Sequence[str]) -> float:
    if "memory" in bar.kind:
        return case["variants"][bar.of]["peak_bytes"] / MB
    of, baseline = _times(case, [bar.of]), _times(case, to)
    return paired_ratio(baseline, of) if bar.sense == "at least" else paired_ratio(of, baseline)


def _measured(bar: Bar, cases: Mapping[str, Any], to: Sequence[str]) -> float:
    figure = _figure(bar, cases[bar.case], to)
    if not bar.since:
        return figure
    return (figure - bar.less[0]) - (_figure(bar, cases[bar.since], to) - bar.less[1])


def why_absent(variant: Mapping[str, Any]) -> str | None:
    """Why a variant of the results has no figures; None if it has."""
    return next((f"{word}: {variant[word]}" for word in ("missing", "refused") if word in variant), None)


def _why_not(bar: Bar, cases: Mapping[str, Any]) -> str | None:
    for key in filter(None, (bar.case, bar.since)):
        if key not in cases:
            return f"{key} was not run"
        for name in (bar.of, *bar.to):
            variant = cases[key]["variants"][name]
            why = why_absent(variant)
            if why is not None:
                return f"{name} is {why}"
            if "memory" in bar.kind and variant.get("peak_bytes") is None:
                return "memory was not measured"
    return None


def judge(bar: Bar, cases: Mapping[str, Any]) -> dict[str, Any]:
    """The bar's row of the results: ``measured``, ``beside``, ``met``, and ``margin``.

    ``times_floor`` is the judged variant's time over what the machine's rates allow. ``margin`` is measured over
    limit, minus 1 (for growth: measured minus limit): above 0 is above the limit. Where something is missing,
    ``measured`` and ``met`` are None and ``why`` says what.
    """
    row = {
        "op": bar.op,
        "row": bar.row,
        "dtype": bar.case.rpartition(" ")[2],
        "bar": _wording(bar),
        "kind": bar.kind,
        "limit": bar.limit,
        "sense": bar.sense,
        "unit": _UNITS[bar.kind],
        "case": bar.case,
        "of": bar.of,
        "to": list(bar.to),
        "measured": None,
        "beside": None,
        "times_floor": None,
        "met": None,
        "margin": None,
    }
    why = _why_not(bar, cases)
    if why is not None:
        return {**row, "why": why}
    measured = _measured(bar, cases, bar.to)
    beside = _measured(bar, cases, bar.beside) if bar.beside else None
    met = measured <= bar.limit if bar.sense == "at most" else measured >= bar.limit
    margin = measured - bar.limit if bar.since else measured / bar.limit - 1
    judged = cases[bar.case]["variants"][bar.of]
    floor = judged.get("floor_seconds") if bar.kind == "time" else None
    times_floor = judged["seconds"] / floor if floor else None
    return {**row, "measured": measured, "beside": beside, "times_floor": times_floor, "met": met, "margin": margin}


def _wording(bar: Bar) -> str:
    if bar.kind == "memory":
        return f"{bar.sense} {bar.limit:.0f} MB extra"
    if bar.kind == "memory growth":
        return f"extra memory {bar.sense} {bar.limit:.0f} MB above that at {bar.against}"
    if bar.kind == "ratio growth":
        return f"{bar.sense} {bar.limit:.2f} above that at {bar.against}"
    return f"{bar.sense} {bar.limit:g}x {bar.against}"
