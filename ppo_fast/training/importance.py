"""Importance correction: replies drawn by another engine's distribution, weighted for the trainer's own.

With old log-probs that the trainer has re-scored, the ratio new / old says nothing of how far the sampler was from old.
A detached weight ``w = exp(old - sampler)`` on the token's surrogate says it, cut at a cap, since its variance would
grow without one (truncated importance sampling, Ionides 2008).
"""

from __future__ import annotations

from torch import Tensor


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, correction: str, cap: float) -> Tensor:
    """Weights [B, T] of the tokens: "truncate" caps them at ``cap``, "mask" gives those beyond it the weight 0."""
    weights = (old_logprobs - sampler_logprobs).exp()
    return weights.clamp(max=cap) if correction == "truncate" else weights.where(weights <= cap, 0.0)


def importance_metrics(old_logprobs: Tensor, sampler_logprobs: Tensor, applied: Tensor) -> dict[str, float]:
    """Of the live tokens, [n] each: the applied weights' mean, the largest before the cut, the share that was cut."""
    if applied.numel() == 0:
        return {}
    weights = (old_logprobs - sampler_logprobs).double().exp()
    return {
        "importance/mean": float(applied.double().mean()),
        "importance/max": float(weights.max()),
        "importance/cut_frac": float((applied < weights * (1 - 1e-6)).double().mean()),
    }
