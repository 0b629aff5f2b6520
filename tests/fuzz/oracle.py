"""What the vocabulary ops should give, from their definitions, in any precision; and how near a result has to come.

In float64 these functions are the truth, in the dtype of an op's statistics they are the yardstick: what plain PyTorch
makes of the same inputs. A result may be ``TIMES`` as far from the truth as the worst of its row by the yardstick, or
as the roundings that the row's own numbers make unavoidable, where PyTorch was exact by luck.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TIMES = 4.0


class Softmax(NamedTuple):
    """Rows of a softmax and the gradient of ``c * logprob + e * entropy`` by its logits."""

    logprobs: Tensor  # [n]
    entropy: Tensor  # [n]
    gradient: Tensor  # [n, V]
    size: Tensor  # [n, V] sum of the magnitudes of the terms in the gradient
    lse: Tensor  # [n]


def softmax_rows(z: Tensor, ids: Tensor, c: Tensor, e: Tensor) -> Softmax:
    """``z [n, V]`` may hold -inf; a row of nothing else has log-prob -inf, entropy 0 and gradient 0."""
    dead = (z == -torch.inf).all(1)
    logp = torch.log_softmax(torch.where(dead[:, None], 0.0, z), 1)
    lse = torch.where(dead, -torch.inf, z.logsumexp(1))

    def entropy_terms(logp: Tensor) -> tuple[Tensor, Tensor]:
        p = logp.exp()
        return p, torch.where(p == 0, 0.0, p * logp)

    entropy = torch.where(dead, 0.0, -entropy_terms(logp)[1].sum(1))
    logprobs = torch.where(dead, -torch.inf, logp.gather(1, ids[:, None])[:, 0])
    # The backward pass knows a row by its log-sum-exp, rounded once.
    p, plogp = entropy_terms(torch.where(dead[:, None], 0.0, z - lse[:, None]))
    c, e = c[:, None], e[:, None]
    hit = torch.zeros_like(z).scatter_(1, ids[:, None], 1.0)
    gradient = c * (hit - p) - e * (plogp + p * entropy[:, None])
    size = c.abs() * (hit + p) + e.abs() * (plogp.abs() + p * (entropy[:, None] + 1))
    blank = dead[:, None]
    return Softmax(logprobs, entropy, torch.where(blank, 0.0, gradient), torch.where(blank, 0.0, size), lse)


class HeadRows(NamedTuple):
    """Rows of an output layer, and the gradients of ``sum(c * logprob + e * entropy)``."""

    softmax: Softmax
    logits_error: Tensor  # [n] what rounding does to a logit, in units of the precision's epsilon
    raw: Tensor  # [n, V] gradient by the bare products
    raw_error: Tensor  # [n, V] what rounding does to it, in the same units
    reach: Tensor  # [n] what it is made of, beside the probability: cut off where that is below the normal numbers
    d_hidden: Tensor  # [n, H]
    d_weight: Tensor  # [V, H]
    d_bias: Tensor  # [V]


def head_rows(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [n]
    c: Tensor,  # [n]
    e: Tensor,  # [n]
    *,
    bias: Tensor | None,
    temperature: Tensor,  # [n]
    softcap: float | None,
    logit_scale: float,
    kept_ids: Tensor | None,  # [n, K]
) -> HeadRows:
    H = hidden.shape[1]
    t = temperature[:, None]
    bare = hidden @ weight.T
    # A product's terms are added one after another by some kernels: an error like a random walk over H steps.
    error = (hidden.square() @ weight.square().T).sqrt().amax(1) * max(1.0, math.sqrt(H) / 4)
    z = bare if bias is None else bare + bias
    z = z * logit_scale
    slope = torch.full_like(z, logit_scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
        slope = slope * (1 - (z / softcap).square()).clamp(min=0)
    z = z / t
    if kept_ids is not None:
        chosen = torch.zeros(z.shape[0], z.shape[1] + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(kept_ids < 0, z.shape[1], kept_ids), True)
        z = z.masked_fill(~chosen[:, :-1], -torch.inf)
    largest = torch.where(z.isfinite(), z, 0.0).abs().amax(1)
    if bias is not None:
        finite = torch.where(bias.isfinite(), bias, 0.0)
        error = error + (bare.abs() + finite.abs()).amax(1)
    rows = softmax_rows(z, ids, c, e)
    error = error * logit_scale / temperature + 2 * largest
    # An error of the logit is a relative error of its probability; 1 - tanh^2 has an absolute one.
    raw, raw_error = rows.gradient * slope / t, rows.size * slope / t * (4 + error[:, None])
    if softcap is not None:
        raw_error = raw_error + 4 * rows.size * logit_scale / t
    return HeadRows(
        rows,
        error,
        raw,
        raw_error,
        (c.abs() + 100 * e.abs()) * logit_scale / temperature,  # log p is about -87 there
        raw @ weight,
        raw.T @ hidden,
        raw.sum(0),
    )


# --------------------------------------------------------------------------------------------------------------- judge


def judge(
    what: str,
    got: Tensor,
    exact: Tensor,  # float64
    yardstick: Tensor | None,
    unavoidable: Tensor | float,
    *,
    times: float = TIMES,
) -> None:
    """Every element of ``got`` within ``times`` of the larger of: the yardstick's worst error in the row (the last
    dimension), and ``unavoidable``, which broadcasts to the shape. Infinities at the same places, of the same sign; an
    exact value that the dtype cannot hold counts as one. NaN in ``exact`` must be NaN in ``got``."""
    assert exact.dtype == torch.float64
    assert got.shape == exact.shape, f"{what}: shape {list(got.shape)}, expected {list(exact.shape)}"
    if got.numel() == 0:
        return
    dtype, got = got.dtype, got.double()
    yardstick = exact if yardstick is None else yardstick.double()
    unavoidable = torch.as_tensor(unavoidable, dtype=torch.float64).expand(exact.shape)
    info = torch.finfo(dtype)
    error = (got - exact).abs()
    miss = torch.where(yardstick.isfinite() & exact.isfinite(), (yardstick - exact).abs(), 0.0)
    if miss.dim():
        miss = miss.amax(-1, keepdim=True).expand(exact.shape)
    # Half a subnormal is lost wherever the result lies below the normal numbers.
    times *= 4 if dtype == torch.float64 else 1  # there the exact value has roundings of its own
    bound = times * torch.maximum(miss, unavoidable) + info.eps * info.tiny
    overflows = exact.abs() + bound >= info.max
    fine = (error <= bound) | (got == exact) | (overflows & (got == exact.sign() * math.inf))
    fine |= exact.isnan() & got.isnan()
    if not fine.all():
        at = tuple((~fine).nonzero()[0].tolist())
        raise AssertionError(
            f"{what} at {list(at)}: got {float(got[at]):.9g}, exact {float(exact[at]):.9g}, off by "
            f"{float(error[at]):.3g} with {float(bound[at]):.3g} allowed ({int((~fine).sum())} of {fine.numel()})"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Signs of zeros and NaNs included."""
    # Copies: a single element counts as contiguous at any stride, and can't be looked at as bytes then.
    plain = (x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and torch.equal(*plain)
