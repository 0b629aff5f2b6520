"""The clipped value loss of PPO, its gradient and its statistics in one pass over [B, T]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_fast.ops import _eager
from ppo_fast.ops._aggregation import nan_without_tokens, row_weights
from ppo_fast.ops._checks import check_float_like, check_mask, check_matrix, check_number
from ppo_fast.ops._library import (
    define,
    define_loss_backward,
    differentiable,
    may_give_away,
    stat_dtype,
    sum_dtype,
)
from ppo_fast.profiling import annotate

VALUE_SUMS = ("count", "loss", "clipped", "sq_error")


class ValueStats(NamedTuple):
    """Sums over live tokens, so that micro-batches and ranks add up; 0-d float64 tensors, detached."""

    count: Tensor  # type: ignore[assignment]  # live tokens; shadows tuple.count
    loss: Tensor  # per-token losses, unweighted, with their 1/2
    clipped: Tensor  # tokens whose clipped term is strictly the larger
    sq_error: Tensor  # (V - R)^2, unclipped, without 1/2

    @property
    def loss_mean(self) -> Tensor:
        """Mean loss per token."""
        return self.loss / self.count

    @property
    def clipped_fraction(self) -> Tensor:
        """Share of tokens whose gradient the clip sets to zero."""
        return self.clipped / self.count

    def merge(self, other: ValueStats) -> ValueStats:
        """The statistics of both batches together."""
        return ValueStats(*(a + b for a, b in zip(self, other, strict=True)))


def value_loss(
    values: Tensor,  # [B, T]
    old_values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True = live
    *,
    clip_range: float | None = 0.2,
    aggregation: str = "token_mean",
    normalizer: float | Tensor | None = None,
) -> tuple[Tensor, ValueStats]:
    """``1/2 max((V - R)^2, (V_old + clip(V - V_old, +-clip_range) - R)^2)``, aggregated over live tokens.

    Args:
        values: the critic's, now; float32, bfloat16, float16 or float64, computed in float32 (float64 for float64).
        old_values, returns: from the rollout; constants, they receive no gradient.
        mask: where False nothing is read, and gradients are exactly 0; it may have holes.
        clip_range: >= 0 in units of the value, or None for no clip.
        aggregation, normalizer: as in `ppo_loss`.

    Returns:
        the loss, 0-d, and `ValueStats`. With no live token: 0 if a normalizer is given.

    Raises:
        TypeError, ValueError: as `ppo_loss`.

    Source: the PPO2 implementation of OpenAI Baselines (2017). Double backward is an error.
    """
    check_matrix("values", values)
    check_float_like("old_values", old_values, values, "values")
    check_float_like("returns", returns, values, "values")
    check_mask(mask, values.shape, values.device, "values")
    if clip_range is not None:
        check_number("clip_range", clip_range)
        if not clip_range >= 0:
            raise ValueError(f"clip_range must be None or >= 0, got {clip_range}")
    with annotate("ppo_fast::value_loss"):
        dtype = stat_dtype(values.dtype)
        loss, _, sums = torch.ops.ppo_fast.value_loss(
            values.to(dtype).contiguous(),
            old_values.detach().to(dtype).contiguous(),
            returns.detach().to(dtype).contiguous(),
            mask.contiguous(),
            row_weights(mask, aggregation, normalizer, dtype),
            None if clip_range is None else float(clip_range),
        )
        return nan_without_tokens(loss, mask, normalizer), ValueStats(*sums.unbind(0))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, d_values, sums = output
    ctx.save_for_backward(inputs[0], d_values)
    ctx.mark_non_differentiable(d_values, sums)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *rest: Tensor | None) -> Any:
    values, d_values = ctx.saved_tensors
    gradient = None
    if grad_loss is not None:
        scale = torch.ops.ppo_fast.value_loss_backward
        gradient = d_values if may_give_away(grad_loss) else scale(grad_loss, d_values, values)
    return gradient, None, None, None, None, None


def _fake(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, row_weights: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    sums = values.new_empty(len(VALUE_SUMS), dtype=sum_dtype(values.device))
    return values.new_empty(()), torch.empty_like(values), sums


define(
    "value_loss(Tensor values, Tensor old_values, Tensor returns, Tensor mask, Tensor row_weights, float? clip_range) "
    "-> (Tensor, Tensor, Tensor)",
    _eager.value_loss,
    _fake,
)
define_loss_backward("value_loss")
differentiable("value_loss", _backward, _setup_context)
