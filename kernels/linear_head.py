"""The output layer's two primitives: logits and their statistics, and the logits turned into gradients.

With a gradient to come (`head_forward` with a workspace, then `head_backward`) the products are the vendor's GEMMs,
with float32 output from 16-bit operands, and two row kernels stand between them:

    logits = hidden @ weight.T           GEMM 1, into the workspace [n, V]
    statistics                           one program a row, one read: maximum, sum, weighted sum, the token's logit;
                                         bias, logit scale and softcap are applied, and stored if there are any
    the caller forms c = dL/dlogp and e = dL/dentropy
    logits become their own gradient     one program a row, one read, one write, in place
    d_hidden = gradient @ weight         GEMM 2
    d_weight += gradient.T @ hidden      GEMM 3, only if asked for

    dL/dlogit_j = (c * (1[j = y] - p_j) - e * p_j * (log p_j + entropy)) / temperature * (1 - (logit_j / softcap)^2)

A gradient for 16-bit GEMMs is half as wide as the logits it replaces: it starts where they start, and lies on columns
that the program has already read. Rows without a gradient are written as zeros and not read; GEMMs 2 and 3 multiply
them as the zeros they are, since their number isn't known on the host. Scoring, where nothing is kept, stores no logits
where `head_scores` takes it.

Numerics. The statistics are float32 (float64 for float64) from float32 accumulators, never of rounded logits. Maxima
start at -inf, columns past V are -inf before the maximum and before exp. The gradient is rounded once, to the GEMMs'
operand; for float16 it is scaled by a power of two first, or small probabilities would underflow. d_weight and d_hidden
are accumulated in float32. d_bias is summed before the rounding.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels import head_scores
from ppo_fast.kernels.common import COMPILE, LN_2, LOG2_E, NEG_INF, on_device_of, stat_dtype
from ppo_fast.kernels.logits import finished, over, shaped
from ppo_fast.kernels.partials import folded_by_lane

# As in selected_logprobs, and for the same reasons: 16 columns a lane.
_MAX_BLOCK = 4096
_MIN_BLOCK = 256
_COLUMNS_PER_WARP = 512
# Vocabulary rows multiplied at a time where a tile has to be widened, or a product scaled before it is added.
_TILE = 16384
# What the logits of one block of rows may take where they are scored through memory.
_SCORING_BYTES = 512 << 20


def _blocks(z: Tensor) -> dict[str, int]:
    wide = z.element_size() // 4  # float64 takes twice the registers
    block = min(max(triton.next_power_of_2(z.shape[1]), _MIN_BLOCK), _MAX_BLOCK // wide)
    return {"BLOCK_V": block, "num_warps": max(block * wide // _COLUMNS_PER_WARP, 1)}


@triton.jit
def _statistics_kernel(
    logits_ptr,  # [n, V] stat dtype: products, overwritten by the logits if STORE
    bias_ptr,  # [V] stat dtype, or None
    token_ids_ptr,  # [n] int64
    temperature_ptr,  # [n] stat dtype, or None: 1
    logprobs_ptr,  # [n] stat dtype
    entropy_ptr,  # [n] stat dtype, or None: not asked for
    peak_ptr,  # [n] stat dtype
    total_ptr,  # [n] stat dtype
    softcap: tl.float64,
    logit_scale: tl.float64,
    V,
    stride,
    HAS_SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    STAT: tl.constexpr = total_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.full((), 1.0, STAT)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    scale = over(1.0, temperature) * LOG2_E
    cap = tl.full((), softcap, STAT)
    factor = tl.full((), logit_scale, STAT)
    token_id = tl.load(token_ids_ptr + row)
    known = (token_id >= 0) & (token_id < V)
    token = tl.where(known, token_id, -1).to(tl.int32)
    lanes = tl.arange(0, BLOCK_V)
    top = tl.full((), NEG_INF, STAT)
    mass = tl.zeros((BLOCK_V,), STAT)
    moment = tl.zeros((BLOCK_V,), STAT)
    target = tl.zeros((BLOCK_V,), STAT)  # the token's logit in its lane, 0 in the others
    for start in range(0, V, BLOCK_V):
        columns = start + lanes
        inside = columns < V
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
        z = shaped(tl.load(row_ptr + columns, mask=inside, other=0.0), bias, cap, factor, HAS_SOFTCAP)
        if STORE:
            tl.store(row_ptr + columns, z, mask=inside)
        z = tl.where(inside, z, NEG_INF)
        target = tl.where(columns == token, z, target)
        top, mass, moment = folded_by_lane(z, top, mass, moment, scale, entropy_ptr is not None)

    logprob, entropy, peak, total = finished(
        top, tl.sum(mass, axis=0), tl.sum(moment, axis=0), tl.sum(target, axis=0), known, temperature
    )
    tl.store(logprobs_ptr + row, logprob)
    tl.store(peak_ptr + row, peak)
    tl.store(total_ptr + row, total)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # [n, V] stat dtype
    gradient_ptr,  # [n, V] dtype of the operand; each row starts where that of the logits starts
    token_ids_ptr,  # [n] int64
    temperature_ptr,  # [n] stat dtype, or None: 1
    peak_ptr,  # [n] stat dtype
    total_ptr,  # [n] stat dtype
    c_ptr,  # [n] stat dtype
    e_ptr,  # [n] stat dtype, or None: 0
    entropy_ptr,  # [n] stat dtype, or None where e is
    operand_scale_ptr,  # [1] stat dtype, or None: 1
    softcap: tl.float64,
    logit_scale: tl.float64,
    V,
    stride,
    gradient_stride,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    STAT: tl.constexpr = total_ptr.dtype.element_ty
    OUT: tl.constexpr = gradient_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    out_ptr = gradient_ptr + row * gradient_stride
    lanes = tl.arange(0, BLOCK_V)
    token_id = tl.load(token_ids_ptr + row)
    known = (token_id >= 0) & (token_id < V)
    token = tl.where(known, token_id, -1).to(tl.int32)
    c = tl.where(known, tl.load(c_ptr + row), float("nan"))
    e = tl.zeros((), STAT)
    entropy = tl.zeros((), STAT)
    if e_ptr is not None:
        e = tl.load(e_ptr + row)
        entropy = tl.load(entropy_ptr + row)
    peak = tl.load(peak_ptr + row)
    total = tl.load(total_ptr + row)

    # Rows that are all -inf, and rows no gradient arrives at (clipped tokens) are written, not read; a NaN among the
    # logits shows in the total, so that 0 * NaN stays NaN. The branch is uniform: it costs code, not registers.
    if (total == 0.0) | ((c == 0.0) & (e == 0.0) & (total == total)):
        for start in range(0, V, BLOCK_V):
            columns = start + lanes
            tl.store(out_ptr + columns, tl.zeros((BLOCK_V,), OUT), mask=columns < V)
        return

    temperature = tl.full((), 1.0, STAT)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    inverse = over(1.0, temperature)
    scale = inverse * LOG2_E
    outer = inverse * tl.full((), logit_scale, STAT)
    if operand_scale_ptr is not None:
        outer *= tl.load(operand_scale_ptr)
    per_cap = 1.0 / tl.full((), softcap, STAT)
    share = 1.0 / total
    offset = entropy - tl.log(total)
    for start in range(0, V, BLOCK_V):
        columns = start + lanes
        inside = columns < V
        z = tl.load(row_ptr + columns, mask=inside, other=NEG_INF)
        u = (z - peak) * scale
        p = tl.exp2(u) * share
        coefficient = c
        if e_ptr is not None:
            coefficient = c + e * tl.where(p == 0.0, 0.0, u * LN_2 + offset)
        gradient = (tl.where(columns == token, c, 0.0) - p * coefficient) * outer
        if HAS_SOFTCAP:
            tanh = z * per_cap
            gradient *= tl.maximum(1.0 - tanh * tanh, 0.0)
        if OUT != STAT:
            # A narrower gradient lies on columns of this block, or of earlier ones: all warps must have read them.
            tl.debug_barrier()
        tl.store(out_ptr + columns, gradient.to(OUT), mask=inside)


# ------------------------------------------------------------------------------------------------------------- products


def _multiplies_wide(device: torch.device) -> bool:
    """Whether torch.mm multiplies 16-bit matrices to a float32 result; on ROCm only the newest releases do."""
    return device.type == "cuda" and torch.version.hip is None


def _parts(weight: Tensor, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The vocabulary, ``size`` rows at a time, and those rows of the weight as an operand for results in ``dtype``."""
    widens = weight.dtype != dtype and not _multiplies_wide(weight.device)
    for start in range(0, weight.shape[0], size):
        part = slice(start, min(start + size, weight.shape[0]))
        yield part, weight[part].to(dtype) if widens else weight[part]


def _part_size(weight: Tensor) -> int:
    widens = weight.dtype.itemsize == 2 and not _multiplies_wide(weight.device)
    return _TILE if widens else weight.shape[0]


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """``out = a @ b``, or ``out += a @ b``, accumulated in the dtype of ``out``. Operands may be narrower."""
    beta = 1 if add else 0
    if a.dtype == b.dtype != out.dtype and _multiplies_wide(out.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def _products(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    for part, operand in _parts(weight, _part_size(weight), out.dtype):
        _multiply(hidden, operand.T, out[:, part], add=False)


def _operand_scale(c: Tensor, e: Tensor | None, entropy: Tensor, temperature: Tensor | None, factor: float) -> Tensor:
    """The power of two [1] that brings the largest possible element of the gradient just under 2^15, for float16:
    probabilities down to 2^-29 of that element then stay normal numbers."""
    largest = c.abs() if e is None else c.abs() + e.abs() * (0.37 + entropy)  # p * |log p| <= 1/e
    largest = largest * factor if temperature is None else largest * factor / temperature
    largest = torch.nan_to_num(largest, nan=0.0, posinf=0.0).amax(0, keepdim=True)
    return torch.ldexp(torch.ones_like(largest), (15 - torch.frexp(largest).exponent).clamp(-64, 64))


# --------------------------------------------------------------------------------------------------------- entry points


def head_forward(
    hidden: Tensor,  # [n, H], any strides
    weight: Tensor,  # [V, H], any strides
    bias: Tensor | None,  # [V] stat dtype
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    softcap: float | None,
    logit_scale: float,
    logits: Tensor | None,  # [n or more, V] stat dtype
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ppo_fast::_head_forward``: (logprobs [n], entropy [n] or [0], peak [n], total [n]), in the stat dtype.

    Given a workspace, it holds the logits before the temperature. A row of -inf gives logprob -inf, entropy 0. A token
    id outside [0, V) gives a NaN log-prob; a temperature not above 0 gives NaN.
    """
    n, V = hidden.shape[0], weight.shape[0]
    like = weight.new_empty(0, dtype=stat_dtype(weight.dtype))
    logprobs, peak, total = (like.new_empty(n) for _ in range(3))
    entropy = like.new_empty(n if want_entropy else 0)
    results = logprobs, entropy, peak, total
    if n == 0:
        return results
    layer = bias, softcap, logit_scale
    if logits is not None:
        _products(hidden, weight, logits[:n])
        _statistics(logits[:n], *layer, token_ids, temperature, results, store=True)
    elif head_scores.chosen(hidden, weight):
        head_scores.score(hidden, weight, *layer, token_ids, temperature, results)
    else:
        rows = min(n, max(1, _SCORING_BYTES // (V * like.element_size())))
        scratch = like.new_empty((rows, V))
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            z = scratch[: part.stop - start]
            _products(hidden[part], weight, z)
            _statistics(
                z,
                *layer,
                token_ids[part],
                None if temperature is None else temperature[part],
                tuple(x[part] for x in results),
                store=False,
            )
    return results


def _statistics(
    z: Tensor,  # [n, V] stat dtype, rows of stride 1
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    token_ids: Tensor,
    temperature: Tensor | None,
    results: tuple[Tensor, ...],  # logprobs, entropy, peak, total: written
    *,
    store: bool,
) -> None:
    logprobs, entropy, peak, total = results
    shapes = bias is not None or softcap is not None or logit_scale != 1.0
    with on_device_of(z):
        _statistics_kernel[(z.shape[0],)](
            z,
            bias,
            token_ids,
            temperature,
            logprobs,
            entropy if entropy.numel() else None,
            peak,
            total,
            1.0 if softcap is None else softcap,
            logit_scale,
            z.shape[1],
            z.stride(0),
            HAS_SOFTCAP=softcap is not None,
            STORE=store and shapes,
            **_blocks(z),
            **COMPILE,
        )


def head_backward(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    softcap: float | None,
    logit_scale: float,
    logits: Tensor,  # [n or more, V] stat dtype, overwritten
    logprobs: Tensor,  # [n]
    entropy: Tensor,  # [n], or [0] without e
    peak: Tensor,  # [n]
    total: Tensor,  # [n]
    c: Tensor,  # [n]
    e: Tensor | None,  # [n]
    need_hidden: bool,
    d_weight: Tensor | None,  # [V, H] stat dtype, added to
    d_bias: Tensor | None,  # [V] stat dtype, added to
) -> Tensor:
    """``ppo_fast::_head_backward``: d_hidden [n, H] in the stat dtype, [0, H] if not needed."""
    (n, H), V = hidden.shape, weight.shape[0]
    d_hidden = logits.new_empty((n if need_hidden else 0, H))
    if n == 0:
        return d_hidden
    scale = None
    if weight.dtype == torch.float16:
        scale = _operand_scale(c, e, entropy, temperature, logit_scale)
    z = logits[:n]
    # As wide as the logits where the sum over rows must not see rounded ones.
    narrow = weight.dtype != logits.dtype and d_bias is None
    gradient = z.view(weight.dtype)[:, :V] if narrow else z
    with on_device_of(z):
        _gradient_kernel[(n,)](
            z,
            gradient,
            token_ids,
            temperature,
            peak,
            total,
            c,
            e,
            None if e is None else entropy,
            scale,
            1.0 if softcap is None else softcap,
            logit_scale,
            V,
            z.stride(0),
            gradient.stride(0),
            HAS_SOFTCAP=softcap is not None,
            **_blocks(z),
            **COMPILE,
        )
    if d_bias is not None:
        sums = gradient.sum(0)
        d_bias += sums if scale is None else sums / scale
    if not need_hidden and d_weight is None:
        return d_hidden
    unscaled = scale is None
    parts = _parts(weight, _part_size(weight) if unscaled else min(V, _TILE), logits.dtype)
    for part, operand in parts:
        g = gradient[:, part].to(weight.dtype)
        if need_hidden:
            _multiply(g, operand, d_hidden, add=part.start > 0)
        if d_weight is None:
            continue
        if unscaled:
            _multiply(g.T, hidden, d_weight[part], add=True)
        else:
            product = d_weight.new_empty((part.stop - part.start, H))
            _multiply(g.T, hidden, product, add=False)
            d_weight[part].addcdiv_(product, scale)
    if need_hidden and scale is not None:
        d_hidden /= scale
    return d_hidden
