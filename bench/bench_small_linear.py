"""Linear layers on few rows against F.linear: figures without a bar.

The shapes are layers of SmolLM2-135M and Qwen2.5-0.5B. A variant's floor is the weight's bytes over the bandwidth of
memory or the products over the rate of torch's square GEMM, whichever is more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from harness.case import Bar, Case, Expected, Variant, Work
from harness.timing import copies_beyond_cache
from ppo_fast import ops

OP = "small_linear"
ROWS = (1, 4, 16, 64)
LAYERS = ((576, 1536), (896, 4864), (4864, 896), (896, 151_936))  # in, out
_OWN = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Layer:
    """A weight, and rows for it."""

    weight: Tensor  # [V, H]
    x: Tensor  # [64, H]


def make_layer(seed: int, H: int, V: int, dtype: torch.dtype) -> Layer:
    """Normal numbers; outputs have the standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=generator).div_(H**0.5).to(dtype)
    return Layer(weight, torch.randn(max(ROWS), H, generator=generator).to(dtype))


def answers(layer: Layer) -> Mapping[str, Expected]:
    """The products in float64, at the last features."""
    last = slice(-512, None)
    product = layer.x.double() @ layer.weight[last].double().t()
    return {str(n): Expected(product[:n], (slice(None), last)) for n in ROWS}


def _on_rows(function: Callable[[Layer, Tensor], Tensor], n: int) -> Callable[[Layer], dict[str, Tensor]]:
    def run(layer: Layer) -> dict[str, Tensor]:
        with torch.no_grad():
            return {str(n): function(layer, layer.x[:n])}

    return run


def case(H: int, V: int, dtype: torch.dtype) -> Case:
    """Both at each number of rows."""
    size = H * V * dtype.itemsize
    variants = []
    for n in ROWS:
        work = Work(flops=2.0 * n * H * V, bytes=size)
        own = _on_rows(lambda layer, x: ops.small_linear(x, layer.weight), n)
        theirs = _on_rows(lambda layer, x: linear(x, layer.weight), n)
        variants += [
            Variant(f"{OP}, {n} rows", own, work=work, tolerance=_OWN[dtype]),
            Variant(f"F.linear, {n} rows", theirs, work=work),
        ]
    return Case(
        f"{OP} {H}x{V}",
        dtype,
        inputs=lambda seed: make_layer(seed, H, V, dtype),
        reference=answers,
        variants=variants,
        copies=copies_beyond_cache(size),
        seconds=4.0,
    )


CASES = [case(H, V, dtype) for dtype in (torch.float32, torch.bfloat16) for H, V in LAYERS]
BARS: list[Bar] = []
