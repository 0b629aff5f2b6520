"""SwiGLU's activation, the product of a gate's SiLU and another layer's result, in one pass.

Separate operations keep four tensors of a wide layer's size for the backward pass, this one its two inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from ppo_fast.ops._checks import check_float_tensor, check_like
from ppo_fast.ops._library import define, transformed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, silu(z) = z sigmoid(z): the hidden layer of Shazeer, arXiv:2002.05202, Eq. 6.

    Args:
        gate: ``[..., F]`` float32, bfloat16, float16 or float64.
        up: of the shape, dtype and device of ``gate``.

    Returns:
        ``[..., F]`` in the dtype of ``gate``. The C++ kernel computes in float32 and rounds once.

    Raises:
        TypeError: for a dtype that doesn't fit.
        ValueError: for shapes or devices that don't fit.
    """
    check_float_tensor("gate", gate)
    check_float_tensor("up", up)
    check_like("up", up, gate.shape, gate.device, "gate")
    if up.dtype != gate.dtype:
        raise TypeError(f"up must have the dtype of gate, {gate.dtype}, got {up.dtype}")
    if transformed():
        return _eager(gate, up)
    product: Tensor = _SwiGLU.apply(gate.contiguous(), up.contiguous())
    return product


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        product: Tensor = torch.ops.ppo_fast.swiglu(gate, up)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        d_gate, d_up = torch.ops.ppo_fast.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)
        return d_gate, d_up


# ------------------------------------------------------------------------------------------------------ registered ops


def _eager(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _eager_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(gate)


define("swiglu(Tensor gate, Tensor up) -> Tensor", _eager, _fake)
define("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", _eager_backward, _fake_backward)
