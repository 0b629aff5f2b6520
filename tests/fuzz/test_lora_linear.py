"""lora_linear: values and gradients as exact as plain PyTorch's; rows that know nothing of each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import lora_linear

from .harness import eager, examples, on_every_path
from .oracle import judge, same_bits
from .strategies import DTYPES, LAYOUTS, generator, leading_shape, place

ROWS = {"normal": 1.0, "small": 1e-3, "large": 100.0, "zero": 0.0, "nan": math.nan}
# Rows in tiles of 12 and 6, 24 and 12 for narrow products, then 4 and 1, in bands of 96; features in panels of one and
# two vectors; 256 to a chain of additions, vectors of depth turned at a time.
_COUNTS = (1, 2, 4, 5, 6, 7, 11, 12, 13, 15, 23, 24, 25, 47, 48, 49, 95, 96, 97, 191, 192, 193, 300)
_FEATURES = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 95, 96, 97, 128, 257)
_DEPTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 1025)
_RANKS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 65)


@dataclass(frozen=True)
class LoraLinearCase:
    """``shape`` is that of x but for its last axis, ``rows`` the kinds of the rows in turn."""

    shape: tuple[int, ...]
    out: int
    depth: int
    rank: int | None = None
    dtype: str = "float32"
    adapter_dtype: str = "float32"
    scaling: float = 1.0
    bias: bool = False
    rows: tuple[str, ...] = ("normal",)
    layouts: tuple[str, ...] = ("contiguous",) * 5  # of x, weight, A, B and the gradient of the result
    wanted: tuple[bool, bool, bool] = (True, True, True)  # gradients of x, A and B
    alone: int = 1  # rows that are computed once more without the others
    seed: int = 0


class LoraLinearInputs(NamedTuple):
    x: Tensor  # [*shape, in]
    weight: Tensor  # [out, in]
    a: Tensor | None  # [r, in]
    b: Tensor | None  # [out, r]
    bias: Tensor | None  # [out]
    upstream: Tensor  # [*shape, out]


def lora_linear_inputs(case: LoraLinearCase) -> LoraLinearInputs:
    g, n = generator(case.seed), math.prod(case.shape)

    def put(*shape: int, dtype: str, layout: str, scale: float | Tensor = 1.0) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * scale
        return place(x.to(getattr(torch, dtype)), layout).tensor

    kinds = torch.tensor([ROWS[case.rows[i % len(case.rows)]] for i in range(n)], dtype=torch.float64)
    of_x, of_weight, of_a, of_b, of_upstream = case.layouts
    a = b = None
    if case.rank is not None:
        a = put(case.rank, case.depth, dtype=case.adapter_dtype, layout=of_a, scale=case.depth**-0.5)
        b = put(case.out, case.rank, dtype=case.adapter_dtype, layout=of_b, scale=case.rank**-0.5)
    return LoraLinearInputs(
        put(*case.shape, case.depth, dtype=case.dtype, layout=of_x, scale=kinds.reshape(*case.shape, 1)),
        put(case.out, case.depth, dtype=case.dtype, layout=of_weight, scale=case.depth**-0.5),
        a,
        b,
        put(case.out, dtype=case.dtype, layout="stepped") if case.bias else None,
        put(*case.shape, case.out, dtype=case.dtype, layout=of_upstream),
    )


@st.composite
def lora_linear_cases(draw: Any) -> LoraLinearCase:
    out = draw(st.one_of(st.integers(1, 70), st.sampled_from(_FEATURES)))
    count = draw(st.one_of(st.integers(1, 30), st.sampled_from(_COUNTS)))
    depth = draw(st.sampled_from([h for h in _DEPTHS if count * out * h <= 3_000_000]))
    layouts = st.sampled_from(LAYOUTS)
    return LoraLinearCase(
        shape=draw(leading_shape(count)),
        out=out,
        depth=depth,
        rank=draw(st.one_of(st.none(), st.sampled_from(_RANKS))),
        dtype=draw(st.one_of(st.just("float32"), st.sampled_from(DTYPES))),  # the kernels' own, half the time
        adapter_dtype=draw(st.one_of(st.just("float32"), st.sampled_from(DTYPES))),
        scaling=draw(st.sampled_from([1.0, 2.0, 0.3, -1.5, 0.0])),
        bias=draw(st.booleans()),
        rows=tuple(draw(st.lists(st.sampled_from(list(ROWS)), min_size=1, max_size=5))),
        layouts=draw(st.tuples(*[layouts] * 5)),
        wanted=draw(st.tuples(*[st.booleans()] * 3).filter(any)),
        alone=draw(st.sampled_from([1, 1, 2, 3, 5, 70])),
        seed=draw(st.integers(0, 2**31)),
    )


def _in(dtype: torch.dtype, inputs: LoraLinearInputs, scaling: float) -> list[Tensor]:
    """y and the gradients of x, A and B in ``dtype``, from the numbers that the op computes with."""
    own = inputs.x.dtype
    x, weight, a, b, bias, dy = (None if t is None else t.to(own).to(dtype) for t in inputs)
    assert x is not None
    assert weight is not None
    assert dy is not None
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    y, dx = x @ weight.t(), dy @ weight
    if bias is not None:
        y = y + bias
    if a is None or b is None:
        return [y, dx]
    h, dh = scaling * (x @ a.t()), scaling * (dy @ b)
    return [y + h @ b.t(), dx + dh @ a, dh.t() @ x, dy.t() @ h]


@examples
@given(case=lora_linear_cases())
def test_lora_linear(case: LoraLinearCase) -> None:
    i = lora_linear_inputs(case)
    n = math.prod(case.shape)
    exact, near = (_in(dtype, i, case.scaling) for dtype in (torch.float64, i.x.dtype))
    # What the terms of each sum amount to. A chain of additions that begins with the largest errs like a random walk.
    sizes = _in(torch.float64, LoraLinearInputs(*(None if t is None else t.abs() for t in i)), abs(case.scaling))
    rank = case.rank or 0
    steps = (case.depth + rank, case.out + rank, n, n)
    sizes = [size.nan_to_num(0.0) * max(1.0, math.sqrt(count) / 4) for size, count in zip(sizes, steps, strict=False)]
    wanted = [want and (k == 0 or case.rank is not None) for k, want in enumerate(case.wanted)]
    some = torch.randperm(n, generator=generator(case.seed + 1))[: case.alone]

    def run() -> tuple[Tensor, ...]:
        leaves = [
            None if t is None else t.detach().requires_grad_(want)
            for t, want in zip((i.x, i.a, i.b), wanted, strict=True)
        ]
        x, a, b = leaves
        assert x is not None
        y = lora_linear(x, i.weight, a, b, bias=i.bias, scaling=case.scaling)
        asked = [t for t in leaves if t is not None and t.requires_grad]
        return (y.detach(), *(torch.autograd.grad(y, asked, i.upstream) if asked else ()))

    names = ["y", *(name for name, want in zip(("dx", "da", "db"), wanted, strict=True) if want)]
    picked = [0, *(k + 1 for k, want in enumerate(wanted) if want)]

    def plain() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Other dtypes take the vendor's products on every path, whose bits may depend on the number of threads."""
        with eager():
            yield f"lora_linear in {case.dtype}", run()

    own = case.dtype == "float32"
    for path, results in on_every_path("lora_linear", run) if own else plain():
        for name, k, got in zip(names, picked, results, strict=True):
            source = (i.upstream, i.x, i.a, i.b)[k]
            assert source is not None
            assert got.shape == source.shape, f"{path}: {name}"
            assert got.dtype == source.dtype, f"{path}: {name}"
            eps = max(torch.finfo(got.dtype).eps, torch.finfo(i.x.dtype).eps)
            flat = got.reshape(exact[k].shape)
            judge(f"{path}: {name}", flat, exact[k], near[k].to(flat.dtype), eps * sizes[k])
        if n and own and not path.endswith("eager"):
            rows = i.x.reshape(n, -1)[some]
            alone = lora_linear(rows, i.weight, i.a, i.b, bias=i.bias, scaling=case.scaling)
            assert same_bits(alone, results[0].reshape(n, -1)[some]), f"{path}: a row depends on the others"
