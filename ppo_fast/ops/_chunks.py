"""The chunk loop under the linear_* ops: every output-layer product they make is made here, a few rows at a time.

A chunk of rows goes through

    head_forward    hidden @ weight.T and the statistics of the rows; the logits stay in a workspace
    consume         the caller's: stores what it wants, answers c = dL/dlogp and e = dL/dentropy of the rows
    head_backward   the stored logits become their own gradient; d_hidden of the rows comes out, d_weight and d_bias are
                    added to

and is gone: one product for scoring, two with a frozen head, three with a trainable one. The two primitives stand in
_head.py; kept sets have two of their own, in _kept.py. d_weight and d_bias accumulate in float32 (float64 for float64)
over all chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_ids_in_range
from ppo_fast.ops._head import FullVocabulary
from ppo_fast.ops._kept import KeptSets
from ppo_fast.ops._row_math import Gradients, Head, Rows, Statistics

Consume = Callable[[Statistics, "Tensor | slice"], "tuple[Tensor, Tensor | None] | None"]


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
    if head.bias is not None:
        head = head._replace(bias=head.bias.to(head.stat_dtype).contiguous())
    store = gradients is not None
    softmax = FullVocabulary(head, count, store, chunk_tokens) if rows.kept_ids is None else KeptSets(head, rows)
    size = min(chunk_tokens or softmax.chunk_rows, max(count, 1))
    # Vendor GEMMs inside must see the dtypes chosen here, whatever autocast region the caller stands in.
    with torch.autocast(head.weight.device.type, enabled=False):
        for start in range(0, max(count, 1), size):
            stop = min(start + size, count)
            index = slice(start, stop) if live is None else live[start:stop]
            chunk = rows.take(index)
            statistics = softmax.forward(chunk, want_entropy)
            coefficients = consume(statistics, index)
            if gradients is None or stop == start:
                continue
            assert coefficients is not None
            d_hidden = softmax.backward(chunk, statistics, *coefficients, gradients)
            if gradients.hidden is not None and d_hidden is not None:
                gradients.hidden[index] = d_hidden.to(gradients.hidden.dtype)
