"""A linear layer with a LoRA adapter as one autograd function: ``y = x W^T + bias + s (x A^T) B^T`` in fewer passes.

peft makes the adapter's product, its multiple by ``s`` and the sum as three tensors of the output's size, and over
16-bit weights it turns the input into the adapter's float32 and keeps that copy for the backward pass, one for each of
q, k and v. Here the product is added into the layer's output in place, and kept are the input as it is, which layers
share, and ``h = x A^T`` [N, r].

Numerics: over bfloat16 weights the adapter's float32 matrices are rounded to bfloat16 on their way into the products,
as autocast does it; every product is added up in float32 and its result rounded once. Parameters, and the gradients
that add up in them, stay float32. float16 has too short a range for an adapter's gradients: peft's own forward there.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _AdaptedLinear(torch.autograd.Function):
    """``layer.base_layer(x) + scaling * x A^T B^T`` over a frozen base layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., in]
        a: Tensor,  # [r, in]
        b: Tensor,  # [out, r]
        base_layer: nn.Linear,
        scaling: float,
    ) -> Tensor:  # [..., out]
        y: Tensor = base_layer(x)  # called, not computed here: hooks on the base layer run
        h = (x.reshape(-1, x.shape[-1]) @ a.to(x.dtype).t()).mul_(scaling)
        y.view(-1, y.shape[-1]).addmm_(h, b.to(x.dtype).t())
        ctx.save_for_backward(x, h, a, b, base_layer.weight)
        ctx.scaling = scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h, a, b, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_a = grad_b = None
        grad_h = (rows @ b.to(grad.dtype)).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ weight).addmm_(grad_h, a.to(grad.dtype)).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_a = (grad_h.t() @ x.reshape(-1, x.shape[-1])).to(a.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = (rows.t() @ h).to(b.dtype)
        return grad_x, grad_a, grad_b, None, None


class _Forward:
    """The forward of an adapted layer: the function above where the active adapter is plain LoRA, else peft's own."""

    def __init__(self, layer: LoraLinear) -> None:
        self._layer = layer

    def __call__(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        layer = self._layer
        active = layer.active_adapters
        if arguments or keywords or len(active) != 1 or not self._plain(active[0], x):
            y: Tensor = type(layer).forward(layer, x, *arguments, **keywords)
            return y
        name = active[0]
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        made: Tensor = _AdaptedLinear.apply(x, a, b, layer.base_layer, layer.scaling[name])
        return made

    def _plain(self, name: str, x: Tensor) -> bool:
        layer, base = self._layer, self._layer.base_layer
        return (
            name in layer.lora_A
            and not layer.disable_adapters
            and not layer.merged
            and name not in layer.lora_variant
            and not layer.lora_bias[name]
            and not getattr(layer.lora_dropout[name], "p", 0.0)
            and not any(p.requires_grad for p in base.parameters())
            and x.dtype == base.weight.dtype != torch.float16
            and not torch.is_autocast_enabled(x.device.type)
        )


def fuse_adapters(model: nn.Module) -> None:
    """Gives every LoRA layer on a plain ``nn.Linear`` in ``model`` the forward pass above. Adapters may come later."""
    for layer in model.modules():
        if type(layer) is LoraLinear and type(layer.base_layer) is nn.Linear:
            layer.forward = _Forward(layer)
