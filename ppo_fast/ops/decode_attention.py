"""Attention of one new token a row over a cache of keys and values whose rows are not equally long."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_float_tensor, check_like, check_number
from ppo_fast.ops._library import define, stat_dtype


def decode_attention(
    query: Tensor,  # [n, heads, 1, D]
    key: Tensor,  # [n, key heads, columns, D]
    value: Tensor,  # [n, key heads, columns, E]
    lengths: Tensor,  # [n] int64
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [n, heads, E]
    """``softmax(scale * query . key) @ value`` over each row's first ``lengths`` columns, for inference.

    Query heads share key heads in runs of ``heads / key heads`` (grouped-query attention, arXiv:2305.13245); keys are
    never repeated. Columns past a row's length are not read: NaN there changes nothing.

    Args:
        query, key, value: float32, bfloat16, float16 or float64, one dtype, contiguous along the last axis.
        lengths: from 1 to the number of columns.
        scale: None for ``D ** -0.5``.
        window: attend to the last ``window`` columns alone.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        In the dtype of ``query``; computed in float32 (float64 for float64). The C++ kernels give a row the same bits
        whatever the other rows are, how many there are, and for any number of threads.

    Raises:
        TypeError, ValueError: for a dtype, a shape, a device or a number that doesn't fit, and for a ``query``, ``key``
            or ``value`` that requires grad while gradients are recorded: there is no derivative.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_float_tensor(name, x)
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {x.dtype}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have four axes, got {list(x.shape)}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but decode_attention has no derivative: use torch.no_grad()")
    n, heads, _, size = query.shape
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"key must have a number of heads that divides query's {heads}, got {key.shape[1]}")
    check_like("query", query, (n, heads, 1, size), query.device, "one query a head")
    check_like("key", key, (n, key.shape[1], key.shape[2], size), query.device, "query")
    check_like("value", value, (*key.shape[:3], value.shape[3]), query.device, "key")
    if lengths.dtype != torch.int64:
        raise TypeError(f"lengths must be int64, got {lengths.dtype}")
    check_like("lengths", lengths, (n,), query.device, "the rows of query")
    for name, number in (("scale", scale), ("window", window), ("softcap", softcap)):
        if number is not None:
            check_number(name, number)
            if not number > 0:
                raise ValueError(f"{name} must be above 0, got {number}")
    return torch.ops.ppo_fast.decode_attention(
        *(x if x.shape[3] == 1 or x.stride(3) == 1 else x.contiguous() for x in (query, key, value)),
        lengths.contiguous(),
        size**-0.5 if scale is None else float(scale),
        window or 0,
        softcap or 0.0,
    )


# ------------------------------------------------------------------------------------------------------ registered op


def _eager(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    n, heads, _, size = query.shape
    dtype = stat_dtype(query.dtype)
    columns = torch.arange(key.shape[2], device=key.device)
    seen = columns < lengths[:, None]
    if window:
        seen &= columns >= lengths[:, None] - window
    seen = seen[:, None, :, None]
    keys, values = (x.to(dtype).masked_fill(~seen, 0.0) for x in (key, value))
    scores = query.reshape(n, key.shape[1], heads // key.shape[1], size).to(dtype) @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen.transpose(2, 3), -torch.inf).softmax(-1)
    return (weights @ values).reshape(n, heads, value.shape[3]).to(query.dtype)


def _fake(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *_: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[3])


define(
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, int window, float softcap) "
    "-> Tensor",
    _eager,
    _fake,
)
