"""What a user would pick instead: plain PyTorch, torch.compile of it, TRL's chunked head, torchrl's GAE."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CLIP = 0.2


def why_missing(package: str) -> str | None:
    """None where the package is installed, else a sentence."""
    return None if importlib.util.find_spec(package) else f"{package} is not installed; `make bench` installs its peers"


NO_TRL, NO_TORCHRL = why_missing("trl"), why_missing("torchrl")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for fixed shapes, a fresh graph for every case: nobody pays for another's dynamic shapes."""
    return torch.compile(function, dynamic=False)


def eager_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of [N, V] logits; in float32, as trainers do it for 16-bit logits."""
    logprobs = logits.float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, None]).squeeze(-1), entropy


def eager_linear_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same from hidden states, by the full logits."""
    return eager_logprobs(hidden @ weight.t(), ids)


def ppo_terms(logprobs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor, entropy_coef: float) -> Tensor:
    """The clipped PPO loss of each token, in plain operations."""
    ratio = (logprobs - old).exp()
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return surrogate - entropy_coef * entropy


def eager_linear_ppo(
    hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, entropy_coef: float
) -> Tensor:
    """The mean clipped PPO loss from hidden states, by the full logits and autograd."""
    return ppo_terms(*eager_linear_logprobs(hidden, weight, ids), old, advantages, entropy_coef).mean()


def trl_linear_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor, tile: int = 4096) -> tuple[Tensor, Tensor]:
    """TRL 1.16's chunked head with the tile of the vocabulary that is fastest on a CPU."""
    from trl.kernels import ChunkedLogProbFunction

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, tile, None, 1.0, ("entropy",))
    return logprobs, entropy


def trl_linear_ppo(
    hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, entropy_coef: float, tile: int = 4096
) -> Tensor:
    """The mean clipped PPO loss on TRL's chunked head."""
    return ppo_terms(*trl_linear_logprobs(hidden, weight, ids, tile), old, advantages, entropy_coef).mean()


def trl_trainers_linear_logprobs(*arguments: Any) -> tuple[Tensor, Tensor]:
    """TRL 1.16's chunked head with the tile of its own trainers, made for GPUs."""
    from trl.trainer import utils

    return trl_linear_logprobs(*arguments, utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def trl_trainers_linear_ppo(*arguments: Any) -> Tensor:
    """The mean clipped PPO loss with that tile."""
    from trl.trainer import utils

    return trl_linear_ppo(*arguments, utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def moments(advantages: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and squared deviations over live tokens, float64 [3]: what whitening needs."""
    count, wide = mask.sum(), torch.where(mask, advantages, 0.0).double()
    total = wide.sum()
    spread = torch.where(mask, wide - total / count, 0.0).square().sum()
    return torch.stack([count.double(), total, spread])


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of [B, T] by a Python loop over T, as in TRL's PPOTrainer; right-padded rows."""
    rewards, values = rewards * mask, values * mask
    last, reversed_advantages = torch.zeros_like(values[:, 0]), []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def torchrl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """torchrl's vectorised GAE on full rows: one trajectory each, which ends at the last step."""
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    done = torch.zeros_like(mask)
    done[:, -1] = True
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    columns = [x.unsqueeze(-1) for x in (values, following, rewards, done, done)]
    advantages, returns = vec_generalized_advantage_estimate(gamma, lam, *columns)
    return advantages.squeeze(-1), returns.squeeze(-1)


def eager_ppo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, entropy: Tensor, entropy_coef: float
) -> Tensor:
    """The clipped PPO loss of [B, T] and nothing else."""
    losses = ppo_terms(logprobs, entropy, old, advantages, entropy_coef)
    return torch.where(mask, losses, 0.0).sum() / mask.sum()


def eager_ppo_with_statistics(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, entropy: Tensor, entropy_coef: float
) -> tuple[Tensor, Tensor]:
    """The clipped PPO loss of [B, T], and the sums that `ops.ppo_loss` gives, stacked in the order of its fields."""
    count = mask.sum()

    def total(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0).sum()

    log_ratios = logprobs - old
    ratio = log_ratios.exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    plain, capped = -advantages * ratio, -advantages * clipped
    surrogate = torch.maximum(plain, capped)
    loss = total(surrogate - entropy_coef * entropy) / count
    with torch.no_grad():
        outside = ratio != clipped
        sums = torch.stack(
            [
                count.float(),
                total(surrogate),
                total((outside & (capped > plain)).float()),
                total(outside.float()),
                total(ratio - 1),
                total((ratio - 1).square()),
                total(-log_ratios),
                total(0.5 * log_ratios.square()),
                total(log_ratios.expm1() - log_ratios),
                torch.zeros(()),
                total(entropy),
            ]
        )
    return loss, sums
