"""Log-prob of the selected token, entropy and log-sum-exp of every row of logits, and the gradient of the first two.

Pipeline. Forward, one program a row, one read of it: block by block over the vocabulary, a running maximum m of the raw
logits (a scalar), and for each lane the running sums of e = exp((x - m) / temperature) and of e * log e, rescaled when
m grows; lanes are added once, at the end, so a block costs one reduction across the program (its maximum) and one exp a
logit. The selected logit is fetched by itself, where it is checked against V. Backward, one program a row: read a
block, write its gradient, into a fresh tensor or over the logits (each block is read before it is written, and no
program sees another's row).

    d/dlogit_j = (c * (1[j = y] - p_j) - e * p_j * (log p_j + entropy)) / temperature        c, e: upstream gradients

Numerics. Everything between the load and the store is in the stat dtype: float32, float64 for float64.
- Exponents are differences from the maximum, taken before the division by the temperature: their rounding is relative
  to the difference, not to the logit, and logprob = (x_y - m) / temperature - log(sum) subtracts no two large numbers.
- m starts at -inf and columns past V are loaded as -inf, before the maximum and before exp. While nothing but -inf has
  been seen, 0 stands in for m, so that -inf - -inf does not turn an empty block into NaN; p = 0 contributes 0 to the
  entropy, not 0 * -inf. The exponent of a rescaling is bounded from below: -inf times a sum would be NaN if logits
  masked with the lowest finite number came first. NaN is dropped by the maximum but not by exp: it reaches the sums.
- Backward has the row's log-sum-exp, rounded: p inherits its absolute error, 4e-6 at 128. Where it is larger than that
  (logits at -1e4, say) the row is read twice, maximum and sum first. Other rows pay a comparison.
- The gradient is rounded once, at the store.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels.common import COMPILE, LN_2, LOG2_E, NEG_INF, on_device_of
from ppo_fast.kernels.logits import over
from ppo_fast.kernels.partials import folded_by_lane

# Columns a program holds at a time, and lanes for them: 16 columns a lane, for 16-bit logits two 16-byte loads in
# flight a lane, 8 KiB a program. Three programs of 8 warps, for which 80 registers a lane leave room, then cover the 15
# to 20 KiB in flight that bandwidth times latency asks of one H100 multiprocessor; the tests of the compiled code hold
# both widths and registers to that. A reasoned choice, not a measured one.
# A block never has fewer columns than lanes, 64-lane wavefronts included: then no two lanes hold the same column, which
# in place would have one lane read what another has written.
_MAX_BLOCK = 4096
_MIN_BLOCK = 256
_COLUMNS_PER_WARP = 512

# Largest |log-sum-exp| whose float32 rounding, half a unit in the last place, is left in the probabilities: 3.8e-6.
_TRUSTED_LSE = tl.constexpr(128.0)


def _blocks(vocab: int) -> dict[str, int]:
    block = min(max(triton.next_power_of_2(vocab), _MIN_BLOCK), _MAX_BLOCK)
    return {"BLOCK_V": block, "num_warps": max(block // _COLUMNS_PER_WARP, 1)}


@triton.jit(do_not_specialize=["B"])
def _forward_kernel(
    logits_ptr,  # [A, B, V], any strides over A and B
    token_ids_ptr,  # [A, B] int64
    temperature_ptr,  # [A, B] stat dtype
    mask_ptr,  # [A, B] bool, or None: every row is live
    logprobs_ptr,  # [A, B] stat dtype
    entropy_ptr,  # [A, B] stat dtype, or None: not asked for
    lse_ptr,  # [A, B] stat dtype
    B,
    V,
    stride_a,
    stride_b,
    BLOCK_V: tl.constexpr,
):
    STAT: tl.constexpr = lse_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    if mask_ptr is not None:  # noqa: SIM102  (decided at compile time, unlike the next)
        # A masked row costs one byte read. The branch is uniform and keeps nothing alive: no registers.
        if tl.load(mask_ptr + row) == 0:
            tl.store(logprobs_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
            if entropy_ptr is not None:
                tl.store(entropy_ptr + row, 0.0)
            return

    row_ptr = logits_ptr + (row // B) * stride_a + (row % B) * stride_b
    temperature = tl.load(temperature_ptr + row)
    scale = over(1.0, temperature) * LOG2_E  # exponents are base 2: what the hardware has
    lanes = tl.arange(0, BLOCK_V)
    top = tl.full((), NEG_INF, STAT)
    mass = tl.zeros((BLOCK_V,), STAT)  # sum of e
    moment = tl.zeros((BLOCK_V,), STAT)  # sum of e * log2(e)
    for start in range(0, V, BLOCK_V):
        columns = start + lanes
        x = tl.load(row_ptr + columns, mask=columns < V, other=NEG_INF).to(STAT)
        top, mass, moment = folded_by_lane(x, top, mass, moment, scale, entropy_ptr is not None)

    total = tl.sum(mass, axis=0)
    log_total = tl.log(total)
    empty = total == 0.0  # every logit is -inf
    token_id = tl.load(token_ids_ptr + row)
    known = (token_id >= 0) & (token_id < V)
    selected = tl.load(row_ptr + token_id, mask=known, other=float("nan")).to(STAT)
    logprob = tl.where(empty & known, NEG_INF, over(selected - top, temperature) - log_total)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(lse_ptr + row, tl.where(empty, NEG_INF, over(top, temperature) + log_total))
    if entropy_ptr is not None:
        entropy = log_total - LN_2 * (tl.sum(moment, axis=0) / total)
        tl.store(entropy_ptr + row, tl.where(empty, 0.0, entropy))


@triton.jit(do_not_specialize=["B"])
def _backward_kernel(
    grad_logprobs_ptr,  # [A, B] stat dtype, or None: zero
    grad_entropy_ptr,  # [A, B] stat dtype, or None: zero
    logits_ptr,  # [A, B, V], any strides over A and B
    token_ids_ptr,  # [A, B] int64
    temperature_ptr,  # [A, B] stat dtype
    mask_ptr,  # [A, B] bool, or None: every row is live
    entropy_ptr,  # [A, B] stat dtype, or None: not needed
    lse_ptr,  # [A, B] stat dtype
    grad_ptr,  # [A, B, V] dtype of logits; may be the logits
    B,
    V,
    stride_a,
    stride_b,
    grad_stride_a,
    grad_stride_b,
    BLOCK_V: tl.constexpr,
):
    STAT: tl.constexpr = lse_ptr.dtype.element_ty
    OUT: tl.constexpr = grad_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + (row // B) * stride_a + (row % B) * stride_b
    out_ptr = grad_ptr + (row // B) * grad_stride_a + (row % B) * grad_stride_b
    lanes = tl.arange(0, BLOCK_V)

    live = tl.full((), 1, tl.int1)
    if mask_ptr is not None:
        live = tl.load(mask_ptr + row)
    lse = tl.load(lse_ptr + row, mask=live, other=NEG_INF)
    c = tl.zeros((), STAT)
    e = tl.zeros((), STAT)
    token = tl.full((), -1, tl.int32)
    if grad_logprobs_ptr is not None:
        token_id = tl.load(token_ids_ptr + row, mask=live, other=0)
        known = (token_id >= 0) & (token_id < V)
        c = tl.load(grad_logprobs_ptr + row, mask=live, other=0.0)
        c = tl.where(known, c, float("nan"))
        token = tl.where(known, token_id, -1).to(tl.int32)
    if grad_entropy_ptr is not None:
        e = tl.load(grad_entropy_ptr + row, mask=live, other=0.0)

    # Masked rows, rows that are all -inf, and rows no gradient arrives at (clipped tokens) are written, not read; a NaN
    # among the logits shows in lse, so that 0 * NaN stays NaN. The branch is uniform: it costs code, not registers.
    if (lse == NEG_INF) | ((c == 0.0) & (e == 0.0) & (lse == lse)):
        for start in range(0, V, BLOCK_V):
            columns = start + lanes
            tl.store(out_ptr + columns, tl.zeros((BLOCK_V,), OUT), mask=columns < V)
        return

    temperature = tl.load(temperature_ptr + row)
    inverse = over(1.0, temperature)
    scale = inverse * LOG2_E
    base = lse * temperature  # log2 p_j = (x_j - base) * scale - log2_mass
    log2_mass = tl.zeros((), STAT)
    if tl.abs(lse) > _TRUSTED_LSE:
        top = tl.full((), NEG_INF, STAT)
        mass = tl.zeros((BLOCK_V,), STAT)
        for start in range(0, V, BLOCK_V):
            columns = start + lanes
            x = tl.load(row_ptr + columns, mask=columns < V, other=NEG_INF).to(STAT)
            new_top = tl.maximum(top, tl.max(x, axis=0))
            shift = tl.where(new_top == NEG_INF, 0.0, new_top)
            mass = tl.exp2((top - shift) * scale) * mass + tl.exp2((x - shift) * scale)
            top = new_top
        base = top
        log2_mass = tl.log2(tl.sum(mass, axis=0))

    entropy = tl.zeros((), STAT)
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + row)
    for start in range(0, V, BLOCK_V):
        columns = start + lanes
        inside = columns < V
        x = tl.load(row_ptr + columns, mask=inside, other=NEG_INF).to(STAT)
        u = (x - base) * scale - log2_mass
        p = tl.exp2(u)
        coefficient = c
        if grad_entropy_ptr is not None:
            coefficient = c + e * tl.where(p == 0.0, 0.0, u * LN_2 + entropy)
        gradient = tl.where(columns == token, c, 0.0) - p * coefficient
        tl.store(out_ptr + columns, (gradient * inverse).to(OUT), mask=inside)


def selected_logprobs(
    logits: Tensor,  # [A, B, V]
    token_ids: Tensor,  # [A, B] int64
    temperature: Tensor,  # [A, B] stat dtype
    mask: Tensor | None,  # [A, B] bool
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ppo_fast::selected_logprobs``: (logprobs [A, B], entropy [A, B] or [0], lse [A, B]), in the stat dtype.

    Masked rows are not read and give 0. A row of -inf gives logprob -inf, entropy 0, lse -inf. A token id outside
    [0, V) gives a NaN log-prob; a temperature not above 0 gives NaN.
    """
    A, B, V = logits.shape
    logprobs = torch.empty_like(temperature)
    lse = torch.empty_like(temperature)
    entropy = torch.empty_like(temperature) if return_entropy else temperature.new_empty(0)
    if A * B > 0:
        with on_device_of(logits):
            _forward_kernel[(A * B,)](
                logits,
                token_ids,
                temperature,
                mask,
                logprobs,
                entropy if return_entropy else None,
                lse,
                B,
                V,
                logits.stride(0),
                logits.stride(1),
                **_blocks(V),
                **COMPILE,
            )
    return logprobs, entropy, lse


def _backward_into(
    grad: Tensor,  # [A, B, V], stride 1 over V; may be `logits`
    grad_logprobs: Tensor | None,  # [A, B]
    grad_entropy: Tensor | None,  # [A, B]
    logits: Tensor,  # [A, B, V]
    token_ids: Tensor,  # [A, B]
    temperature: Tensor,  # [A, B]
    mask: Tensor | None,  # [A, B]
    entropy: Tensor,  # [A, B] or [0]
    lse: Tensor,  # [A, B]
) -> None:
    A, B, V = logits.shape
    if A * B * V == 0:
        return
    with on_device_of(logits):
        _backward_kernel[(A * B,)](
            grad_logprobs,
            grad_entropy,
            logits,
            token_ids,
            temperature,
            mask,
            entropy if grad_entropy is not None else None,
            lse,
            grad,
            B,
            V,
            logits.stride(0),
            logits.stride(1),
            grad.stride(0),
            grad.stride(1),
            **_blocks(V),
            **COMPILE,
        )


def selected_logprobs_backward(
    grad_logprobs: Tensor | None,  # [A, B] stat dtype
    grad_entropy: Tensor | None,  # [A, B] stat dtype
    logits: Tensor,  # [A, B, V]
    token_ids: Tensor,  # [A, B] int64
    temperature: Tensor,  # [A, B] stat dtype
    mask: Tensor | None,  # [A, B] bool
    entropy: Tensor,  # [A, B], or [0] without grad_entropy
    lse: Tensor,  # [A, B] stat dtype
) -> Tensor:
    """``ppo_fast::selected_logprobs_backward``: the gradient [A, B, V], contiguous, in the dtype of logits."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _backward_into(grad, grad_logprobs, grad_entropy, logits, token_ids, temperature, mask, entropy, lse)
    return grad


def selected_logprobs_backward_(
    grad_logprobs: Tensor | None,  # [A, B] stat dtype
    grad_entropy: Tensor | None,  # [A, B] stat dtype
    logits: Tensor,  # [A, B, V], overwritten
    token_ids: Tensor,  # [A, B] int64
    temperature: Tensor,  # [A, B] stat dtype
    mask: Tensor | None,  # [A, B] bool
    entropy: Tensor,  # [A, B], or [0] without grad_entropy
    lse: Tensor,  # [A, B] stat dtype
) -> None:
    """``ppo_fast::selected_logprobs_backward_``: the same gradient, written over the logits."""
    _backward_into(logits, grad_logprobs, grad_entropy, logits, token_ids, temperature, mask, entropy, lse)
