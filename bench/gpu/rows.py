"""The ops on [B, T] and on logits that are there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import peers
from gpu.head import ENTROPY_COEF
from gpu.machine import Machine, Numbers, Result, measure, require_as_exact
from ppo_fast import ops

CHECKED_ROWS = 4
SLACK = 4.0  # float32 on both sides, summed in another order: more of PyTorch's error than ours may be is allowed


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Result:
    """(gradient,) of a function of one tensor."""
    leaf = at.detach().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)


def check(
    x: Tensor,  # [4, B, T]
    mask: Tensor,  # [B, T]
    logits: Tensor,  # [n, V]
    ids: Tensor,  # [n]
) -> None:
    """Values against float64, of rows few enough for it."""
    wide = x.double()
    table = logits.double().log_softmax(-1)
    exact: Result = table.gather(1, ids[:, None])[:, 0], -(table.exp() * table).sum(-1)
    ours = ops.selected_logprobs(logits, ids, return_entropy=True)
    require_as_exact("selected_logprobs", ours, peers.eager_logprobs(logits, ids), exact, SLACK)

    def plain(y: Tensor) -> Result:
        return slope(lambda p: peers.eager_ppo(p, y[1], y[2], mask, y[3], ENTROPY_COEF), y[0])

    ours = slope(lambda p: ops.ppo_loss(p, x[1], x[2], mask, entropy=x[3], entropy_coef=ENTROPY_COEF)[0], x[0])
    require_as_exact("ppo_loss", ours, plain(x), plain(wide), SLACK)
    loops = [peers.loop_gae(y[0], y[1], mask, 1.0, 0.95) for y in (x, wide)]
    require_as_exact("gae", ops.gae(x[0], x[1], mask), *loops, SLACK)


def bench_rows(machine: Machine, vocabulary: int) -> Numbers:
    """The ops on [B, T] and on logits."""
    B, T = machine.rows
    generator = torch.Generator(machine.device).manual_seed(0)
    how: dict[str, Any] = {"device": machine.device, "generator": generator}
    x = torch.randn(4, B, T, **how)
    mask = torch.ones(B, T, dtype=torch.bool, device=machine.device)
    logits = torch.randn(4 * B, vocabulary, **how)
    ids = torch.randint(vocabulary, (4 * B,), **how)

    check(x[:, :CHECKED_ROWS], mask[:CHECKED_ROWS], logits[:CHECKED_ROWS], ids[:CHECKED_ROWS])

    def ppo(function: Callable[[Tensor], Tensor]) -> Callable[[], Result]:
        return lambda: slope(function, x[0])

    rest = x[1], x[2], mask
    compiled_ppo, compiled_rows = machine.compiled(peers.eager_ppo), machine.compiled(peers.eager_logprobs)
    gae: dict[str, Callable[[], object]] = {
        "ours": lambda: ops.gae(x[0], x[1], mask, return_moments=True),
        "Python loop": lambda: peers.loop_gae(x[0], x[1], mask, 1.0, 0.95),
    }
    if peers.NO_TORCHRL is None:
        gae["torchrl"] = lambda: peers.torchrl_gae(x[0], x[1], mask, 1.0, 0.95)
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
        "gae": measure(machine, gae),
    }
