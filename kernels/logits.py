"""What an output layer does to its products before the softmax, shared by the kernels of the linear ops.

A logit is ``softcap * tanh(logit_scale * (product + bias) / softcap)``. The temperature comes later: running maxima are
of undivided logits, and exponents are differences from them times ``log2(e) / temperature``, so that their rounding is
relative to the difference, not to the logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_fast.kernels.common import LN_2, NEG_INF


@triton.jit
def over(x, temperature):
    """x / temperature, correctly rounded; NaN where no distribution is defined (temperature not above 0)."""
    quotient = tl.div_rn(x, temperature) if temperature.dtype == tl.float32 else x / temperature
    return tl.where(temperature > 0, quotient, float("nan"))


@triton.jit
def _tanh(x):
    """tanh without cancellation: near 0 the convergent of its continued fraction whose rest is 1e-16 of it at 1/2."""
    s = x * x
    above = 135135.0 + s * (17325.0 + s * (378.0 + s))
    below = 135135.0 + s * (62370.0 + s * (3150.0 + s * 28.0))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.5, x * above / below, tl.where(x < 0.0, -far, far))


@triton.jit
def shaped(
    z,  # products with the output layer, stat dtype
    bias,  # broadcasts to z, or None
    softcap,  # stat dtype
    logit_scale,  # stat dtype
    HAS_SOFTCAP: tl.constexpr,
):
    """The logits, before the temperature."""
    if bias is not None:
        z += bias
    z *= logit_scale
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def finished(
    top,  # largest logit, -inf where all are
    mass,  # sum of e = exp((logit - top) / temperature)
    moment,  # sum of e * log2(e), anything where the entropy isn't asked for
    target,  # the token's logit
    known,  # whether the token's id is one
    temperature,
):
    """(log-prob, entropy, peak, total) of rows. A row of -inf has log-prob -inf, entropy 0, peak 0, total 0."""
    empty = mass == 0.0
    log_mass = tl.log(mass)
    logprob = over(target - top, temperature) - log_mass
    logprob = tl.where(known, tl.where(empty, NEG_INF, logprob), float("nan"))
    entropy = tl.where(empty, 0.0, log_mass - LN_2 * (moment / mass))
    return logprob, entropy, tl.where(empty, 0.0, top), mass
