"""The clipped policy loss of a batch of tokens, its gradient and every statistic, from one pass.

Pipeline. [B, T] is read as one line of tokens, a block a program. A program forms loss, gradient and statistics of its
tokens (`ppo_token`), stores gradient and log-ratio, and leaves its sums as one row of a table, which a second, single
program adds up (`common`). The gradient is final: the row weights carry every normaliser, and backward only multiplies
by the incoming scalar.

Numerics. A token's terms are in the dtype of the log-probs, float32 or float64; coefficients and clip bounds arrive as
float64 and are rounded to it once, as PyTorch does. Sums are float64 from the first addition, counts are integers
inside a block. Masked tokens are never loaded: they enter every sum as 0 and their gradient is 0.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels.common import COMPILE, combine, on_device_of
from ppo_fast.kernels.ppo_token import exp_remainder, kl_term, scaled, surrogate_term

# Tokens a program: 8 a lane in 4 warps. Small enough that a 16-reply minibatch of 1024 tokens makes 16 programs, large
# enough that the 96 bytes of sums a program leaves are nothing beside the 25 KiB it reads and writes. A reasoned
# choice, not a measured one.
_BLOCK = 1024
_WARPS = 4
_N_SUMS = 11


@triton.jit(do_not_specialize=["n_tokens", "T"])
def _ppo_loss_kernel(
    logprobs_ptr,  # [B, T] stat dtype
    old_logprobs_ptr,  # [B, T]
    advantages_ptr,  # [B, T]
    mask_ptr,  # [B, T] bool
    row_weights_ptr,  # [B]
    entropy_ptr,  # [B, T], or None
    ref_logprobs_ptr,  # [B, T], or None
    d_logprobs_ptr,  # [B, T]
    d_entropy_ptr,  # [B, T], or None
    table_ptr,  # [n_blocks, 12] float64
    low: tl.float64,
    high: tl.float64,
    dual_clip: tl.float64,  # inf: none
    entropy_coef: tl.float64,
    kl_coef: tl.float64,
    n_tokens,
    T,
    OBJECTIVE: tl.constexpr,
    KL_ESTIMATOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    STAT: tl.constexpr = logprobs_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    token = first + lanes
    inside = token < n_tokens
    # One 64-bit division a program; the tokens' rows come from 32-bit ones.
    row = first // T + ((first % T).to(tl.int32) + lanes) // T

    # A masked token's zeros are a ratio of 1 with advantage 0: its terms are 0, it is neither flat nor outside.
    live = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    weight = tl.load(row_weights_ptr + row, mask=live, other=0.0)
    logprob = tl.load(logprobs_ptr + token, mask=live, other=0.0)
    old_logprob = tl.load(old_logprobs_ptr + token, mask=live, other=0.0)
    advantage = tl.load(advantages_ptr + token, mask=live, other=0.0)

    difference = logprob - old_logprob
    ratio = tl.exp(difference)
    surrogate, slope, flat, outside = surrogate_term(
        logprob,
        difference,
        ratio,
        advantage,
        tl.full((), low, STAT),
        tl.full((), high, STAT),
        tl.full((), dual_clip, STAT),
        OBJECTIVE,
    )
    loss = surrogate
    entropy = tl.zeros((BLOCK,), STAT)
    if entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + token, mask=live, other=0.0)
        coef = tl.full((), entropy_coef, STAT)
        loss -= scaled(coef, entropy)
        tl.store(d_entropy_ptr + token, tl.where(live, -weight * coef, 0.0), mask=inside)
    ref_kl = tl.zeros((BLOCK,), STAT)
    if ref_logprobs_ptr is not None:
        ref_logprob = tl.load(ref_logprobs_ptr + token, mask=live, other=0.0)
        ref_kl, ref_kl_slope = kl_term(logprob - ref_logprob, KL_ESTIMATOR)
        coef = tl.full((), kl_coef, STAT)
        loss += scaled(coef, ref_kl)
        slope += scaled(coef, ref_kl_slope)
    tl.store(d_logprobs_ptr + token, tl.where(live, weight * slope, 0.0), mask=inside)

    update_k3 = exp_remainder(difference, ratio)  # k3 with d' = old - new
    deviation = tl.where(tl.abs(difference) < 0.5, update_k3 + difference, ratio - 1.0)
    out = table_ptr + tl.program_id(0).to(tl.int64) * 12
    tl.store(out, tl.sum((weight * loss).to(tl.float64), axis=0))
    tl.store(out + 1, tl.sum(live.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 2, tl.sum(surrogate.to(tl.float64), axis=0))
    tl.store(out + 3, tl.sum(flat.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 4, tl.sum(outside.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 5, tl.sum(deviation.to(tl.float64), axis=0))
    tl.store(out + 6, tl.sum((deviation * deviation).to(tl.float64), axis=0))
    tl.store(out + 7, tl.sum((-difference).to(tl.float64), axis=0))
    tl.store(out + 8, tl.sum((0.5 * difference * difference).to(tl.float64), axis=0))
    tl.store(out + 9, tl.sum(update_k3.to(tl.float64), axis=0))
    tl.store(out + 10, tl.sum(ref_kl.to(tl.float64), axis=0))
    tl.store(out + 11, tl.sum(entropy.to(tl.float64), axis=0))


def ppo_loss(
    logprobs: Tensor,  # [B, T] float32 or float64
    old_logprobs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    row_weights: Tensor,  # [B]
    entropy: Tensor | None,  # [B, T]
    ref_logprobs: Tensor | None,  # [B, T]
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    objective: int,
    entropy_coef: float,
    kl_coef: float,
    kl_estimator: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ppo_fast::ppo_loss``: (loss [], d_logprobs [B, T], d_entropy [B, T] or [0], sums [11] float64)."""
    B, T = logprobs.shape
    d_logprobs = torch.empty_like(logprobs)
    d_entropy = logprobs.new_empty(0) if entropy is None else torch.empty_like(logprobs)
    loss = logprobs.new_zeros(())
    sums = logprobs.new_zeros(_N_SUMS, dtype=torch.float64)
    if B * T == 0:
        return loss, d_logprobs, d_entropy, sums
    n_blocks = triton.cdiv(B * T, _BLOCK)
    table = logprobs.new_empty((n_blocks, _N_SUMS + 1), dtype=torch.float64)
    with on_device_of(logprobs):
        _ppo_loss_kernel[(n_blocks,)](
            logprobs,
            old_logprobs,
            advantages,
            mask,
            row_weights,
            entropy,
            ref_logprobs,
            d_logprobs,
            None if entropy is None else d_entropy,
            table,
            1.0 - clip_low,
            1.0 + clip_high,
            float("inf") if dual_clip is None else dual_clip,
            entropy_coef,
            kl_coef,
            B * T,
            T,
            OBJECTIVE=objective,
            KL_ESTIMATOR=kl_estimator,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **COMPILE,
        )
        combine(table, loss, sums)
    return loss, d_logprobs, d_entropy, sums
