"""small_linear: sums as exact as plain PyTorch's, rounded once; rows that know nothing of each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import small_linear

from .harness import examples, on_every_path, stat_of
from .oracle import judge, same_bits
from .strategies import DTYPES, LAYOUTS, generator, leading_shape, place

ROWS = (
    "normal", "normal", "normal", "small", "large", "huge", "tiny", "denormal", "zero", "nan", "inf", "both inf"
)  # fmt: skip
_SCALES = {"small": 1e-3, "large": 100.0, "huge": 1e30, "tiny": 1e-30, "denormal": 1e-39, "zero": 0.0}
# Rows in tiles of 2 to 6, blocks of 64; features in tiles of 3 and 4, pieces of 24; steps of 2 to 32 elements, 64 to a
# chain of additions.
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 31, 63, 64, 65, 66, 127, 128, 129, 193)
_FEATURES = (1, 2, 3, 4, 5, 23, 24, 25, 27, 28, 47, 48, 49, 71, 72, 73, 95, 96, 97, 120, 241, 1023, 4001)
_DEPTHS = (
    1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 511, 512, 513, 543,
    1023, 1024, 1025, 1055, 2047, 2048, 2049, 2079, 4096, 4097,
)  # fmt: skip
_RANKS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64, 65, 300, 1025)


@dataclass(frozen=True)
class SmallLinearCase:
    """``shape`` is that of x but for its last axis, ``rows`` the kinds of the rows in turn."""

    shape: tuple[int, ...]
    V: int
    H: int
    dtype: str = "float32"  # of the weight
    x_dtype: str | None = None  # where it isn't the weight's
    out_dtype: str | None = None
    rows: tuple[str, ...] = ("normal",)
    layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias: str | None = None  # its dtype
    rank: int | None = None  # of an extra
    extra_dtypes: tuple[str, str] = ("float32", "float32")
    extra_layouts: tuple[str, str] = ("contiguous", "contiguous")
    nan_feature: bool = False
    alone: int = 1  # rows that are computed once more without the others
    seed: int = 0


class SmallLinearInputs(NamedTuple):
    x: Tensor  # [*shape, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    extra: tuple[Tensor, Tensor] | None  # [*shape, R], [V, R]

    def some(self, rows: Tensor) -> SmallLinearInputs:
        """Rows of x and extra alone, in memory of their own: x is [rows, H]."""
        x, *x2 = (y.reshape(-1, y.shape[-1])[rows] for y in (self.x, *(self.extra or ())[:1]))
        return self._replace(x=x, extra=(x2[0], self.extra[1]) if self.extra else None)


def small_linear_inputs(case: SmallLinearCase) -> SmallLinearInputs:
    g, n = generator(case.seed), math.prod(case.shape)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def put(x: Tensor, dtype: str, layout: str) -> Tensor:
        return place(x.to(getattr(torch, dtype)), layout).tensor

    x = normal(n, case.H)
    for i in range(n):
        kind = case.rows[i % len(case.rows)]
        x[i] *= _SCALES.get(kind, 1.0)
        at = torch.randint(case.H, (2,), generator=g)
        if kind in ("nan", "inf"):
            x[i, at[0]] = math.nan if kind == "nan" else -math.inf
        elif kind == "both inf":
            x[i, at] = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    weight = normal(case.V, case.H) / math.sqrt(case.H)
    if case.nan_feature:
        weight[case.V // 2, int(torch.randint(case.H, (1,), generator=g))] = math.nan
    extra = None
    if case.rank is not None:
        extra = (
            put(normal(*case.shape, case.rank), case.extra_dtypes[0], case.extra_layouts[0]),
            put(normal(case.V, case.rank) / math.sqrt(case.rank), case.extra_dtypes[1], case.extra_layouts[1]),
        )
    return SmallLinearInputs(
        put(x.reshape(*case.shape, case.H), case.x_dtype or case.dtype, case.layout),
        put(weight, case.dtype, case.weight_layout),
        None if case.bias is None else put(normal(case.V), case.bias, "stepped"),
        extra,
    )


@st.composite
def small_linear_cases(draw: Any) -> SmallLinearCase:
    V = draw(st.one_of(st.integers(1, 100), st.sampled_from(_FEATURES)))
    count = draw(st.one_of(st.integers(1, 20), st.sampled_from([n for n in _COUNTS if n * V <= 50_000])))
    depths = [h for h in _DEPTHS if count * V * h <= 3_000_000 and V * h <= 300_000]
    H = draw(st.one_of(st.sampled_from(depths), st.sampled_from(depths[-len(depths) // 4 :])))
    dtypes, layouts = st.sampled_from(DTYPES), st.sampled_from(LAYOUTS)
    return SmallLinearCase(
        shape=draw(leading_shape(count)),
        V=V,
        H=H,
        dtype=draw(dtypes),
        x_dtype=draw(st.one_of(st.none(), st.none(), dtypes)),
        out_dtype=draw(st.one_of(st.none(), st.none(), dtypes)),
        rows=tuple(draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=6))),
        layout=draw(layouts),
        weight_layout=draw(layouts),
        bias=draw(st.one_of(st.none(), dtypes)),
        rank=draw(st.one_of(st.none(), st.sampled_from([r for r in _RANKS if count * V * r <= 3_000_000]))),
        extra_dtypes=draw(st.tuples(dtypes, dtypes)),
        extra_layouts=draw(st.tuples(layouts, layouts)),
        nan_feature=draw(st.integers(0, 9)) == 9,
        alone=draw(st.sampled_from([1, 1, 2, 3, 5, 70])),
        seed=draw(st.integers(0, 2**31)),
    )


def _products(a: SmallLinearInputs, dtype: torch.dtype) -> Tensor:
    """[n, V] in ``dtype``, from the values that the op computes with."""
    stat = stat_of(a.weight.dtype)
    x = a.x.reshape(-1, a.x.shape[-1]).to(a.weight.dtype).to(dtype)
    y = x @ a.weight.to(dtype).t()
    if a.extra is not None:
        x2, weight2 = (z.reshape(-1, z.shape[-1]).to(stat).to(dtype) for z in a.extra)
        y = y + x2 @ weight2.t()
    return y if a.bias is None else y + a.bias.to(stat).to(dtype)


def _roundings(a: SmallLinearInputs) -> Tensor:
    """[n, V] what roundings do to a sum, in units of the accumulators' epsilon."""
    stat = stat_of(a.weight.dtype)
    x, weight = a.x.reshape(-1, a.x.shape[-1]).to(a.weight.dtype).double(), a.weight.double()
    H = x.shape[1]
    squares, steps = x.square() @ weight.square().t(), H
    if a.extra is not None:
        x2, weight2 = (z.reshape(-1, z.shape[-1]).to(stat).double() for z in a.extra)
        squares, steps = squares + x2.square() @ weight2.square().t(), H + x2.shape[1]
    # One chain of additions goes over both products, and errs like a random walk.
    size = squares.sqrt() * max(1.0, math.sqrt(steps) / 4)
    if a.bias is not None:
        size = size + a.bias.to(stat).double().abs()
    size = size + torch.finfo(stat).tiny * steps  # products below the normal numbers
    if a.weight.dtype == torch.bfloat16:
        # Dot products of AVX512-BF16 take operands and sums below the normal numbers for zero.
        size = size + torch.finfo(stat).tiny / torch.finfo(stat).eps * (
            H + x.abs().sum(1)[:, None] + weight.abs().sum(1)
        )
    return size


def _one_nan(x: Tensor) -> Tensor:
    """Torch's casts, which have the last word, leave NaNs other bits in vectors than past them."""
    return x.masked_fill(x.isnan(), math.nan)


@examples
@given(case=small_linear_cases())
def test_small_linear(case: SmallLinearCase) -> None:
    a = small_linear_inputs(case)
    stat, n = stat_of(case.dtype), math.prod(case.shape)
    exact, near = (_products(a, dtype) for dtype in (torch.float64, stat))
    unavoidable = torch.finfo(stat).eps * (_roundings(a) + exact.abs()).nan_to_num(0.0, posinf=0.0)
    out_dtype = None if case.out_dtype is None else getattr(torch, case.out_dtype)
    some = torch.randperm(n, generator=generator(case.seed + 1))[: case.alone]

    def run(a: SmallLinearInputs = a, out_dtype: torch.dtype | None = out_dtype) -> tuple[Tensor]:
        return (_one_nan(small_linear(a.x, a.weight, a.bias, extra=a.extra, out_dtype=out_dtype)),)

    for path, (got,) in on_every_path("small_linear", run):
        assert got.shape == (*case.shape, case.V), path
        assert got.dtype == (out_dtype or a.x.dtype), path
        got = got.reshape(n, case.V)
        sums = run(out_dtype=stat)[0].reshape(n, case.V)
        judge(path, sums, exact, near, unavoidable)
        assert same_bits(got, _one_nan(sums.to(got.dtype))), f"{path}: not rounded once"
        if n and not path.endswith("eager"):
            alone = run(a.some(some))[0]
            assert same_bits(alone, got[some]), f"{path}: a row depends on the others"
