"""bench/gpu.sh: what it judges by, and that every line a CPU can run does run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.head import judged
from gpu.machine import Machine, measure, require_as_exact

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


@pytest.mark.long
def test_dry_run(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    subprocess.run(
        ["bash", BENCH / "gpu.sh", "--dry", "--json", tmp_path / "dry.json"],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
    )
    results = json.loads((tmp_path / "dry.json").read_text())
    assert results["dry"]
    assert {"heads", "rows", "choice", "iteration", "commit"} <= results.keys()
