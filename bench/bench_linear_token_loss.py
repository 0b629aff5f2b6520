"""A PPO loss written in Python and given to linear_token_loss, against the built-in one."""

from __future__ import annotations

import torch
from torch import Tensor

import peers
from bench_linear_ppo_loss import ENTROPY_COEF, OWN, ppo_fast_loss, ready, token_loss
from harness.case import DTYPES, Bar, Case, Variant
from head import Head, answers, gemm_work, make_head
from ppo_fast import ops

OP = "linear_token_loss"
TOKENS = 512


def python_ppo(logprobs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """A token's share of the mean loss."""
    return peers.ppo_terms(logprobs, entropy, old, advantages, ENTROPY_COEF) / TOKENS


def _by_token_loss(x: Head) -> dict[str, Tensor]:
    hidden = x.hidden.detach().requires_grad_()
    loss = ops.linear_token_loss(hidden, x.weight, x.ids, python_ppo, (x.old, x.advantages))
    assert isinstance(loss, Tensor)
    loss.backward()
    return {"d_hidden": hidden.grad}


def case(dtype: torch.dtype) -> Case:
    """Frozen head with an entropy bonus, both ways."""
    work = gemm_work(2, TOKENS)
    return Case(
        f"{OP} N={TOKENS}",
        dtype,
        inputs=lambda seed: make_head(TOKENS, dtype),
        reference=lambda x: answers(x, token_loss(x, x.old, ENTROPY_COEF, TOKENS)),
        variants=[
            Variant("linear_token_loss", _by_token_loss, ready, work, OWN[dtype]),
            Variant("linear_ppo_loss", lambda x: ppo_fast_loss(x, entropy_coef=ENTROPY_COEF), ready, work, OWN[dtype]),
        ],
        first_rows=Head.first,
        memory=("linear_token_loss",),
        seconds=12.0,
    )


CASES = [case(dtype) for dtype in DTYPES]
BARS = [
    Bar(
        OP,
        "a PPO loss in Python, frozen head",
        case.key,
        "linear_token_loss",
        1.05,
        "linear_ppo_loss",
        ["linear_ppo_loss"],
    )
    for case in CASES
]
