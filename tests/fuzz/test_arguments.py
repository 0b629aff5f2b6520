"""A bad argument is a TypeError, ValueError or IndexError that names it: never a crash, never a silent number.

Each test takes a valid call and puts one wrong value after another into one of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_fast.ops import (
    gae,
    linear_ppo_loss,
    linear_selected_logprobs,
    linear_token_loss,
    masked_mean,
    ppo_loss,
    selected_logprobs,
    value_loss,
    whiten,
)

B, T, V, H = 2, 3, 7, 4


def _pseudo_loss(logprobs: Tensor, entropy: Tensor, row: Tensor) -> Tensor:
    return logprobs * row


def _matrix() -> Tensor:
    return torch.rand(B, T)


def _ids() -> Tensor:
    return torch.randint(V, (B, T))


def _mask() -> Tensor:
    return torch.ones(B, T, dtype=torch.bool)


def _kept() -> Tensor:
    return torch.arange(V).expand(B, T, V).clone()


LOSS: dict[str, Any] = {
    "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 2.0, "objective": "ppo", "entropy_coef": 0.1, "kl_coef": 0.1,
    "kl_estimator": "k3", "aggregation": "token_mean", "normalizer": 4.0, "ref_logprobs": _matrix,
}  # fmt: skip
LAYER: dict[str, Any] = {
    "hidden": lambda: torch.randn(B, T, H), "weight": lambda: torch.randn(V, H), "token_ids": _ids,
    "bias": lambda: torch.randn(V), "temperature": 1.0, "softcap": 5.0, "logit_scale": 1.0, "mask": _mask,
    "kept_ids": _kept,
}  # fmt: skip
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    selected_logprobs: {
        "logits": lambda: torch.randn(B, T, V), "token_ids": _ids, "temperature": 1.0, "mask": _mask
    },
    linear_selected_logprobs: LAYER,
    linear_token_loss: {
        **LAYER, "token_loss": lambda: _pseudo_loss, "rows": lambda: (torch.rand(B, T),), "chunk_tokens": 4
    },
    linear_ppo_loss: {**LAYER, **LOSS, "old_logprobs": _matrix, "advantages": _matrix, "chunk_tokens": 4},
    ppo_loss: {
        **LOSS, "logprobs": _matrix, "old_logprobs": _matrix, "advantages": _matrix, "mask": _mask, "entropy": _matrix,
    },
    value_loss: {
        "values": _matrix, "old_values": _matrix, "returns": _matrix, "mask": _mask, "clip_range": 0.2,
        "aggregation": "token_mean", "normalizer": 4.0,
    },
    gae: {
        "rewards": _matrix, "values": _matrix, "mask": _mask, "gamma": 1.0, "lam": 0.9,
        "bootstrap_values": lambda: torch.rand(B),
    },
    whiten: {"x": _matrix, "mask": _mask, "moments": lambda: torch.tensor([6.0, 1.0, 2.0])},
    masked_mean: {"x": _matrix, "mask": _mask},
}  # fmt: skip

IDS, MASK = ("token_ids", "kept_ids"), "mask"
NAMES = ("objective", "kl_estimator", "aggregation")
OPTIONAL = ("mask", "bias", "kept_ids", "softcap", "dual_clip", "normalizer", "ref_logprobs", "entropy", "clip_range",
            "bootstrap_values", "moments", "chunk_tokens")  # fmt: skip


def _wrong_shapes(x: Tensor) -> list[Tensor]:
    return [x[None], x.reshape(-1)[:-1], torch.cat([x, x]), x.new_zeros(0), x.new_zeros(()), x.to("meta")]


def _wrong_values(name: str, valid: Any) -> list[Any]:
    """Values that the argument ``name`` must refuse."""
    wrong: list[Any] = ["nonsense", [0.5], {}, object(), 1j]
    if name not in OPTIONAL:
        wrong.append(None)
    if name in NAMES:
        return [*wrong, 3, 0.5, True, "PPO", "", torch.tensor(1)]
    if name == "token_loss":
        return [*wrong, 3, lambda *a: 1.0, lambda *a: a[0].sum(), lambda *a: (a[0], a[1]), lambda *a: a[0] > 0]
    if name == "rows":
        x = valid[0]
        return ["ab", 3, None, (3,), ("ab",), (x[None],), (x[:1],), (x.to("meta"),), (x.clone().requires_grad_(),)]
    if name == "chunk_tokens":
        return [*wrong, 0, -1, 1.5, math.nan, True, torch.tensor(3)]
    if isinstance(valid, Tensor):
        wrong += [1.0, 3, True, valid.to_sparse() if name in ("hidden", "weight", "bias") else "sparse"]
        wrong += _wrong_shapes(valid)
        wrong.append(valid.to(torch.complex64))
        if name in IDS:
            wrong += [valid.float(), valid.bool(), torch.full_like(valid, V), torch.full_like(valid, -2)]
        elif name == MASK:
            wrong += [valid.long(), valid.float()]
        else:
            wrong += [valid.long(), valid.bool(), valid.to(torch.float8_e4m3fn)]
        return wrong
    wrong += [math.nan, -1, -0.5, torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5]), torch.tensor(math.nan), torch.tensor(1j)]
    if name in ("temperature", "softcap", "logit_scale", "normalizer"):
        wrong += [0, 0.0, math.inf, torch.tensor(0.0)]
    if name in ("entropy_coef", "kl_coef", "dual_clip"):
        wrong += [math.inf]
    if name == "dual_clip":
        wrong += [1, 0.5]
    if name in ("clip_low", "gamma", "lam"):
        wrong += [1.5, math.inf]
    return wrong


PAIRS = [(call, name) for call, arguments in CALLS.items() for name in arguments]


def _made(arguments: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {k: v() if callable(v) else v for k, v in arguments.items()}


@pytest.mark.parametrize(("call", "name"), PAIRS, ids=[f"{call.__name__}-{name}" for call, name in PAIRS])
def test_a_bad_argument_is_named(call: Callable[..., Any], name: str) -> None:
    arguments = _made(CALLS[call])
    call(**arguments)
    for value in _wrong_values(name, arguments[name]):
        with pytest.raises((TypeError, ValueError, IndexError), match=name):
            call(**{**arguments, name: value})
