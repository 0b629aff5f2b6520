"""The table: bar and measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = ("op", "work", "dtype", "bar", "measured", "`out=` form", "× floor", "")


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if "MB" in unit:
        return f"{value:.1f}{unit}"
    return f"{value:.3f}{unit}" if abs(value) < 10 else f"{value:.1f}{unit}"


def _verdict(row: dict[str, Any]) -> str:
    if row["met"] is None:
        return row["why"]
    good = "met" if row["met"] else "**missed**"
    size = f"{abs(row['margin']):.3g}{row['unit']}" if "growth" in row["kind"] else f"{abs(row['margin']):.1%}"
    return f"{good} by {size}"


def table(bars: Sequence[dict[str, Any]]) -> str:
    """Markdown, one row a bar."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for row in bars:
        rows.append(
            (
                f"`{row['op']}`",
                row["row"],
                row["dtype"],
                row["bar"],
                _figure(row["measured"], row["unit"]),
                _figure(row["beside"], row["unit"]),
                "" if row["times_floor"] is None else f"{row['times_floor']:.1f}",
                _verdict(row),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
