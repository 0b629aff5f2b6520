"""swiglu and rms_norm: as exact as the separate operations; elements and rows that know nothing of each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from ppo_fast.ops import rms_norm, swiglu

from .harness import examples, on_every_path
from .oracle import judge, same_bits
from .strategies import DTYPES, LAYOUTS, generator, leading_shape, place

SCALES = (1.0, 3.0, 1e-3, 30.0, 0.0, math.nan)
_WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 576, 1000, 4097)


@dataclass(frozen=True)
class RowsCase:
    """``scales`` are those of the rows in turn."""

    shape: tuple[int, ...]
    width: int
    dtype: str = "float32"
    scales: tuple[float, ...] = (1.0,)
    layouts: tuple[str, ...] = ("contiguous",) * 3
    eps: float = 1e-6
    alone: int = 1  # rows that are computed once more without the others
    seed: int = 0


@st.composite
def rows_cases(draw: Any) -> RowsCase:
    width = draw(st.one_of(st.integers(1, 70), st.sampled_from(_WIDTHS)))
    count = draw(st.sampled_from([n for n in (1, 2, 3, 5, 8, 33, 257) if n * width <= 50_000]))
    return RowsCase(
        shape=draw(leading_shape(count)),
        width=width,
        dtype=draw(st.sampled_from(DTYPES)),
        scales=tuple(draw(st.lists(st.sampled_from(SCALES), min_size=1, max_size=4))),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        eps=draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        alone=draw(st.sampled_from([1, 2, 5])),
        seed=draw(st.integers(0, 2**31)),
    )


def _inputs(case: RowsCase) -> list[Tensor]:
    """Three tensors [*shape, width]; the first has rows of the scales."""
    g, n = generator(case.seed), math.prod(case.shape)
    scales = torch.tensor([case.scales[i % len(case.scales)] for i in range(n)], dtype=torch.float64)
    made = [torch.randn(*case.shape, case.width, generator=g, dtype=torch.float64) for _ in range(3)]
    made[0] = made[0] * scales.reshape(*case.shape, 1)
    return [place(x.to(getattr(torch, case.dtype)), how).tensor for x, how in zip(made, case.layouts, strict=True)]


def _gradients(function: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = function(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, upstream))


def _rows(x: Tensor, width: int, some: Tensor | slice) -> Tensor:
    return x.reshape(-1, width)[some]


@examples
@given(case=rows_cases())
def test_swiglu(case: RowsCase) -> None:
    gate, up, upstream = _inputs(case)
    dtype = gate.dtype

    def separate(of: torch.dtype) -> tuple[Tensor, ...]:
        return _gradients(lambda g, u: silu(g) * u, [gate.to(of), up.to(of)], upstream.to(of))

    exact, near = separate(torch.float64), separate(dtype)
    g, u, d = (t.double().abs().nan_to_num(0.0) for t in (gate, up, upstream))
    sizes = [g * u, d * u * (1 + g), d * g]
    n = math.prod(case.shape)
    some = torch.randperm(n, generator=generator(case.seed + 1))[: case.alone]
    for path, found in on_every_path("swiglu", lambda: _gradients(swiglu, [gate, up], upstream)):
        for name, got, truth, theirs, size in zip(("y", "d_gate", "d_up"), found, exact, near, sizes, strict=True):
            assert got.dtype == dtype
            judge(f"{path}: {name}", got, truth, theirs, torch.finfo(dtype).eps * size)
        if not path.endswith("eager"):
            part = _gradients(swiglu, *_split([gate, up], upstream, case.width, some))
            for got, whole in zip(part, found, strict=True):
                assert same_bits(got, _rows(whole, case.width, some)), f"{path}: a row depends on the others"


@examples
@given(case=rows_cases())
def test_rms_norm(case: RowsCase) -> None:
    x, _, upstream = _inputs(case)
    weight = torch.randn(case.width, generator=generator(case.seed + 2), dtype=torch.float64).to(x.dtype)
    dtype = x.dtype

    def separate(of: torch.dtype) -> tuple[Tensor, ...]:
        def function(x: Tensor, w: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps) * w

        return _gradients(function, [x.to(of), weight.to(of)], upstream.to(of))

    # 16-bit squares overflow and underflow; the op's are float32.
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    exact, near = separate(torch.float64), [t.to(dtype) for t in separate(stat)]
    wide, w, d = (t.double().nan_to_num(0.0) for t in (x, weight, upstream))
    rstd = (wide.square().mean(-1, keepdim=True) + case.eps).rsqrt()
    along = (w * d * wide).abs().mean(-1, keepdim=True) * rstd.square()
    of_weight = (d * wide * rstd).reshape(-1, case.width).abs().sum(0)
    sizes = [(wide * rstd * w).abs(), rstd * ((w * d).abs() + wide.abs() * along), of_weight]
    n = math.prod(case.shape)
    some = torch.randperm(n, generator=generator(case.seed + 1))[: case.alone]

    def function(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, w, case.eps)

    for path, found in on_every_path("rms_norm", lambda: _gradients(function, [x, weight], upstream)[:2]):
        for name, got, truth, theirs, size in zip(("y", "d_x"), found, exact, near, sizes, strict=False):
            assert got.dtype == dtype
            judge(f"{path}: {name}", got, truth, theirs, torch.finfo(dtype).eps * size)
        d_weight = _gradients(function, [x, weight], upstream)[2]
        judge(f"{path}: d_weight", d_weight, exact[2], near[2], torch.finfo(dtype).eps * sizes[2])
        if not path.endswith("eager"):
            rows = [_rows(t, case.width, some) for t in (x, upstream)]
            for got, whole in zip(_gradients(function, [rows[0], weight], rows[1])[:2], found, strict=True):
                assert same_bits(got, _rows(whole, case.width, some)), f"{path}: a row depends on the others"


def _split(leaves: list[Tensor], upstream: Tensor, width: int, some: Tensor) -> tuple[list[Tensor], Tensor]:
    return [_rows(t, width, some) for t in leaves], _rows(upstream, width, some)
