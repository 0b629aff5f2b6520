"""Peak memory of one call, in a process of its own: the kernel's high-water mark, reset just before. Linux only."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from harness.case import Case
from harness.timing import call

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
AVAILABLE = _CLEAR_REFS.exists()


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def track_peak() -> None:
    """From here on VmHWM is the peak; ru_maxrss can't be reset."""
    _CLEAR_REFS.write_text("5")


def peak_bytes(case: Case, name: str) -> int:
    """Bytes that one call of the variant takes at its peak beyond what was resident, results included.

    The call before it, on the first few rows, loads code and starts threads; the op meets its full size only under
    measurement, so a buffer that it keeps from call to call is counted.
    """
    variant = next(variant for variant in case.variants if variant.name == name)
    inputs = case.inputs(0)
    call(variant, case.first_rows(inputs))
    argument = variant.prepare(inputs)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory that the allocator keeps would serve the call uncounted
    before = status("VmRSS")
    track_peak()
    results = variant.run(argument)
    peak = status("VmHWM")
    del results
    return peak - before


def peak_bytes_in_fresh_process(script: Path, key: str, name: str, threads: int) -> int:
    """`peak_bytes`, by the script's ``--peak KEY VARIANT``."""
    command = [sys.executable, str(script), "--threads", str(threads), "--peak", key, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {key}, {name} failed:\n{done.stderr}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])
