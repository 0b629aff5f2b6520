"""Linear layers through our own kernels, for as long as a rollout lasts.

At the few rows of a decode step a GEMM is the reading of its weight. `small_linear` reads it where it lies, about
twice as fast as a BLAS does. The many rows of a prompt take, in float32, the kernel of training, `lora_linear`. The
forward of every ``nn.Linear`` (GPT-2's ``Conv1D`` too, whose weights are copied: they lie the other way round) is
replaced and put back afterwards.

LoRA. Adapters stay products of their own, in their own precision, and are added before the layer's sum is rounded:
nothing of a small adapter is lost in 16 bits, and replies are drawn from the very distribution that training computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_fast import ops
from ppo_fast.ops._library import stat_dtype

_FEW_ROWS = 64  # what small_linear reads a weight once for


def swaps(device: torch.device) -> bool:
    """Whether the layers are of use there: on a CPU, with the C++ extension."""
    return device.type == "cpu" and ops.backends()["small_linear"]["cpu"] != "eager"


class _Small:
    """The forward of a linear layer and of its active adapters."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype | None) -> None:
        if isinstance(layer, LoraLinear) and layer.disable_adapters and layer.merged:
            layer.unmerge()  # as its own forward pass does
        weight, bias = _weight_and_bias(layer)
        self._weight = _rows_contiguous(weight if dtype is None else weight.to(dtype))
        self._out_features, self._in_features = weight.shape
        self._stat = stat_dtype(self._weight.dtype)
        self._bias = None if bias is None else bias.to(self._stat).contiguous()
        self._down: Tensor | None = None  # [R, H], the adapters' A one below the other
        self._up: Tensor | None = None  # [V, R], their scaling * B side by side
        if isinstance(layer, LoraLinear) and not layer.disable_adapters and not layer.merged:
            self._adapt(layer)

    def _adapt(self, layer: LoraLinear) -> None:
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        if not names:
            return
        self._down = _rows_contiguous(torch.cat([layer.lora_A[name].weight.detach() for name in names]))
        ups = [layer.scaling[name] * layer.lora_B[name].weight.detach().to(self._stat) for name in names]
        self._up = torch.cat(ups, dim=1).contiguous()
        for name in names:
            if layer.lora_bias[name]:
                shift = layer.scaling[name] * layer.lora_B[name].bias.detach().to(self._stat)
                self._bias = shift if self._bias is None else self._bias + shift

    def __call__(self, x: Tensor) -> Tensor:
        # Not through the public ops, whose checks take as long as a small product: there are hundreds in a step.
        rows = x.reshape(-1, self._in_features)
        if len(rows) > _FEW_ROWS and rows.dtype == self._weight.dtype == torch.float32:
            down = None if self._down is None else self._down.to(torch.float32)
            y, _ = torch.ops.ppo_fast.lora_linear.default(rows, self._weight, self._bias, down, self._up, 1.0)
        else:
            y = self._on_few_rows(rows)
        return y.to(x.dtype).view(*x.shape[:-1], self._out_features)

    def _on_few_rows(self, rows: Tensor) -> Tensor:
        small_linear = torch.ops.ppo_fast.small_linear.default
        h = None
        if self._down is not None:
            down = self._down
            h = small_linear(rows.to(down.dtype), down, None, None, None, True).to(self._stat)
        wide = rows.dtype != self._weight.dtype
        y: Tensor = small_linear(rows.to(self._weight.dtype), self._weight, self._bias, h, self._up, wide)
        return y


@contextlib.contextmanager
def small_linears(body: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """The linear layers of ``body`` run through `small_linear` inside, over weights cast to ``dtype`` if one is given.

    Inputs and outputs keep the dtype they have; products of 16-bit weights are added up in float32.
    """
    swapped: list[tuple[nn.Module, object]] = []
    try:
        for layer in _linears(body):
            swapped.append((layer, vars(layer).get("forward")))
            layer.forward = _Small(layer, dtype)
        yield
    finally:
        for layer, before in reversed(swapped):  # a layer in two places was swapped twice
            del layer.forward
            if before is not None:  # accelerate's hooks stand there
                layer.forward = before  # type: ignore[assignment]


def _weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """[V, H] and [V], of a layer with adapters the base's."""
    base = layer.get_base_layer() if isinstance(layer, LoraLinear) else layer
    assert isinstance(base, (nn.Linear, Conv1D))
    weight = base.weight.detach()
    return weight.t() if isinstance(base, Conv1D) else weight, None if base.bias is None else base.bias.detach()


def _rows_contiguous(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _linears(module: nn.Module) -> Iterator[nn.Module]:
    """The layers to swap. Of one with adapters of another kind, the layer below."""
    for child in module.children():
        if type(child) in (nn.Linear, Conv1D) or (type(child) is LoraLinear and _is_plain(child)):
            yield child
        elif isinstance(child, ParamWrapper):
            continue  # adapts the weight of the layer below, in its own forward and nowhere else
        elif isinstance(child, BaseTunerLayer):
            if type(child.base_layer) in (nn.Linear, Conv1D):
                yield child.base_layer
        else:
            yield from _linears(child)


def _is_plain(layer: LoraLinear) -> bool:
    """Whether it is a linear layer plus low-rank products and nothing else, not a hook on one of them."""
    parts = [part for part in layer.modules() if part is not layer]
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    return type(layer.base_layer) in (nn.Linear, Conv1D) and not layer.lora_variant and not hooked
