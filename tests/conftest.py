"""Tiny random models and a tokenizer of 64 words, made on the spot: no test reads anything from a network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, here or by a test

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<unk>")
# fmt: off
WORDS = (
    "user", "assistant", "system", ":", ".", ",", "!", "?", "the", "a", "an", "it", "was", "is", "and", "but",
    "not", "very", "so", "my", "our", "this", "that", "we", "i", "you", "hotel", "room", "kettle", "train", "book",
    "letter", "staff", "food", "night", "morning", "day", "coat", "door", "soup", "garden", "good", "bad", "kind",
    "cold", "warm", "quiet", "loud", "slow", "happy", "sad", "lovely", "broken", "clean", "late", "arrived",
    "called", "liked", "left", "with", "again",
)
# fmt: on

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)

# Beside what _SHAPE sets. Scales and caps are chosen to matter at logits of a few units.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
    },
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "gpt2": {},
    "mistral": {"sliding_window": 5},
    "phi": {},
}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT2_SHAPE = {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, 64 of them, with <pad>, <eos>, <unk> and a chat template."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    assert len(vocabulary) == 64
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedModel]:
    """``tiny_model(family="llama", seed=0, **config)``: a new random causal language model, float32, evaluation mode.

    Two layers, hidden size 32, the vocabulary of ``tiny_tokenizer``. Biases are drawn too, and the weights are large
    enough for next-token distributions to be far from uniform.
    """

    def make(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
        shape = _GPT2_SHAPE if family == "gpt2" else _SHAPE
        settings = {
            "vocab_size": len(tiny_tokenizer),
            "pad_token_id": tiny_tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tiny_tokenizer.eos_token_id,
            "initializer_range": 0.4,
            **shape,
            **FAMILIES.get(family, {}),
            **overrides,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(std=0.3)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def vader() -> Any:
    """VADER's analyzer: the demo's reward."""
    install = 'vaderSentiment is not installed: pip install "ppo-fast[demo]"'
    module = pytest.importorskip("vaderSentiment.vaderSentiment", reason=install)
    return module.SentimentIntensityAnalyzer()


@pytest.fixture(scope="session")
def tiny_model_dir(
    tiny_model: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a tiny Llama (safetensors) and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
