"""TRL's GRPO and RLOO on SmolLM2-135M-Instruct with and without `ppo_fast.integrations.trl`: five real steps each.

    python bench/bench_trl.py --parts runs/trl [--only grpo-lora-ours ...]

In the peers' environment (`make bench-trl`). Three runs a case, each in a process of its own: ``stock`` and ``ours``
train freely from the same seed and are timed; ``both`` takes stock's steps and compares the other's loss and gradients
on the same weights and replies at every one. A part that is there already is not run again; with all of them there
bench/results/trl.json is written, and README's table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

import readme
from harness.memory import status, track_peak
from harness.results import header, write_result
from ppo_fast.integrations import trl as integration
from ppo_fast.recipes.smollm2 import ALIAS, ensure_model

BENCH = Path(__file__).parent
RESULT = BENCH / "results" / "trl.json"
CASES = [f"{algorithm}-{weights}" for algorithm in ("grpo", "rloo") for weights in ("full", "lora")]
RUNS = ("stock", "ours", "both")
STEPS, REPLIES, REPLY_TOKENS, PROMPT_TOKENS, RANK = 5, 8, 48, 64, 16
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": REPLIES,
    "num_generations": 4,
    "max_completion_length": REPLY_TOKENS,
    "max_steps": STEPS,
    "learning_rate": 1e-5,
    "temperature": 0.7,
    "beta": 0.05,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 1,
}
TOPICS = ("the sea", "a bicycle repair", "how bread is baked", "planning a garden", "the rules of chess", "the moon")
REQUEST = (
    "Write about {}. Begin with a short overview for a reader who knows nothing about it, then give three concrete "
    "details, one surprising fact, and a closing sentence that a child could remember. Keep the language plain."
)


def lower_case(completions: list[str], **_: Any) -> list[float]:
    """The Python reward: the share of characters that are not capitals."""
    return [sum(c == c.lower() for c in text) / max(1, len(text)) for text in completions]


def prompts(tokenizer: Any) -> list[str]:
    """Chat prompts of exactly PROMPT_TOKENS tokens."""
    end = tokenizer("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    made = []
    for topic in TOPICS:
        ids = tokenizer("<|im_start|>user\n" + REQUEST.format(topic), add_special_tokens=False)["input_ids"]
        made.append(tokenizer.decode(ids[: PROMPT_TOKENS - len(end)] + end))
    return made


def build(case: str, base: Callable[[type], type] = lambda trainer: trainer, **settings: Any) -> Any:
    """The trainer of a case; ``base`` may derive from TRL's class."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_model(ALIAS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    algorithm, weights = case.split("-")
    config, trainer = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[algorithm]
    quiet = {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return base(trainer)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lower_case,
        args=config(output_dir=tempfile.mkdtemp(), **SETTINGS, **quiet, **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts(tokenizer)}),
        processing_class=tokenizer,
        peft_config=lora if weights == "lora" else None,
    )


class HeadClock:
    """Stands before whatever computes the head and adds up the seconds of its forward and backward pass."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seconds = inner, 0.0

    def apply(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        found = self.inner.apply(*arguments)
        self.seconds += time.perf_counter() - started
        node = found[0].grad_fn
        while node is not None and node.name().startswith(("View", "Reshape")):
            node = node.next_functions[0][0]
        if node is not None:
            node.register_prehook(self._begin)
            node.register_hook(self._end)
        return found

    def _begin(self, _: Any) -> None:
        self.started = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self.started

    def pop(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def run_freely(case: str, ours: bool) -> dict[str, Any]:
    """Five steps: seconds of each and of its head, what TRL logged, and the process's peak memory."""
    from transformers import TrainerCallback
    from trl.trainer import utils

    calls = integration.enable() if ours else integration.Calls()
    clock = HeadClock(utils._ChunkedLogProbFunction)
    utils._ChunkedLogProbFunction = clock
    steps: list[dict[str, Any]] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.pop()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append({"seconds": time.perf_counter() - self.started, "head_seconds": clock.pop()})

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                steps[-1] |= {key: logs[key] for key in ("loss", "grad_norm", "reward", "kl", "entropy")}

    trainer = build(case)
    trainer.add_callback(Steps())
    track_peak()
    trainer.train()
    return {
        "steps": steps,
        "peak_bytes": status("VmHWM"),
        "calls": {key: getattr(calls, key) for key in ("scored", "frozen", "trained", "rows")},
        "left_to_trl": sum(calls.left.values()),
    }


def run_both(case: str) -> dict[str, Any]:
    """Five of stock's steps, and at each the loss and the gradients that ours makes of the same weights and replies."""
    from transformers import TrainerCallback

    steps: list[dict[str, Any]] = []
    mine: list[Tensor] = []
    seen: list[integration.Calls] = []

    def derived(trainer: type) -> type:
        class Both(trainer):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *rest: Any, **keywords: Any) -> Tensor:
                with integration.enabled() as calls:
                    loss = super().compute_loss(model, self._rescored(model, inputs), *rest, **keywords)
                    mine[:] = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
                seen.append(calls)
                stock = super().compute_loss(model, inputs, *rest, **keywords)
                steps.append({"stock_loss": stock.item(), "loss": loss.item()})
                return stock

            @torch.no_grad()
            def _rescored(self, model: Any, inputs: Any) -> Any:
                """RLOO's ratio is of log-probs summed over a reply: both of them must come from the same arithmetic."""
                if "old_logps" not in inputs:
                    return inputs
                ids, mask = (
                    torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1)
                    for name in ("ids", "mask")
                )
                live = inputs["completion_mask"]
                logprobs, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, live.shape[1])
                return {**inputs, "old_logps": (logprobs * live).sum(1)}

        return Both

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            pairs = list(zip(mine, [p.grad for p in model.parameters() if p.requires_grad], strict=True))
            length = math.sqrt(sum(theirs.double().square().sum().item() for _, theirs in pairs))
            error = math.sqrt(sum((ours - theirs).double().square().sum().item() for ours, theirs in pairs))
            largest = max(theirs.abs().max().item() for _, theirs in pairs)
            largest_error = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
            steps[-1] |= {"gradient_norm": length, "relative_error": error / length}
            steps[-1] |= {"largest_relative_error": largest_error / largest}
            mine.clear()

    trainer = build(case, derived, max_grad_norm=0.0)
    trainer.add_callback(Compare())
    trainer.train()
    return {"steps": steps, "served": sum(calls.frozen + calls.trained for calls in seen)}


def summary(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A case's figures for the table; times are medians over the steps."""
    stock, ours, both = (parts[run] for run in RUNS)

    def median(part: dict[str, Any], key: str) -> float:
        return statistics.median(step[key] for step in part["steps"])

    def apart(key: str) -> float:
        return max(abs(a[key] - b[key]) for a, b in zip(stock["steps"], ours["steps"], strict=True))

    made = {
        name: {"head": median(part, "head_seconds"), "step": median(part, "seconds"), "peak_bytes": part["peak_bytes"]}
        for name, part in (("stock", stock), ("ours", ours))
    }
    return {
        **made,
        "ratio": {key: made["ours"][key] / made["stock"][key] for key in made["ours"]},
        "loss_difference": max(abs(step["loss"] - step["stock_loss"]) for step in both["steps"]),
        "gradient_error": max(step["relative_error"] for step in both["steps"]),
        "free_loss_difference": apart("loss"),
        "free_entropy_difference": apart("entropy"),
    }


def main() -> None:
    """Runs the parts that are missing, each in its own process; writes the result once all are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, required=True, help="folder of the parts' JSON")
    parser.add_argument("--only", nargs="+", metavar="CASE-RUN", help="e.g. grpo-full-stock")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: 2)")
    parser.add_argument("--part", metavar="CASE-RUN", help="one part, in this process")
    arguments = parser.parse_args()
    if arguments.part:
        torch.set_num_threads(arguments.threads)
        case, run = arguments.part.rsplit("-", 1)
        found = run_both(case) if run == "both" else run_freely(case, run == "ours")
        write_result(arguments.parts / f"{arguments.part}.json", found)
        return
    arguments.parts.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or [f"{case}-{run}" for case in CASES for run in RUNS]:
        if not (arguments.parts / f"{name}.json").exists():
            command = [sys.executable, __file__, "--parts", str(arguments.parts), "--threads", str(arguments.threads)]
            subprocess.run([*command, "--part", name], check=True)
    files = {case: {run: arguments.parts / f"{case}-{run}.json" for run in RUNS} for case in CASES}
    if not all(path.exists() for runs in files.values() for path in runs.values()):
        return
    parts = {case: {run: json.loads(path.read_text()) for run, path in runs.items()} for case, runs in files.items()}
    result = {
        **header(BENCH, arguments.threads),
        "command": "python bench/bench_trl.py --parts runs/trl",
        "model": ALIAS,
        "settings": {**SETTINGS, "prompt_tokens": PROMPT_TOKENS, "lora_rank": RANK},
        "summary": {case: summary(parts[case]) for case in CASES},
        "parts": parts,
    }
    write_result(RESULT, result)
    readme.rewrite()
    print(f"wrote {RESULT.name} in bench/results, and the table in README.md")


if __name__ == "__main__":
    main()
