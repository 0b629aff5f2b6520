"""LoRA layers as one operation each, `lora_linear`, in place of the several that peft makes of them.

peft makes the adapter's product, its multiple and the sum as three tensors of the output's size, and over 16-bit
weights it turns the input into the adapter's float32 and keeps that copy for the backward pass, one for each of q, k
and v.

Numerics: over bfloat16 weights the adapter's float32 matrices are rounded to bfloat16 on their way into the products,
as autocast does it; every product is added up in float32 and its result rounded once. Parameters, and the gradients
that add up in them, stay float32. float16 has too short a range for an adapter's gradients: peft's own forward there.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from ppo_fast import ops


class _Forward:
    """The forward of an adapted layer: one operation where the adapter is off or plain LoRA, else peft's own."""

    def __init__(self, layer: LoraLinear) -> None:
        self._layer = layer

    def __call__(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        layer, base = self._layer, self._layer.base_layer
        if not (arguments or keywords or layer.merged) and _is_frozen(base, x):
            if layer.disable_adapters:
                return ops.lora_linear(x, base.weight, bias=base.bias)
            active = layer.active_adapters
            if len(active) == 1 and _is_plain(layer, active[0]) and x.dtype != torch.float16:
                a, b = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
                return ops.lora_linear(x, base.weight, a, b, bias=base.bias, scaling=layer.scaling[active[0]])
        y: Tensor = type(layer).forward(layer, x, *arguments, **keywords)
        return y


def _is_frozen(base: nn.Linear, x: Tensor) -> bool:
    """Whether the base layer is nothing but its product with ``x``: no gradient, no cast, no hook."""
    return (
        x.dtype == base.weight.dtype
        and not any(p.requires_grad for p in base.parameters())
        and not torch.is_autocast_enabled(x.device.type)
        and not (base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or "forward" in vars(base))
    )


def _is_plain(layer: LoraLinear, name: str) -> bool:
    """Whether the adapter is a low-rank product and nothing else."""
    return (
        name in layer.lora_A
        and name not in layer.lora_variant
        and not layer.lora_bias[name]
        and not getattr(layer.lora_dropout[name], "p", 0.0)
    )


def fuse_adapters(model: nn.Module) -> None:
    """Gives every LoRA layer on a plain ``nn.Linear`` in ``model`` the forward pass above. Adapters may come later."""
    for layer in model.modules():
        if type(layer) is LoraLinear and type(layer.base_layer) is nn.Linear:
            layer.forward = _Forward(layer)
