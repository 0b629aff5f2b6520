"""linear_sample: the kept set of a sort, the winner of the race among them, and its log-prob, all in float64.

Logits that are exact on every path ("whole" ones, most with equals) leave no room: the set, its order and the draw are
those of the definition. Others may be off by what roundings do to a logit, and tokens so close may change places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import backends, linear_sample
from ppo_fast.ops._noise import gumbel

from .harness import PATHS, examples, on_every_path, stat_of
from .oracle import TIMES, judge, same_bits, softmax_rows
from .strategies import (
    DTYPES,
    LAYOUTS,
    TEMPERATURES,
    draw_temperature,
    generator,
    head_sizes,
    place,
    temperatures,
)

# Whole logits times these are exact too.
_EXACT_SCALES = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class SampleCase:
    B: int
    H: int
    V: int
    dtype: str = "float32"
    hidden_dtype: str | None = None  # where it isn't the weight's
    logits: str = "whole"
    layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias: str = "none"
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: str = "one"
    top_k: int | None = None
    top_p: float | None = None
    max_kept: int = 1024
    return_entropy: bool = True
    nan_row: bool = False
    alone: int = 1  # rows that are drawn once more without the others
    seed: int = 0

    @property
    def exact(self) -> bool:
        return self.logits in ("whole", "few", "equal") and self.softcap is None and self.bias != "normal"

    @property
    def most(self) -> int | None:
        """The most tokens that are kept; None for all."""
        top_k = self.top_k
        if top_k is None and self.top_p is not None and self.top_p < 1:
            top_k = self.max_kept
        return None if top_k is None else min(top_k, self.V)


class SampleInputs(NamedTuple):
    hidden: Tensor  # [B, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    temperature: float | Tensor
    keys: Tensor  # [B, 2]


def sample_inputs(case: SampleCase) -> SampleInputs:
    g, dtype = generator(case.seed), getattr(torch, case.dtype)
    shapes = (case.B, case.H), (case.V, case.H)
    if case.logits in ("whole", "few", "equal"):
        most = {"whole": 2, "few": 1, "equal": 0}[case.logits]
        hidden, weight = (torch.randint(-most, most + 1, shape, generator=g).double() for shape in shapes)
        if case.logits == "few":
            weight[:, 1:] = 0.0
    else:
        hidden, weight = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
        weight *= {"normal": 3.0, "flat": 1e-3, "peaked": 30.0}[case.logits] / math.sqrt(case.H)
    bias = None
    if case.bias != "none":
        bias = torch.randint(-2, 3, (case.V,), generator=g).double()
        if case.bias == "normal":
            bias += torch.randn(case.V, generator=g, dtype=torch.float64)
        elif case.bias == "banned":
            bias[torch.rand(case.V, generator=g) > 0.3] = -math.inf
            bias[int(torch.randint(case.V, (), generator=g))] = 1.0
    if case.nan_row and case.B:
        hidden[case.B // 2] = math.nan
    if case.temperature == "some zero":
        temperature = 0.3 + torch.rand(case.B, generator=g)
        temperature[torch.rand(case.B, generator=g) < 0.4] = 0.0
    else:
        temperature = 0 if case.temperature == "zero" else draw_temperature(case.temperature, (case.B,), g)
    keys = torch.randint(-(2**63), 2**63 - 1, (case.B, 2), generator=g)
    hidden_dtype = dtype if case.hidden_dtype is None else getattr(torch, case.hidden_dtype)
    return SampleInputs(
        place(hidden.to(hidden_dtype), case.layout).tensor,
        place(weight.to(dtype), case.weight_layout).tensor,
        None if bias is None else bias.to(dtype),
        temperature,
        place(keys, "stepped").tensor,
    )


@st.composite
def sample_cases(draw: Any) -> SampleCase:
    B, H, V = draw(head_sizes())
    B = B if draw(st.integers(0, 30)) else 0
    counts = st.one_of(st.integers(1, 5), st.sampled_from([8, 16, 17, 50, 64, 200, 1000, V, max(1, V - 1)]))
    cut = draw(st.sampled_from(["none", "none", "top_k", "top_p", "both"]))
    top_k = draw(counts) if cut in ("top_k", "both") else None
    top_p = draw(st.sampled_from([0.5, 0.25, 0.75, 0.5, 0.9, 0.999, 1e-9, 0.1])) if cut in ("top_p", "both") else None
    logits = draw(st.sampled_from(["whole", "whole", "few", "equal", "equal", "normal", "normal", "flat", "peaked"]))
    equal = logits == "equal"  # all of them: a share of half may end exactly with a token
    max_kept = draw(st.one_of(st.just(1024), counts))
    return SampleCase(
        B=B,
        H=H,
        V=V,
        dtype=draw(st.sampled_from(DTYPES)),
        hidden_dtype=draw(st.sampled_from([None, None, None, "float32", "bfloat16"])),
        logits=logits,
        layout=draw(st.sampled_from(LAYOUTS)),
        weight_layout=draw(st.sampled_from(LAYOUTS)),
        bias=draw(st.sampled_from(["none", "banned"] if equal else ["none", "none", "whole", "normal", "banned"])),
        softcap=None if equal else draw(st.sampled_from([None, None, None, 4.0, 30.0])),
        logit_scale=draw(st.sampled_from([1.0, 1.0, *_EXACT_SCALES, 2.0])),
        temperature=draw(st.sampled_from(["zero", "some zero", *TEMPERATURES[:-1], "extreme"])),
        top_k=top_k,
        top_p=draw(st.sampled_from([None, 1.0])) if top_p is None else top_p,
        max_kept=max_kept if top_k is None else max(max_kept, min(top_k, V)),
        return_entropy=draw(st.booleans()),
        nan_row=draw(st.integers(0, 19)) == 19,
        alone=draw(st.sampled_from([1, 2, 3, 17, 33])),
        seed=draw(st.integers(0, 2**31)),
    )


class Rows:
    """Exact logits, the order of tokens by them, and what roundings may change."""

    def __init__(self, case: SampleCase, a: SampleInputs) -> None:
        self.case, self.a, self.stat = case, a, stat_of(case.dtype)
        self.eps = torch.finfo(self.stat).eps
        t = temperatures(a.temperature, self.stat, (case.B,))
        self.greedy = t == 0
        self.temperature = torch.where(self.greedy, 1.0, t)[:, None]
        self.logits = self.logits_in(torch.float64)  # [B, V]
        self.ordered, self.order = self.logits.sort(dim=1, descending=True, stable=True)
        blocks = torch.arange((case.V + 3) // 4)[None]
        self.noise = (
            gumbel(a.keys, blocks, torch.float64).flatten(1)[:, : case.V].masked_fill(self.greedy[:, None], 0.0)
        )
        # [B] what roundings do to a logit over the temperature, in units of the epsilon
        error = self._logit_error()
        largest = torch.where(self.logits.isfinite(), self.logits, 0.0).abs().amax(1)
        self.error = (error + 2 * largest) / self.temperature[:, 0].double()
        # [B, 1] how far apart two logits may be and still change places
        self.slack = 2 * TIMES * self.eps * (torch.zeros_like(error) if case.exact else error + 2 * largest)[:, None]

    def logits_in(self, dtype: torch.dtype) -> Tensor:
        """[B, V] at temperature 1."""
        case, a = self.case, self.a
        z = a.hidden.to(a.weight.dtype).to(dtype) @ a.weight.to(dtype).t()
        z = (z if a.bias is None else z + a.bias.to(dtype)) * case.logit_scale
        return z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)

    def _logit_error(self) -> Tensor:
        a = self.a
        hidden, weight = a.hidden.to(a.weight.dtype).double(), a.weight.double()
        # A chain of additions errs like a random walk.
        error = (hidden.square() @ weight.square().t()).sqrt() * max(1.0, math.sqrt(self.case.H) / 4)
        if a.bias is not None:
            bias = a.bias.double()
            error = error + (hidden @ weight.t()).abs() + torch.where(bias.isfinite(), bias, 0.0).abs()
        return error.amax(1) * self.case.logit_scale

    def check_kept(self, path: str, kept: Tensor) -> Tensor:
        """[B, V] bool, the set of ``kept [B, K]``: that of the definition, most probable first, the lower id first."""
        case, slack = self.case, self.slack
        assert kept.shape == (case.B, case.most), path
        inside = kept >= 0
        size = inside.sum(1)
        assert torch.equal(inside, torch.arange(case.most) < size[:, None]), f"{path}: ids after the filling"
        chosen = torch.zeros(case.B, case.V + 1, dtype=torch.bool)
        chosen = chosen.scatter_(1, torch.where(inside, kept, case.V), True)[:, :-1]
        assert torch.equal(chosen.sum(1), size), f"{path}: an id twice"
        values = self.logits.gather(1, kept.clamp(min=0))
        assert ((values.diff(dim=1) <= slack) | ~inside[:, 1:]).all(), f"{path}: not in order"
        if case.exact:
            wanted = self.order[:, : case.most].masked_fill(~inside, -1)
            assert torch.equal(kept, wanted), f"{path}: not the most probable ones, the lower id first"
        least = torch.where(inside, values, torch.inf).amin(1, keepdim=True)
        assert (chosen | (self.logits <= least + slack)).all(), f"{path}: a more probable token is left out"
        assert (chosen.logical_not() | (self.logits > -torch.inf)).all(), f"{path}: a banned token is kept"

        top = self.ordered[:, : case.most]
        fewest = most = (top > -torch.inf).sum(1)
        if case.top_p is not None and case.top_p < 1:
            d = (top - top[:, :1]) / self.temperature
            weights = d.exp()
            before = weights.cumsum(1) - weights
            # Equal weights add up without roundings: there "less than p" is to the letter.
            reach = torch.where(d.isfinite(), d, 0.0).abs().amax(1, keepdim=True)
            leeway = 1e-12 + 1e-15 * reach + 2 * slack / self.temperature
            leeway = torch.where(((weights == 1) | (weights == 0)).all(1, keepdim=True) & case.exact, 0.0, leeway)
            share = case.top_p * weights.sum(1, keepdim=True)
            fewest, most = (
                torch.minimum(most, (before < share * f).sum(1)) for f in ((-2 * leeway).exp(), (2 * leeway).exp())
            )
        assert ((fewest <= size) & (size <= most)).all(), f"{path}: {size} kept, should be {fewest} to {most}"
        return chosen

    def check_draw(self, path: str, ids: Tensor, chosen: Tensor) -> None:
        """The winner of the race; where that is certain, the id itself."""
        keyed = (self.logits / self.temperature + self.noise).masked_fill(~chosen, -torch.inf)
        slack = 2 * TIMES * self.eps * self.error
        if self.case.exact:
            slack = torch.where(self.greedy, 0.0, slack)
            assert torch.equal(ids[self.greedy], self.order[self.greedy, 0]), f"{path}: not the first of the largest"
        got = keyed.gather(1, ids[:, None])[:, 0]
        lead = keyed.amax(1) - got
        assert (lead <= slack).all(), f"{path}: ids {ids}, short of the best key by {lead} with {slack} allowed"


@examples
@given(case=sample_cases())
def test_linear_sample(case: SampleCase) -> None:
    a = sample_inputs(case)
    rows = Rows(case, a)
    whole = torch.ones(case.B, case.V, dtype=torch.bool)
    near = rows.logits_in(rows.stat) / rows.temperature.to(rows.stat)
    nothing = torch.zeros(case.B, dtype=torch.float64)
    some = torch.randperm(case.B, generator=generator(case.seed + 1))[: case.alone]

    def run(a: SampleInputs = a) -> tuple[Tensor, ...]:
        return linear_sample(
            a.hidden,
            a.weight,
            bias=a.bias,
            softcap=case.softcap,
            logit_scale=case.logit_scale,
            temperature=a.temperature,
            top_k=case.top_k,
            top_p=case.top_p,
            keys=a.keys,
            return_entropy=case.return_entropy,
            return_kept=case.most is not None,
            max_kept=case.max_kept,
        )

    broken = rows.logits.isnan().any(1)
    if broken.any():
        for path in PATHS:
            with backends.force(path), pytest.raises(ValueError, match=f"row {int(broken.nonzero()[0])} hold"):
                run()
        return
    for path, got in on_every_path("linear_sample", run):
        ids, logprobs = got[:2]
        chosen = whole if case.most is None else rows.check_kept(path, got[-1])
        rows.check_draw(path, ids, chosen)
        z = (rows.logits / rows.temperature).masked_fill(~chosen, -torch.inf)
        exact = softmax_rows(z, ids, nothing, nothing)
        yardstick = softmax_rows(near.masked_fill(~chosen, -torch.inf), ids, *(2 * [nothing.to(rows.stat)]))
        unavoidable = rows.eps * (rows.error + 1 + exact.entropy + exact.logprobs.abs())
        judge(f"{path}: log-probs", logprobs, exact.logprobs, yardstick.logprobs, unavoidable)
        assert not (logprobs > 0).any(), f"{path}: a log-prob above 0"
        if case.return_entropy:
            entropy = got[2]
            judge(f"{path}: entropy", entropy, exact.entropy, yardstick.entropy, unavoidable)
            assert not (entropy < 0).any(), f"{path}: an entropy below 0"
        if not case.B or path.endswith("eager"):
            continue
        temperature = a.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.expand(case.B)[some]
        alone = run(SampleInputs(a.hidden[some], a.weight, a.bias, temperature, a.keys[some]))
        for i, (x, y) in enumerate(zip(got, alone, strict=True)):
            assert same_bits(x[some], y), f"{path}: result {i} of a row depends on the others"
