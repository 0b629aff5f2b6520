"""The head's three products, scoring, and the actor loss: values, times, memory, and the bars of the actor loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import peers
from gpu.machine import Machine, Numbers, Result, measure, require_as_exact, setting
from head import Head
from ppo_fast import ops

CHECKED_ROWS = 64
ENTROPY_COEF = 0.01
BAR_GEMMS, BAR_EXTRA = 1.2, 1 << 30


def exact_rows(x: Head, n: int) -> Result:
    """Log-probs, entropies and d_hidden of the mean PPO loss of the first n tokens, in float64."""
    small = x.first(n)
    hidden = small.hidden.double().requires_grad_()
    z = hidden @ small.weight.double().t()
    table = z.log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    logprobs = table.gather(1, small.ids[:, None])[:, 0]
    losses = peers.ppo_terms(logprobs, entropy, small.old.double(), small.advantages.double(), ENTROPY_COEF)
    (d_hidden,) = torch.autograd.grad(losses.mean(), hidden)
    return logprobs.detach(), entropy.detach(), d_hidden


def our_loss(hidden: Tensor, weight: Tensor, x: Head) -> Tensor:
    loss, _ = ops.linear_ppo_loss(
        hidden[None], weight, x.ids[None], x.old[None], x.advantages[None], torch.ones_like(x.half)[None],
        entropy_coef=ENTROPY_COEF,
    )  # fmt: skip
    return loss


def with_gradients(loss: Callable[[Tensor, Tensor], Tensor], x: Head, trainable: bool) -> Callable[[], Result]:
    def call() -> Result:
        hidden = x.hidden.detach().requires_grad_()
        weight = x.weight.detach().requires_grad_(trainable)
        return torch.autograd.grad(loss(hidden, weight), (hidden, weight) if trainable else (hidden,))

    return call


def bench_gemms(machine: Machine, x: Head) -> dict[str, Numbers]:
    gradient = torch.randn(len(x.ids), x.weight.shape[0], device=machine.device, dtype=machine.dtype)
    return measure(
        machine,
        {
            "GEMM 1": lambda: x.hidden @ x.weight.t(),
            "GEMM 2": lambda: gradient @ x.weight,
            "GEMM 3": lambda: gradient.t() @ x.hidden,
        },
    )


def bench_head(machine: Machine, shape: tuple[int, int, int]) -> Numbers:
    """GEMMs, scoring and the actor loss at one shape."""
    x = machine.make_head(shape)
    n = min(CHECKED_ROWS, shape[0])
    small, exact = x.first(n), exact_rows(x, n)
    with torch.no_grad():
        plain = peers.eager_linear_logprobs(small.hidden, small.weight, small.ids)
        for way in ("fused", "vendor"):
            with setting(PPO_FAST_SCORING=way):
                ours = ops.linear_selected_logprobs(small.hidden, small.weight, small.ids, return_entropy=True)
            require_as_exact(f"scoring, {way}", ours, plain, exact[:2])
    eager = with_gradients(
        lambda h, w: peers.eager_linear_ppo(h, w, small.ids, small.old, small.advantages, ENTROPY_COEF), small, False
    )
    mine = with_gradients(lambda h, w: our_loss(h, w, small), small, False)
    errors = require_as_exact("actor loss", mine(), eager(), exact[2:])

    def scored(way: str) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad(), setting(PPO_FAST_SCORING=way):
                return ops.linear_selected_logprobs(x.hidden, x.weight, x.ids, return_entropy=True)

        return call

    def without_grad(function: Callable[..., Any]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return function(x.hidden, x.weight, x.ids)

        return call

    gemms = bench_gemms(machine, x)
    scoring = {
        "ours": scored(""),
        "ours, fused": scored("fused"),
        "ours, vendor": scored("vendor"),
        "eager": without_grad(peers.eager_linear_logprobs),
        "torch.compile": without_grad(machine.compiled(peers.eager_linear_logprobs)),
    }
    if peers.NO_TRL is None:
        scoring["TRL"] = without_grad(peers.trl_trainers_linear_logprobs)
    results: Numbers = {"errors": errors, "gemms": gemms, "scoring": measure(machine, scoring)}

    rest = x.ids, x.old, x.advantages, ENTROPY_COEF
    compiled = machine.compiled(peers.eager_linear_ppo)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "ours": lambda h, w: our_loss(h, w, x),
        "eager": lambda h, w: peers.eager_linear_ppo(h, w, *rest),
        "torch.compile": lambda h, w: compiled(h, w, *rest),
    }
    if peers.NO_TRL is None:
        losses["TRL"] = lambda h, w: peers.trl_trainers_linear_ppo(h, w, *rest)
    for name, trainable in (("frozen", False), ("trainable", True)):
        variants = {who: with_gradients(loss, x, trainable) for who, loss in losses.items()}
        found = measure(machine, variants)
        used = ("GEMM 1", "GEMM 2", "GEMM 3")[: 3 if trainable else 2]
        results[name] = {**found, "bars": judged(found, [gemms[gemm]["ms"] for gemm in used], x, trainable)}
    return results


def judged(found: dict[str, Numbers], gemms: list[float | None], x: Head, trainable: bool) -> Numbers:
    """The three bars of the actor loss; None where something could not be measured."""
    ours, eager = found["ours"], found["eager"]["ms"]
    known = [ms for ms in gemms if ms is not None]
    d_weight = 4 * x.weight.numel() if trainable else 0
    extra = None if ours["peak_bytes"] is None else ours["peak_bytes"] - d_weight
    against_gemms = ours["ms"] / sum(known) if ours["ms"] and len(known) == len(gemms) else None
    return {
        "over the GEMMs": against_gemms,
        "at most 1.2x of the GEMMs": None if against_gemms is None else against_gemms <= BAR_GEMMS,
        "never slower than eager": None if not (ours["ms"] and eager) else ours["ms"] <= eager,
        "bytes beside d_weight": extra,
        "under 1 GiB beside d_weight": None if extra is None else extra < BAR_EXTRA,
    }
