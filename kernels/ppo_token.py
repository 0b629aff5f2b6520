"""The scalar mathematics of the policy loss, per token: the one copy of it in Triton.

Follows ``ppo_fast.ops._eager.ppo_token_terms`` in every convention: a term is flat only strictly beyond its bound, so
that the slope at ratio 1 and on the bound itself is that of -ratio * A; a zero advantage gives exactly 0 even where the
ratio overflows; NaN passes every comparison as "inside" and so reaches loss and gradient.

`exp_remainder` gives exp(x) - 1 - x without cancellation. Near policy = reference that is all there is of the k3
estimator, and of ratio - 1: at |x| = 1e-4 the plain formula in float32 has no correct digit of its 5e-9.
"""

from __future__ import annotations

import triton
import triton.language as tl

CISPO = tl.constexpr(1)  # the other objective is 0: PPO


@triton.jit
def scaled(coefficient, x):
    """coefficient * x, and 0 where the coefficient is 0: a term that is switched off must not turn inf into NaN."""
    return tl.where(coefficient == 0.0, 0.0, coefficient * x)


@triton.jit
def exp_remainder(x, exp_x):
    """exp(x) - 1 - x, given exp(x). Below 1/2 in magnitude by its Taylor series, cut where the rest is 2^-62 of it."""
    series = tl.full(x.shape, 1.0, x.dtype)
    for k in tl.static_range(16, 2, -1):  # 1 + x/3 (1 + x/4 (1 + ... (1 + x/16)))
        series = 1.0 + series * x * (1.0 / k)
    return tl.where(tl.abs(x) < 0.5, 0.5 * x * x * series, exp_x - 1.0 - x)


@triton.jit
def kl_term(difference, ESTIMATOR: tl.constexpr):
    """(k, dk/ddifference) of the estimator k1, k2 or k3 of KL(p, q), from difference = log p - log q."""
    if ESTIMATOR == 1:
        k = difference
        slope = tl.full(difference.shape, 1.0, difference.dtype)
    elif ESTIMATOR == 2:
        k = 0.5 * difference * difference
        slope = difference
    else:
        decayed = tl.exp(-difference)
        k = exp_remainder(-difference, decayed)
        slope = tl.where(tl.abs(difference) < 0.5, difference - k, 1.0 - decayed)  # 1 - exp(-d) = d - k3
    return k, slope


@triton.jit
def surrogate_term(
    logprob,
    difference,  # logprob - old_logprob
    ratio,  # exp(difference)
    advantage,
    low,  # 1 - clip_low
    high,  # 1 + clip_high
    dual_clip,  # inf: none
    OBJECTIVE: tl.constexpr,
):
    """(surrogate, dsurrogate/dlogprob, flat, outside) of one token."""
    above = ratio > high
    below = ratio < low
    positive = advantage > 0.0
    negative = advantage < 0.0
    silent = (advantage == 0.0) & (difference == difference)
    if OBJECTIVE == CISPO:
        flat = tl.zeros(ratio.shape, tl.int1)
        outside = above
        slope = -tl.where(silent, 0.0, tl.where(above, high, ratio) * advantage)
        surrogate = slope * tl.where(silent, 0.0, logprob)
    else:
        outside = above | below
        too_far = negative & (ratio > dual_clip)
        flat = (positive & above) | (negative & below) | too_far
        bounded = tl.where(positive & above, high, tl.where(negative & below, low, ratio))
        bounded = tl.where(too_far, dual_clip, bounded)
        surrogate = tl.where(silent, 0.0, -bounded * advantage)
        slope = tl.where(flat | silent, 0.0, -ratio * advantage)
    return surrogate, slope, flat, outside
