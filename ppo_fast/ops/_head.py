"""The two primitives under the linear_* ops: an output layer applied to a chunk of rows, and the gradient of that.

    _head_forward    hidden @ weight.T -> statistics of every row; the logits stay in a workspace if it is given
    _head_backward   the stored logits -> d_hidden of the rows; d_weight and d_bias are added to

They are internal ops, so that a device can bring its own: C++ on CPU (csrc/linear_head.cpp), Triton on GPUs
(kernels/linear_head.py). Layout of the workspace, unit of ``peak`` and rounding of the operands are the device's own; a
backward runs on the device path of its forward. Here they are made of torch operations, tile by tile of vocabulary
rows, for every device without kernels.

Numerics of this implementation. Logits are never rounded to 16 bits: a 16-bit head is multiplied with float32 output
where the vendor's GEMM offers that (CUDA), else tile by tile after widening the tile, never the whole weight. The
gradient of the logits is formed in float32 and rounded once to the dtype of the weight, as the operand of the two
backward products; for float16 it is first scaled by a power of two, or small probabilities would underflow. float32
follows torch.get_float32_matmul_precision().
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ppo_fast.ops._library import define, stat_dtype
from ppo_fast.ops._memory import fresh
from ppo_fast.ops._row_math import (
    Gradients,
    Head,
    RowFactors,
    Rows,
    RowSums,
    Statistics,
    gradient_,
    row_factors,
    shape_logits_,
)

# Vocabulary rows per product. On CPU the tile of logits should stay in the caches while its statistics are taken, and
# vendor GEMMs lose below about 4096; elsewhere launches count.
_CPU_TILE, _TILE = 4096, 16384
# A workspace holds this many rows or a multiple.
ROW_MULTIPLE = 32
# What the stored logits of a chunk may take. GEMMs on accelerators need many more rows to be efficient, and each chunk
# reads and writes the whole gradient of the weight: 1536 rows there at V = 151,936.
_CPU_CHUNK_BYTES, _CHUNK_BYTES = 80 << 20, 896 << 20
# Rows per chunk where nothing is stored. The weight is read, and widened, once per chunk.
_CPU_SCORING_CHUNK, _SCORING_CHUNK = 512, 2048


class FullVocabulary:
    """The softmax over the whole vocabulary, for ``count`` rows chunk by chunk.

    ``chunk_rows`` is the default size of a chunk: chunks of about the same size, of at most as many rows as fit their
    stored logits into 80 MiB on CPU and 896 MiB elsewhere (`ROW_MULTIPLE` at least); 512 and 2048 where nothing is
    stored.
    """

    def __init__(self, head: Head, count: int, store: bool, chunk_tokens: int | None) -> None:
        self.head = head
        V = head.weight.shape[0]
        on_cpu = head.weight.device.type == "cpu"
        largest = _CPU_SCORING_CHUNK if on_cpu else _SCORING_CHUNK
        if store:
            budget = _CPU_CHUNK_BYTES if on_cpu else _CHUNK_BYTES
            largest = max(1, budget // (V * head.stat_dtype.itemsize * ROW_MULTIPLE)) * ROW_MULTIPLE
        chunks = max(1, -(-count // largest))
        self.chunk_rows = max(1, -(-count // (chunks * ROW_MULTIPLE))) * ROW_MULTIPLE
        # Made once and reused: fresh pages cost more than the arithmetic done in them.
        rows = min(chunk_tokens or self.chunk_rows, max(count, 1))
        rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        self.logits = fresh(head.weight, rows, V, zero=False) if store else None

    def forward(self, rows: Rows, want_entropy: bool) -> Statistics:
        """Statistics of the rows; their logits stay in the workspace, in the layout of the device, if there is one."""
        weight, bias, softcap, logit_scale = self.head
        return Statistics(
            *torch.ops.ppo_fast._head_forward(
                rows.hidden,
                weight,
                bias,
                rows.token_ids,
                rows.temperature,
                softcap,
                logit_scale,
                self.logits,
                want_entropy,
            )
        )

    def backward(
        self,
        rows: Rows,
        statistics: Statistics,
        c: Tensor,  # [n] dL/dlogp
        e: Tensor | None,  # [n] dL/dentropy
        gradients: Gradients,
    ) -> Tensor | None:
        """d_hidden [n, H] in the stat dtype if wanted; d_weight and d_bias are added to. Overwrites the stored logits.

        On CPU rows with c == e == 0 are dropped first. Elsewhere their number isn't known on the host, and they are
        multiplied as the zeros they are.
        """
        assert self.logits is not None
        weight, _, softcap, logit_scale = self.head
        d_hidden = torch.ops.ppo_fast._head_backward(
            rows.hidden,
            weight,
            rows.token_ids,
            rows.temperature,
            softcap,
            logit_scale,
            self.logits,
            *statistics,
            c.contiguous(),
            None if e is None else e.contiguous(),
            gradients.hidden is not None,
            gradients.weight,
            gradients.bias,
        )
        return None if gradients.hidden is None else d_hidden


# --------------------------------------------------------------------------------------------- in torch operations


def _forward(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V] stat dtype
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    softcap: float | None,
    logit_scale: float,
    logits: Tensor | None,  # [n or more, V] stat dtype
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, dtype = hidden.shape[0], stat_dtype(weight.dtype)
    head = Head(weight, bias, softcap, logit_scale)
    tiles = Tiles(weight, n)
    hidden = tiles.widened(hidden)
    scratch = [tiles.buffer() for _ in range(2)]
    sums = RowSums(n, weight.new_empty(0, dtype=dtype), want_entropy)
    for start, stop, operand in tiles:
        z = scratch[0][:, : stop - start] if logits is None else logits[:n, start:stop]
        if operand.dtype == dtype:
            torch.mm(hidden, operand.T, out=z)
        else:
            torch.mm(hidden, operand.T, out_dtype=dtype, out=z)
        shape_logits_(z, None if bias is None else bias[start:stop], head, temperature)
        sums.fold(z, token_ids - start, scratch[0][:, : stop - start], scratch[1][:, : stop - start])
    return tuple(sums.statistics())  # type: ignore[return-value]


def _backward(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    logits: Tensor,  # [n or more, V] stat dtype, overwritten
    logprobs: Tensor,  # [n]
    entropy: Tensor,  # [n], or [0]
    peak: Tensor,  # [n]
    total: Tensor,  # [n]
    c: Tensor,  # [n]
    e: Tensor | None,  # [n]
    need_hidden: bool,
    d_weight: Tensor | None,  # [V, H] stat dtype
    d_bias: Tensor | None,  # [V] stat dtype
) -> Tensor:
    n, dtype = hidden.shape[0], stat_dtype(weight.dtype)
    head = Head(weight, None, softcap, logit_scale)
    rows, statistics = Rows(hidden, token_ids, temperature, None), Statistics(logprobs, entropy, peak, total)
    alive = _alive_rows(c, e)
    if alive is not None:
        rows, statistics = rows.take(alive), statistics.take(alive)
        c, e = c[alive], None if e is None else e[alive]
    factors = row_factors(head, rows.temperature, statistics, c, e)
    scale, unscale = _operand_scale(weight.dtype, factors)
    tiles = Tiles(weight, rows.hidden.shape[0])
    hidden = tiles.widened(rows.hidden)
    d_hidden = hidden.new_zeros((hidden.shape[0] if need_hidden else 0, hidden.shape[1]), dtype=dtype)
    scratch = [tiles.buffer() for _ in range(2)]

    for start, stop, operand in tiles if rows.hidden.shape[0] else ():
        g = logits[:n, start:stop]
        if alive is not None:
            g = torch.index_select(g, 0, alive)
        width = stop - start
        gradient_(g, rows.token_ids - start, factors, (scratch[0][:, :width], scratch[1][:, :width]))
        if d_bias is not None:
            d_bias[start:stop] += g.sum(0)
        if weight.dtype != dtype:
            rounded = (g if scale is None else g.mul_(scale)).to(weight.dtype)
            g = g.copy_(rounded) if operand.dtype == dtype else rounded
        if need_hidden:
            _add_product(d_hidden, g, operand, unscale)
        if d_weight is not None:
            _add_product(d_weight[start:stop], g.T, hidden, unscale)
    return _spread_rows(d_hidden, alive, n) if need_hidden else d_hidden


class Tiles:
    """(start, stop, operand) over the vocabulary: weight[start:stop] in the dtype it is multiplied in."""

    def __init__(self, weight: Tensor, n: int) -> None:
        self.weight, self.n, self.dtype = weight, n, stat_dtype(weight.dtype)
        self.size = min(weight.shape[0], _CPU_TILE if weight.device.type == "cpu" else _TILE)
        self.widens = weight.dtype != self.dtype and not _has_wide_product(weight.device)

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        wide = self.weight.new_empty((self.size, self.weight.shape[1]), dtype=self.dtype) if self.widens else None
        for start in range(0, self.weight.shape[0], self.size):
            part = self.weight[start : start + self.size]
            stop = start + part.shape[0]
            yield start, stop, part if wide is None else wide[: stop - start].copy_(part)

    def widened(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype) if self.widens else hidden

    def buffer(self) -> Tensor:
        return self.weight.new_empty((self.n, self.size), dtype=self.dtype)


def _has_wide_product(device: torch.device) -> bool:
    """Whether torch.mm multiplies 16-bit matrices to a float32 result; on ROCm only the newest releases do."""
    return device.type == "cuda" and torch.version.hip is None


def _alive_rows(c: Tensor, e: Tensor | None) -> Tensor | None:
    """The rows that have a gradient, where it is known on the host and not all of them."""
    if c.device.type != "cpu":
        return None
    alive = (c != 0) if e is None else (c != 0) | (e != 0)
    return None if bool(alive.all()) else alive.nonzero()[:, 0]


def _spread_rows(d_hidden: Tensor, alive: Tensor | None, n: int) -> Tensor:
    """The rows back among the dropped ones, whose gradient is zero."""
    return d_hidden if alive is None else d_hidden.new_zeros((n, d_hidden.shape[1])).index_copy_(0, alive, d_hidden)


def _operand_scale(dtype: torch.dtype, factors: RowFactors) -> tuple[Tensor | None, Tensor | None]:
    """For float16: the power of two that brings the largest possible element of the gradient just under 2^15, and its
    inverse. Probabilities down to 2^-29 of that element then stay normal numbers."""
    if dtype != torch.float16 or factors.bound.numel() == 0:
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


_ROWS = "Tensor hidden, Tensor weight, {}Tensor token_ids, Tensor? temperature, float? softcap, float logit_scale, "
define(
    f"_head_forward({_ROWS.format('Tensor? bias, ')}Tensor(a!)? logits, bool want_entropy) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    lambda hidden, weight, *rest: tuple(
        hidden.new_empty(n, dtype=stat_dtype(weight.dtype))
        for n in (hidden.shape[0], hidden.shape[0] if rest[-1] else 0, hidden.shape[0], hidden.shape[0])
    ),
)
define(
    f"_head_backward({_ROWS.format('')}Tensor(a!) logits, Tensor logprobs, Tensor entropy, Tensor peak, Tensor total, "
    "Tensor c, Tensor? e, bool need_hidden, Tensor(b!)? d_weight, Tensor(c!)? d_bias) -> Tensor",
    _backward,
    lambda hidden, weight, *rest: hidden.new_empty(
        hidden.shape if rest[-3] else (0, hidden.shape[1]), dtype=stat_dtype(weight.dtype)
    ),
)
