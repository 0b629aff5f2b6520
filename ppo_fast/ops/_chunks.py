"""The chunk loop under the linear_* ops: every output-layer product they make is made here, a few rows at a time.

A chunk of rows goes through

    head_forward    hidden @ weight.T and the statistics of the rows; the logits stay in a workspace
    consume         the caller's: stores what it wants, answers c = dL/dlogp and e = dL/dentropy of the rows
    head_backward   the stored logits become their own gradient; d_hidden of the rows comes out, d_weight and d_bias are
                    added to

and is gone: one product for scoring, two with a frozen head, three with a trainable one. The two primitives stand in
_head.py. Kept sets have the same two over the gathered weight rows of each token. d_weight and d_bias accumulate in
float32 (float64 for float64) over all chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_ids_in_range, visible
from ppo_fast.ops._head import ROW_MULTIPLE, alive_rows, head_backward, head_forward, spread_rows, workspace
from ppo_fast.ops._row_math import Head, Rows, RowSums, Statistics, gradient_, row_factors, shape_logits_

# What the stored logits of a chunk may take. GEMMs on accelerators need many more rows to be efficient.
_CPU_CHUNK_BYTES, _CHUNK_BYTES = 80 << 20, 512 << 20
# Rows per chunk where nothing is stored. The weight is read, and widened, once per chunk.
_SCORING_CHUNK = 512

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
    size = chunk_rows(head, rows, count, gradients is not None)
    if chunk_tokens is not None:
        size = min(size, chunk_tokens) if kept else chunk_tokens
    size = min(size, max(count, 1))
    if head.bias is not None:
        head = head._replace(bias=head.bias.to(head.stat_dtype).contiguous())
    # Buffers are made once and reused: fresh pages cost more than the arithmetic done in them.
    space: Any = KeptWorkspace(head, rows, size) if kept else None
    logits = None if kept or gradients is None else workspace(head, size)
    # Vendor GEMMs inside must see the dtypes chosen here, whatever autocast region the caller stands in.
    with torch.autocast(head.weight.device.type, enabled=False):
        for start in range(0, max(count, 1), size):
            stop = min(start + size, count)
            index = slice(start, stop) if live is None else live[start:stop]
            chunk = rows.take(index)
            if kept:
                statistics = _kept_forward(head, chunk, space, want_entropy)
            else:
                statistics = head_forward(head, chunk, logits, want_entropy)
            coefficients = consume(statistics, index)
            if gradients is None or stop == start:
                continue
            assert coefficients is not None
            if kept:
                d_hidden = _kept_backward(head, chunk, space, statistics, *coefficients, gradients)
            else:
                assert logits is not None
                need_hidden = gradients.hidden is not None
                d_hidden = head_backward(
                    head, chunk, logits, statistics, *coefficients, need_hidden, gradients.weight, gradients.bias
                )
            if gradients.hidden is not None and d_hidden is not None:
                gradients.hidden[index] = d_hidden.to(gradients.hidden.dtype)


def chunk_rows(head: Head, rows: Rows, count: int, store: bool) -> int:
    """Rows per chunk by default, for ``count`` rows in chunks of about the same size.

    At most as many as fit their stored logits (with kept sets: their gathered weight rows) into 80 MiB on CPU and 512
    MiB elsewhere, or `ROW_MULTIPLE`; 512 where nothing is stored.
    """
    V, H = head.weight.shape
    budget = _CPU_CHUNK_BYTES if head.weight.device.type == "cpu" else _CHUNK_BYTES
    if rows.kept_ids is not None:
        # A single token's rows can take megabytes (K = 1024, H = 4096: 16 MiB), so the minimum is one token here.
        return max(1, budget // (rows.kept_ids.shape[1] * H * head.stat_dtype.itemsize))
    largest = _SCORING_CHUNK
    if store:
        largest = max(1, budget // (V * head.stat_dtype.itemsize * ROW_MULTIPLE)) * ROW_MULTIPLE
    even = -(-count // max(1, -(-count // largest)))
    return -(-even // ROW_MULTIPLE) * ROW_MULTIPLE


# ----------------------------------------------------------------------------------------------------------- kept sets


class KeptWorkspace:
    """What the backward of a chunk of kept sets needs of its forward."""

    def __init__(self, head: Head, rows: Rows, size: int) -> None:
        assert rows.kept_ids is not None
        K, H = rows.kept_ids.shape[1], head.weight.shape[1]
        new = head.weight.new_empty
        self.gathered = new((size, K, H), dtype=head.stat_dtype)
        self.logits, *self.scratch = (new((size, K), dtype=head.stat_dtype) for _ in range(3))
        # For the chunk at hand: weight rows [n, K], and which column is the token's own [n], -1 for none.
        self.ids = self.column = rows.token_ids


def _kept_forward(head: Head, rows: Rows, space: KeptWorkspace, want_entropy: bool) -> Statistics:
    """`chunk_forward` over each token's own few weight rows, which are gathered and stay in ``space``."""
    kept = rows.kept_ids
    assert kept is not None
    n, V, dtype = kept.shape[0], head.weight.shape[0], head.stat_dtype
    own = (kept == rows.token_ids[:, None]) & (kept >= 0)
    present = own.any(1)
    if visible(kept):
        _check_kept(kept, rows.token_ids, present, V)
    space.column = torch.where(present, own.int().argmax(1), -1)
    space.ids = kept.clamp(0, V - 1)
    gathered, z = space.gathered[:n], space.logits[:n]
    gathered.copy_(head.weight[space.ids])
    torch.bmm(gathered, rows.hidden.to(dtype)[:, :, None], out=z[:, :, None])
    shape_logits_(z, None if head.bias is None else head.bias[space.ids].to(dtype), head, rows.temperature)
    z.masked_fill_(kept < 0, -torch.inf).masked_fill_(kept >= V, torch.nan)
    sums = RowSums(n, z, want_entropy)
    sums.fold(z, space.column, space.scratch[0][:n], space.scratch[1][:n])
    return sums.statistics()


def _check_kept(kept: Tensor, token_ids: Tensor, present: Tensor, V: int) -> None:
    if kept.numel() and not (int(kept.min()) >= -1 and int(kept.max()) < V):
        raise IndexError(f"kept_ids must lie in [0, {V}), or be -1 for none, at live positions")
    ordered = kept.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError("kept_ids must not name a token twice at one position")
    if not bool(present.all()):
        lost = int(token_ids[~present][0])
        raise IndexError(f"token_ids must lie in their kept set at live positions: kept_ids lacks token {lost}")


def _kept_backward(
    head: Head,
    rows: Rows,
    space: KeptWorkspace,
    statistics: Statistics,
    c: Tensor,  # [n]
    e: Tensor | None,  # [n]
    gradients: Gradients,
) -> Tensor | None:
    """`chunk_backward` over the gathered rows. All in the stat dtype: what was gathered has been widened already."""
    n, dtype = rows.hidden.shape[0], head.stat_dtype
    g, gathered, ids, column = space.logits[:n], space.gathered[:n], space.ids, space.column
    alive = alive_rows(c, e)
    if alive is not None:
        if alive.numel() == 0:
            return None
        rows, statistics = rows.take(alive), statistics.take(alive)
        c, e = c[alive], None if e is None else e[alive]
        g, gathered, ids, column = g[alive], gathered[alive], ids[alive], column[alive]
    scratch = (space.scratch[0][: g.shape[0]], space.scratch[1][: g.shape[0]])
    gradient_(g, column, row_factors(head, rows.temperature, statistics, c, e), scratch)
    d_hidden = None if gradients.hidden is None else torch.bmm(g[:, None, :], gathered)[:, 0]
    # Columns that hold no token have a zero gradient, which goes to row 0.
    if gradients.bias is not None:
        gradients.bias.index_add_(0, ids.flatten(), g.flatten())
    if gradients.weight is not None:
        torch.mul(g[:, :, None], rows.hidden.to(dtype)[:, None, :], out=gathered)
        gradients.weight.index_add_(0, ids.flatten(), gathered.flatten(0, 1))
    return spread_rows(d_hidden, alive, n)
