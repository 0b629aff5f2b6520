"""Whitening and means over the live tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_float_tensor, check_mask, visible
from ppo_fast.ops._library import stat_dtype, sum_dtype
from ppo_fast.profiling import annotate

_MIN_STD = 1e-8


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
    with annotate("ppo_fast::whiten"), torch.no_grad():
        # Wide, so that a mean far from zero costs no digits of the small differences to it.
        wide = torch.where(mask, x.to(sum_dtype(x.device)), 0.0)
        if moments is None:
            count = mask.sum()
            mean = wide.sum() / count
            spread = torch.where(mask, wide - mean, 0.0).square().sum()
        else:
            count, total, spread = moments.to(wide.dtype).unbind(0)
            mean = total / count
        whitened = (wide - mean) / (spread / count).sqrt().clamp(min=_MIN_STD)
        if not shift_mean:
            whitened = whitened + mean
        return torch.where(mask, whitened, 0.0).to(stat_dtype(x.dtype))


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
