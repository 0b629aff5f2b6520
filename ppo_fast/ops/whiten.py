"""Whitening and means over the live tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops import _eager
from ppo_fast.ops._checks import check_float_tensor, check_mask, visible
from ppo_fast.ops._library import define, stat_dtype, sum_dtype
from ppo_fast.profiling import annotate


def whiten(
    x: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True = live
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,  # [3]
) -> Tensor:  # [B, T]
    """``(x - mean) / max(std, 1e-8)`` over live tokens, population std; ``shift_mean=False`` adds the mean back.

    Args:
        x: float32, bfloat16, float16 or float64. The result is float32 (float64 for float64), detached.
        mask: where False nothing is read and the output is 0.
        moments: count, sum, and sum of squared deviations from the mean, as `gae` returns them; those of several
            micro-batches or ranks combine to the whole batch's (Chan et al. 1979), with which each part is whitened.
            None takes the moments of ``x`` itself.

    Raises:
        TypeError, ValueError: for a mask that is not bool, or shapes and devices that don't fit.
    """
    check_float_tensor("x", x)
    check_mask(mask, x.shape, x.device, "x")
    if moments is not None:
        check_float_tensor("moments", moments)
        if moments.shape != (3,):
            raise ValueError(f"moments must have the shape [3] (count, sum, M2), got {list(moments.shape)}")
        if moments.device != x.device:
            raise ValueError(f"moments must be on the device of x, {x.device}, got {moments.device}")
    with annotate("ppo_fast::whiten"):
        x, wide = x.detach().to(stat_dtype(x.dtype)).contiguous(), sum_dtype(x.device)
        if moments is None:
            selected = torch.where(mask, x.to(wide), 0.0)
            count, total = mask.sum(dtype=wide), selected.sum()
            spread = torch.where(mask, selected - total / count, 0.0).square().sum()
            moments = torch.stack([count, total, spread])
        matrix = (1, -1) if x.dim() != 2 else x.shape
        moments = moments.detach().to(wide).contiguous()
        live = mask.reshape(matrix).contiguous()
        return torch.ops.ppo_fast.whiten(x.view(matrix), live, moments, shift_mean).view(x.shape)


def _fake(x: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool) -> Tensor:
    return torch.empty_like(x)


define("whiten(Tensor x, Tensor mask, Tensor moments, bool shift_mean) -> Tensor", _eager.whiten, _fake)


def masked_mean(
    x: Tensor,  # [...]
    mask: Tensor,  # [...] bool, True = live
) -> Tensor:
    """The mean of ``x`` over live positions, 0-d, float32 (float64 for float64); differentiable, 0 gradient elsewhere.

    Raises:
        TypeError, ValueError: for a mask that is not bool, or shapes and devices that don't fit.
        ValueError: if no position is live, where that can be seen without a synchronisation (CPU); else NaN.
    """
    check_float_tensor("x", x)
    check_mask(mask, x.shape, x.device, "x")
    if visible(mask) and not mask.any():
        raise ValueError("mask must have a live position: there is nothing to take the mean over")
    with annotate("ppo_fast::masked_mean"):
        return (torch.where(mask, x, 0.0).sum(dtype=sum_dtype(x.device)) / mask.sum()).to(stat_dtype(x.dtype))
