"""Generalised advantage estimation over the live positions of each row, with the moments that whitening needs.

Pipeline. One program a row, one read of [B, T]. The recurrence runs backwards over live positions,

    A_t = (r_t + gamma * V_next - V_t) + gamma * lambda * A_next

and is a composition of affine maps of the pair (A_next, V_next): a live position maps it to (the above, V_t), a hole
maps it to itself. Maps compose associatively, so a block of T is one scan, and the pair at the block's earliest
position is carried to the block before it; the carry crosses holes and blocks alike, and starts as (0, bootstrap).
Blocks are read from the end of the row backwards, so that the scan itself runs forwards. Each program also leaves
count, mean and squared deviation of its live advantages; a second, single program merges the rows.

Numerics. The scan is in the dtype of the inputs (float32, or float64). A composed map is a product of at most T factors
gamma * lambda <= 1 and sums of the same terms the sequential loop adds, in another order. Moments are float64: inside a
block from its own mean, between blocks and rows by the parallel form of Welford's update, in an order fixed by the
shape, so that a mean far from 0 costs no digits and a repeated call gives the same bits. Holes are never loaded.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels.common import COMPILE, on_device_of

# Positions a program scans at a time, and lanes for them: 8 positions a lane, so that most of the scan stays inside a
# lane and the five scanned values inside the registers. 1024 holds a common reply whole; longer rows loop. A reasoned
# choice, not a measured one. A block never has fewer positions than lanes.
_MAX_BLOCK = 1024
_MIN_BLOCK = 64
_POSITIONS_PER_WARP = 256
# Rows of moments merged at a time by the single merging program, in one warp.
_MERGE_ROWS = 256


@triton.jit
def _after(decay_x, value_x, constant_x, next_x, seen_x, decay_y, value_y, constant_y, next_y, seen_y):
    """The map x (later positions) followed by the map y (earlier ones). A map takes (A, V) to
    (decay * A + value * V + constant, next if seen else V); ``seen`` says whether it holds a live position."""
    decay = decay_y * decay_x
    value = decay_y * value_x + tl.where(seen_x != 0, 0.0, value_y)
    constant = decay_y * constant_x + value_y * next_x + constant_y
    following = tl.where(seen_y != 0, next_y, next_x)
    return decay, value, constant, following, seen_x | seen_y


@triton.jit(do_not_specialize=["T"])
def _gae_kernel(
    rewards_ptr,  # [B, T]
    values_ptr,  # [B, T]
    mask_ptr,  # [B, T] bool
    bootstrap_ptr,  # [B], or None: 0
    advantages_ptr,  # [B, T]
    returns_ptr,  # [B, T]
    moments_ptr,  # [B, 3] float64: count, sum, squared deviation from the row's mean
    gamma: tl.float64,
    gamma_lam: tl.float64,
    T,
    BLOCK_T: tl.constexpr,
):
    STAT: tl.constexpr = values_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    rewards_ptr += row * T
    values_ptr += row * T
    mask_ptr += row * T
    advantages_ptr += row * T
    returns_ptr += row * T
    discount = tl.full((), gamma, STAT)
    decay_live = tl.full((), gamma_lam, STAT)

    next_advantage = tl.zeros((), STAT)
    next_value = tl.zeros((), STAT)
    if bootstrap_ptr is not None:
        next_value = tl.load(bootstrap_ptr + row)
    count = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    squares = tl.zeros((), tl.float64)

    lanes = tl.arange(0, BLOCK_T)
    earliest = lanes == BLOCK_T - 1
    for start in range(0, T, BLOCK_T):
        t = T - 1 - (start + lanes)
        inside = t >= 0
        live = tl.load(mask_ptr + t, mask=inside, other=0) != 0
        reward = tl.load(rewards_ptr + t, mask=live, other=0.0)
        value = tl.load(values_ptr + t, mask=live, other=0.0)

        decay, through, constant, following, seen = tl.associative_scan(
            (
                tl.where(live, decay_live, 1.0),
                tl.where(live, discount, 0.0),
                reward - value,
                value,
                live.to(tl.int32),
            ),
            0,
            _after,
        )
        advantage = decay * next_advantage + through * next_value + constant
        # Selected, not multiplied by 0: a value that is infinite or NaN ends where the recurrence ends it.
        following = tl.where(seen != 0, following, next_value)
        tl.store(advantages_ptr + t, tl.where(live, advantage, 0.0), mask=inside)
        tl.store(returns_ptr + t, tl.where(live, advantage + value, 0.0), mask=inside)
        next_advantage = tl.sum(tl.where(earliest, advantage, 0.0), axis=0)
        next_value = tl.sum(tl.where(earliest, following, 0.0), axis=0)

        x = tl.where(live, advantage, 0.0).to(tl.float64)
        block_count = tl.sum(live.to(tl.int32), axis=0).to(tl.float64)
        block_total = tl.sum(x, axis=0)
        block_mean = block_total / tl.maximum(block_count, 1.0)
        deviation = tl.where(live, x - block_mean, 0.0)
        gap = block_mean - total / tl.maximum(count, 1.0)
        weight = count * block_count / tl.maximum(count + block_count, 1.0)
        squares += tl.sum(deviation * deviation, axis=0) + gap * gap * weight
        count += block_count
        total += block_total

    tl.store(moments_ptr + row * 3, count)
    tl.store(moments_ptr + row * 3 + 1, total)
    tl.store(moments_ptr + row * 3 + 2, squares)


@triton.jit(do_not_specialize=["B"])
def _merge_moments_kernel(
    rows_ptr,  # [B, 3] float64: count, sum, squared deviation of each row
    moments_ptr,  # [3] float64
    B,
    ROWS: tl.constexpr,
):
    lanes = tl.arange(0, ROWS)
    count = tl.zeros((ROWS,), tl.float64)
    total = tl.zeros((ROWS,), tl.float64)
    for start in range(0, B, ROWS):
        row = start + lanes
        count += tl.load(rows_ptr + row * 3, mask=row < B, other=0.0)
        total += tl.load(rows_ptr + row * 3 + 1, mask=row < B, other=0.0)
    all_count = tl.sum(count, axis=0)
    all_total = tl.sum(total, axis=0)
    mean = all_total / tl.maximum(all_count, 1.0)
    squares = tl.zeros((ROWS,), tl.float64)
    for start in range(0, B, ROWS):
        row = start + lanes
        row_count = tl.load(rows_ptr + row * 3, mask=row < B, other=0.0)
        row_total = tl.load(rows_ptr + row * 3 + 1, mask=row < B, other=0.0)
        row_squares = tl.load(rows_ptr + row * 3 + 2, mask=row < B, other=0.0)
        gap = row_total / tl.maximum(row_count, 1.0) - mean
        squares += row_squares + row_count * gap * gap
    tl.store(moments_ptr, all_count)
    tl.store(moments_ptr + 1, all_total)
    tl.store(moments_ptr + 2, tl.sum(squares, axis=0))


def gae(
    rewards: Tensor,  # [B, T] float32 or float64
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, holes allowed
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None,  # [B]
) -> tuple[Tensor, Tensor, Tensor]:
    """``ppo_fast::gae``: (advantages [B, T], returns [B, T], moments [3] float64 = count, sum, M2 about the mean)."""
    B, T = values.shape
    advantages = torch.empty_like(values)
    returns = torch.empty_like(values)
    if B * T == 0:
        return advantages, returns, values.new_zeros(3, dtype=torch.float64)
    moments = values.new_empty(3, dtype=torch.float64)
    row_moments = values.new_empty((B, 3), dtype=torch.float64)
    block = min(max(triton.next_power_of_2(T), _MIN_BLOCK), _MAX_BLOCK)
    with on_device_of(values):
        _gae_kernel[(B,)](
            rewards,
            values,
            mask,
            bootstrap_values,
            advantages,
            returns,
            row_moments,
            gamma,
            gamma * lam,
            T,
            BLOCK_T=block,
            num_warps=max(block // _POSITIONS_PER_WARP, 1),
            **COMPILE,
        )
        _merge_moments_kernel[(1,)](row_moments, moments, B, ROWS=_MERGE_ROWS, num_warps=1, **COMPILE)
    return advantages, returns, moments
