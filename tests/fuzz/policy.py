"""What a policy loss takes beside new log-probs: old ones, advantages and settings."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from .layer import Layer
from .strategies import generator


class Policy:
    """Old and reference log-probs about the exact ones of a layer, and the settings of a policy loss."""

    def __init__(self, layer: Layer, seed: int) -> None:
        g, shape, live = generator(seed), layer.case.shape, layer.live
        nothing = torch.zeros(int(live.sum()), dtype=torch.float64)
        self.logprobs = layer.rows(torch.float64, nothing, nothing).softmax.logprobs
        base = torch.zeros(shape, dtype=torch.float64)
        base[live] = torch.nan_to_num(self.logprobs, neginf=-20.0)

        def near(spread: float) -> Tensor:
            x = base + spread * torch.randn(shape, generator=g, dtype=torch.float64)
            return x.masked_fill(~live, torch.nan).to(layer.stat)

        self.old, self.reference = near(0.3), near(0.5)
        self.advantages = torch.randn(shape, generator=g).masked_fill(~live, torch.nan)
        self.advantages[torch.rand(shape, generator=g) < 0.1] = 0.0


POLICY_SETTINGS = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["ppo", "ppo", "cispo"]),
        "clip_low": st.sampled_from([0.2, 0.0, 1.0]),
        "clip_high": st.sampled_from([0.2, 0.28, 0.0, float("inf")]),
        "dual_clip": st.sampled_from([None, None, 1.5, 3.0]),
        "entropy_coef": st.sampled_from([0.0, 0.01, 1.0]),
        "kl_coef": st.sampled_from([0.0, 0.05, 1.0]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "aggregation": st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_constant"]),
        "normalizer": st.sampled_from([None, None, 7.5, "tensor"]),
    }
)


def fitting(drawn: dict[str, object], live: Tensor) -> dict[str, object]:
    """Settings that go together: dual clip with PPO alone, a normalizer where no token is live."""
    drawn = dict(drawn)
    if drawn["objective"] == "cispo":
        drawn["dual_clip"] = None
    if drawn["normalizer"] == "tensor" or (drawn["normalizer"] is None and not live.any()):
        drawn["normalizer"] = torch.tensor(11.0)
    return drawn


def near_bounds(difference: Tensor, error: Tensor, drawn: dict[str, object]) -> Tensor:
    """Tokens whose log-ratio may fall on either side of a bound."""
    bounds = [1 - drawn["clip_low"], 1 + drawn["clip_high"], drawn["dual_clip"] or 1.0]
    at = torch.zeros_like(difference, dtype=torch.bool)
    for bound in bounds:
        at |= (difference - torch.tensor(bound, dtype=torch.float64).log()).abs() <= error
    return at


def at_bounds(difference: Tensor, error: Tensor, drawn: dict[str, object]) -> int:
    return int(near_bounds(difference, error, drawn).sum())
