"""A whole iteration of PPO, stage by stage: ppo_fast's trainer against plain_ppo.py, on the shape of Qwen2.5-0.5B.

    python bench/bench_iteration.py                 the table; writes bench/results/iteration.json, README's
    python bench/bench_iteration.py --part ours     one part, as JSON

Random weights in the model's shape (V = 151,936, H = 896, 24 layers), float32, LoRA r 16 on policy and critic; 8
prompts of 64 tokens, 64 new ones, 2 epochs of 2 minibatches. Each part runs in a process of its own, one after the
other, round by round; of its iterations the first is left out, which loads and packs and plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

import readme
from harness.results import header
from plain_ppo import PlainPPO
from ppo_fast.files import write_atomically
from ppo_fast.recipes.smollm2 import ALIAS, ensure_model
from ppo_fast.training import PPOConfig, PPOTrainer

BENCH = Path(__file__).parent
RESULT = BENCH / "results" / "iteration.json"
REPLIES, PROMPT_TOKENS, NEW_TOKENS, EPOCHS, MINIBATCHES, RANK = 8, 64, 64, 2, 2, 16
TEMPERATURE, KL_COEF = 0.7, 0.05
ITERATIONS = 2
STAGES = ("rollout", "score", "update")
# part, figure, bar, kind
BARS = (
    ("ours", "seconds", 1.4, "at least", "speed"),
    ("ours", "peak_bytes", 0.5, "at most", "memory"),
    ("ours, checkpointed", "peak_bytes", 0.3, "at most", "memory"),
    ("ours, checkpointed", "seconds", 1.0, "at least", "speed"),
)
NAMES = {"speed": "times as fast as plain", "memory": "of plain's peak memory"}


def model() -> PreTrainedModel:
    """Qwen2.5-0.5B's shape with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=151_645, pad_token_id=151_643,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def lora(task: str) -> LoraConfig:
    """On every linear layer."""
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", lora_dropout=0.0, task_type=task)


def texts(tokenizer: Any) -> list[str]:
    """Prompts of exactly PROMPT_TOKENS tokens, made of words that are one token each."""
    words = [
        word
        for word in sorted(tokenizer.get_vocab())
        if word.startswith("\u0120") and word[1:].isalpha() and word[1:].isascii() and len(word) > 4
    ]
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(words), (REPLIES, PROMPT_TOKENS), generator=generator).tolist()
    made = ["".join(" " + words[i][1:] for i in row) for row in picked]
    counts = {len(tokenizer(text)["input_ids"]) for text in made}
    if counts != {PROMPT_TOKENS}:
        raise RuntimeError(f"the prompts have {sorted(counts)} tokens, expected {PROMPT_TOKENS}")
    return made


def share_of_sevens(ids: Sequence[int]) -> float:
    """The reward: the share of ids that 7 divides."""
    return sum(i % 7 == 0 for i in ids) / max(1, len(ids))


def plain() -> list[dict[str, Any]]:
    """Stages of every iteration of the peer."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_model(ALIAS))
    prompts = torch.tensor([tokenizer(text)["input_ids"] for text in texts(tokenizer)])
    trainer = PlainPPO(model(), lora, TEMPERATURE)

    def reward(replies: Tensor) -> Tensor:
        return torch.tensor([share_of_sevens(row) for row in replies.tolist()])

    found = []
    for _ in range(ITERATIONS):
        stages = trainer.iterate(prompts, NEW_TOKENS, reward, epochs=EPOCHS, minibatches=MINIBATCHES, kl_coef=KL_COEF)
        found.append({"seconds": stages.seconds, "peak_bytes": stages.peak_bytes})
    return found


def ours(*, checkpointing: bool) -> list[dict[str, Any]]:
    """The same by the trainer, from its own metrics."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_model(ALIAS))

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [share_of_sevens(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config = PPOConfig(
            output_dir=str(run), response_length=NEW_TOKENS, temperature=TEMPERATURE, learning_rate=1e-5,
            per_device_train_batch_size=REPLIES // MINIBATCHES, gradient_accumulation_steps=MINIBATCHES,
            num_mini_batches=MINIBATCHES, num_ppo_epochs=EPOCHS, total_episodes=ITERATIONS * REPLIES, kl_coef=KL_COEF,
            gradient_checkpointing=checkpointing, save_steps=0,
        )  # fmt: skip
        PPOTrainer(
            model(), reward, config, [{"prompt": text} for text in texts(tokenizer)], processing_class=tokenizer,
            peft_config=lora("CAUSAL_LM"),
        ).train()  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["rollout/tokens"] != REPLIES * NEW_TOKENS:
            raise RuntimeError(f"a reply ended early: {line['rollout/tokens']} tokens in all")
    return [
        {
            "seconds": {stage: line[f"time/{stage}"] for stage in STAGES},
            "peak_bytes": {stage: int(line[f"perf/peak_memory_{stage}"]) for stage in STAGES},
        }
        for line in lines
    ]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "plain": plain,
    "ours": lambda: ours(checkpointing=False),
    "ours, checkpointed": lambda: ours(checkpointing=True),
}


def summary(parts: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Of each part the median seconds of each stage over all but first iterations, and the highest peak."""
    found = {}
    for name, rounds in parts.items():
        later = [iteration for iterations in rounds for iteration in iterations[1:]]
        stages = {stage: statistics.median(i["seconds"][stage] for i in later) for stage in STAGES}
        peak = max(max(i["peak_bytes"].values()) for iterations in rounds for i in iterations)
        found[name] = {"stages": stages, "seconds": sum(stages.values()), "peak_bytes": peak}
    return found


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar and measured, side by side."""
    rows = []
    for part, figure, bar, sense, kind in BARS:
        ratio = found[part][figure] / found["plain"][figure]
        measured = 1 / ratio if kind == "speed" else ratio
        met = measured >= bar if sense == "at least" else measured <= bar
        rows.append({"part": part, "figure": NAMES[kind], "bar": bar, "sense": sense, "measured": measured, "met": met})
    return rows


def main() -> None:
    """All parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=1, help="times that every part is run (default: 1)")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.part:
        print(json.dumps(PARTS[arguments.part]()))
        return
    parts: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in PARTS}
    for _ in range(arguments.rounds):
        for name, rounds in parts.items():
            command = [sys.executable, __file__, "--part", name, "--threads", str(arguments.threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
            print(name, rounds[-1], flush=True)
    found = summary(parts)
    bars = judged(found)
    for name, one in found.items():
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in one["stages"].items())
        print(f"{name}: {one['seconds']:.1f} s ({stages}), {one['peak_bytes'] / 2**30:.2f} GiB")
    for row in bars:
        sign = "met" if row["met"] else "missed"
        print(f"{row['part']}: {row['measured']:.2f} {row['figure']}, bar {row['sense']} {row['bar']}: {sign}")
    result = {**header(BENCH, arguments.threads), "command": "python bench/bench_iteration.py", "summary": found,
              "bars": bars, "parts": parts}  # fmt: skip
    write_atomically(RESULT, json.dumps(result, indent=1) + "\n")
    readme.README.write_text(readme.render(readme.README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
