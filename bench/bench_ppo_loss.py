"""The clipped PPO loss of [B, T] with every statistic of the update, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import peers
from harness.case import Bar, Case, Expected, Variant, Work
from harness.timing import copies_beyond_cache
from ppo_fast import ops

OP = "ppo_loss"
SHAPE = (512, 1024)
ENTROPY_COEF = 0.01
SUMS = ("count", "loss", "flat", "outside", "ratio_dev", "ratio_dev_sq", "k1", "k2", "k3", "ref_kl", "entropy")


@dataclass(frozen=True)
class Batch:
    """What the loss reads, [B, T] each. A fifth of the positions is masked."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The peers' arguments, log-probs and entropies requiring grad."""
        logprobs, entropy = (x.detach().requires_grad_() for x in (self.logprobs, self.entropy))
        return logprobs, self.old, self.advantages, self.mask, entropy


def make_batch(seed: int, shape: tuple[int, int]) -> Batch:
    """Log-ratios that leave the clip for every third token, and never come near its edges."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(shape, generator=generator)  # noqa: E731
    logprobs = -normal().abs() - 1
    size = torch.where(torch.rand(shape, generator=generator) < 1 / 3, 0.5, 0.05)
    mask = torch.rand(shape, generator=generator) < 0.8
    return Batch(logprobs, logprobs - size * torch.where(normal() > 0, 1.0, -1.0), normal(), mask, normal().abs())


def _gradients(loss: Tensor, sums: Mapping[str, Tensor], logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    loss.backward()
    assert logprobs.grad is not None
    assert entropy.grad is not None
    return {"mean": loss.detach(), **sums, "d_logprobs": logprobs.grad, "d_entropy": entropy.grad}


def answers(x: Batch) -> Mapping[str, Expected]:
    """In float64, by autograd; sums relative to the sum of absolute values."""
    logprobs, old, advantages, mask, entropy = (t.double() if t.is_floating_point() else t for t in x.arguments())
    logprobs, entropy = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
    loss, sums = peers.eager_ppo_with_statistics(logprobs, old, advantages, mask, entropy, ENTROPY_COEF)
    scales = dict.fromkeys(("loss", "ratio_dev", "k1"), float(mask.sum())) | {"mean": 1.0}
    found = _gradients(loss, dict(zip(SUMS, sums.unbind(0), strict=True)), logprobs, entropy)
    return {name: Expected(value.double(), scale=scales.get(name)) for name, value in found.items()}


def _ours(x: Batch) -> dict[str, Tensor]:
    logprobs, old, advantages, mask, entropy = x.arguments()
    loss, stats = ops.ppo_loss(logprobs, old, advantages, mask, entropy=entropy, entropy_coef=ENTROPY_COEF)
    return _gradients(loss, {name: getattr(stats, name) for name in SUMS}, logprobs, entropy)


def _peer(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Batch], dict[str, Tensor]]:
    def run(x: Batch) -> dict[str, Tensor]:
        arguments = x.arguments()
        loss, sums = function(*arguments, ENTROPY_COEF)
        return _gradients(loss, dict(zip(SUMS, sums.unbind(0), strict=True)), arguments[0], arguments[4])

    return run


def _loss_alone(function: Callable[..., Tensor]) -> Callable[[Batch], dict[str, Tensor]]:
    def run(x: Batch) -> dict[str, Tensor]:
        arguments = x.arguments()
        return _gradients(function(*arguments, ENTROPY_COEF), {}, arguments[0], arguments[4])

    return run


def case(shape: tuple[int, int] = SHAPE) -> Case:
    """One shape in float32."""
    tokens = shape[0] * shape[1]
    work = Work(bytes=tokens * (4 * 4 + 1 + 2 * 4))
    return Case(
        f"{OP} with statistics {list(shape)}",
        torch.float32,
        inputs=lambda seed: make_batch(seed, shape),
        reference=answers,
        variants=(
            Variant("ppo_fast", _ours, work=work, tolerance=2e-5),
            Variant("eager", _peer(peers.eager_ppo_with_statistics), work=work),
            Variant("torch.compile", _peer(peers.compiled(peers.eager_ppo_with_statistics)), work=work),
            Variant("eager, loss alone", _loss_alone(peers.eager_ppo)),
            Variant("torch.compile, loss alone", _loss_alone(peers.compiled(peers.eager_ppo))),
        ),
        copies=copies_beyond_cache(17 * tokens),
        seconds=8.0,
    )


CASES = [case()]
BARS = [
    Bar(OP, "with all statistics, [512, 1024], fwd+bwd", CASES[0].key, "ppo_fast", limit, name, [name], "at least")
    for name, limit in (("eager", 10), ("torch.compile", 2))
]
