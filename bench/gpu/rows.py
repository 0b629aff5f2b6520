"""The ops on [B, T] and on logits that are there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import peers
from gpu.head import ENTROPY_COEF
from gpu.machine import Machine, Numbers, Result, measure
from ppo_fast import ops


def bench_rows(machine: Machine, vocabulary: int) -> Numbers:
    """The ops on [B, T] and on logits."""
    B, T = machine.rows
    generator = torch.Generator(machine.device).manual_seed(0)
    how: dict[str, Any] = {"device": machine.device, "generator": generator}
    x = torch.randn(4, B, T, **how)
    mask = torch.ones(B, T, dtype=torch.bool, device=machine.device)
    logits = torch.randn(4 * B, vocabulary, **how)
    ids = torch.randint(vocabulary, (4 * B,), **how)

    def ppo(function: Callable[[Tensor], Tensor]) -> Callable[[], Result]:
        def call() -> Result:
            leaf = x[0].detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf)

        return call

    rest = x[1], x[2], mask
    compiled_ppo, compiled_rows = machine.compiled(peers.eager_ppo), machine.compiled(peers.eager_logprobs)
    return {
        "selected_logprobs": measure(
            machine,
            {
                "ours": lambda: ops.selected_logprobs(logits, ids, return_entropy=True),
                "eager": lambda: peers.eager_logprobs(logits, ids),
                "torch.compile": lambda: compiled_rows(logits, ids),
                "one read": lambda: logits.sum(),
            },
        ),
        "ppo_loss": measure(
            machine,
            {
                "ours": ppo(lambda p: ops.ppo_loss(p, *rest, entropy=x[3], entropy_coef=ENTROPY_COEF)[0]),
                "eager": ppo(lambda p: peers.eager_ppo(p, *rest, x[3], ENTROPY_COEF)),
                "torch.compile": ppo(lambda p: compiled_ppo(p, *rest, x[3], ENTROPY_COEF)),
            },
        ),
        "gae": measure(
            machine,
            {
                "ours": lambda: ops.gae(x[0], x[1], mask, return_moments=True),
                "Python loop": lambda: peers.loop_gae(x[0], x[1], mask, 1.0, 0.95),
            },
        ),
    }
