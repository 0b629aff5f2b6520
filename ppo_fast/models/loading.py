"""Models and tokenizers from a path, a hub id or an object, made ready for PPO: one dtype, no dropout, a real EOS."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppo_fast.errors import UserError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOISES = ("drop", "jitter")  # attention_dropout, resid_pdrop, layerdrop (OPT), router_jitter_noise (Mixtral)
_SAMPLING_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "sequence_bias",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
)


def load_model(name_or_path: str, *, dtype: str = "float32", auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The model at a path or hub id, in ``dtype``, with safetensors weights and no code from the checkpoint.

    Raises:
        UserError: the model can't be found or read, its weights lack a tensor, or it is an adapter.
    """
    try:
        model, report = auto_class.from_pretrained(
            name_or_path, dtype=DTYPES[dtype], trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"the model {name_or_path!r} can't be loaded ({_first_line(error)}); give a folder with config.json and "
            "safetensors weights, or a hub id that this machine can reach"
        ) from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"{name_or_path!r} holds an adapter, not a model; load it with peft's PeftModel.from_pretrained(base, "
            f"{name_or_path!r}) and pass that object, or merge it and save the result"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would go on with random numbers in their place.
        raise UserError(
            f"the weights of {name_or_path!r} lack {missing[0]!r} and {len(missing) - 1} other tensors of a "
            f"{type(model).__name__}; give a model that was saved as one"
        )
    return model


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at a path or hub id.

    Raises:
        UserError: it can't be found or read.
    """
    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer of {name_or_path!r} can't be loaded ({_first_line(error)}); save it into the model's "
            "folder or pass processing_class="
        ) from error


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a reply: the tokenizer's EOS and every EOS of the model's generation_config."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    found = sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if not found:
        raise UserError("neither the tokenizer nor the model names an EOS token; set tokenizer.eos_token")
    if found[-1] >= vocabulary:
        raise UserError(
            f"EOS id {found[-1]} is outside the model's vocabulary of {vocabulary}; fix tokenizer.eos_token"
        )
    return tuple(found)


def unused_sampling_settings(model: PreTrainedModel) -> dict[str, Any]:
    """What the model's own generation_config would do to the distribution, were it not overridden: name -> value."""
    if model.generation_config is None:
        return {}
    settings = model.generation_config.to_diff_dict()
    return {name: settings[name] for name in _SAMPLING_SETTINGS if settings.get(name) is not None}


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0: modules, and the plain floats that layers keep, under whatever name.

    With dropout the log-probs of the update differ from those of sampling before any step, and the ratio isn't 1.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(noise in name for noise in _NOISES):
                setattr(module, name, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
