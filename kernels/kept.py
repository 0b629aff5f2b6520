"""Kept sets: the softmax of each token over its own few rows of the output layer's weight, and its gradients.

Pipeline. Forward, one program a token: it reads the K rows of its set, a block of rows at a time, multiplies them with
the token's hidden state, and takes the statistics of the logits as they come; the logits [n, K] are stored, before the
temperature. Backward, three kernels: one program a token turns its logits into their gradient (their softmax is taken
again: K numbers); one program a token and block of H adds the rows up to d_hidden; and for the weight the pairs of
(id, token) are sorted by id, and the program that finds itself at the first pair of an id adds up that id's pairs. So
d_weight has one writer a row and an order fixed by the ids: no atomics, and the same inputs give the same bits. An id
that is in every set costs its program as many steps as there are tokens.

Rows whose gradient is zero, those of dead tokens among them, are not read for d_hidden.

Numerics. All is in the stat dtype, float32 or float64; 16-bit rows are widened as they are read. Maxima start at -inf;
columns without an id are -inf before the maximum and before exp, an id past V is NaN, and so is the log-prob of a token
that its set lacks.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels.common import COMPILE, LN_2, LOG2_E, NEG_INF, on_device_of, stat_dtype
from ppo_fast.kernels.logits import finished, over, shaped

# Rows and columns of the weight a program holds at a time, and warps: 16 elements a lane, 256 bytes a 16-bit row, so
# that gathered rows still make whole memory transactions. float64 takes half the rows. Reasoned, not measured.
_ROWS = 16
_COLUMNS = 128
_WARPS = 4
# Columns of d_weight that a program adds up: 4 a lane.
_SUM_COLUMNS = 512
# Logits a program holds at a time while it forms their gradient.
_LARGEST_SET = 1024


@triton.jit
def _folded(z, hit, top, mass, moment, target, scale):
    """The running statistics with a block of logits added."""
    target += tl.sum(tl.where(hit, z, 0.0), axis=0)
    new_top = tl.maximum(top, tl.max(z, axis=0))
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    drop = tl.maximum((top - base) * scale, -16384.0)
    shrink = tl.exp2(drop)
    u = (z - base) * scale
    e = tl.exp2(u)
    moment = shrink * (moment + drop * mass) + tl.sum(tl.where(e == 0.0, 0.0, e * u), axis=0)
    return new_top, shrink * mass + tl.sum(e, axis=0), moment, target


@triton.jit
def _forward_kernel(
    hidden_ptr,  # [n, H]
    weight_ptr,  # [V, H], any strides
    bias_ptr,  # [V] stat dtype, or None
    token_ids_ptr,  # [n] int64
    temperature_ptr,  # [n] stat dtype, or None: 1
    kept_ids_ptr,  # [n, K] int64
    logits_ptr,  # [n, K] stat dtype
    logprobs_ptr,  # [n] stat dtype
    entropy_ptr,  # [n] stat dtype, or None: not asked for
    softcap: tl.float64,
    logit_scale: tl.float64,
    V,
    H,
    K,
    weight_row,
    weight_column,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    STAT: tl.constexpr = logits_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    temperature = tl.full((), 1.0, STAT)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token)
    scale = over(1.0, temperature) * LOG2_E
    cap = tl.full((), softcap, STAT)
    factor = tl.full((), logit_scale, STAT)
    own = tl.load(token_ids_ptr + token)
    columns = tl.arange(0, BLOCK_H)
    top = tl.full((), NEG_INF, STAT)
    mass = tl.zeros((), STAT)
    moment = tl.zeros((), STAT)
    target = tl.zeros((), STAT)
    found = tl.zeros((), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(kept_ids_ptr + token * K + k, mask=k < K, other=-1)
        member = (ids >= 0) & (ids < V)
        products = tl.zeros((BLOCK_K, BLOCK_H), STAT)
        for first in range(0, H, BLOCK_H):
            h = first + columns
            x = tl.load(hidden_ptr + token * H + h, mask=h < H, other=0.0).to(STAT)
            cells = ids[:, None] * weight_row + h.to(tl.int64)[None, :] * weight_column
            w = tl.load(weight_ptr + cells, mask=member[:, None] & (h < H)[None, :], other=0.0).to(STAT)
            products += w * x[None, :]
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + ids, mask=member, other=0.0)
        z = shaped(tl.sum(products, axis=1), bias, cap, factor, HAS_SOFTCAP)
        z = tl.where(ids < 0, NEG_INF, tl.where(ids < V, z, float("nan")))
        tl.store(logits_ptr + token * K + k, z, mask=k < K)
        hit = member & (ids == own)
        found += tl.sum(hit.to(tl.int32), axis=0)
        top, mass, moment, target = _folded(z, hit, top, mass, moment, target, scale)
    logprob, entropy, _, _ = finished(top, mass, moment, target, found > 0, temperature)
    tl.store(logprobs_ptr + token, logprob)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + token, entropy)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # [n, K] stat dtype
    token_ids_ptr,  # [n] int64
    temperature_ptr,  # [n] stat dtype, or None: 1
    kept_ids_ptr,  # [n, K] int64
    c_ptr,  # [n] stat dtype
    e_ptr,  # [n] stat dtype, or None: 0
    gradient_ptr,  # [n, K] stat dtype
    softcap: tl.float64,
    logit_scale: tl.float64,
    K,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    STAT: tl.constexpr = logits_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    c = tl.load(c_ptr + token)
    e = tl.zeros((), STAT)
    if e_ptr is not None:
        e = tl.load(e_ptr + token)
    temperature = tl.full((), 1.0, STAT)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token)
    inverse = over(1.0, temperature)
    scale = inverse * LOG2_E
    own = tl.load(token_ids_ptr + token)
    top = tl.full((), NEG_INF, STAT)
    mass = tl.zeros((), STAT)
    moment = tl.zeros((), STAT)
    target = tl.zeros((), STAT)
    found = tl.zeros((), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        z = tl.load(logits_ptr + token * K + k, mask=k < K, other=NEG_INF)
        ids = tl.load(kept_ids_ptr + token * K + k, mask=k < K, other=-1)
        hit = (ids >= 0) & (ids == own)
        found += tl.sum(hit.to(tl.int32), axis=0)
        top, mass, moment, target = _folded(z, hit, top, mass, moment, target, scale)
    _, entropy, peak, total = finished(top, mass, moment, target, found > 0, temperature)

    c = tl.where(found > 0, c, float("nan"))
    # A set of nothing but -inf, and a token no gradient arrives at: zeros, also where 0 would meet infinity.
    silent = (total == 0.0) | ((c == 0.0) & (e == 0.0) & (total == total))
    outer = inverse * tl.full((), logit_scale, STAT)
    per_cap = 1.0 / tl.full((), softcap, STAT)
    offset = entropy - tl.log(total)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        z = tl.load(logits_ptr + token * K + k, mask=k < K, other=NEG_INF)
        ids = tl.load(kept_ids_ptr + token * K + k, mask=k < K, other=-1)
        u = (z - peak) * scale
        p = tl.exp2(u) / total
        coefficient = c + e * tl.where(p == 0.0, 0.0, u * LN_2 + offset)
        gradient = (tl.where((ids >= 0) & (ids == own), c, 0.0) - p * coefficient) * outer
        if HAS_SOFTCAP:
            tanh = z * per_cap
            gradient *= tl.maximum(1.0 - tanh * tanh, 0.0)
        tl.store(gradient_ptr + token * K + k, tl.where(ids < 0, 0.0, tl.where(silent, 0.0, gradient)), mask=k < K)


@triton.jit
def _d_hidden_kernel(
    gradient_ptr,  # [n, K] stat dtype
    kept_ids_ptr,  # [n, K] int64
    weight_ptr,  # [V, H], any strides
    d_hidden_ptr,  # [n, H] stat dtype
    V,
    H,
    K,
    weight_row,
    weight_column,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    STAT: tl.constexpr = gradient_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_K, BLOCK_H), STAT)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        g = tl.load(gradient_ptr + token * K + k, mask=k < K, other=0.0)
        ids = tl.load(kept_ids_ptr + token * K + k, mask=k < K, other=-1)
        wanted = (ids >= 0) & (ids < V) & (g != 0.0)
        cells = ids[:, None] * weight_row + h.to(tl.int64)[None, :] * weight_column
        w = tl.load(weight_ptr + cells, mask=wanted[:, None] & (h < H)[None, :], other=0.0).to(STAT)
        total += w * g[:, None]
    tl.store(d_hidden_ptr + token * H + h, tl.sum(total, axis=0), mask=h < H)


@triton.jit(do_not_specialize=["n_pairs"])
def _d_weight_kernel(
    sorted_ids_ptr,  # [n K] int64, ascending
    order_ptr,  # [n K] int64: where each stood in [n, K]
    gradient_ptr,  # [n, K] stat dtype
    hidden_ptr,  # [n, H]
    d_weight_ptr,  # [V, H] stat dtype, added to, or None
    d_bias_ptr,  # [V] stat dtype, added to, or None
    n_pairs,
    V,
    H,
    K,
    BLOCK_H: tl.constexpr,
):
    STAT: tl.constexpr = gradient_ptr.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64)
    own = tl.load(sorted_ids_ptr + pair)
    before = tl.load(sorted_ids_ptr + pair - 1, mask=pair > 0, other=-1)
    if (own < 0) | (own >= V) | (before == own):
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.zeros((BLOCK_H,), STAT)
    bias = tl.zeros((), STAT)
    current = own
    while current == own:
        position = tl.load(order_ptr + pair)
        g = tl.load(gradient_ptr + position)
        bias += g
        if d_weight_ptr is not None:
            x = tl.load(hidden_ptr + position // K * H + h, mask=h < H, other=0.0).to(STAT)
            row += g * x
        pair += 1
        current = tl.load(sorted_ids_ptr + pair, mask=pair < n_pairs, other=-1)
    if d_weight_ptr is not None:
        out_ptr = d_weight_ptr + own * H + h
        tl.store(out_ptr, tl.load(out_ptr, mask=h < H, other=0.0) + row, mask=h < H)
    if d_bias_ptr is not None:  # noqa: SIM102  (decided at compile time, unlike the next)
        if tl.program_id(1) == 0:
            tl.store(d_bias_ptr + own, tl.load(d_bias_ptr + own) + bias)


def _rows(z: Tensor) -> int:
    return _ROWS * 4 // z.element_size()


def kept_forward(
    hidden: Tensor,  # [n, H] contiguous
    weight: Tensor,  # [V, H], any strides
    bias: Tensor | None,  # [V] stat dtype
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    kept_ids: Tensor,  # [n, K] int64 contiguous, -1 for none
    softcap: float | None,
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ppo_fast::_kept_forward``: logits before the temperature [n, K], logprobs [n], entropy [n] or [0], stat dtype.

    An id past V, a token outside its set, or a temperature not above 0 gives NaN; a set of logits of -inf logprob -inf
    and entropy 0.
    """
    (n, K), (V, H) = kept_ids.shape, weight.shape
    logits = hidden.new_empty((n, K), dtype=stat_dtype(weight.dtype))
    logprobs, entropy = logits.new_empty(n), logits.new_empty(n if want_entropy else 0)
    if n == 0:
        return logits, logprobs, entropy
    with on_device_of(weight):
        _forward_kernel[(n,)](
            hidden,
            weight,
            bias,
            token_ids,
            temperature,
            kept_ids,
            logits,
            logprobs,
            entropy if want_entropy else None,
            1.0 if softcap is None else softcap,
            logit_scale,
            V,
            H,
            K,
            *weight.stride(),
            HAS_SOFTCAP=softcap is not None,
            BLOCK_K=_rows(logits),
            BLOCK_H=_COLUMNS,
            num_warps=_WARPS,
            **COMPILE,
        )
    return logits, logprobs, entropy


def kept_backward(
    c: Tensor,  # [n]
    e: Tensor | None,  # [n]
    logits: Tensor,  # [n, K], of `kept_forward`
    hidden: Tensor,  # [n, H] contiguous
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    kept_ids: Tensor,  # [n, K] int64 contiguous
    softcap: float | None,
    logit_scale: float,
    need_hidden: bool,
    d_weight: Tensor | None,  # [V, H] stat dtype contiguous, added to
    d_bias: Tensor | None,  # [V] stat dtype, added to
) -> Tensor:
    """``ppo_fast::_kept_backward``: d_hidden [n, H] in the stat dtype, [0] if not needed."""
    (n, K), (V, H) = kept_ids.shape, weight.shape
    d_hidden = logits.new_empty((n, H) if need_hidden else 0)
    if n == 0:
        return d_hidden
    gradient = torch.empty_like(logits)
    block = min(max(triton.next_power_of_2(K), 64), _LARGEST_SET)
    with on_device_of(weight):
        _gradient_kernel[(n,)](
            logits,
            token_ids,
            temperature,
            kept_ids,
            c,
            e,
            gradient,
            1.0 if softcap is None else softcap,
            logit_scale,
            K,
            HAS_SOFTCAP=softcap is not None,
            BLOCK_K=block,
            num_warps=max(block // 256, 1),
            **COMPILE,
        )
        if need_hidden:
            _d_hidden_kernel[(n, triton.cdiv(H, _COLUMNS))](
                gradient,
                kept_ids,
                weight,
                d_hidden,
                V,
                H,
                K,
                *weight.stride(),
                BLOCK_K=_rows(logits),
                BLOCK_H=_COLUMNS,
                num_warps=_WARPS,
                **COMPILE,
            )
        if d_weight is not None or d_bias is not None:
            sorted_ids, order = kept_ids.flatten().sort(stable=True)
            _d_weight_kernel[(n * K, 1 if d_weight is None else triton.cdiv(H, _SUM_COLUMNS))](
                sorted_ids,
                order,
                gradient,
                hidden,
                d_weight,
                d_bias,
                n * K,
                V,
                H,
                K,
                BLOCK_H=_SUM_COLUMNS,
                num_warps=_WARPS,
                **COMPILE,
            )
    return d_hidden
