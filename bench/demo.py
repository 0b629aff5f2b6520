"""The demo over several seeds: trains and evaluates each, one after the other, and keeps what README's table needs.

    python bench/demo.py --runs runs/demo --seeds 1 2 3

A run that is there already is not trained again. Writes bench/results/demo.json and README's table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

import ppo_fast
import readme
from harness.results import write_result
from ppo_fast import cli

RECIPE = Path(ppo_fast.__file__).parent / "recipes" / "sentiment.yaml"
RESULT = Path(__file__).parent / "results" / "demo.json"


def main() -> None:
    """Runs the seeds that are missing, then writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, one folder a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    seeds = [_seed(arguments.runs / f"seed-{seed}", seed) for seed in arguments.seeds]
    record = json.loads((arguments.runs / f"seed-{arguments.seeds[0]}" / "run_record.json").read_text())
    result = {
        "command": "python bench/demo.py --runs runs/demo --seeds " + " ".join(map(str, arguments.seeds)),
        "recipe": yaml.safe_load(RECIPE.read_text()),
        "machine": {key: record["machine"][key] for key in ("processor", "cores", "threads", "device")},
        "versions": record["versions"],
        "seeds": seeds,
    }
    write_result(RESULT, result)
    readme.rewrite()
    print(f"wrote {RESULT.name} in bench/results, and the table in README.md")


def _seed(run: Path, seed: int) -> dict[str, Any]:
    if not (run / "run_record.json").exists():
        flags = ["--output-dir", str(run), "--set", f"ppo.seed={seed}"]
        _require(cli.main(["train", "--config", str(RECIPE), *flags]))
    if not (run / "evaluation.json").exists():
        _require(cli.main(["eval", str(run)]))
    evaluation = json.loads((run / "evaluation.json").read_text())
    return {
        "seed": seed,
        "training_seconds": json.loads((run / "run_record.json").read_text())["cost"]["seconds"],
        "pairs": len(evaluation["before"]),
        "summary": evaluation["summary"],
    }


def _require(code: int) -> None:
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
