"""decode_attention: rows of their own lengths, as exact as plain PyTorch, whatever lies past them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import decode_attention

from .harness import examples, on_every_path, stat_of
from .oracle import TIMES, judge, same_bits
from .strategies import DTYPES, LAYOUTS, generator, place

# Vectors of 4 to 16 numbers, two at a time; chains of 256 columns.
_SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 80, 128, 129)
_COLUMNS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 700)
_LOTS = (
    {"n": 4, "key_heads": 2, "group": 3, "columns": 300, "size": 64, "value_size": 64},
    {"n": 9, "key_heads": 1, "group": 2, "columns": 513, "size": 33, "value_size": 31},
)


@dataclass(frozen=True)
class AttentionCase:
    n: int
    key_heads: int
    group: int
    columns: int
    size: int
    value_size: int
    dtype: str = "float32"
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")  # query, key, value
    lengths: str = "any"
    beyond: float = math.nan  # in keys and values that a row doesn't attend to
    spoiled: bool = False  # one key, one value of the middle row hold NaN
    queries: str = "normal"
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    seed: int = 0


class AttentionInputs(NamedTuple):
    query: Tensor  # [n, heads, 1, size]
    key: Tensor  # [n, key heads, columns, size]
    value: Tensor  # [n, key heads, columns, value size]
    lengths: Tensor  # [n]
    seen: Tensor  # [n, columns] bool


def attention_inputs(case: AttentionCase) -> AttentionInputs:
    g, dtype = generator(case.seed), getattr(torch, case.dtype)
    n, C = case.n, case.columns
    query, key, value = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in (
            (n, case.key_heads * case.group, 1, case.size),
            (n, case.key_heads, C, case.size),
            (n, case.key_heads, C, case.value_size),
        )
    )
    query *= {"normal": 1.0, "flat": 1e-4, "peaked": 30.0, "certain": 1e4, "zero": 0.0}[case.queries]
    lengths = torch.randint(1, C + 1, (n,), generator=g)
    if case.lengths != "any":
        lengths.fill_(1 if case.lengths == "one" else C)
    columns = torch.arange(C)
    seen = columns < lengths[:, None]
    if case.window is not None:
        seen &= columns >= lengths[:, None] - case.window
    if case.spoiled and n:
        row, column = n // 2, int(lengths[n // 2]) - 1
        key[row, 0, column, case.size // 2] = math.nan
        value[row, -1, column, case.value_size // 2] = math.nan
    # Memory that rows share can't be poisoned for one and read for another.
    for x, layout in ((key, case.layouts[1]), (value, case.layouts[2])):
        if layout != "expanded":
            x.masked_fill_(~seen[:, None, :, None], case.beyond)
    query, key, value = (
        place(x.to(dtype), layout).tensor for x, layout in zip((query, key, value), case.layouts, strict=True)
    )
    return AttentionInputs(query, key, value, lengths, seen)


@st.composite
def attention_cases(draw: Any) -> AttentionCase:
    if draw(st.integers(0, 7)) == 7:  # enough for several threads
        shape = dict(draw(st.sampled_from(_LOTS)))
    else:
        shape = {
            "n": draw(st.integers(0, 7)),
            "key_heads": draw(st.integers(1, 4)),
            "group": draw(st.integers(1, 7)),
            "columns": draw(st.one_of(st.integers(1, 70), st.sampled_from(_COLUMNS))),
            "size": draw(st.sampled_from(_SIZES)),
            "value_size": draw(st.sampled_from(_SIZES)),
        }
    layouts = st.sampled_from(LAYOUTS)
    return AttentionCase(
        **shape,
        dtype=draw(st.sampled_from(DTYPES)),
        layouts=draw(st.tuples(layouts, layouts, layouts)),
        lengths=draw(st.sampled_from(["any", "any", "any", "one", "all"])),
        beyond=draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e38])),
        spoiled=draw(st.integers(0, 9)) == 9,
        queries=draw(st.sampled_from(["normal", "normal", "flat", "peaked", "certain", "zero"])),
        scale=draw(st.sampled_from([None, None, 1.0, 0.03, 5.0])),
        window=draw(st.one_of(st.none(), st.integers(1, 20), st.sampled_from([32, 256, 257, 10_000]))),
        softcap=draw(st.sampled_from([None, None, 0.5, 20.0, 50.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def _attention(case: AttentionCase, a: AttentionInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[n, heads, value size] in ``dtype``; and what roundings do to it, in units of the precision's epsilon."""
    scale = case.size**-0.5 if case.scale is None else case.scale
    results = torch.zeros(2, case.n, case.key_heads * case.group, case.value_size, dtype=dtype)
    for i in range(case.n):
        seen = a.seen[i]
        # [key heads, group or columns seen, size]
        query = a.query[i].to(dtype).view(case.key_heads, case.group, case.size)
        key, value = (x[i][:, seen].to(dtype) for x in (a.key, a.value))
        scores = query @ key.transpose(1, 2) * scale
        # A chain of multiplications and additions errs like a random walk.
        error = (query.square() @ key.square().transpose(1, 2)).sqrt() * max(1.0, math.sqrt(case.size) / 4) * scale
        error = error + scores.abs()
        if case.softcap is not None:
            capped = torch.tanh(scores / case.softcap)
            scores = case.softcap * capped
            error = error * (1 - capped.square()) + 2 * scores.abs()
        weights = scores.softmax(-1)
        # The largest score is taken off; errors of scores are relative ones of weights, and of their sum.
        error = error + scores.abs() + scores.abs().amax(-1, keepdim=True) + 2
        error = error + (weights * error).sum(-1, keepdim=True)
        chains = max(1.0, math.sqrt(min(int(seen.sum()), 256)) / 4)
        results[0, i] = (weights @ value).view(-1, case.value_size)
        results[1, i] = ((weights * (error + chains)) @ value.abs()).view(-1, case.value_size)
        # A weight below float32's normal numbers is cut off; those end at 1e-31 of its epsilon.
        results[1, i] += (value.abs().sum(1) * 1e-30).repeat_interleave(case.group, 0)
    return results[0], results[1]


@examples
@given(case=attention_cases())
def test_decode_attention(case: AttentionCase) -> None:
    a = attention_inputs(case)
    stat = stat_of(case.dtype)
    exact, roundings = _attention(case, a, torch.float64)
    near, _ = _attention(case, a, stat)
    unavoidable = torch.finfo(stat).eps * roundings.nan_to_num(0.0)
    # The result is rounded once.
    unavoidable = unavoidable + torch.finfo(a.query.dtype).eps / 2 / TIMES * exact.abs().nan_to_num(0.0)
    settings = {"scale": case.scale, "window": case.window, "softcap": case.softcap}

    def run() -> tuple[Tensor]:
        return (decode_attention(*a[:4], **settings),)

    for path, (got,) in on_every_path("decode_attention", run):
        assert got.dtype == a.query.dtype, path
        judge(path, got, exact, near, unavoidable)
        if path.endswith("eager"):
            continue
        for i in range(case.n):
            C = int(a.lengths[i])
            query, key, value, lengths = (x[i : i + 1] for x in a[:4])
            alone = decode_attention(query, key[:, :, :C], value[:, :, :C], lengths, **settings)
            assert same_bits(alone[0], got[i]), f"{path}: row {i} depends on the others"
