"""The bench in parts, each a process of its own, held to its share of the time that is left.

A part that hangs, crashes, or breaks the device for its process takes no other with it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.machine import Numbers


@dataclass(frozen=True)
class Part:
    share: float  # of the time that is left to this part and those after it, beside their shares
    command: Sequence[str]  # writes FOLDER/NAME.json, if anything


def run_parts(
    parts: Mapping[str, Part], folder: Path, seconds: float, keep: Callable[[dict[str, Numbers]], object]
) -> list[str]:
    """Runs one after the other, and ``keep`` on what is there after each: its numbers, or under "why" what went wrong.

    A part that takes longer than its share is killed; what it doesn't use is left to the others.

    Returns:
        The names of those that went wrong.
    """
    end = time.monotonic() + seconds
    shares = sum(part.share for part in parts.values())
    found: dict[str, Numbers] = {}
    for name, part in parts.items():
        limit = max(0.0, end - time.monotonic()) * part.share / shares
        shares -= part.share
        why = _failure(part.command, limit)
        numbers = folder / f"{name}.json"
        found[name] = {"why": why} if why else json.loads(numbers.read_text()) if numbers.exists() else {}
        keep(found)
    return [name for name, numbers in found.items() if "why" in numbers]


def _failure(command: Sequence[str], limit: float) -> str | None:
    try:
        status = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"cut off after {limit:.0f} s"
    return f"ended with status {status}" if status else None
