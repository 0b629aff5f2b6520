"""Linear layers on few rows, as a decode step has them: next to nothing but the reading of a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_float_tensor, check_like
from ppo_fast.ops._library import define, stat_dtype

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What the rows of a weight widened at a time may take, where no kernel reads them as they are.
_WIDENED_BYTES = 32 << 20


def small_linear(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None = None,  # [V]
    *,
    extra: tuple[Tensor, Tensor] | None = None,  # [..., R], [V, R]
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., V]
    """``x @ weight.T + bias`` for inference, at its best for 1 to 64 rows, right for any number, none included.

    Products are added up in float32 (float64 for a float64 weight) and rounded once. The C++ kernels read the weight
    where it lies, once for 64 rows, and give a row the same bits whatever the other rows are, how many there are, and
    for any number of threads.

    Args:
        x: ``[..., H]`` float32, bfloat16, float16 or float64, any strides; computed in the weight's dtype.
        weight: ``[V, H]`` of any of these. One whose rows aren't contiguous is copied first, in each call.
        bias: ``[V]`` of any of these, added in float32 (float64 for a float64 weight).
        extra: ``(x2, weight2)`` adds ``x2 @ weight2.T`` before the sum is rounded, in float32 (float64): a low-rank
            adapter, for one, with ``x2 = x @ A.T`` and ``weight2 = scaling * B``.
        out_dtype: of the result; None for that of ``x``. float32 from 16-bit inputs is the unrounded sum.

    Raises:
        TypeError: for a dtype that is none of the above.
        ValueError: for shapes or devices that don't fit, and for an argument that requires grad while gradients are
            recorded: there is no derivative.
    """
    check_float_tensor("x", x)
    check_float_tensor("weight", weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight must have the shape [V, H] with V, H >= 1, got {list(weight.shape)}")
    V, H = weight.shape
    stat = stat_dtype(weight.dtype)
    if x.dim() == 0 or x.shape[-1] != H:
        raise ValueError(f"x must have the shape [..., H] with H = {H}, got {list(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x must be on the device of weight, {weight.device}, got {x.device}")
    given = {"x": x, "weight": weight}
    if bias is not None:
        check_float_tensor("bias", bias)
        check_like("bias", bias, (V,), weight.device, "the rows of weight")
        given["bias"] = bias
        bias = bias.to(stat).contiguous()
    x2 = weight2 = None
    if extra is not None:
        x2, weight2 = extra
        check_float_tensor("extra[0]", x2)
        check_float_tensor("extra[1]", weight2)
        if weight2.dim() != 2 or weight2.numel() == 0 or len(weight2) != V:
            raise ValueError(f"extra[1] must have the shape [V, R] with V = {V}, R >= 1, got {list(weight2.shape)}")
        check_like("extra[0]", x2, (*x.shape[:-1], weight2.shape[1]), weight.device, "x and the columns of extra[1]")
        check_like("extra[1]", weight2, weight2.shape, weight.device, "weight")
        given |= {"extra[0]": x2, "extra[1]": weight2}
        x2, weight2 = x2.reshape(-1, weight2.shape[1]).to(stat), weight2.to(stat).contiguous()
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype not in _FLOATS:
        raise TypeError(f"out_dtype must be float32, bfloat16, float16 or float64, got {out_dtype}")
    if torch.is_grad_enabled():
        for name, tensor in given.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"{name} requires grad, but small_linear has no derivative: call it under torch.no_grad()"
                )
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    # No named range around it: a decode step makes hundreds of these calls, and profilers see the op itself.
    y = torch.ops.ppo_fast.small_linear(
        x.reshape(-1, H).to(weight.dtype), weight, bias, x2, weight2, out_dtype != weight.dtype
    )
    return y.to(out_dtype).view(*x.shape[:-1], V)


# ------------------------------------------------------------------------------------------------------ registered op


def _eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None, extra_weight: Tensor | None, wide: bool
) -> Tensor:
    """[n, V] in the dtype of x, or of the sums if ``wide``; the weight is widened a few rows at a time."""
    y = _fake(x, weight, bias, extra, extra_weight, wide)
    dtype = stat_dtype(x.dtype)
    rows = x.to(dtype)
    count = max(1, _WIDENED_BYTES // (x.shape[1] * dtype.itemsize))
    for start in range(0, len(weight), count):
        part = slice(start, start + count)
        product = rows @ weight[part].to(dtype).t()
        if extra is not None and extra_weight is not None:
            product += extra @ extra_weight[part].t()
        y[:, part] = product if bias is None else product + bias[part]
    return y


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None, extra_weight: Tensor | None, wide: bool
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=stat_dtype(x.dtype) if wide else x.dtype)


define(
    "small_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? extra, Tensor? extra_weight, bool wide) -> Tensor",
    _eager,
    _fake,
)
