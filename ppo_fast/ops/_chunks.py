"""The chunk loop under the linear_* ops: every output-layer product they make is made here, a few rows at a time.

A chunk of rows goes through

    chunk_forward    hidden @ weight.T by tiles of vocabulary rows; row statistics from each tile while it is in cache
    consume          the caller's: stores what it wants, answers c = dL/dlogp and e = dL/dentropy of the rows
    chunk_backward   the stored logits become their own gradient in place, tile by tile; d_hidden of the rows comes out,
                     d_weight and d_bias are added to

and is gone: one product for scoring, two with a frozen head, three with a trainable one. The two primitives and the
`Workspace` they share are all that a device's own kernels have to replace; here they are made of torch operations. Kept
sets have two primitives of their own, in _kept.py.

Numerics. Logits are never rounded to 16 bits: a 16-bit head is multiplied with float32 output where the vendor's GEMM
offers that (CUDA), else tile by tile after widening the tile, never the whole weight. The gradient of the logits is
formed in float32 and rounded once to the dtype of the weight, as the operand of the two backward products; for float16
it is first scaled by a power of two, or small probabilities would underflow. d_weight and d_bias accumulate in float32
(float64 for float64) over all chunks. float32 follows torch.get_float32_matmul_precision().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_ids_in_range
from ppo_fast.ops._kept import KeptWorkspace, kept_backward, kept_chunk_rows, kept_forward
from ppo_fast.ops._row_math import Head, RowFactors, Rows, RowSums, Statistics, gradient_, row_factors, shape_logits_

# Vocabulary rows per product. On CPU the tile of logits should stay in the caches while its statistics are taken, and
# vendor GEMMs lose below about 4096; elsewhere launches count.
_CPU_TILE, _TILE = 4096, 16384
# What the stored logits of a chunk may take. GEMMs on accelerators need many more rows to be efficient.
_CPU_CHUNK_BYTES, _CHUNK_BYTES = 64 << 20, 512 << 20
_MIN_CHUNK = 16
# Rows per chunk where nothing is stored: the weight is widened once per chunk, so more rows make it cheaper.
_SCORING_CHUNK = 1024

Consume = Callable[[Statistics, "Tensor | slice"], "tuple[Tensor, Tensor | None] | None"]


@dataclass(frozen=True)
class Gradients:
    """Where the gradients go; None for what nobody asked for."""

    hidden: Tensor | None  # [N, H], written
    weight: Tensor | None  # [V, H] stat dtype, added to
    bias: Tensor | None  # [V] stat dtype, added to

    @classmethod
    def zeros(cls, head: Head, rows: Rows, hidden: torch.dtype | None, weight: bool, bias: bool) -> Gradients:
        """Buffers for what is asked for; ``hidden`` is the dtype of that gradient, None for none."""
        like, dtype = head.weight, head.stat_dtype
        return cls(
            None if hidden is None else like.new_zeros(rows.hidden.shape, dtype=hidden),
            like.new_zeros(like.shape, dtype=dtype) if weight else None,
            like.new_zeros(like.shape[0], dtype=dtype) if bias else None,
        )

    @property
    def wanted(self) -> bool:
        return not (self.hidden is None and self.weight is None and self.bias is None)


def chunk_loop(
    head: Head,
    rows: Rows,
    mask: Tensor | None,  # [N] bool, True = live
    consume: Consume,
    gradients: Gradients | None,
    *,
    want_entropy: bool,
    chunk_tokens: int | None,
) -> None:
    """Walk the live rows. ``consume(statistics, index)`` gets the statistics of the rows ``index`` (a slice or a tensor
    of positions) and, where gradients are wanted, returns their ``(c, e)``; e is None where the entropy has none.

    Masked rows are never touched: not their hidden state, their id or their temperature. On a GPU a mask costs one
    synchronisation, to learn the number of live rows. With no live row ``consume`` is still called once, on none.
    """
    if gradients is not None and not gradients.wanted:
        gradients = None
    N = rows.hidden.shape[0]
    check_ids_in_range(rows.token_ids, head.weight.shape[0], mask)  # here, too, for code that was compiled
    live = None if mask is None else mask.nonzero()[:, 0]
    if live is not None and live.numel() == N:
        live = None
    count = N if live is None else live.numel()
    kept = rows.kept_ids is not None
    size = chunk_tokens or (kept_chunk_rows(head, rows) if kept else chunk_rows(head, gradients is not None))
    size = min(size, max(count, 1))
    forward: Any = kept_forward if kept else chunk_forward
    backward: Any = kept_backward if kept else chunk_backward
    # Buffers are made once and reused: fresh pages cost more than the arithmetic done in them.
    space: Any = KeptWorkspace() if kept else Workspace(head, rows, size, store=gradients is not None)
    # Vendor GEMMs inside must see the dtypes chosen here, whatever autocast region the caller stands in.
    with torch.autocast(head.weight.device.type, enabled=False):
        for start in range(0, max(count, 1), size):
            stop = min(start + size, count)
            index = slice(start, stop) if live is None else live[start:stop]
            chunk = rows.take(index)
            statistics = forward(head, chunk, space, want_entropy)
            coefficients = consume(statistics, index)
            if gradients is None or stop == start:
                continue
            assert coefficients is not None
            d_hidden = backward(head, chunk, space, statistics, *coefficients, gradients)
            if gradients.hidden is not None and d_hidden is not None:
                gradients.hidden[index] = d_hidden.to(gradients.hidden.dtype)


def chunk_rows(head: Head, store: bool) -> int:
    """Rows per chunk by default: as many as fit their stored logits into 64 MiB on CPU and 512 MiB elsewhere, at least
    16; 1024 where nothing is stored."""
    V = head.weight.shape[0]
    budget = _CPU_CHUNK_BYTES if head.weight.device.type == "cpu" else _CHUNK_BYTES
    return max(_MIN_CHUNK, budget // (V * head.stat_dtype.itemsize)) if store else _SCORING_CHUNK


class Workspace:
    """The logits of one chunk (if a backward will need them) and scratch for one tile of them."""

    def __init__(self, head: Head, rows: Rows, size: int, *, store: bool) -> None:
        weight, dtype = head.weight, head.stat_dtype
        V, H = weight.shape
        on_cpu = weight.device.type == "cpu"
        self.tile = min(V, _CPU_TILE if on_cpu else _TILE)
        self.widens = weight.dtype != dtype and not _has_wide_product(weight.device)
        self.logits = weight.new_empty((size, V), dtype=dtype) if store else None
        self.scratch = tuple(weight.new_empty((size, self.tile), dtype=dtype) for _ in range(2))
        self.rounded = weight.new_empty((size, self.tile)) if store and weight.dtype != dtype else None
        self.wide = weight.new_empty((self.tile, H), dtype=dtype) if self.widens else None

    def tiles(self, head: Head) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, operand) over the vocabulary: weight[start:stop] in the dtype it is multiplied in."""
        for start in range(0, head.weight.shape[0], self.tile):
            part = head.weight[start : start + self.tile]
            stop = start + part.shape[0]
            yield start, stop, part if self.wide is None else self.wide[: stop - start].copy_(part)

    def view(self, buffer: Tensor, like: Tensor) -> Tensor:
        return buffer[: like.shape[0], : like.shape[1]]


def _has_wide_product(device: torch.device) -> bool:
    """Whether torch.mm multiplies 16-bit matrices to a float32 result; on ROCm only the newest releases do."""
    return device.type == "cuda" and torch.version.hip is None


def chunk_forward(head: Head, rows: Rows, space: Workspace, want_entropy: bool) -> Statistics:
    """Statistics of the rows; their logits stay in ``space`` if it stores them."""
    n = rows.hidden.shape[0]
    dtype = head.stat_dtype
    hidden = rows.hidden.to(dtype) if space.widens else rows.hidden
    sums = RowSums(n, head.weight.new_empty(0, dtype=dtype), want_entropy)
    for start, stop, weight in space.tiles(head):
        if space.logits is None:
            z = shifted = space.scratch[0][:n, : stop - start]
        else:
            z = space.logits[:n, start:stop]
            shifted = space.view(space.scratch[0], z)
        if weight.dtype == dtype:
            torch.mm(hidden, weight.T, out=z)
        else:
            torch.mm(hidden, weight.T, out_dtype=dtype, out=z)
        bias = None if head.bias is None else head.bias[start:stop].to(dtype)
        shape_logits_(z, bias, head, rows.temperature)
        sums.fold(z, rows.token_ids - start, shifted, space.view(space.scratch[1], z))
    return sums.statistics()


def chunk_backward(
    head: Head,
    rows: Rows,
    space: Workspace,
    statistics: Statistics,
    c: Tensor,  # [n] dL/dlogp
    e: Tensor | None,  # [n] dL/dentropy
    gradients: Gradients,
) -> Tensor | None:
    """d_hidden [n, H] in the stat dtype if wanted; d_weight and d_bias are added to. Overwrites the stored logits.

    On CPU rows with c == e == 0 are dropped first. Elsewhere their number isn't known on the host, and they are
    multiplied as the zeros they are.
    """
    n, dtype = rows.hidden.shape[0], head.stat_dtype
    alive = _alive(c, e)
    if alive is not None:
        if alive.numel() == 0:
            return None
        rows, statistics = rows.take(alive), statistics.take(alive)
        c, e = c[alive], None if e is None else e[alive]
    factors = row_factors(head, rows.temperature, statistics, c, e)
    scale, unscale = _operand_scale(head.weight.dtype, factors)
    hidden = rows.hidden.to(dtype) if space.widens else rows.hidden
    d_hidden = None if gradients.hidden is None else torch.zeros(rows.hidden.shape, dtype=dtype, device=hidden.device)
    assert space.logits is not None

    for start, stop, weight in space.tiles(head):
        g = space.logits[:n, start:stop]
        if alive is not None:
            g = torch.index_select(g, 0, alive)
        scratch = (space.view(space.scratch[0], g), space.view(space.scratch[1], g))
        gradient_(g, rows.token_ids - start, factors, scratch)
        if gradients.bias is not None:
            gradients.bias[start:stop] += g.sum(0)
        operand = g
        if space.rounded is not None:
            operand = space.view(space.rounded, g).copy_(g if scale is None else g.mul_(scale))
            if space.widens:
                operand = g.copy_(operand)
        if d_hidden is not None:
            _add_product(d_hidden, operand, weight, unscale)
        if gradients.weight is not None:
            _add_product(gradients.weight[start:stop], operand.T, hidden, unscale)

    return _spread(d_hidden, alive, n)


def _alive(c: Tensor, e: Tensor | None) -> Tensor | None:
    """The rows that have a gradient, where it is known on the host and not all of them."""
    if c.device.type != "cpu":
        return None
    alive = (c != 0) if e is None else (c != 0) | (e != 0)
    return None if bool(alive.all()) else alive.nonzero()[:, 0]


def _spread(d_hidden: Tensor | None, alive: Tensor | None, n: int) -> Tensor | None:
    """The rows back among the dropped ones, whose gradient is zero."""
    if d_hidden is None or alive is None:
        return d_hidden
    return d_hidden.new_zeros((n, d_hidden.shape[1])).index_copy_(0, alive, d_hidden)


def _operand_scale(dtype: torch.dtype, factors: RowFactors) -> tuple[Tensor | None, Tensor | None]:
    """For float16: the power of two that brings the largest possible element of the gradient just under 2^15, and its
    inverse. Probabilities down to 2^-29 of that element then stay normal numbers."""
    if dtype != torch.float16:
        return None, None
    largest = torch.nan_to_num(factors.bound, nan=0.0, posinf=0.0).amax()
    exponent = (15 - torch.frexp(largest).exponent).clamp(-64, 64)
    one = torch.ones_like(largest)
    return torch.ldexp(one, exponent), torch.ldexp(one, -exponent)


def _add_product(total: Tensor, a: Tensor, b: Tensor, unscale: Tensor | None) -> None:
    """``total += (a @ b) * unscale``, accumulated in the dtype of ``total`` whatever that of the operands."""
    if a.dtype == total.dtype and unscale is None:
        total.addmm_(a, b)
        return
    product = torch.mm(a, b) if a.dtype == total.dtype else torch.mm(a, b, out_dtype=total.dtype)
    if unscale is None:
        total.add_(product)
    else:
        total.addcmul_(product, unscale)
