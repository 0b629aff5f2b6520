"""Checkpoints: everything a run needs to go on as if it had never stopped.

checkpoint-N/policy/             adapter (peft's own format) or model, with the tokenizer
checkpoint-N/value/              the critic's adapter or model, where it has one of its own
checkpoint-N/value_head.safetensors
checkpoint-N/trainer_state.pt    optimizers, schedulers, random states, data position, KL controller; read back with
                                 weights_only=True, so that a checkpoint from elsewhere can't run code
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_fast.errors import UserError
from ppo_fast.models.roles import VALUE, Roles
from ppo_fast.training.run_folder import written_beside

_NAME = re.compile(r"checkpoint-(\d+)")
_ADAPTER_FILE, _HEAD_FILE, _STATE_FILE = "adapter_model.safetensors", "value_head.safetensors", "trainer_state.pt"


def size_in_bytes(roles: Roles) -> int:
    """An upper estimate of one checkpoint: each trained tensor, and Adam's two moments of it."""
    return 3 * sum(p.numel() * p.element_size() for p in roles.trained) + 2**20


def find(run: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    if not run.is_dir():
        return []
    found = [(int(match[1]), path) for path in run.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def resolve(run: Path, wanted: Literal[True] | str | Path) -> Path:
    """The checkpoint to resume from: the one named, or the newest of the run.

    Raises:
        UserError: there is none.
    """
    if wanted is not True:
        path = Path(wanted)
        if not (path / _STATE_FILE).is_file():
            raise UserError(f"{str(path)!r} is not a checkpoint (it has no {_STATE_FILE}); give a checkpoint-N folder")
        if path.resolve().parent != run.resolve():
            raise UserError(
                f"{str(path)!r} belongs to another run than {str(run)!r}; a run goes on in its own output_dir"
            )
        return path
    checkpoints = find(run)
    if not checkpoints:
        raise UserError(f"{str(run)!r} holds no checkpoint; train it first, or start it again without --resume")
    return checkpoints[-1]


def save(
    run: Path, iteration: int, roles: Roles, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], keep: int | None
) -> Path:
    """Writes checkpoint-``iteration`` beside, renames it, then removes what ``keep`` no longer covers."""
    folder = run / f"checkpoint-{iteration}"
    try:
        _write(folder, roles, tokenizer, state)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as a RuntimeError
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{folder.name} can't be written ({reason:.200}); free some space, then resume from the one before it"
        ) from error
    if keep is not None:
        for old in find(run)[:-keep]:
            shutil.rmtree(old)
    return folder


def _write(folder: Path, roles: Roles, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any]) -> None:
    with written_beside(folder) as scratch:
        if roles.adapters is not None:
            _save_adapter(roles.adapters, _policy_adapter(roles), scratch / "policy")
        else:
            roles.policy.model.save_pretrained(scratch / "policy")
        tokenizer.save_pretrained(scratch / "policy")
        if _has_value_adapter(roles):
            _save_adapter(roles.adapters, VALUE, scratch / "value")
        if roles.critic_model is not None:
            roles.critic_model.save_pretrained(scratch / "value")
        save_file(roles.critic.head.state_dict(), scratch / _HEAD_FILE)
        torch.save(state, scratch / _STATE_FILE)


def load(folder: Path, roles: Roles) -> dict[str, Any]:
    """Puts the checkpoint's weights into ``roles`` and returns its trainer state.

    Raises:
        UserError: the checkpoint belongs to another kind of run.
    """
    load_policy(folder, roles)
    with _readable(folder):
        return _load_rest(folder, roles)


def _load_rest(folder: Path, roles: Roles) -> dict[str, Any]:
    if _has_value_adapter(roles):
        _load_adapter(roles.adapters, VALUE, folder / "value")
    if roles.critic_model is not None:
        _load_model(roles.critic_model, folder / "value")
    roles.critic.head.load_state_dict(load_file(folder / _HEAD_FILE))
    return load_state(folder)


def load_state(folder: Path) -> dict[str, Any]:
    """The checkpoint's trainer state alone.

    Raises:
        UserError: it is damaged.
    """
    with _readable(folder):
        return torch.load(folder / _STATE_FILE, weights_only=True)


def load_policy(folder: Path, roles: Roles) -> None:
    """Puts the checkpoint's policy alone into ``roles``.

    Raises:
        UserError: the checkpoint is damaged, or belongs to another kind of run.
    """
    with _readable(folder):
        if roles.adapters is not None:
            _load_adapter(roles.adapters, _policy_adapter(roles), folder / "policy")
        else:
            _load_model(roles.policy.model, folder / "policy")


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, UnpicklingError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{str(folder)!r} can't be read ({reason:.200}): it is damaged or of a run with other settings; go on from "
            "another checkpoint, or with the run's own config.yaml"
        ) from error


def _policy_adapter(roles: Roles) -> str:
    assert roles.policy.adapter is not None
    return roles.policy.adapter


def _has_value_adapter(roles: Roles) -> bool:
    return roles.adapters is not None and VALUE in roles.adapters.peft_config


def _save_adapter(model: PeftModel, name: str, folder: Path) -> None:
    folder.mkdir()
    model.peft_config[name].save_pretrained(str(folder))
    # Without the embeddings: they aren't the adapter's, and peft would ask the hub whether they changed.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / _ADAPTER_FILE)


def _load_adapter(model: PeftModel, name: str, folder: Path) -> None:
    if not (folder / _ADAPTER_FILE).is_file():
        raise UserError(f"{str(folder)!r} holds no adapter; this checkpoint is of a run without LoRA: use its settings")
    result = set_peft_model_state_dict(model, load_file(folder / _ADAPTER_FILE), adapter_name=name)
    if result.unexpected_keys:
        raise UserError(f"the adapter in {str(folder)!r} doesn't fit this model; resume with the run's own config.yaml")


def _load_model(model: PreTrainedModel, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{str(folder)!r} holds no model; this checkpoint is of a LoRA run: use its settings")
    loaded: nn.Module = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    model.load_state_dict(loaded.state_dict())
