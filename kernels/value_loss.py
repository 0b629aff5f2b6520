"""The clipped value loss of a batch of tokens, its gradient and its statistics, from one pass.

Pipeline and numerics are those of `ppo_loss`: a block of tokens a program, gradients stored, float64 sums left as a row
of a table that a second program adds up. Per token, in the dtype of the values,

    1/2 max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2)

where V itself is clamped, not V - V_old: inside the range the two squares are then equal to the bit, and the clipped
one counts only where it is strictly larger. There its slope is 0, for it is larger only outside the range. On a tie the
slope is that of the unclipped square.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels.common import COMPILE, combine, on_device_of

# As in ppo_loss, and for the same reasons.
_BLOCK = 1024
_WARPS = 4
_N_SUMS = 4


@triton.jit(do_not_specialize=["n_tokens", "T"])
def _value_loss_kernel(
    values_ptr,  # [B, T] stat dtype
    old_values_ptr,  # [B, T], or None: not clipped
    returns_ptr,  # [B, T]
    mask_ptr,  # [B, T] bool
    row_weights_ptr,  # [B]
    d_values_ptr,  # [B, T]
    table_ptr,  # [n_blocks, 5] float64
    clip_range: tl.float64,
    n_tokens,
    T,
    BLOCK: tl.constexpr,
):
    STAT: tl.constexpr = values_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    token = first + lanes
    inside = token < n_tokens
    row = first // T + ((first % T).to(tl.int32) + lanes) // T

    # A masked token's zeros have no error, and lie inside the range.
    live = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    weight = tl.load(row_weights_ptr + row, mask=live, other=0.0)
    value = tl.load(values_ptr + token, mask=live, other=0.0)
    target = tl.load(returns_ptr + token, mask=live, other=0.0)
    error = value - target
    square = error * error
    largest = square
    slope = error
    clipped = tl.zeros((BLOCK,), tl.int1)
    if old_values_ptr is not None:
        old_value = tl.load(old_values_ptr + token, mask=live, other=0.0)
        reach = tl.full((), clip_range, STAT)
        lowest = old_value - reach
        highest = old_value + reach
        bounded = tl.where(value > highest, highest, tl.where(value < lowest, lowest, value))
        bounded_error = tl.where(old_value == old_value, bounded, old_value) - target  # NaN compares as inside
        bounded_square = bounded_error * bounded_error
        clipped = bounded_square > square
        kept = bounded_square <= square
        largest = tl.where(kept, square, bounded_square)
        slope = tl.where(kept, error, tl.where(clipped, 0.0, float("nan")))
    tl.store(d_values_ptr + token, tl.where(live, weight * slope, 0.0), mask=inside)

    loss = 0.5 * largest
    out = table_ptr + tl.program_id(0).to(tl.int64) * 5
    tl.store(out, tl.sum((weight * loss).to(tl.float64), axis=0))
    tl.store(out + 1, tl.sum(live.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 2, tl.sum(loss.to(tl.float64), axis=0))
    tl.store(out + 3, tl.sum(clipped.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 4, tl.sum(square.to(tl.float64), axis=0))


def value_loss(
    values: Tensor,  # [B, T] float32 or float64
    old_values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    row_weights: Tensor,  # [B]
    clip_range: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ppo_fast::value_loss``: (loss [], d_values [B, T], sums [4] float64 = count, loss, clipped, squared error)."""
    B, T = values.shape
    d_values = torch.empty_like(values)
    loss = values.new_zeros(())
    sums = values.new_zeros(_N_SUMS, dtype=torch.float64)
    if B * T == 0:
        return loss, d_values, sums
    n_blocks = triton.cdiv(B * T, _BLOCK)
    table = values.new_empty((n_blocks, _N_SUMS + 1), dtype=torch.float64)
    with on_device_of(values):
        _value_loss_kernel[(n_blocks,)](
            values,
            None if clip_range is None else old_values,
            returns,
            mask,
            row_weights,
            d_values,
            table,
            0.0 if clip_range is None else clip_range,
            B * T,
            T,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **COMPILE,
        )
        combine(table, loss, sums)
    return loss, d_values, sums
