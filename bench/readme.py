"""Writes the tables of README.md from the JSON under bench/results/.

python bench/readme.py            rewrites README.md
python bench/readme.py --check    exits with 1 if README.md isn't what the JSON says
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.table import table
from ppo_fast.files import write_atomically

BENCH = Path(__file__).parent
README = BENCH.parent / "README.md"

Table = Callable[[dict[str, Any]], str]


def demo(result: dict[str, Any]) -> str:
    """One row a seed: held-out means before and after, and the paired difference with its interval."""
    head = [
        "seed",
        "VADER compound",
        "after the EOS rule",
        "judge",
        "tokens",
        "finished",
        "distinct-2",
        "KL, nats",
        "training",
    ]
    rows = [head, ["---"] * len(head)]
    for seed in result["seeds"]:
        differences = seed["summary"]["differences"]
        rows.append(
            [
                str(seed["seed"]),
                _change(differences["reward"], 2),
                _change(differences["penalised"], 2),
                _change(differences["judge"], 2),
                _change(differences["length"], 1),
                _change(differences["finished"], 2),
                _change(differences["distinct_2"], 2),
                f"{seed['summary']['kl']['estimate']:.1f}",
                f"{seed['training_seconds'] / 60:.1f} min",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ops(result: dict[str, Any]) -> str:
    """Machine and floors, one row a bar, the plot."""
    machine, floors = result["machine"], result["floors"]
    rates = ", ".join(f"{name} GEMM {rate / 1e9:.0f} GFLOPS" for name, rate in floors["gemm"].items())
    met = sum(bar["met"] is True for bar in result["bars"])
    return "\n".join(
        [
            f"{machine['processor']} ({', '.join(machine['instruction_sets'])}), {machine['threads']} threads, torch "
            f"{result['versions']['torch']}; memory {floors['read'] / 1e9:.0f} GB/s, {rates}. "
            f"{met} of {len(result['bars'])} bars met.",
            "",
            table(result["bars"]),
            "",
            f"![Time and memory over N and V](bench/results/{result['name']}-scaling.png)",
        ]
    )


def trl(result: dict[str, Any]) -> str:
    """One row a case: TRL's figure → with ppo_fast, and the ratio in bold; what the results differ by."""
    machine, versions, settings = result["machine"], result["versions"], result["settings"]
    head = ["", "head, s a step", "whole step, s", "peak memory, GiB", "loss differs by", "gradient differs by"]
    rows = [head, ["---"] * len(head)]
    for case, row in result["summary"].items():
        algorithm, weights = case.split("-")
        rows.append(
            [
                f"{algorithm.upper()}, {'LoRA' if weights == 'lora' else 'full weights'}",
                *(_ratio(row, key, unit, digits) for key, unit, digits in _TRL_COLUMNS),
                f"{row['loss_difference']:.0e}",
                f"{row['gradient_error']:.0e}",
            ]
        )
    return "\n".join(
        [
            f"{machine['processor']}, {machine['threads']} threads, TRL {versions['trl']}, torch {versions['torch']}; "
            f"SmolLM2-135M in float32, {settings['per_device_train_batch_size']} replies of at most "
            f"{settings['max_completion_length']} tokens to prompts of {settings['prompt_tokens']}.",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


_TRL_COLUMNS = (("head", 1, 2), ("step", 1, 1), ("peak_bytes", 2**30, 1))


def _ratio(row: dict[str, Any], key: str, unit: float, digits: int) -> str:
    stock, ours = (row[name][key] / unit for name in ("stock", "ours"))
    return f"{stock:.{digits}f} → {ours:.{digits}f}, **{row['ratio'][key]:.2f}x**"


def rollout(result: dict[str, Any]) -> str:
    """The machine, one row a bar."""
    machine, versions = result["machine"], result["versions"]
    met = sum(bar["met"] is True for bar in result["bars"])
    return "\n".join(
        [
            f"{machine['processor']}, {machine['threads']} threads, torch {versions['torch']}, transformers "
            f"{versions['transformers']}. {met} of {len(result['bars'])} bars met.",
            "",
            table(result["bars"]),
        ]
    )


def iteration(result: dict[str, Any]) -> str:
    """One row a part: seconds of every stage, peak memory, ratios in bold to the peer that was measured with it."""
    rows = [["", *(f"{stage}, s" for stage in _STAGES), "together, s", "peak memory, GiB"], ["---"] * 6]
    for found in result["summary"].values():
        stages = [f"{found['stages'][stage]:.1f}" for stage in _STAGES]
        seconds, peak = f"{found['seconds']:.1f}", f"{found['peak_bytes'] / 2**30:.1f}"
        if "peer" in found:
            seconds, peak = f"{seconds}, **{found['speed']:.2f}x as fast**", f"{peak}, **{found['memory']:.2f}x**"
        rows.append([found["title"], *stages, seconds, peak])
    machines = {
        f"{run['machine']['processor']}, {run['machine']['threads']} threads, torch {run['versions']['torch']}, "
        f"transformers {run['versions']['transformers']}"
        for run in result["runs"].values()
    }
    judged = [bar["met"] for bar in result["bars"]]
    unmeasured = f", {judged.count(None)} not measured" if None in judged else ""
    bars = f"{judged.count(True)} of {len(judged)} bars met{unmeasured}"
    return "\n".join([f"{'; '.join(sorted(machines))}. {bars}.", "", *(f"| {' | '.join(row)} |" for row in rows)])


_STAGES = ("rollout", "score", "update")

# Table -> the results under bench/results/ that it is made of.
TABLES: dict[str, tuple[str, Table]] = {
    "demo": ("demo.json", demo),
    "ops": ("ops-*.json", ops),
    "trl": ("trl.json", trl),
    "rollout": ("rollout.json", rollout),
    "iteration": ("iteration.json", iteration),
}


def _change(difference: dict[str, Any], digits: int) -> str:
    interval = difference["interval"]
    return (
        f"{difference['before']:.{digits}f} → {difference['after']:.{digits}f}, "
        f"**{interval['estimate']:+.{digits}f}** [{interval['low']:+.{digits}f}, {interval['high']:+.{digits}f}]"
    )


def render(text: str) -> str:
    """README's text with every table between its markers made anew; nothing where there is no result yet."""
    for name, (files, make) in TABLES.items():
        results = (json.loads(path.read_text()) for path in sorted((BENCH / "results").glob(files)))
        made = "\n".join(make(result) + "\n" for result in results)
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, made=made: f"{match[1]}{made}{match[2]}", text)
        if count != 1:
            raise SystemExit(f"README.md has {count} places for the table {name!r}; it needs one")
    return text


def rewrite() -> None:
    """README.md with the tables that the results give now."""
    write_atomically(README, render(README.read_text(encoding="utf-8")))


def main() -> int:
    """Rewrites or checks README.md."""
    if "--check" not in sys.argv[1:]:
        rewrite()
        return 0
    before = README.read_text(encoding="utf-8")
    differs = before != render(before)
    if differs:
        print("README.md differs from bench/results; run `python bench/readme.py`")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
