"""Runs on a tiny random model: prompts, a reward, settings, and a trainer built from them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from ppo_fast.training import PPOConfig, PPOTrainer


def length_reward(prompts, completions, completion_ids, **columns):
    """Shorter replies score higher; every reply has its own score."""
    return [-0.1 * len(ids) + 0.01 * (sum(ids) % 7) for ids in completion_ids]


@pytest.fixture
def prompts(tiny_tokenizer) -> list[dict[str, str]]:
    words = [w for w in sorted(tiny_tokenizer.get_vocab()) if w.isalpha()]
    return [{"prompt": " ".join(words[i : i + 2 + i % 4])} for i in range(12)]


@pytest.fixture
def settings(tmp_path):
    """Keyword arguments of a quick PPOConfig; tests override what they are about."""
    return {
        "output_dir": str(tmp_path / "run"),
        "response_length": 6,
        "temperature": 0.9,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "total_episodes": 32,
        "learning_rate": 1e-3,
        "missing_eos_penalty": 0.5,
        "save_steps": 2,
        "save_total_limit": None,
        "seed": 3,
    }


@pytest.fixture
def make_trainer(tiny_model_dir, prompts, settings):
    """``make_trainer(lora=True, model_dtype=..., trainer={...}, **config)``."""

    def make(
        *, lora: bool = True, model_dtype: torch.dtype = torch.float32, trainer: dict | None = None, **config
    ) -> PPOTrainer:
        arguments = {
            "reward_funcs": length_reward,
            "train_dataset": prompts,
            "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        } | (trainer or {})
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=model_dtype)
        from ppo_fast.models.loading import load_tokenizer

        arguments.setdefault("processing_class", load_tokenizer(str(tiny_model_dir)))
        return PPOTrainer(model, args=PPOConfig(**(settings | config)), **arguments)

    return make
