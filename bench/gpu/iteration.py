"""One PPO iteration of a 7B-shaped model with LoRA, on random weights: its time and its peak memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from gpu.machine import Machine, Numbers
from ppo_fast.training import PPOConfig, PPOTrainer


def bench_iteration(machine: Machine, folder: Path) -> Numbers:
    """One PPO iteration of a Qwen2-7B-shaped model with LoRA, all roles on one copy of its random weights."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "word": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    large = {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    tiny = dict.fromkeys(large, 2) | {"vocab_size": 301, "hidden_size": 16}
    config = Qwen2Config(
        **(tiny if machine.dry else large), tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype)
    trainer = PPOTrainer(
        model,
        reward_funcs=lambda prompts, completions, completion_ids, **columns: [float(len(x)) for x in completion_ids],
        args=PPOConfig(
            output_dir=str(folder),
            response_length=4 if machine.dry else 128,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1 if machine.dry else 4,
            num_ppo_epochs=1,
            total_episodes=2 if machine.dry else 8,
            gradient_checkpointing=True,
            temperature=1.0,
            dtype=str(machine.dtype).removeprefix("torch."),
            save_steps=0,
        ),
        train_dataset=[{"prompt": "word"}],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    start = time.perf_counter()
    peak = machine.peak_of(trainer.train)
    return {"seconds": round(time.perf_counter() - start, 1), "peak_bytes_beside_weights": peak}
