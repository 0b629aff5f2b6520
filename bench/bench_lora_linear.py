"""A frozen layer and its LoRA adapter, forward and backward, against the operations that peft makes: without a bar.

The shapes are layers of SmolLM2-135M and Qwen2.5-0.5B, the rows those of a micro-batch of two and of four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

import peers
from harness.case import Bar, Case, Expected, Variant, Work
from harness.timing import copies_beyond_cache
from ppo_fast import ops

OP = "lora_linear"
RANK, SCALING = 16, 2.0
LAYERS = ((576, 1536), (1536, 576), (896, 4864), (4864, 896))  # in, out
ROWS = (256, 512)
NAMES = ("y", "d_x", "d_a", "d_b")
_OWN = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """A weight, its adapter in float32, as peft keeps it, rows, and the gradient of their results."""

    x: Tensor  # [n, in]
    weight: Tensor  # [out, in]
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    upstream: Tensor  # [n, out]

    def double(self) -> Layer:
        """The same in float64."""
        return Layer(self.x.double(), self.weight.double(), self.a.double(), self.b.double(), self.upstream.double())


def make_layer(seed: int, rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> Layer:
    """Normal numbers; the results of both products have the standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    made = partial(torch.randn, generator=generator)
    return Layer(
        made(rows, in_features).to(dtype),
        (made(out_features, in_features) / in_features**0.5).to(dtype),
        made(RANK, in_features) / in_features**0.5,
        made(out_features, RANK) / RANK**0.5,
        made(rows, out_features).to(dtype),
    )


def separate(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """One operation after the other."""
    y = linear(x, weight)
    return (y + linear(linear(x.to(a.dtype), a), b) * SCALING).to(y.dtype)


def own(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The op."""
    return ops.lora_linear(x, weight, a, b, scaling=SCALING)


def run(function: Function, layer: Layer) -> dict[str, Tensor]:
    """Forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (layer.x, layer.a, layer.b)]
    y = function(leaves[0], layer.weight, *leaves[1:])
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, layer.upstream)), strict=True))


def answers(layer: Layer) -> Mapping[str, Expected]:
    """The same in float64."""
    return {name: Expected(value) for name, value in run(separate, layer.double()).items()}


def case(rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> Case:
    """Ours, separate operations, and torch.compile of them."""
    size = in_features * out_features * dtype.itemsize
    work = Work(flops=4.0 * rows * (in_features * out_features + 1.5 * RANK * (in_features + out_features)), bytes=size)
    return Case(
        f"{OP} {rows} rows {in_features}x{out_features}",
        dtype,
        inputs=lambda seed: make_layer(seed, rows, in_features, out_features, dtype),
        reference=answers,
        variants=[
            Variant(OP, partial(run, own), work=work, tolerance=_OWN[dtype]),
            Variant("separate operations", partial(run, separate), work=work),
            Variant("torch.compile", partial(run, peers.compiled(separate)), work=work),
        ],
        copies=copies_beyond_cache(size),
        seconds=4.0,
    )


CASES = [
    case(rows, in_features, out_features, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for in_features, out_features in LAYERS
    for rows in ROWS
]
BARS: list[Bar] = []
