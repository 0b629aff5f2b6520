"""Qwen2.5-0.5B's shape with random weights, the model of the rollouts' and the iteration's benches."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from head import HIDDEN, VOCABULARY

QWEN = Qwen2Config(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=151_645, pad_token_id=151_643,
)  # fmt: skip
TINY = Qwen2Config(
    vocab_size=301, hidden_size=16, intermediate_size=2, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


def random_model(config: Qwen2Config, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights every time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
