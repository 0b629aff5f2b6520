"""bench/gpu.sh: what it judges by, and that every line a CPU can run does run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.head import judged
from gpu.machine import Machine, measure, require_as_exact
from gpu.parts import Part, run_parts

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_bars_of_the_actor_loss():
    x = Machine(dry=True).make_head((4, 8, 33))
    rows = {"ours": {"ms": 5.0, "peak_bytes": (1 << 30) + 100}, "eager": {"ms": 6.0}}
    frozen = judged(rows, [2.0, 2.0], x, False)
    assert frozen["over the GEMMs"] == 1.25
    assert not frozen["at most 1.2x of the GEMMs"]
    assert frozen["never slower than eager"]
    assert not frozen["under 1 GiB beside d_weight"]
    trainable = judged(rows, [2.0, 2.0, 2.0], x, True)
    assert trainable["bytes beside d_weight"] == (1 << 30) + 100 - 4 * 8 * 33
    assert trainable["under 1 GiB beside d_weight"]
    missing = judged({"ours": {"ms": None, "peak_bytes": None}, "eager": {"ms": None}}, [2.0, None], x, False)
    assert set(missing.values()) == {None}


def test_values_that_are_wrong_are_not_timed():
    exact = torch.ones(3, dtype=torch.float64)
    theirs, wrong = exact.float() + 1e-3, exact.float() + 2e-3
    assert require_as_exact("x", (theirs,), (theirs,), (exact,)) == [pytest.approx(1e-3, rel=1e-3)]
    for bad in (wrong, exact.float() * torch.nan):
        with pytest.raises(SystemExit, match="x: the error against float64 is"):
            require_as_exact("x", (bad,), (theirs,), (exact,))


def test_a_variant_that_needs_too_much_memory_is_left_out():
    def too_much():
        raise torch.OutOfMemoryError

    found = measure(Machine(dry=True), {"a": lambda: None, "b": too_much})
    assert found["a"]["ms"] >= 0
    assert found["b"]["why"] == "out of memory"


def test_a_part_that_takes_too_long_is_cut_off(tmp_path):
    """And what the others found is kept, after each of them; what they leave of their shares is there for it."""
    kept = []
    writes = ["sh", "-c", f"echo '{{\"ms\": 1}}' > '{tmp_path}/good.json'"]
    parts = {"good": writes, "stuck": ["sleep", "60"], "bad": ["false"], "silent": ["true"]}
    started = time.monotonic()
    failed = run_parts(
        {name: Part(1, command) for name, command in parts.items()}, tmp_path, 6, lambda found: kept.append({**found})
    )
    assert time.monotonic() - started < 6
    assert failed == ["stuck", "bad"]
    assert kept[0] == {"good": {"ms": 1}}
    cut_off = kept[-1].pop("stuck")["why"]
    assert cut_off.startswith("cut off after")
    assert kept[-1] == {"good": {"ms": 1}, "bad": {"why": "ended with status 1"}, "silent": {}}


def dry_run(path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of ``bench/gpu.sh --dry``."""
    command = ["bash", BENCH / "gpu.sh", "--dry", "--json", path, *more]
    status = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}).returncode
    return status, json.loads(path.read_text())


@pytest.mark.long
def test_dry_run(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    status, results = dry_run(tmp_path / "dry.json")
    assert status == 0
    assert results["dry"]
    assert "commit" in results
    parts = results["parts"]
    assert list(parts) == ["tests", "head 12 x 32 x 301", "rows", "sampling", "choice", "decode", "iteration"]
    assert not [name for name, numbers in parts.items() if "why" in numbers]
    assert parts["head 12 x 32 x 301"]["frozen"]["ours"]["ms"] > 0


@pytest.mark.long
def test_dry_run_without_time(tmp_path):
    """Nothing is done, and the JSON says why."""
    status, results = dry_run(tmp_path / "dry.json", "--seconds", "1")
    assert status == 1
    assert len(results["parts"]) == 7
    assert all("cut off after" in numbers["why"] for numbers in results["parts"].values())
