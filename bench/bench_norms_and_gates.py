"""swiglu and rms_norm, forward and backward, against the separate operations: without a bar.

The widths are SmolLM2-135M's and Qwen2.5-0.5B's, the rows those of a micro-batch of four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

import peers
from harness.case import Bar, Case, Expected, Variant, Work
from harness.timing import copies_beyond_cache
from ppo_fast import ops

ROWS, EPS = 512, 1e-6
_OWN = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

Function = Callable[[Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]  # the two arguments, and the gradient of the result


def product(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's, as transformers writes it."""
    return silu(gate) * up


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm, as transformers writes it; in float64, if that is what comes."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * scaled.to(x.dtype)


def own_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The op."""
    return ops.rms_norm(x, weight, EPS)


def gates(seed: int, rows: int, width: int, dtype: torch.dtype) -> Inputs:
    """Normal numbers."""
    made = partial(torch.randn, rows, width, generator=torch.Generator().manual_seed(seed))
    return made().to(dtype), made().to(dtype), made().to(dtype)


def norms(seed: int, rows: int, width: int, dtype: torch.dtype) -> Inputs:
    """The same under one row of weights, which are frozen."""
    x, weights, upstream = gates(seed, rows, width, dtype)
    return x, 1 + weights[0] / 4, upstream


def run(function: Function, names: tuple[str, ...], inputs: Inputs) -> dict[str, Tensor]:
    """The result and the gradients of the first arguments."""
    *arguments, upstream = inputs
    leaves = [t.detach().requires_grad_() for t in arguments[: len(names) - 1]]
    y = function(*leaves, *arguments[len(leaves) :])
    return dict(zip(names, (y.detach(), *torch.autograd.grad(y, leaves, upstream)), strict=True))


def case(op: str, rows: int, width: int, dtype: torch.dtype) -> Case:
    """Ours, separate operations, and torch.compile of them."""
    separate, own, make, names = {
        "swiglu": (product, ops.swiglu, gates, ("y", "d_gate", "d_up")),
        "rms_norm": (norm, own_norm, norms, ("y", "d_x")),
    }[op]
    tensors = {"swiglu": 8, "rms_norm": 5}[op]  # read and written, forward and backward
    work = Work(bytes=tensors * rows * width * dtype.itemsize)

    def answers(inputs: Inputs) -> Mapping[str, Expected]:
        exact = run(separate, names, tuple(t.double() for t in inputs))  # type: ignore[arg-type]
        return {name: Expected(value) for name, value in exact.items()}

    return Case(
        f"{op} {rows}x{width}",
        dtype,
        inputs=lambda seed: make(seed, rows, width, dtype),
        reference=answers,
        variants=[
            Variant(op, partial(run, own, names), work=work, tolerance=_OWN[dtype]),
            Variant("separate operations", partial(run, separate, names), work=work),
            Variant("torch.compile", partial(run, peers.compiled(separate), names), work=work),
        ],
        copies=copies_beyond_cache(3 * rows * width * dtype.itemsize),
        seconds=3.0,
    )


CASES = [
    case(op, ROWS, width, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for op, widths in (("swiglu", (1536, 4864)), ("rms_norm", (576, 896)))
    for width in widths
]
BARS: list[Bar] = []
