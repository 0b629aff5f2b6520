"""A frozen linear layer and its low-rank adapter as one operation, forward and backward.

Composed of separate operations, the adapter's product, its multiple and the sum are three more tensors of the output's
size. Here it goes on in the accumulators of the layer's own product, or is added to its result in place, and so is its
share of the input's gradient. Kept for the backward pass are the input, which layers on the same input share, and
``h = scaling * x A^T`` [N, r].

In float32 on a CPU both large products, ``x W^T`` and ``dy W``, run in a C++ kernel of our own: at the hundreds of rows
of a training step it beats the vendor's GEMM, and the adapter's product costs it next to nothing. 16-bit products are
the vendor's, who is ahead there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_fast.ops._checks import check_float_tensor, check_like, check_number
from ppo_fast.ops._library import define


def lora_linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    lora_a: Tensor | None = None,  # [r, in]
    lora_b: Tensor | None = None,  # [out, r]
    *,
    bias: Tensor | None = None,  # [out]
    scaling: float = 1.0,
) -> Tensor:  # [..., out]
    """``x W^T + bias + scaling * (x A^T) B^T`` over frozen W and bias: LoRA, arXiv:2106.09685, Eq. 3.

    Gradients go to ``x``, ``lora_a`` and ``lora_b``. Without an adapter it is the frozen layer alone.

    Args:
        x: ``[..., in]`` float32, bfloat16, float16 or float64.
        weight: ``[out, in]`` in the dtype of ``x``.
        lora_a: ``[r, in]`` of any of these dtypes, together with
        lora_b: ``[out, r]``. Both are rounded to the dtype of ``x`` for the products, as autocast does it; their
            gradients come in their own dtype.
        bias: ``[out]`` in the dtype of ``x``.
        scaling: of the adapter's product, ``lora_alpha / r`` as a rule.

    Returns:
        In the dtype of ``x``. float32 is added up in float32; the C++ kernel gives a row the same bits whatever the
        other rows are, up to the adapter's ``x A^T``, and for any number of threads.

    Raises:
        TypeError: for a dtype that doesn't fit.
        ValueError: for shapes or devices that don't fit, and for a ``weight`` or ``bias`` that requires grad while
            gradients are recorded: they are frozen.
    """
    check_float_tensor("x", x)
    check_float_tensor("weight", weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight must have the shape [out, in] with out, in >= 1, got {list(weight.shape)}")
    out_features, in_features = weight.shape
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x must have the shape [..., in] with in = {in_features}, got {list(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x must be on the device of weight, {weight.device}, got {x.device}")
    frozen = {"weight": weight}
    if bias is not None:
        check_float_tensor("bias", bias)
        check_like("bias", bias, (out_features,), weight.device, "the rows of weight")
        frozen["bias"] = bias = bias.contiguous()
    for name, tensor in frozen.items():
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but lora_linear keeps it frozen: detach it, or use F.linear")
    if (lora_a is None) != (lora_b is None):
        raise ValueError("lora_a and lora_b must be given together")
    if lora_a is not None and lora_b is not None:
        check_float_tensor("lora_a", lora_a)
        check_float_tensor("lora_b", lora_b)
        if lora_a.dim() != 2 or lora_a.numel() == 0 or lora_a.shape[1] != in_features:
            raise ValueError(
                f"lora_a must have the shape [r, in] with r >= 1, in = {in_features}, got {list(lora_a.shape)}"
            )
        check_like("lora_a", lora_a, lora_a.shape, weight.device, "weight")
        check_like("lora_b", lora_b, (out_features, len(lora_a)), weight.device, "weight and lora_a")
    check_number("scaling", scaling)
    y: Tensor = _LoraLinear.apply(x, weight, bias, lora_a, lora_b, float(scaling))
    return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        h = up = None
        if a is not None and b is not None:
            h = (rows @ a.to(x.dtype).t()).mul_(scaling)
            up = b.to(x.dtype)
        ctx.save_for_backward(x, weight, a, b, h)
        ctx.scaling = scaling
        return _product(rows, weight, bias, h, up).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, h = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_a = grad_b = grad_h = down = None
        if a is not None:
            grad_h = (rows @ b.to(grad.dtype)).mul_(ctx.scaling)
            down = a.to(grad.dtype).t()
        if ctx.needs_input_grad[0]:
            grad_x = _product(rows, weight.t(), None, grad_h, down).view(x.shape)
        if grad_h is not None and ctx.needs_input_grad[3]:
            grad_a = (grad_h.t() @ x.reshape(-1, x.shape[-1])).to(a.dtype)
        if ctx.needs_input_grad[4]:
            grad_b = (rows.t() @ h).to(b.dtype)
        return grad_x, None, None, grad_a, grad_b, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None) -> Tensor:
    """``x @ weight.T + bias + down @ up.T`` [n, features]."""
    if x.dtype == torch.float32:
        product: Tensor = torch.ops.ppo_fast.lora_linear(x, weight, bias, down, up)
        return product
    return _eager(x, weight, bias, down, up)


# ------------------------------------------------------------------------------------------------------ registered op


def _eager(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None) -> Tensor:
    y = torch.nn.functional.linear(x, weight, bias)
    return y if down is None or up is None else y.addmm_(down, up.t())


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


define("lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? down, Tensor? up) -> Tensor", _eager, _fake)
