"""Advantages without a critic: each reply against the other replies to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_coefficient, check_float_tensor, choose
from ppo_fast.ops._library import stat_dtype, sum_dtype
from ppo_fast.profiling import annotate

_SCALES = {"std": True, "none": False}


def group_advantages(
    scores: Tensor,  # [B], the replies to one prompt next to each other
    group_size: int,
    *,
    scale: str = "std",
    correction: int = 0,
    eps: float = 1e-4,
) -> Tensor:  # [B]
    """``(score - mean) / (std + eps)`` within each group, and exactly 0 where a group's scores are all equal.

    Args:
        scores: float32, bfloat16, float16 or float64. The result is float32 (float64 for float64), detached.
        group_size: replies per prompt; B must be a multiple of it.
        scale: ``"std"``, or ``"none"`` for ``score - mean`` alone (Dr. GRPO).
        correction: the standard deviation divides by ``group_size - correction``: 0 is the population's, 1 is TRL's.
        eps: finite and >= 0, added to the standard deviation.

    Raises:
        TypeError, ValueError: for scores that are not a floating-point [B], or settings out of range.

    Sources: GRPO, Shao et al. 2024, section 4.1.2; Dr. GRPO, Liu et al. 2025.
    """
    check_float_tensor("scores", scores)
    if scores.dim() != 1:
        raise ValueError(f"scores must have the shape [B], got {list(scores.shape)}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be an integer >= 1, got {group_size!r}")
    if scores.shape[0] % group_size:
        raise ValueError(f"scores must hold whole groups of group_size = {group_size}, got {scores.shape[0]}")
    if correction not in (0, 1):
        raise ValueError(f"correction must be 0 or 1, got {correction!r}")
    check_coefficient("eps", eps)
    divide = choose("scale", scale, _SCALES)
    with annotate("ppo_fast::group_advantages"), torch.no_grad():
        groups = scores.to(sum_dtype(scores.device)).reshape(-1, group_size)
        centred = groups - groups.mean(1, keepdim=True)
        if divide and group_size > correction:
            std = (centred.square().sum(1, keepdim=True) / (group_size - correction)).sqrt()
            centred = centred / (std + eps)
        # Not left to the arithmetic: the mean of equal numbers may miss them by a rounding, which eps blows up.
        equal = (groups == groups[:, :1]).all(1, keepdim=True)
        return torch.where(equal, 0.0, centred).reshape(-1).to(stat_dtype(scores.dtype))
