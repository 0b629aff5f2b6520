"""Large buffers of the linear ops. On CPU fresh pages cost more than the arithmetic done in them: csrc/memory.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._library import define, stat_dtype


def fresh(like: Tensor, rows: int, columns: int, *, zero: bool) -> Tensor:
    """``[rows, columns]`` in the stat dtype for ``like``, on its device, holding zeros or anything."""
    return torch.ops.ppo_fast._fresh(like, rows, columns, zero)


def rounded(source: Tensor, dtype: torch.dtype) -> Tensor:
    """``source`` in ``dtype``; its own values may be lost."""
    if source.dtype == torch.float32 and dtype == torch.bfloat16 and source.dim() == 2:
        return torch.ops.ppo_fast._rounded(source)
    return source.to(dtype)


def _fresh(like: Tensor, rows: int, columns: int, zero: bool) -> Tensor:
    make = like.new_zeros if zero else like.new_empty
    return make((rows, columns), dtype=stat_dtype(like.dtype))


define(
    "_fresh(Tensor like, SymInt rows, SymInt columns, bool zero) -> Tensor",
    _fresh,
    _fresh,
)
define(
    "_rounded(Tensor(a!) source) -> Tensor",
    lambda source: source.to(torch.bfloat16),
    lambda source: torch.empty_like(source, dtype=torch.bfloat16),
)
