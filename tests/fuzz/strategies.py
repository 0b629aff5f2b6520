"""Drawn inputs of the ops: block edges of the kernels, memory layouts, masks and extreme values.

A case is a frozen dataclass of plain parameters, so that a failing example is printed in full and can be typed in
again; its tensors are made from a seed. Memory around a tensor is NaN: whatever reads past an end shows it, and
whatever writes there can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16", "float64")
MASKS = ("none", "all", "holes", "dead", "one", "last dead")
TEMPERATURES = ("one", "low", "high", "each", "sequence", "integer", "extreme")
LOGITS = (
    "normal", "normal", "flat", "wide", "peak", "far", "banned", "single", "empty", "ramp", "huge", "tiny", "equal"
)  # fmt: skip
HIDDEN = ("normal", "normal", "small", "large", "huge", "tiny", "zero", "denormal")

# Edges of blocks, each with its neighbours: vectors, panels of 12, 16, 32, 96 and 1000-odd columns, chunks of rows.
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
_VOCABULARIES = (
    1, 2, 3, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129,
    191, 192, 193, 255, 257, 384, 999, 1000, 1001, 1023, 1024, 1025, 1151, 1152, 1153, 2047, 2048, 2049, 2303, 2304,
    2305, 4095, 4096, 4097, 4999,
)  # fmt: skip
_WIDE_VOCABULARIES = (16_383, 16_384, 16_385, 18_433, 32_769, 40_003)
_HIDDEN_SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------------------- layouts


class Placed(NamedTuple):
    """A tensor, the storage around it, and the way from one to the other."""

    storage: Tensor
    view: Callable[[Tensor], Tensor]

    @property
    def tensor(self) -> Tensor:
        return self.view(self.storage)


def _sliced(shape: torch.Size) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    return (*shape[:-1], shape[-1] + 5), lambda s: s[..., 2 : 2 + shape[-1]]


# Each gives the shape of the storage and the view of it, for a tensor of at least as many dimensions as it says.
_PLACES: dict[str, tuple[int, Callable[[torch.Size], tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]]] = {
    "contiguous": (0, lambda shape: (tuple(shape), lambda s: s)),
    "offset": (0, lambda shape: ((shape.numel() + 3,), lambda s: s[1 : 1 + shape.numel()].view(shape))),
    "sliced": (1, _sliced),
    "stepped": (1, lambda shape: ((*shape[:-1], 2 * shape[-1]), lambda s: s[..., ::2])),
    "shifted": (2, lambda shape: ((*shape[:-2], shape[-2] + 1, shape[-1]), lambda s: s[..., 1:, :])),
    "transposed": (2, lambda shape: ((*shape[:-2], shape[-1], shape[-2]), lambda s: s.transpose(-1, -2))),
    "swapped": (3, lambda shape: ((shape[1], shape[0], *shape[2:]), lambda s: s.transpose(0, 1))),
    "expanded": (2, lambda shape: ((1, *shape[1:]), lambda s: s.expand(shape))),
}
LAYOUTS = tuple(_PLACES)
# Rows contiguous and apart: what inplace_backward accepts.
ROW_LAYOUTS = ("contiguous", "offset", "sliced", "shifted", "swapped")


def place(x: Tensor, layout: str) -> Placed:
    """``x`` laid out so; an expanded one repeats its first slice. Too few dimensions or no elements: contiguous."""
    dims, how = _PLACES[layout]
    if x.dim() < dims or x.numel() == 0:
        how = _PLACES["contiguous"][1]
    shape, view = how(x.shape)
    storage = torch.full(shape, math.nan if x.is_floating_point() else 1, dtype=x.dtype)
    if layout == "expanded" and storage.shape != x.shape:
        storage.copy_(x[:1])
    else:
        view(storage).copy_(x)
    return Placed(storage, view)


def draw_mask(kind: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor | None:
    """Bool, or None for none."""
    if kind == "none":
        return None
    mask = torch.rand(shape, generator=g) > 0.35
    flat = mask.view(-1)
    if kind == "all":
        flat.fill_(True)
    elif kind in ("dead", "one"):
        flat.fill_(False)
        if kind == "one" and flat.numel():
            flat[int(torch.randint(flat.numel(), (1,), generator=g))] = True
    elif kind == "last dead" and mask.dim() and flat.numel():
        mask[-1] = False
    return mask


def draw_temperature(kind: str, shape: tuple[int, ...], g: torch.Generator) -> float | Tensor:
    each = 0.5 + torch.rand(shape, generator=g)
    if kind == "sequence":
        return each[..., :1].clone() if shape else each
    return {
        "one": 1.0,
        "low": 0.7,
        "high": 1.3,
        "integer": 2,
        "each": each.double(),
        "extreme": 10 ** (6 * torch.rand(shape, generator=g) - 3),
    }[kind]


def temperatures(temperature: float | Tensor, stat: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """One a token, as the op computes with it."""
    return torch.as_tensor(temperature, dtype=stat).expand(shape)


# -------------------------------------------------------------------------------------------------------------- logits


@dataclass(frozen=True)
class LogitsCase:
    """`selected_logprobs`: ``shape`` is that of token_ids, ``rows`` the kinds of the rows in turn."""

    shape: tuple[int, ...]
    V: int
    dtype: str = "float32"
    layout: str = "contiguous"
    rows: tuple[str, ...] = ("normal",)
    mask: str = "none"
    poison: float = math.nan  # what stands in masked rows
    temperature: str = "one"
    upstream: str = "both"
    nan_row: bool = False
    seed: int = 0


def _logit_row(kind: str, V: int, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    x = torch.randn(V, generator=g, dtype=torch.float64)
    at = int(torch.randint(V, (1,), generator=g))
    limit = 6e4 if dtype == torch.float16 else 1e30
    if kind == "peak":
        x[at] = 40.0
    elif kind == "far":
        x = x - 1e4
    elif kind == "banned":
        x[torch.rand(V, generator=g) > 0.5] = -math.inf
        x[at] = 0.5
    elif kind == "single":
        x = torch.full_like(x, -math.inf)
        x[at] = 1.5
    elif kind == "empty":
        x = torch.full_like(x, -math.inf)
    elif kind == "ramp":
        x = torch.linspace(-300, 300, V, dtype=torch.float64)
    elif kind == "equal":
        x = torch.full_like(x, float(x[0]) - 1e4)
    else:
        x *= {"normal": 3.0, "flat": 1e-3, "wide": 30.0, "huge": limit / 10, "tiny": 1e-40}[kind]
    return x.clamp(max=limit)


class LogitsInputs(NamedTuple):
    logits: Placed  # [*shape, V]
    ids: Tensor  # [*shape]
    mask: Tensor | None
    temperature: float | Tensor
    c: Tensor  # [*shape] stat dtype
    e: Tensor


def logits_inputs(case: LogitsCase) -> LogitsInputs:
    g, dtype = generator(case.seed), getattr(torch, case.dtype)
    N = math.prod(case.shape)
    rows = [_logit_row(case.rows[i % len(case.rows)], case.V, dtype, g) for i in range(N)]
    logits = (torch.stack(rows) if rows else torch.zeros(0, case.V)).to(dtype).reshape(*case.shape, case.V)
    ids = torch.randint(case.V, case.shape, generator=g)
    if case.nan_row and N:
        logits.view(N, case.V)[N // 2, int(ids.reshape(-1)[0])] = math.nan
    mask = draw_mask(case.mask, case.shape, g)
    if mask is not None and case.layout != "expanded":
        logits[~mask] = case.poison
        ids[~mask] = -(2**40)
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    c, e = (torch.randn(case.shape, generator=g, dtype=torch.float64).to(stat) for _ in range(2))
    c[torch.rand(case.shape, generator=g) < 0.2] = 0.0
    if mask is not None:
        c, e = (x.masked_fill(~mask, math.nan) for x in (c, e))
    return LogitsInputs(place(logits, case.layout), ids, mask, draw_temperature(case.temperature, case.shape, g), c, e)


@st.composite
def leading_shape(draw: Any, count: int) -> tuple[int, ...]:
    """A shape of 0 to 4 dimensions with ``count`` elements, or with none at all."""
    if count == 1 and draw(st.booleans()):
        return draw(st.sampled_from([(), (1,), (1, 1), (1, 1, 1)]))
    if draw(st.integers(0, 30)) == 30:
        return draw(st.sampled_from([(0,), (0, 3), (3, 0), (2, 0, 3)]))
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    a = draw(st.sampled_from(divisors))
    b = draw(st.sampled_from([d for d in divisors if (count // a) % d == 0]))
    return draw(st.sampled_from([(count,), (a, count // a), (a, b, count // a // b), (a, 1, b, count // a // b)]))


@st.composite
def logits_cases(draw: Any, layouts: tuple[str, ...] = LAYOUTS) -> LogitsCase:
    V = draw(
        st.one_of(st.integers(1, 70), st.sampled_from(_VOCABULARIES), st.sampled_from(_WIDE_VOCABULARIES))
        if draw(st.integers(0, 6)) == 6
        else st.one_of(st.integers(1, 70), st.sampled_from(_VOCABULARIES))
    )
    count = draw(st.sampled_from([n for n in _COUNTS if n * V <= 70_000]))
    return LogitsCase(
        shape=draw(leading_shape(count)),
        V=V,
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(layouts)),
        rows=tuple(draw(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=4))),
        mask=draw(st.sampled_from(MASKS)),
        poison=draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e38])),
        temperature=draw(st.sampled_from(TEMPERATURES)),
        upstream=draw(st.sampled_from(["both", "both", "logprobs", "entropy"])),
        nan_row=draw(st.integers(0, 9)) == 9,
        seed=draw(st.integers(0, 2**31)),
    )


# -------------------------------------------------------------------------------------------------------- output layer


@dataclass(frozen=True)
class LinearCase:
    """The linear ops: ``shape`` is that of token_ids."""

    shape: tuple[int, ...]
    H: int
    V: int
    dtype: str = "float32"
    hidden_dtype: str | None = None  # where it isn't the weight's
    hidden: str = "normal"
    layout: str = "contiguous"
    weight_layout: str = "contiguous"
    trainable: tuple[bool, bool, bool] = (True, True, True)  # hidden, weight, bias
    mask: str = "none"
    temperature: str = "one"
    bias: str = "none"
    softcap: float | None = None
    logit_scale: float = 1.0
    kept: int | None = None
    chunk_tokens: int | None = None
    nan_row: bool = False
    seed: int = 0


class LinearInputs(NamedTuple):
    hidden: Tensor  # [*shape, H], a leaf's view
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    ids: Tensor  # [*shape]
    mask: Tensor | None
    temperature: float | Tensor
    kept_ids: Tensor | None  # [*shape, K]


def kept_sets(ids: Tensor, V: int, K: int, g: torch.Generator) -> Tensor:
    """[n, K] distinct ids with the token's own among them and -1 in between; K may exceed V."""
    n = ids.shape[0]
    scores = torch.rand(n, V, generator=g)
    scores.scatter_(1, ids[:, None], 2.0)  # the token's own comes first
    sets = scores.argsort(1, descending=True)[:, :K]
    sets = torch.cat([sets, sets.new_full((n, K - sets.shape[1]), -1)], 1)
    blank = torch.rand(n, K, generator=g) < 0.3
    blank[:, 0] = False
    sets = sets.masked_fill(blank, -1)
    return sets[:, torch.randperm(K, generator=g)]


def linear_inputs(case: LinearCase) -> LinearInputs:
    g, dtype = generator(case.seed), getattr(torch, case.dtype)
    N = math.prod(case.shape)
    hidden = torch.randn(N, case.H, generator=g, dtype=torch.float64)
    hidden *= {
        "normal": 1.0, "small": 1e-3, "large": 10.0, "huge": 1e3, "tiny": 1e-7, "zero": 0.0, "denormal": 1e-39
    }[case.hidden]  # fmt: skip
    weight = torch.randn(case.V, case.H, generator=g, dtype=torch.float64) * (4 / math.sqrt(case.H))
    ids = torch.randint(case.V, (N,), generator=g)
    bias = None
    if case.bias != "none":
        bias = torch.randn(case.V, generator=g, dtype=torch.float64)
        if case.bias == "banned":
            bias[torch.rand(case.V, generator=g) > 0.6] = -math.inf
        elif case.bias == "all banned":
            bias.fill_(-math.inf)
        elif case.bias == "far":
            bias -= 1e4
    kept = None if case.kept is None else kept_sets(ids, case.V, case.kept, g).reshape(*case.shape, case.kept)
    ids, hidden = ids.reshape(case.shape), hidden.reshape(*case.shape, case.H)
    if case.nan_row and N:
        hidden.view(N, case.H)[N // 2] = math.nan
    mask = draw_mask(case.mask, case.shape, g)
    if mask is not None and case.layout != "expanded":
        hidden[~mask] = math.nan
        ids[~mask] = 2**40
        if kept is not None:
            kept[~mask] = 2**40
    hidden_dtype = dtype if case.hidden_dtype is None else getattr(torch, case.hidden_dtype)
    return LinearInputs(
        place(hidden.to(hidden_dtype), case.layout).tensor,
        place(weight.to(dtype), case.weight_layout).tensor,
        None if bias is None else bias.to(dtype),
        ids,
        mask,
        draw_temperature(case.temperature, case.shape, g),
        kept,
    )


@st.composite
def head_sizes(draw: Any) -> tuple[int, int, int]:
    """Rows, hidden size, vocabulary."""
    V = draw(st.one_of(st.integers(1, 70), st.sampled_from(_VOCABULARIES)))
    count = draw(st.sampled_from([n for n in _COUNTS if n * V <= 50_000]))
    H = draw(st.sampled_from([h for h in _HIDDEN_SIZES if count * V * h <= 2_000_000 and V * h <= 300_000]))
    return count, H, V


@st.composite
def linear_cases(draw: Any, matrix: bool = False, nan_rows: bool = False) -> LinearCase:
    """``matrix``: token_ids are [B, T]."""
    count, H, V = draw(head_sizes())
    shape = draw(leading_shape(count))
    if matrix:
        shape = (1, count) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    dtype = draw(st.sampled_from(DTYPES))
    return LinearCase(
        shape=shape,
        H=H,
        V=V,
        dtype=dtype,
        hidden_dtype=draw(st.sampled_from([None, None, None, "float32", "bfloat16"])),
        hidden=draw(st.sampled_from(HIDDEN)),
        layout=draw(st.sampled_from(LAYOUTS)),
        weight_layout=draw(st.sampled_from(("contiguous", "contiguous", "offset", "sliced", "stepped", "transposed"))),
        trainable=draw(
            st.sampled_from(
                [(True, False, False), (True, True, True), (False, True, False), (False, False, True), (False,) * 3]
            )
        ),
        mask=draw(st.sampled_from(MASKS)),
        temperature=draw(st.sampled_from(TEMPERATURES[:-1])),
        bias=draw(st.sampled_from(["none", "none", "normal", "banned", "all banned", "far"])),
        softcap=draw(st.sampled_from([None, None, 4.0, 30.0])),
        logit_scale=draw(st.sampled_from([1.0, 1.0, 0.25, 3.0])),
        kept=draw(st.sampled_from([None, None, None, 1, 2, 5, 17, 64])),
        chunk_tokens=draw(st.sampled_from([None, None, 1, 7, 16, 1000])),
        nan_row=nan_rows and draw(st.integers(0, 9)) == 9,
        seed=draw(st.integers(0, 2**31)),
    )


# -------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class TokenCase:
    """[B, T] inputs of the losses and of gae, each in a layout of its own."""

    B: int
    T: int
    dtype: str = "float32"
    other_dtype: str | None = None  # of all but the first input
    layouts: tuple[str, ...] = ("contiguous",)
    scale: float = 1.0
    offset: float = 0.0
    mask: str = "all"
    seed: int = 0


class Tokens:
    """Makes the inputs of a case one after another."""

    def __init__(self, case: TokenCase) -> None:
        self.case, self.g, self.made = case, generator(case.seed), 0
        mask = draw_mask(case.mask, (case.B, case.T), self.g)
        assert mask is not None
        self.mask = place(mask, self.layout()).tensor

    def layout(self) -> str:
        self.made += 1
        layouts = self.case.layouts
        return layouts[self.made % len(layouts)]

    def normal(self) -> Tensor:
        return torch.randn(self.case.B, self.case.T, generator=self.g, dtype=torch.float64)

    def put(self, values: Tensor, dtype: str | None = None) -> Tensor:
        """[B, T] values, NaN where masked, in the dtype and the next layout of the case."""
        x = values.to(getattr(torch, dtype or self.case.other_dtype or self.case.dtype))
        return place(x.masked_fill(~self.mask, math.nan), self.layout()).tensor


@st.composite
def token_cases(draw: Any, longest: int = 20_000) -> TokenCase:
    if draw(st.integers(0, 12)) == 12:  # enough for several threads
        shapes = [(1, 16_385), (9, 4096), (2, 12_289), (64, 600), (130, 257), (16_385, 1)]
        B, T = draw(st.sampled_from([shape for shape in shapes if shape[1] <= longest]))
    else:
        B, T = draw(st.integers(0, 9)), draw(st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 129])))
    return TokenCase(
        B=B,
        T=T,
        dtype=draw(st.sampled_from(DTYPES)),
        other_dtype=draw(st.sampled_from([None, None, "float32", "float64"])),
        layouts=tuple(draw(st.lists(st.sampled_from(LAYOUTS[:-1]), min_size=1, max_size=4))),
        scale=draw(st.sampled_from([1.0, 1.0, 1e-6, 30.0])),
        offset=draw(st.sampled_from([0.0, 0.0, -1e4, 3.0])),
        mask=draw(st.sampled_from(MASKS[1:])),
        seed=draw(st.integers(0, 2**31)),
    )
