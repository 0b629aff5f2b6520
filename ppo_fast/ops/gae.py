"""Generalised advantage estimation over the live positions of a batch, with the moments that whitening needs."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ppo_fast.ops import _eager
from ppo_fast.ops._checks import (
    check_float_like,
    check_float_tensor,
    check_fraction,
    check_like,
    check_mask,
    check_matrix,
)
from ppo_fast.ops._library import define, stat_dtype, sum_dtype
from ppo_fast.profiling import annotate


@overload
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values: Tensor | None = None,
    return_moments: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values: Tensor | None = None,
    return_moments: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values: Tensor | None = None,
    return_moments: bool,
) -> tuple[Tensor, ...]: ...
def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True = live
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values: Tensor | None = None,  # [B]
    return_moments: bool = False,
) -> tuple[Tensor, ...]:
    """Advantages and returns of every live token, one backward sweep over the row.

    With n(t) the next live position of the row: ``delta_t = r_t + gamma V(n(t)) - V(t)``,
    ``A_t = delta_t + gamma lam A(n(t))``, ``R_t = A_t + V(t)``. The successor of the last live position has the value
    ``bootstrap_values`` (0 where None) and the advantage 0. A hole in the mask costs no discount.

    Args:
        rewards, values: float32, bfloat16, float16 or float64; computed in float32 (float64 if either is float64).
        mask: where False nothing is read and the outputs are 0; a row without live tokens stays 0.
        gamma, lam: in [0, 1].
        bootstrap_values: the value after the last live token, for replies that were cut short.
        return_moments: also return the moments of the advantages for `whiten`.

    Returns:
        ``(advantages, returns)``, detached, not whitened; with ``return_moments`` also float64 ``[3]``: count, sum, and
        sum of squared deviations from the mean, over live tokens.

    Raises:
        TypeError: for a mask that is not bool, or tensors that are not floating point.
        ValueError: for gamma or lam out of [0, 1], and shapes or devices that don't fit.

    Source: Schulman et al. 2016, eq. 11-16.
    """
    check_matrix("rewards", rewards)
    check_float_like("values", values, rewards, "rewards")
    check_mask(mask, rewards.shape, rewards.device, "rewards")
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    if bootstrap_values is not None:
        check_float_tensor("bootstrap_values", bootstrap_values)
        check_like("bootstrap_values", bootstrap_values, rewards.shape[:1], rewards.device, "the rows of rewards")
    with annotate("ppo_fast::gae"):
        dtype = stat_dtype(torch.promote_types(rewards.dtype, values.dtype))
        advantages, returns, moments = torch.ops.ppo_fast.gae(
            rewards.detach().to(dtype).contiguous(),
            values.detach().to(dtype).contiguous(),
            mask.contiguous(),
            float(gamma),
            float(lam),
            None if bootstrap_values is None else bootstrap_values.detach().to(dtype).contiguous(),
        )
        return (advantages, returns, moments) if return_moments else (advantages, returns)


def _fake(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap_values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    moments = rewards.new_empty(3, dtype=sum_dtype(rewards.device))
    return torch.empty_like(rewards), torch.empty_like(rewards), moments


define(
    "gae(Tensor rewards, Tensor values, Tensor mask, float gamma, float lam, Tensor? bootstrap_values) "
    "-> (Tensor, Tensor, Tensor)",
    _eager.gae,
    _fake,
)
