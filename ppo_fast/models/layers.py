"""Layers as one operation each: frozen linear layers and their LoRA, RMSNorm, SwiGLU.

peft makes an adapter's product, its multiple and the sum as three tensors of the output's size, and over 16-bit weights
it turns the input into the adapter's float32 and keeps that copy for the backward pass, one for each of q, k and v.
transformers makes six operations of an RMSNorm, and keeps four tensors of a SwiGLU's width, where two are enough.

Most families have Llama's norm and perceptron line for line, under names of their own: a layer is one of these if its
forward has the instructions of Llama's. Whatever is more than the formula, another activation, a hook, another kind of
adapter, a cast, a patched class, leaves a layer its own forward.

Numerics: over bfloat16 weights the adapter's float32 matrices are rounded to bfloat16 on their way into the products,
as autocast does it; every product is added up in float32 and its result rounded once. Parameters, and the gradients
that add up in them, stay float32. float16 has too short a range for an adapter's gradients: peft's own forward there.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ppo_fast import ops

_SILU = (nn.SiLU, type(ACT2FN["silu"]))
_TENSORS = (Tensor, nn.Parameter)  # subclasses, as of quantised weights, multiply in a way of their own


class _Forward:
    """A layer's forward in place of its class's, which `own` still is."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer: Any = layer
        self._replaced = type(layer).forward

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        if len(arguments) == 1 and not keywords and type(self._layer).forward is self._replaced:
            return self.fused(*arguments)
        return self.own(*arguments, **keywords)

    def fused(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def own(self, *arguments: Any, **keywords: Any) -> Tensor:
        y: Tensor = type(self._layer).forward(self._layer, *arguments, **keywords)
        return y


class _Linear(_Forward):
    """Of a linear layer: one operation where it is frozen, and its adapter, if it has one, off or plain LoRA.

    With a ``gate`` its input is ``swiglu(gate, x)``.
    """

    def fused(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        layer = self._layer
        base = layer.base_layer if isinstance(layer, LoraLinear) else layer
        if _is_frozen(base, x):
            if layer is base:  # where there is something to gain
                if gate is not None or (x.is_cpu and x.dtype == torch.float32):
                    return ops.lora_linear(x, base.weight, bias=base.bias, gate=gate)
            elif _is_plain(base):
                if layer.disable_adapters and not layer.merged:
                    return ops.lora_linear(x, base.weight, bias=base.bias, gate=gate)
                if (adapter := _adapter(layer)) is not None and x.dtype != torch.float16:
                    a, b, scaling = adapter
                    return ops.lora_linear(x, base.weight, a, b, bias=base.bias, scaling=scaling, gate=gate)
        return self.own(x if gate is None else ops.swiglu(gate, x))


class _Norm(_Forward):
    """Of an RMSNorm. On a GPU it is transformers' own: our kernel is one for CPUs."""

    def fused(self, x: Tensor) -> Tensor:
        layer = self._layer
        weight = layer.weight
        if x.is_cpu and x.dtype == weight.dtype and type(weight) in _TENSORS:
            return ops.rms_norm(x, weight, layer.variance_epsilon)
        return self.own(x)


class _SwiGLU(_Forward):
    """Of a gated perceptron with SiLU. Its product is kept for the backward pass where the last layer is trained."""

    def fused(self, x: Tensor) -> Tensor:
        layer = self._layer
        if type(layer.act_fn) not in _SILU or not _is_plain(layer.act_fn):
            return self.own(x)
        gate, up, down = layer.gate_proj(x), layer.up_proj(x), layer.down_proj
        forward = vars(down).get("forward")
        y: Tensor
        if gate.dtype != up.dtype:  # two layers' weights may differ
            y = down(layer.act_fn(gate) * up)
        elif isinstance(forward, _Linear) and _is_plain(down):
            y = forward.fused(up, gate)
        else:
            y = down(ops.swiglu(gate, up))
        return y


def fuse_layers(model: nn.Module) -> None:
    """Gives the layers of ``model`` the forward passes above. Adapters on its LoRA layers may still come."""
    tuned = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    below = {id(part) for layer in tuned for part in layer.modules() if part is not layer}
    for layer in model.modules():
        forward = None if id(layer) in below or "forward" in vars(layer) else _forward_for(layer)
        if forward is not None:
            layer.forward = forward(layer)


def _forward_for(layer: nn.Module) -> type[_Forward] | None:
    kind = type(layer)
    if kind is nn.Linear or (kind is LoraLinear and type(layer.base_layer) is nn.Linear):
        return _Linear if _own_code(kind) else None
    if _has_forward_of(kind, LlamaRMSNorm):
        return _Norm
    if _has_forward_of(kind, LlamaMLP) and type(layer.act_fn) in _SILU:
        return _SwiGLU
    return None


def _has_forward_of(kind: type[nn.Module], model: type[nn.Module]) -> bool:
    own, its = _own_code(kind), _own_code(model)
    return own is not None and its is not None and _instructions(own) == _instructions(its)


def _instructions(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, code.co_consts


def _own_code(kind: type[nn.Module]) -> CodeType | None:
    """The code of the class's forward, if it is what the source of the class's module defines under this name.

    Somebody may have patched any class, Llama's too, before we first see it. What is put in its place comes from
    another file, whatever names it has copied. transformers decorates none of the forwards that we look for.
    """
    owner = next(c for c in kind.__mro__ if "forward" in vars(c))
    forward = vars(owner)["forward"]
    genuine = (
        isinstance(forward, FunctionType)
        and "__wrapped__" not in vars(forward)
        and forward.__module__ == owner.__module__
        and forward.__qualname__ == f"{owner.__qualname__}.forward"
        and forward.__code__.co_filename == getattr(sys.modules.get(owner.__module__), "__file__", None)
    )
    return forward.__code__ if genuine else None


# Layers that an operation of ours stands in for without calling them, with their forwards as the source has them.
_PARTS = {kind: kind.forward for kind in (nn.Linear, LoraLinear, nn.Dropout, nn.Identity, *_SILU) if _own_code(kind)}


def _is_frozen(base: nn.Module, x: Tensor) -> bool:
    """Whether the base layer is nothing but its product with ``x``: no gradient, no cast, no parametrised weight."""
    if type(base) is not nn.Linear:
        return False
    weight, bias = base.weight, base.bias
    return (
        x.dtype == weight.dtype
        and type(weight) in _TENSORS
        and not weight.requires_grad
        and (bias is None or (type(bias) in _TENSORS and not bias.requires_grad))
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_plain(part: nn.Module) -> bool:
    """Whether a call of it is its class's forward, or ours, and nothing else: no hook, no patch."""
    return (
        not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
        and not _has_any_global_hook()
        and _PARTS.get(type(part)) is type(part).forward
        and type(vars(part).get("forward")) in (type(None), _Linear)
    )


def _adapter(layer: LoraLinear) -> tuple[Tensor, Tensor, float] | None:
    """A, B and scaling of the active adapter, if it is a low-rank product and nothing else."""
    active = layer.active_adapters
    if layer.merged or len(active) != 1 or active[0] not in layer.lora_A:
        return None
    name = active[0]
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if name in layer.lora_variant or layer.lora_bias[name] or getattr(dropout, "p", 0.0):
        return None
    return (a.weight, b.weight, layer.scaling[name]) if _is_plain(a) and _is_plain(b) and _is_plain(dropout) else None
