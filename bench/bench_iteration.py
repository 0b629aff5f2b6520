"""A whole iteration of PPO, stage by stage: ppo_fast's trainer against plain_ppo.py and TRL 0.22.2's PPOTrainer.

    python bench/bench_iteration.py                           all parts; bench/results/iteration.json, README's table
    python bench/bench_iteration.py --only plain ours         these parts anew, the others as they are
    python bench/bench_iteration.py --small                   whether everything runs; writes nothing

Against plain: random weights in the shape of Qwen2.5-0.5B (V = 151,936, H = 896, 24 layers), LoRA r 16 on policy and
critic, 8 prompts of 64 tokens, 64 new ones. Against TRL: SmolLM2-135M and a reward model, 16 prompts of 64 tokens, 64
new ones, LoRA r 16. All make 2 epochs of 2 minibatches. Each part runs in a process of its own, one after the other,
round by round; of its iterations the first is left out. Only parts of the same run are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

import readme
from harness.results import header, write_result
from iteration_parts import QWEN, SMOLLM2, STAGES, Iterations, Work, ours, plain, trl

BENCH = Path(__file__).parent
RESULT = BENCH / "results" / "iteration.json"
TRL_PYTHON = BENCH.parent / ".venv-trl-ppo" / "bin" / "python"
TRL_VERSION = "0.22.2"


@dataclass(frozen=True)
class Bar:
    """What a part's figure must be, as a ratio to its peer's."""

    figure: str  # seconds or peak_bytes
    limit: float

    def judge(self, found: dict[str, Any], peer: dict[str, Any]) -> tuple[float, bool]:
        """The ratio, and whether it is within the bar. Of seconds: how many times as fast."""
        if self.figure == "seconds":
            speed = peer["seconds"] / found["seconds"]
            return speed, speed >= self.limit
        share = found[self.figure] / peer[self.figure]
        return share, share <= self.limit


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    title: str
    work: Work
    dtype: torch.dtype
    run: Callable[[Work, torch.dtype], Iterations] | None  # None: TRL
    peer: str | None = None  # the part that it is compared with
    bars: tuple[Bar, ...] = ()


def speed(limit: float) -> Bar:
    """At least so many times as fast as the peer."""
    return Bar("seconds", limit)


def memory(limit: float) -> Bar:
    """At most this share of the peer's peak memory."""
    return Bar("peak_bytes", limit)


FP32, BF16 = torch.float32, torch.bfloat16
PARTS = {
    "plain": Part("plain", QWEN, FP32, partial(plain, logits="all")),
    "plain-reply-logits": Part("plain, logits of replies alone", QWEN, FP32, partial(plain, logits="reply"), "plain"),
    "ours": Part("ours", QWEN, FP32, ours, "plain", (speed(1.4), memory(0.5))),
    "ours-checkpointed": Part(
        "ours, checkpointed, in micro-batches of 2",
        QWEN,
        FP32,
        partial(ours, checkpointing=True, micro_batch=2),
        "plain",
        (speed(1.0), memory(0.3)),
    ),
    "plain-bf16": Part("plain, bf16", QWEN, BF16, partial(plain, logits="all")),
    "ours-bf16": Part("ours, bf16", QWEN, BF16, ours, "plain-bf16", (speed(1.4),)),
    "trl": Part(f"TRL {TRL_VERSION}, SmolLM2", SMOLLM2, FP32, None),
    "ours-smollm2": Part(
        "ours, SmolLM2, in micro-batches of 4",
        SMOLLM2,
        FP32,
        partial(ours, micro_batch=4),
        "trl",
        (speed(1.4), memory(0.3)),
    ),
    "trl-bf16": Part(f"TRL {TRL_VERSION}, SmolLM2, bf16", SMOLLM2, BF16, None),
    "ours-smollm2-bf16": Part("ours, SmolLM2, bf16", SMOLLM2, BF16, ours, "trl-bf16", (speed(1.4),)),
}


def summary(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of each part its run, the median seconds of each stage over all but first iterations, and the highest peak."""
    found = {}
    for name in PARTS:
        if name not in parts:
            continue
        rounds = parts[name]["rounds"]
        later = [iteration for iterations in rounds for iteration in iterations[1:]]
        stages = {stage: statistics.median(i["seconds"][stage] for i in later) for stage in STAGES}
        peak = max(max(i["peak_bytes"].values()) for iterations in rounds for i in iterations)
        found[name] = {
            "title": PARTS[name].title, "run": parts[name]["run"], "stages": stages,
            "seconds": sum(stages.values()), "peak_bytes": peak,
        }  # fmt: skip
    for name, row in found.items():
        peer = found.get(PARTS[name].peer or "")
        if peer is not None and peer["run"] == row["run"]:
            row["peer"] = peer["title"]
            row["speed"] = peer["seconds"] / row["seconds"]
            row["memory"] = row["peak_bytes"] / peer["peak_bytes"]
    return found


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar and measured, side by side; None where part and peer weren't measured in the same run."""
    rows = []
    for name, part in PARTS.items():
        for bar in part.bars:
            measured, met = None, None
            if "peer" in found.get(name, {}):
                measured, met = bar.judge(found[name], found[part.peer or ""])
            rows.append({
                "part": part.title, "peer": PARTS[part.peer or ""].title, "figure": bar.figure, "bar": bar.limit,
                "measured": measured, "met": met,
            })  # fmt: skip
    return rows


def merged(
    before: dict[str, Any], run: str, head: dict[str, Any], rounds: dict[str, list[Iterations]]
) -> dict[str, Any]:
    """The result with this run's parts in it: of an older run what this one doesn't replace, and no more."""
    parts = before.get("parts", {}) | {name: {"run": run, "rounds": found} for name, found in rounds.items()}
    parts = {name: parts[name] for name in PARTS if name in parts}
    runs = before.get("runs", {}) | {run: head}
    found = summary(parts)
    return {
        "runs": {key: runs[key] for key in sorted({part["run"] for part in parts.values()})},
        "summary": found,
        "bars": judged(found),
        "parts": parts,
    }


def trl_versions(python: Path) -> dict[str, str]:
    """Of TRL and its transformers in the environment of ``python``.

    Raises:
        RuntimeError: there is none, or it has another TRL.
    """
    question = (
        "import importlib.metadata as m, json; print(json.dumps({p: m.version(p) for p in ('trl', 'transformers')}))"
    )
    try:
        done = subprocess.run([str(python), "-c", question], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise RuntimeError(f"no TRL in the environment of {python}; `make bench-iteration` makes it") from None
    versions: dict[str, str] = json.loads(done.stdout)
    if versions["trl"] != TRL_VERSION:
        raise RuntimeError(f"{python} has TRL {versions['trl']}, expected {TRL_VERSION}: remove it and make it anew")
    return versions


def lines(result: dict[str, Any]) -> list[str]:
    """What is printed at the end."""
    made = []
    for row in result["summary"].values():
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in row["stages"].items())
        made.append(f"{row['title']}: {row['seconds']:.1f} s ({stages}), {row['peak_bytes'] / 2**30:.2f} GiB")
    for row in result["bars"]:
        what = "times as fast as" if row["figure"] == "seconds" else "of the peak memory of"
        sense = "at least" if row["figure"] == "seconds" else "at most"
        measured = "not measured" if row["measured"] is None else f"{row['measured']:.2f}"
        sign = {None: "open", True: "met", False: "missed"}[row["met"]]
        made.append(f"{row['part']}: {measured} {what} {row['peer']}, bar {sense} {row['bar']}: {sign}")
    return made


def main() -> None:
    """All parts, some, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=1, help="times that every part is run (default: 1)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="of TRL's environment")
    parser.add_argument("--small", action="store_true", help="4 replies of 8 tokens, one epoch; nothing is written")
    parser.add_argument("--part", choices=PARTS, help="one part, in this process, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.part:
        part = PARTS[arguments.part]
        work = part.work.small() if arguments.small else part.work
        run = part.run or partial(trl, python=arguments.trl_python)
        print(json.dumps(run(work, part.dtype)))
        return
    names = [name for name in PARTS if arguments.only is None or name in arguments.only]
    started, head = datetime.now(timezone.utc).isoformat(timespec="seconds"), header(BENCH, arguments.threads)
    if any(PARTS[name].run is None for name in names):
        head["trl_environment"] = trl_versions(arguments.trl_python)
    rounds: dict[str, list[Iterations]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            command = [sys.executable, __file__, "--part", name, "--threads", str(arguments.threads)]
            command += ["--trl-python", str(arguments.trl_python), *(["--small"] if arguments.small else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, rounds[name][-1], flush=True)
    before = json.loads(RESULT.read_text()) if RESULT.exists() and not arguments.small else {}
    result = merged(before, started, head, rounds)
    print("\n".join(lines(result)))
    if not arguments.small:
        write_result(RESULT, result)
        readme.rewrite()


if __name__ == "__main__":
    main()
