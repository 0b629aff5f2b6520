"""From an aggregation and a normalizer to the weight of each token: how per-token losses become one number."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_positive, choose, visible

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_constant")


def row_weights(
    mask: Tensor,  # [B, T] bool
    aggregation: str,
    normalizer: float | Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # [B]
    """The weight of each live token of a row, such that the loss is the weighted sum over live tokens.

    ``token_mean``: 1 / normalizer, by default the live tokens. ``sequence_mean``: 1 / (live tokens of the row *
    normalizer), by default the rows with live tokens. ``sequence_sum_constant``: 1 / normalizer, by default B * T.

    Raises ValueError for an unknown aggregation, a normalizer that is not a finite positive number or 0-d tensor of
    one, and where no token is live although the normalizer is None, if that can be seen (see `nan_without_tokens`).
    """
    choose("aggregation", aggregation, dict.fromkeys(AGGREGATIONS))
    B, T = mask.shape
    if normalizer is None:
        live = mask.count_nonzero()  # sum() would first widen every bool to int64
        if B * T == 0 or (visible(mask) and not live):
            raise ValueError(
                "mask must have a live token where normalizer is None: there is nothing to take the mean over"
            )
        if aggregation == "token_mean":
            normalizer = live
        elif aggregation == "sequence_mean":
            normalizer = mask.any(1).sum()
        else:
            normalizer = B * T
    elif not isinstance(normalizer, Tensor):
        check_positive("normalizer", normalizer)
    else:
        if normalizer.dim() != 0:
            raise ValueError(f"normalizer must be a number or a 0-d tensor, got shape {list(normalizer.shape)}")
        if visible(normalizer):
            check_positive("normalizer", normalizer.item())
    if isinstance(normalizer, Tensor):
        weights = normalizer.detach().to(device=mask.device, dtype=dtype).reciprocal().expand(B)
    else:
        weights = torch.full((B,), 1.0 / normalizer, dtype=dtype, device=mask.device)
    if aggregation == "sequence_mean":
        weights = weights / mask.sum(1).clamp(min=1)
    return weights.contiguous()


def nan_without_tokens(loss: Tensor, mask: Tensor, normalizer: float | Tensor | None) -> Tensor:
    """The mean over no token is an error; where that would take a synchronisation to see, it is NaN instead."""
    if normalizer is not None or visible(mask):
        return loss
    return torch.where(mask.any(), loss, torch.nan)
