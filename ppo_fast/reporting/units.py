"""Durations and sizes as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``38 s``, ``7 min 31 s``, ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def size(number: float) -> str:
    """Bytes as ``512 MiB`` or ``2.18 GiB``."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
