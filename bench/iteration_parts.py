"""The parts of bench_iteration.py: an iteration of PPO by ppo_fast, by plain_ppo.py, by TRL's PPOTrainer.

Each is a function that gives one dict an iteration: ``seconds`` and ``peak_bytes`` of the stages rollout, score and
update.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

import shapes
import trl_ppo
from plain_ppo import PlainPPO
from ppo_fast.recipes.smollm2 import ALIAS, ensure_model
from ppo_fast.training import PPOConfig, PPOTrainer
from shapes import random_model

RANK, TEMPERATURE, KL_COEF, LEARNING_RATE = 16, 0.7, 0.05, 1e-5
ITERATIONS = 2  # the first one loads, packs and plans
MINIBATCHES = 2
STAGES = ("rollout", "score", "update")

Iterations = list[dict[str, Any]]


def smollm2(dtype: torch.dtype) -> PreTrainedModel:
    """SmolLM2-135M-Instruct, which no EOS stops: see `tokenizer`."""
    model = AutoModelForCausalLM.from_pretrained(ensure_model(ALIAS), dtype=dtype)
    model.generation_config.eos_token_id = None
    return model


def tokenizer() -> Any:
    """SmolLM2's, with an EOS that is never drawn: every reply of every part has full length."""
    made = AutoTokenizer.from_pretrained(ensure_model(ALIAS))
    made.eos_token = "<gh_stars>"
    return made


def reward_head() -> list[float]:
    """Of the reward model on SmolLM2's body."""
    return torch.empty(576).normal_(std=0.02, generator=torch.Generator().manual_seed(0)).tolist()


def reward_model(dtype: torch.dtype) -> PreTrainedModel:
    """SmolLM2's body under `reward_head`."""
    model = AutoModelForSequenceClassification.from_pretrained(ensure_model(ALIAS), num_labels=1, dtype=dtype)
    model.score.weight.data.copy_(torch.tensor([reward_head()]))
    return model


def share_of_sevens(ids: Sequence[int]) -> float:
    """The other reward: the share of ids that 7 divides."""
    return sum(i % 7 == 0 for i in ids) / max(1, len(ids))


@dataclass(frozen=True)
class Work:
    """What one iteration is made of."""

    model: Callable[[torch.dtype], PreTrainedModel]
    replies: int
    reward_model: Callable[[torch.dtype], PreTrainedModel] | None = None  # None: share_of_sevens
    prompt_tokens: int = 64
    new_tokens: int = 64
    epochs: int = 2

    def small(self) -> Work:
        """A look at whether everything runs."""
        return replace(self, replies=4, prompt_tokens=16, new_tokens=8, epochs=1)

    def prompts(self, words: Any) -> list[str]:
        """Of exactly ``prompt_tokens`` tokens, made of words that are one token each."""
        vocabulary = [
            word
            for word in sorted(words.get_vocab())
            if word.startswith("\u0120") and word[1:].isalpha() and word[1:].isascii() and len(word) > 4
        ]
        generator = torch.Generator().manual_seed(0)
        picked = torch.randint(len(vocabulary), (self.replies, self.prompt_tokens), generator=generator).tolist()
        made = ["".join(" " + vocabulary[i][1:] for i in row) for row in picked]
        counts = {len(words(text)["input_ids"]) for text in made}
        if counts != {self.prompt_tokens}:
            raise RuntimeError(f"the prompts have {sorted(counts)} tokens, expected {self.prompt_tokens}")
        return made

    def prompt_ids(self, words: Any) -> list[list[int]]:
        """The same as token ids."""
        return [words(text)["input_ids"] for text in self.prompts(words)]


QWEN = Work(partial(random_model, shapes.QWEN), replies=8)
SMOLLM2 = Work(smollm2, replies=16, reward_model=reward_model)


def lora(task: str) -> LoraConfig:
    """On every linear layer."""
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", lora_dropout=0.0, task_type=task)


def plain(work: Work, dtype: torch.dtype, logits: Literal["all", "reply"]) -> Iterations:
    """The script of an afternoon."""
    prompts = torch.tensor(work.prompt_ids(tokenizer()))
    trainer = PlainPPO(work.model(dtype), lora, TEMPERATURE, logits=logits, learning_rate=LEARNING_RATE)

    def reward(replies: Tensor) -> Tensor:
        return torch.tensor([share_of_sevens(row) for row in replies.tolist()])

    return [
        trainer.iterate(
            prompts, work.new_tokens, reward, epochs=work.epochs, minibatches=MINIBATCHES, kl_coef=KL_COEF
        ).figures()
        for _ in range(ITERATIONS)
    ]


def ours(work: Work, dtype: torch.dtype, *, checkpointing: bool = False, micro_batch: int | None = None) -> Iterations:
    """ppo_fast's trainer, from its own metrics; ``micro_batch`` rows of a minibatch at a time, None for all."""
    words = tokenizer()
    micro_batch = min(micro_batch or work.replies, work.replies // MINIBATCHES)

    def sevens(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [share_of_sevens(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config = PPOConfig(
            output_dir=str(run), response_length=work.new_tokens, temperature=TEMPERATURE, learning_rate=LEARNING_RATE,
            per_device_train_batch_size=micro_batch, gradient_accumulation_steps=work.replies // micro_batch,
            num_mini_batches=MINIBATCHES, num_ppo_epochs=work.epochs, total_episodes=ITERATIONS * work.replies,
            kl_coef=KL_COEF, dtype=str(dtype).removeprefix("torch."), gradient_checkpointing=checkpointing,
            save_steps=0,
        )  # fmt: skip
        PPOTrainer(
            work.model(dtype), sevens if work.reward_model is None else work.reward_model(dtype), config,
            [{"prompt": text} for text in work.prompts(words)], processing_class=words,
            reward_processing_classes=None if work.reward_model is None else [words], peft_config=lora("CAUSAL_LM"),
        ).train()  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["rollout/tokens"] != work.replies * work.new_tokens:
            raise RuntimeError(f"a reply ended early: {line['rollout/tokens']} tokens in all")
    return [
        {
            "seconds": {stage: line[f"time/{stage}"] for stage in STAGES},
            "peak_bytes": {stage: int(line[f"perf/peak_memory_{stage}"]) for stage in STAGES},
        }
        for line in lines
    ]


def trl(work: Work, dtype: torch.dtype, python: Path) -> Iterations:
    """TRL's trainer, on SmolLM2 and its reward model, in the environment of ``python``."""
    job = trl_ppo.Job(
        folder=ensure_model(ALIAS), dtype=str(dtype).removeprefix("torch."), prompts=work.prompt_ids(tokenizer()),
        reward_head=reward_head(), new_tokens=work.new_tokens, epochs=work.epochs, minibatches=MINIBATCHES,
        iterations=ITERATIONS, temperature=TEMPERATURE, kl_coef=KL_COEF, rank=RANK, threads=torch.get_num_threads(),
    )  # fmt: skip
    command = [str(python), trl_ppo.__file__]
    done = subprocess.run(command, input=job.json(), stdout=subprocess.PIPE, text=True, check=True)
    iterations: Iterations = json.loads(done.stdout.splitlines()[-1])
    return iterations
