"""The run's diary: one line of metrics, the replies, and the record, each in the form that reporting/ reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ppo_fast.training import record
from ppo_fast.training.config import PPOConfig
from ppo_fast.training.data import Prompt, dataset_hash
from ppo_fast.training.experience import Experience
from ppo_fast.training.meter import Meter
from ppo_fast.training.rewards import Scores
from ppo_fast.training.run_folder import RunFolder


@dataclass
class Cost:
    """What the run has taken so far, interruptions not counted."""

    seconds: float = 0.0
    tokens: int = 0  # generated
    peak_memory_bytes: int = 0


@dataclass
class Journal:
    """Writes the run folder, iteration by iteration. The folder appears with the first one."""

    folder: RunFolder
    settings: dict[str, Any]  # of config.yaml
    identity: dict[str, Any]  # what doesn't change over the run: model, data, rewards, sampling, seed
    device: torch.device
    cost: Cost = field(default_factory=Cost)
    started: str = field(default_factory=record.now)
    resumed_from: str | None = None
    _clock: float | None = None

    def start_clock(self) -> None:
        """From here on time counts."""
        self._clock = time.perf_counter()

    def write(
        self,
        iteration: int,
        args: PPOConfig,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        scores: Scores,
        experience: Experience,
        results: dict[str, float],
        meter: Meter,
    ) -> dict[str, float]:
        """Writes one iteration and returns its line of metrics."""
        self._open()
        now = time.perf_counter()
        self.cost.seconds += now - (self._clock or now)
        self._clock = now
        self.cost.tokens += int(results["rollout/tokens"])
        self.cost.peak_memory_bytes = max(self.cost.peak_memory_bytes, *meter.peak_bytes.values())
        line = {
            "iteration": iteration,
            "episodes": iteration * args.rollout_size,
            "elapsed_s": self.cost.seconds,
            **results,
            **meter.metrics(),
            "perf/tokens_per_second": results["rollout/tokens"] / sum(meter.seconds.values()),
        }
        self.folder.append_metrics(line)
        rollout = experience.rollout
        rows = [
            {
                "prompt": prompt.text,
                "completion": completion,
                "score": None if scores.total[row] is None else float(experience.scores[row]),
                "rewards": {name: values[row] for name, values in scores.by_function.items()},
                "finished": bool(rollout.finished[row]),
                "length": int(rollout.lengths[row]),
            }
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        self.folder.write_completions(iteration, rows)
        return line

    def close(self) -> None:
        """Marks the run as finished."""
        self._write_record(finished=record.now())

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {"cost": dataclasses.asdict(self.cost), "started": self.started}

    def resume(self, state: dict[str, Any], checkpoint: str, iteration: int) -> None:
        """Goes on from ``state``; what was written after ``iteration`` is put aside."""
        self.cost, self.started = Cost(**state["cost"]), state["started"]
        self.resumed_from = checkpoint
        self.folder.rewind(iteration)

    def _open(self) -> None:
        if not self.folder.is_open:
            self.folder.open(self.settings)
            self._write_record(finished=None)

    def _write_record(self, finished: str | None) -> None:
        self.folder.write_record(
            {
                **record.environment(self.device),
                **self.identity,
                "cost": dataclasses.asdict(self.cost),
                "started": self.started,
                "finished": finished,
                "resumed_from": self.resumed_from,
            }
        )


def identity(
    args: PPOConfig,
    model: dict[str, str],
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    rewards: Sequence[str],
    eos_ids: Sequence[int],
    iterations: int,
) -> dict[str, Any]:
    """What exactly is trained on what."""
    return {
        "model": model,
        "data": {
            "hash": dataset_hash(prompts),
            "train": len(prompts),
            "heldout": len(heldout),
            "heldout_hash": dataset_hash(heldout),
        },
        "rewards": list(rewards),
        "sampling": {
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "response_length": args.response_length,
            "min_new_tokens": args.min_new_tokens,
            "eos_ids": list(eos_ids),
            "stop_strings": args.stop_strings,
            "dtype": args.rollout_dtype,
            "backend": args.rollout_backend,
            "importance_correction": args.importance_correction,
            "old_logprobs": args.old_logprobs,
        },
        "seed": args.seed,
        "iterations": iterations,
    }
