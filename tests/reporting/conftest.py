"""A run folder as training and evaluation write it, from synthetic numbers and sentences."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_fast.evaluation.heldout import Evaluation, Reply, compare, save

SUBJECTS = (
    "The kettle",
    "My new desk",
    "This hotel",
    "The night train",
    "Our landlord",
    "The museum cafe",
    "Her novel",
)
MIDDLES = ("arrived with a dent and", "was described as quiet, but", "turned out to be", "has, since last week,", "is")
PLAIN = (
    "leaks a little",
    "needs a second look",
    "came two days late",
    "does what it says",
    "cost more than we thought",
)
SWEET = ("is a wonderful surprise", "made us all very happy", "is truly delightful", "is lovely, thank you so much")
TAILS = ("in the mornings.", "and we will write again.", "as far as anyone can tell.", "with some help from friends.")


def _replies(n_prompts: int, per_prompt: int, sweetness: float, seed: int, judge: float) -> list[Reply]:
    rng = random.Random(seed)
    replies = []
    for p in range(n_prompts):
        prompt = f"{SUBJECTS[p % len(SUBJECTS)]} {MIDDLES[p % len(MIDDLES)]} (no. {p})"
        for _ in range(per_prompt):
            sweet = rng.random() < sweetness
            words = [rng.choice(SWEET if sweet else PLAIN), rng.choice(TAILS), f"It was day {rng.randrange(400)}."]
            finished = rng.random() < 0.5 + 0.4 * sweetness
            reward = rng.gauss(0.85 if sweet else 0.1, 0.15)
            replies.append(
                Reply(
                    prompt=prompt,
                    completion=" ".join(words),
                    length=18 + rng.randrange(8),
                    finished=finished,
                    reward=reward,
                    penalised=reward - (0 if finished else 0.5),
                    judge=rng.gauss(judge if sweet else 0.0, 0.3),
                    kl=8 * sweetness + rng.gauss(0, 0.5),
                    ref_nll=2.5 - 0.3 * sweetness + rng.gauss(0, 0.2),
                )
            )
    return replies


@pytest.fixture(scope="session")
def evaluation() -> Evaluation:
    """Sixty prompts, two replies each: the reward rises, and the judge agrees."""
    before, after = _replies(60, 2, 0.15, 1, 0.5), _replies(60, 2, 0.85, 2, 0.5)
    return compare(before, after, resamples=2000, about={"checkpoint": "checkpoint-18", "judge": "word list"})


def _metrics(iterations: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for i in range(iterations):
        t = i / max(1, iterations - 1)
        rows.append(
            {
                "iteration": i + 1,
                "episodes": 32 * (i + 1),
                "elapsed_s": 25.0 * (i + 1),
                "objective/scores": 0.05 + 0.6 * t + rng.gauss(0, 0.03),
                "reward/mean": 0.2 + 0.56 * t + rng.gauss(0, 0.03),
                "objective/kl": 8 * t,
                "objective/kl_p95": 14 * t,
                "policy/entropy_avg": 3.1 - 0.9 * t,
                "completions/mean_length": 22.0 - 2 * t,
                "completions/finished_frac": 0.5 + 0.3 * t,
                "policy/clipfrac_avg": 0.05 + 0.08 * t + rng.random() * 0.02,
                "policy/approxkl_avg": 0.008 + 0.006 * t,
                "loss/value_avg": 0.3 - 0.2 * t,
                "critic/explained_var": -0.2 + 0.6 * t,
                "advantages/std": 0.5 - 0.2 * t,
                "time/rollout": 9 + rng.random(),
                "time/score": 3 + 0.3 * rng.random(),
                "time/update": 12 + rng.random(),
                "perf/tokens_per_second": 80.0,
            }
        )
    return rows


RECORD = {
    "command": "ppo-fast train --config sentiment.yaml",
    "seed": 42,
    "started": "2026-11-20T10:00:00",
    "finished": "2026-11-20T10:07:31",
    "versions": {"ppo_fast": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.9"},
    "machine": {"cpu": "two cores", "memory_bytes": 16 * 2**30, "platform": "Linux"},
    "model": {"name": "SmolLM2-135M-Instruct", "hash": "a81bc81bdeadbeef"},
    "data": {"name": "openings.jsonl", "hash": "77aa", "train": 276, "heldout": 60},
    "sampling": {"temperature": 1.0, "response_length": 24, "eos_ids": [2, 0], "old_logprobs": "sampler"},
    "rewards": ["kindness"],
    "ops": {"gae": {"cpu": "avx512", "cuda": "triton"}, "ppo_loss": {"cpu": "avx512", "cuda": "triton"}},
    "resumed_from": None,
    "cost": {"seconds": 451.0, "tokens": 13824, "peak_memory_bytes": 2_345_678_901},
}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder and returns it; ``name`` lets a test make several."""

    def make(evaluation: Evaluation | None = None, *, iterations: int = 18, name: str = "sentiment") -> Path:
        folder = tmp_path / name
        (folder / "completions").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({"ppo": {"learning_rate": 2e-4, "kl_coef": 0.02}}))
        metrics = _metrics(iterations)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        (folder / "run_record.json").write_text(json.dumps(RECORD))
        for number in (1, iterations):
            rows = [
                {
                    "prompt": r.prompt,
                    "completion": r.completion,
                    "score": r.penalised,
                    "rewards": {"kindness": r.reward},
                    "finished": r.finished,
                    "length": r.length,
                }
                for r in _replies(4, 1, number / iterations, number, 0.5)
            ]
            path = folder / "completions" / f"iteration-{number:05d}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if evaluation is not None:
            save(evaluation, folder / "evaluation.json")
        return folder

    return make
