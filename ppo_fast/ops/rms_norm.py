"""Root mean square normalisation of rows: one pass forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_fast.ops._checks import check_coefficient, check_float_tensor, check_like
from ppo_fast.ops._library import define, stat_dtype, transformed


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis: Zhang and Sennrich, arXiv:1910.07467, Eq. 4.

    Args:
        x: ``[..., H]`` float32, bfloat16, float16 or float64.
        weight: ``[H]`` in the dtype of ``x``.
        eps: at least 0.

    Returns:
        ``[..., H]`` in the dtype of ``x``. 16-bit inputs are computed with in float32 and rounded once.

    Raises:
        TypeError: for a dtype that doesn't fit.
        ValueError: for shapes or devices that don't fit, or a negative ``eps``.
    """
    check_float_tensor("x", x)
    check_float_tensor("weight", weight)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have the shape [..., H] with H >= 1, got {list(x.shape)}")
    check_like("weight", weight, x.shape[-1:], x.device, "the last axis of x")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must have the dtype of x, {x.dtype}, got {weight.dtype}")
    check_coefficient("eps", eps)
    if transformed():
        return _eager(x, weight, float(eps))[0]
    y: Tensor = _RMSNorm.apply(x, weight.contiguous(), float(eps))
    return y.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, rstd = torch.ops.ppo_fast.rms_norm(rows, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y  # [N, H]: a view made here could not be written to

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        rows, dy = x.reshape(-1, x.shape[-1]).contiguous(), grad.contiguous()
        want_x, want_weight, _ = ctx.needs_input_grad
        d_x = torch.ops.ppo_fast.rms_norm_backward(dy, rows, weight, rstd).view(x.shape) if want_x else None
        return d_x, _weight_gradient(dy, rows, rstd).to(weight.dtype) if want_weight else None, None


def _weight_gradient(grad: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    return (grad.to(rstd.dtype) * (x.to(rstd.dtype) * rstd[:, None])).sum(0)


# ------------------------------------------------------------------------------------------------------ registered ops


def _eager(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``y`` [N, H] and ``rstd = 1 / sqrt(mean(x^2) + eps)`` [N], float32 (float64 for float64)."""
    wide = x.to(stat_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[..., None] * weight).to(x.dtype), rstd


def _fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], dtype=stat_dtype(x.dtype))


def _eager_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of ``x``."""
    wide = x.to(rstd.dtype)
    weighted, scale = grad.to(rstd.dtype) * weight, rstd[:, None]
    along = (weighted * wide).mean(-1, keepdim=True) * scale.square()
    return ((weighted - wide * along) * scale).to(x.dtype)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    return torch.empty_like(x)


define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _eager, _fake)
define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> Tensor", _eager_backward, _fake_backward
)
