"""A frozen linear layer and its low-rank adapter as one operation, forward and backward.

Composed of separate operations, the adapter's product, its multiple and the sum are three more tensors of the output's
size. Here it goes on in the accumulators of the layer's own product, or is added to its result in place, and so is its
share of the input's gradient. Kept for the backward pass are the input, which layers on the same input share, and
``h = scaling * x A^T`` [N, r]; without an adapter, nothing.

In float32 on a CPU all products run in a C++ kernel of our own: at the hundreds of rows of a training step it beats the
vendor's GEMM, at the adapter's narrow matrices by far. 16-bit products are the vendor's, who is ahead there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from ppo_fast.ops._checks import check_float_like, check_float_tensor, check_like, check_number
from ppo_fast.ops._library import define, transformed


def lora_linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    lora_a: Tensor | None = None,  # [r, in]
    lora_b: Tensor | None = None,  # [out, r]
    *,
    bias: Tensor | None = None,  # [out]
    scaling: float = 1.0,
    gate: Tensor | None = None,  # [..., in]
) -> Tensor:  # [..., out]
    """``x W^T + bias + scaling * (x A^T) B^T`` over frozen W and bias: LoRA, arXiv:2106.09685, Eq. 3.

    Gradients go to ``x``, ``gate``, ``lora_a`` and ``lora_b``. Without an adapter it is the frozen layer alone. Under
    autocast x, gate, weight and bias are cast to its dtype, as for ``nn.Linear``.

    With a gate the layer's input is ``swiglu(gate, x)``: it is the last of a SwiGLU's three. That product is made anew
    in the backward pass, not kept.

    Args:
        x: ``[..., in]`` float32, bfloat16, float16 or float64.
        weight: ``[out, in]`` in the dtype of ``x``.
        lora_a: ``[r, in]`` of any of these dtypes, together with
        lora_b: ``[out, r]``. Both are rounded to the dtype of ``x`` for the products, as autocast does it; their
            gradients come in their own dtype.
        bias: ``[out]`` in the dtype of ``x``.
        scaling: of the adapter's product, ``lora_alpha / r`` as a rule.
        gate: of the shape, dtype and device of ``x``.

    Returns:
        In the dtype of ``x``. The C++ kernel, which adds up in float32, gives a row the same bits whatever the other
        rows are, and for any number of threads.

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
    if bias is not None:
        check_float_tensor("bias", bias)
        check_like("bias", bias, (out_features,), weight.device, "the rows of weight")
        bias = bias.contiguous()
    if gate is not None:
        check_float_like("gate", gate, x, "x")
        gate, x = gate.contiguous(), x.contiguous()
    if torch.is_autocast_enabled(x.device.type) and weight.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        gate = None if gate is None else gate.to(dtype)
    if gate is not None and gate.dtype != x.dtype:
        raise TypeError(f"gate must have the dtype of x, {x.dtype}, got {gate.dtype}")
    frozen = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
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
    with torch.autocast(x.device.type, enabled=False):
        if transformed():
            return _formula(x, weight, bias, lora_a, lora_b, float(scaling), gate)
        y: Tensor = _LoraLinear.apply(x, weight, bias, lora_a, lora_b, float(scaling), gate)
    return y.view(*x.shape[:-1], out_features)


def _formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float,
    gate: Tensor | None,
) -> Tensor:  # fmt: skip
    x = x if gate is None else silu(gate) * x
    y = linear(x, weight, bias)
    return y if a is None or b is None else y + linear(linear(x, a.to(x.dtype)) * scaling, b.to(x.dtype))


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float,
        gate: Tensor | None,
    ) -> Tensor:  # fmt: skip
        run = torch.ops.ppo_fast.lora_linear if x.dtype == torch.float32 else _eager
        y, h = run(_input(x, gate), weight, bias, _like(a, x), _like(b, x), scaling)
        needs_x = gate is not None or ctx.needs_input_grad[3]
        ctx.save_for_backward(x if needs_x else None, gate, weight, a, b, h)
        ctx.shape, ctx.scaling = x.shape, scaling
        return y  # [N, out]: a view made here could not be written to

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, a, b, h = ctx.saved_tensors
        want_up, _, _, want_a, want_b, _, want_gate = ctx.needs_input_grad
        want_x = want_up or want_gate
        rows = _input(x, gate) if want_a else grad.new_empty(1).expand(len(grad), ctx.shape[-1])  # nothing reads these
        run = torch.ops.ppo_fast.lora_linear_backward if grad.dtype == torch.float32 else _eager_backward
        like = (_like(a, grad), _like(b, grad))
        dx, da, db = run(grad, rows, weight, *like, h, ctx.scaling, want_x, want_a, want_b)
        dx, d_gate = dx.view(ctx.shape) if want_x else None, None
        if gate is not None and want_x:
            d_gate, dx = torch.ops.ppo_fast.swiglu_backward(dx, gate, x)
        return (
            dx if want_up else None,
            None,
            None,
            da.to(a.dtype) if want_a else None,
            db.to(b.dtype) if want_b else None,
            None,
            d_gate if want_gate else None,
        )


def _input(x: Tensor, gate: Tensor | None) -> Tensor:
    """The layer's own input, [N, in]."""
    x = x if gate is None else torch.ops.ppo_fast.swiglu(gate, x)
    return x.reshape(-1, x.shape[-1])


def _like(matrix: Tensor | None, x: Tensor) -> Tensor | None:
    return None if matrix is None else matrix.to(x.dtype)


# ------------------------------------------------------------------------------------------------------ registered ops


def _eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """``y`` [n, out] and ``h = scaling * x A^T`` [n, r], with r = 0 if there is no adapter."""
    y = linear(x, weight, bias)
    if a is None or b is None:
        return y, x.new_empty(len(x), 0)
    h = (x @ a.t()).mul_(scaling)
    return y.addmm_(h, b.t()), h


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], 0 if a is None else a.shape[0])


def _eager_backward(
    grad: Tensor, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, h: Tensor, scaling: float,
    want_x: bool, want_a: bool, want_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, ``a`` and ``b``, each [0] unless wanted."""
    dx, da, db = (x.new_empty(0) for _ in range(3))
    dh = None
    if b is not None and (want_x or want_a):
        dh = (grad @ b).mul_(scaling)
    if want_x:
        dx = grad @ weight
        if dh is not None and a is not None:
            dx.addmm_(dh, a)
    if want_a and dh is not None:
        da = dh.t() @ x
    if want_b and b is not None:
        db = grad.t() @ h
    return dx, da, db


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, h: Tensor, scaling: float,
    want_x: bool, want_a: bool, want_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape if want_x else 0)
    da = x.new_empty(0 if a is None or not want_a else a.shape)
    db = x.new_empty(0 if b is None or not want_b else b.shape)
    return dx, da, db


define(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? a, Tensor? b, float scaling) -> (Tensor, Tensor)",
    _eager,
    _fake,
)
define(
    "lora_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor? a, Tensor? b, Tensor h, float scaling, "
    "bool want_x, bool want_a, bool want_b) -> (Tensor, Tensor, Tensor)",
    _eager_backward,
    _fake_backward,
)
