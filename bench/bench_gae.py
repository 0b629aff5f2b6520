"""GAE with the moments that whitening needs, against a Python loop over T and torchrl's vectorised form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import peers
from harness.case import Bar, Case, Expected, Variant, Work
from harness.timing import copies_beyond_cache
from ppo_fast import ops

OP = "gae"
SHAPE = (512, 1024)
GAMMA, LAM = 0.99, 0.95

Inputs = tuple[Tensor, Tensor, Tensor]
"""rewards, values [B, T] float32, mask [B, T] bool, all live: torchrl knows no mask."""


def make_inputs(seed: int, shape: tuple[int, int]) -> Inputs:
    """Normal rewards and values."""
    rewards, values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)).unbind(0)
    return rewards.contiguous(), values.contiguous(), torch.ones(shape, dtype=torch.bool)


def answers(inputs: Inputs) -> Mapping[str, Expected]:
    """In float64, by the recursion."""
    rewards, values, mask = (x.double() if x.is_floating_point() else x for x in inputs)
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        next_value = values[:, t + 1] if t + 1 < values.shape[1] else torch.zeros_like(following)
        following = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAM * following
        advantages[:, t] = following
    moments = peers.moments(advantages, mask)
    found = {"advantages": advantages, "returns": advantages + values, "spread": moments[2]}
    whole = {"sum": Expected(moments[1], scale=float(advantages.abs().sum())), "count": Expected(moments[0])}
    return {name: Expected(value) for name, value in found.items()} | whole


def _named(advantages: Tensor, returns: Tensor, moments: Tensor) -> dict[str, Tensor]:
    count, total, spread = moments.unbind(0)
    return {"advantages": advantages, "returns": returns, "count": count, "sum": total, "spread": spread}


def _ours(x: Inputs) -> dict[str, Tensor]:
    return _named(*ops.gae(*x, gamma=GAMMA, lam=LAM, return_moments=True))


def _peer(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Inputs], dict[str, Tensor]]:
    def run(x: Inputs) -> dict[str, Tensor]:
        advantages, returns = function(*x, GAMMA, LAM)
        return _named(advantages, returns, peers.moments(advantages, x[2]))

    return run


def case(shape: tuple[int, int] = SHAPE) -> Case:
    """One shape in float32."""
    tokens = shape[0] * shape[1]
    work = Work(bytes=tokens * (4 * 4 + 1))
    return Case(
        f"{OP} and moments {list(shape)}",
        torch.float32,
        inputs=lambda seed: make_inputs(seed, shape),
        reference=answers,
        variants=(
            Variant("ppo_fast", _ours, work=work, tolerance=2e-5),
            Variant("Python loop over T", _peer(peers.loop_gae), work=work),
            Variant("torchrl", _peer(peers.torchrl_gae), work=work, missing=peers.NO_TORCHRL),
        ),
        copies=copies_beyond_cache(9 * tokens),
    )


CASES = [case()]
BARS = [
    Bar(OP, "and whitening moments, [512, 1024]", CASES[0].key, "ppo_fast", 60, against, [name], "at least")
    for name, against in (("Python loop over T", "a Python loop over T"), ("torchrl", "torchrl's vectorised GAE"))
]
