"""Kept sets: the two primitives of the chunk loop where each token's softmax runs over its own few vocabulary rows.

`_kept_forward` multiplies a token's hidden state with the K weight rows of its set: logits [n, K], from them log-probs
and entropy. `_kept_backward` takes the softmax of the logits again and turns it into gradients. Both are registered
ops: what stands here gathers the rows, a block of tokens at a time, and runs anywhere; csrc/kept.cpp and
kernels/kept.py read them in place.

All is computed in the stat dtype, the gradients of the logits too: a row is widened as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ppo_fast.ops._checks import visible
from ppo_fast.ops._library import define, stat_dtype
from ppo_fast.ops._row_math import Gradients, Head, Rows, RowSums, Statistics, gradient_, row_factors, shape_logits_

# What one chunk's logits and d_hidden may take.
_CHUNK_BYTES = 32 << 20
# What the gathered rows of one block may take, where they are gathered.
_CPU_GATHER_BYTES, _GATHER_BYTES = 64 << 20, 512 << 20


class KeptSets:
    """The softmax of each token over its own set, chunk by chunk.

    ``chunk_rows`` is the default size of a chunk: as many tokens as fit their logits and d_hidden into 32 MiB.
    """

    def __init__(self, head: Head, rows: Rows) -> None:
        assert rows.kept_ids is not None
        self.head = head
        width = rows.kept_ids.shape[1] + rows.hidden.shape[1]
        self.chunk_rows = max(1, _CHUNK_BYTES // (width * head.stat_dtype.itemsize))
        self.logits = rows.hidden.new_empty(0)  # [n, K] of the chunk at hand

    def forward(self, rows: Rows, want_entropy: bool) -> Statistics:
        """Log-probs and entropy of the rows, the sums left out: the backward takes the softmax again."""
        assert rows.kept_ids is not None
        weight, bias, softcap, logit_scale = self.head
        if rows.kept_ids.is_cuda and visible(rows.kept_ids):  # kernels on a GPU can't raise
            own = _own_columns(rows.kept_ids, rows.token_ids)
            _check_kept(rows.kept_ids, rows.token_ids, own, weight.shape[0])
        self.logits, logprobs, entropy = torch.ops.ppo_fast._kept_forward(
            rows.hidden.contiguous(),
            weight,
            bias,
            rows.token_ids,
            rows.temperature,
            rows.kept_ids.contiguous(),
            softcap,
            logit_scale,
            want_entropy,
        )
        empty = logprobs.new_empty(0)
        return Statistics(logprobs, entropy, empty, empty)

    def backward(
        self,
        rows: Rows,
        statistics: Statistics,
        c: Tensor,  # [n] dL/dlogp
        e: Tensor | None,  # [n] dL/dentropy
        gradients: Gradients,
    ) -> Tensor | None:
        """d_hidden [n, H] in the stat dtype if wanted; d_weight and d_bias are added to."""
        assert rows.kept_ids is not None
        weight, _, softcap, logit_scale = self.head
        d_hidden = torch.ops.ppo_fast._kept_backward(
            c.contiguous(),
            None if e is None else e.contiguous(),
            self.logits,
            rows.hidden.contiguous(),
            weight,
            rows.token_ids,
            rows.temperature,
            rows.kept_ids.contiguous(),
            softcap,
            logit_scale,
            gradients.hidden is not None,
            gradients.weight,
            gradients.bias,
        )
        return None if gradients.hidden is None else d_hidden


# ------------------------------------------------------------------------------------------------------ registered ops


def _own_columns(kept_ids: Tensor, token_ids: Tensor) -> Tensor:
    """Which column is the token's own [n], -1 for none."""
    own = (kept_ids == token_ids[:, None]) & (kept_ids >= 0)
    return torch.where(own.any(1), own.int().argmax(1), -1)


def _check_kept(kept_ids: Tensor, token_ids: Tensor, column: Tensor, V: int) -> None:
    if kept_ids.numel() and not (int(kept_ids.min()) >= -1 and int(kept_ids.max()) < V):
        raise IndexError(f"kept_ids must lie in [0, {V}), or be -1 for none, at live positions")
    ordered = kept_ids.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError("kept_ids must not name a token twice at one position")
    if not bool((column >= 0).all()):
        lost = int(token_ids[column < 0][0])
        raise IndexError(f"token_ids must lie in their kept set at live positions: kept_ids lacks token {lost}")


def _blocks(weight: Tensor, kept_ids: Tensor) -> Iterator[slice]:
    """The tokens, so many at a time that their gathered rows stay within bounds."""
    n, K = kept_ids.shape
    budget = _CPU_GATHER_BYTES if weight.device.type == "cpu" else _GATHER_BYTES
    size = max(1, budget // (K * weight.shape[1] * stat_dtype(weight.dtype).itemsize))
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _statistics(logits: Tensor, column: Tensor, want_entropy: bool) -> Statistics:
    sums = RowSums(logits.shape[0], logits, want_entropy)
    sums.fold(logits, column, torch.empty_like(logits), torch.empty_like(logits))
    return sums.statistics()


def _forward(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V] stat dtype
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    kept_ids: Tensor,  # [n, K] int64
    softcap: float | None,
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, K], log-probs [n], entropy [n] or [0], all in the stat dtype."""
    head = Head(weight, bias, softcap, logit_scale)
    V, dtype = weight.shape[0], head.stat_dtype
    column = _own_columns(kept_ids, token_ids)
    if visible(kept_ids):
        _check_kept(kept_ids, token_ids, column, V)
    logits = hidden.new_empty(kept_ids.shape, dtype=dtype)
    for block in _blocks(weight, kept_ids):
        kept, z = kept_ids[block], logits[block]
        ids = kept.clamp(0, V - 1)
        torch.bmm(weight[ids].to(dtype), hidden[block].to(dtype)[:, :, None], out=z[:, :, None])
        shape_logits_(z, None if bias is None else bias[ids], head, None if temperature is None else temperature[block])
        z.masked_fill_(kept < 0, -torch.inf).masked_fill_(kept >= V, torch.nan)
    statistics = _statistics(logits, column, want_entropy)
    return logits, statistics.logprobs, statistics.entropy


def _backward(
    c: Tensor,  # [n]
    e: Tensor | None,  # [n]
    logits: Tensor,  # [n, K]
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] stat dtype
    kept_ids: Tensor,  # [n, K] int64
    softcap: float | None,
    logit_scale: float,
    need_hidden: bool,
    d_weight: Tensor | None,  # [V, H] stat dtype, added to
    d_bias: Tensor | None,  # [V] stat dtype, added to
) -> Tensor:
    """d_hidden [n, H] in the stat dtype, [0] if not needed. On CPU tokens with c == e == 0 are left out."""
    n, dtype = hidden.shape[0], logits.dtype
    d_hidden = logits.new_zeros(hidden.shape if need_hidden else 0)
    alive: Tensor | slice = slice(0, n)
    if c.device.type == "cpu":
        alive = ((c != 0) if e is None else (c != 0) | (e != 0)).nonzero()[:, 0]
        rows = Rows(hidden, token_ids, temperature, kept_ids).take(alive)
        hidden, token_ids, temperature = rows.hidden, rows.token_ids, rows.temperature
        kept_ids, logits, c, e = kept_ids[alive], logits[alive], c[alive], None if e is None else e[alive]
    column = _own_columns(kept_ids, token_ids)
    statistics = _statistics(logits, column, e is not None)
    factors = row_factors(Head(weight, None, softcap, logit_scale), temperature, statistics, c, e)
    g = logits.clone()
    gradient_(g, column, factors, (torch.empty_like(g), torch.empty_like(g)))
    ids = kept_ids.clamp(0, weight.shape[0] - 1)  # columns that hold no token have a zero gradient, which goes to row 0
    if d_bias is not None:
        d_bias.index_add_(0, ids.flatten(), g.flatten())
    products = logits.new_empty((logits.shape[0], hidden.shape[1]) if need_hidden else 0)
    for block in _blocks(weight, kept_ids):
        if need_hidden:
            torch.bmm(g[block, None, :], weight[ids[block]].to(dtype), out=products[block, None, :])
        if d_weight is not None:
            outer = g[block, :, None] * hidden[block, None, :].to(dtype)
            d_weight.index_add_(0, ids[block].flatten(), outer.flatten(0, 1))
    if need_hidden:
        d_hidden[alive] = products
    return d_hidden


def _fake_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    temperature: Tensor | None,
    kept_ids: Tensor,
    softcap: float | None,
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden.new_empty(kept_ids.shape, dtype=stat_dtype(weight.dtype))
    return logits, logits.new_empty(hidden.shape[0]), logits.new_empty(hidden.shape[0] if want_entropy else 0)


def _fake_backward(c: Tensor, e: Tensor | None, logits: Tensor, hidden: Tensor, *rest: Any) -> Tensor:
    need_hidden = rest[-3]
    return logits.new_empty(hidden.shape if need_hidden else 0)


define(
    "_kept_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor token_ids, Tensor? temperature, Tensor kept_ids, "
    "float? softcap, float logit_scale, bool want_entropy) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
define(
    "_kept_backward(Tensor c, Tensor? e, Tensor logits, Tensor hidden, Tensor weight, Tensor token_ids, "
    "Tensor? temperature, Tensor kept_ids, float? softcap, float logit_scale, bool need_hidden, "
    "Tensor(a!)? d_weight, Tensor(b!)? d_bias) -> Tensor",
    _backward,
    _fake_backward,
)
