"""Ragged prompts and replies, and LoRA adapters that do something from the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ppo_fast.models.tokens import TokenBatch, pad_prompts

PROMPTS = ([5, 11, 29, 15], [31], [7, 7, 40, 9, 12, 60, 33], [52, 20])
REPLIES = ([14, 58, 1], [9, 23, 41, 41, 8, 30], [62, 1], [33])


@pytest.fixture(scope="session")
def ragged() -> list[tuple[list[int], list[int]]]:
    """Four prompts of 1 to 7 tokens with replies of 1 to 6."""
    return list(zip(PROMPTS, REPLIES, strict=True))


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., TokenBatch]:
    """``batch_of(pairs, pad_id=0)``: prompts padded on the left, replies on the right."""

    def make(pairs: list[tuple[list[int], list[int]]], pad_id: int = 0) -> TokenBatch:
        prompts, prompt_mask = pad_prompts([prompt for prompt, _ in pairs], pad_id)
        width = max(len(reply) for _, reply in pairs)
        replies = torch.tensor([reply + [pad_id] * (width - len(reply)) for _, reply in pairs])
        response_mask = torch.tensor([[t < len(reply) for t in range(width)] for _, reply in pairs])
        return TokenBatch(torch.cat([prompts, replies], 1), prompt_mask, response_mask)

    return make


@pytest.fixture(scope="session")
def lora() -> Callable[..., LoraConfig]:
    """``lora(**settings)``: rank 4 on every linear layer, and dropout, which building the roles must turn off."""

    def make(**settings: Any) -> LoraConfig:
        defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.25}
        return LoraConfig(**{**defaults, "task_type": "CAUSAL_LM", **settings})

    return make


@pytest.fixture(scope="session")
def shake() -> Callable[..., None]:
    """``shake(parameters, seed)``: adds noise to them, so that fresh LoRA adapters and zero heads have an effect."""

    def apply(parameters: Iterable[nn.Parameter], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in parameters:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)

    return apply


@pytest.fixture(scope="session")
def with_adapter(
    tiny_model: Callable[..., PreTrainedModel], lora: Callable[..., LoraConfig], shake: Callable[..., None]
) -> Callable[..., PeftModel]:
    """``with_adapter(**settings)``: a tiny Llama that arrives with a trained adapter, named as peft names it."""

    def make(family: str = "llama", seed: int = 0, **settings: Any) -> PeftModel:
        model = get_peft_model(tiny_model(family, seed=seed), lora(**settings))
        shake((p for p in model.parameters() if p.requires_grad), seed=7)
        return model

    return make
