"""Linear layers over weights packed once, for as long as a rollout lasts.

At the few rows of a decode step a GEMM is the reading of its weight. `small_linear` reads a packed copy in one stream,
two to three times faster than a BLAS reads the weight itself, and at the many rows of a prompt it loses nothing. The
forward of every ``nn.Linear`` (GPT-2's ``Conv1D`` too) is replaced and put back afterwards. All are packed beforehand:
between the activations of a first pass the copies would leave the heap in pieces, 100 MB of them.

LoRA. The active adapter is folded into the copy where the copy has the precision for it: replies are drawn from the
very distribution that training computes, and an adapter costs a rollout no more than a merged model would. A copy in 16
bits of weights that have no more would round a small adapter away; there the adapter's own products stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_fast import ops
from ppo_fast.models.head import head_weights


def packs(device: torch.device) -> bool:
    """Whether packed weights are of use there: on a CPU, with the C++ extension."""
    return device.type == "cpu" and ops.backends()["small_linear"]["cpu"] != "eager"


class _Packed:
    """The forward of a linear layer, over a copy of its weight."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype | None) -> None:
        weight, bias = (layer.weight.t(), layer.bias) if isinstance(layer, Conv1D) else head_weights(layer)
        self._packed = ops.pack_weight(weight if dtype is None else weight.to(dtype), bias)

    def __call__(self, x: Tensor) -> Tensor:
        packed = self._packed
        # Not through ops.small_linear, whose checks take as long as a small product: there are hundreds in a step.
        rows = x.reshape(-1, packed.in_features).to(packed.panels.dtype)
        wide = x.dtype != packed.panels.dtype
        y = torch.ops.ppo_fast.small_linear.default(rows, packed.panels, packed.bias, packed.out_features, wide)
        return y.to(x.dtype).view(*x.shape[:-1], packed.out_features)


@contextlib.contextmanager
def packed_linears(body: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """The linear layers of ``body`` run over packed copies of their weights inside, in ``dtype`` if one is given.

    Inputs and outputs keep the dtype they have; products of a 16-bit copy are added up in float32.
    """
    swapped: list[tuple[nn.Module, object]] = []
    try:
        for layer in _linears(body):
            swapped.append((layer, vars(layer).get("forward")))
            layer.forward = _Packed(layer, dtype)
        yield
    finally:
        for layer, before in swapped:
            del layer.forward
            if before is not None:  # accelerate's hooks stand there
                layer.forward = before  # type: ignore[assignment]


def _linears(module: nn.Module) -> Iterator[nn.Module]:
    """The layers to swap. Of an adapted one that isn't folded, the layer below."""
    for child in module.children():
        if type(child) in (nn.Linear, Conv1D) or (type(child) is LoraLinear and _folds(child)):
            yield child
        elif isinstance(child, BaseTunerLayer):
            if type(child.get_base_layer()) in (nn.Linear, Conv1D):
                yield child.get_base_layer()
        else:
            yield from _linears(child)


def _folds(layer: LoraLinear) -> bool:
    """Whether it is one matrix now, and of a precision that keeps its adapters."""
    base = layer.get_base_layer()
    return type(base) is nn.Linear and base.weight.dtype.itemsize >= 4 and not layer.lora_variant
