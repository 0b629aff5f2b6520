"""Sampling from an output layer: exact cuts and draws on every path, and bits that depend on the row alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from ppo_fast.ops import backends, linear_sample, linear_selected_logprobs
from ppo_fast.ops._noise import gumbel, philox

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_keys(n: int, seed: int = 0) -> Tensor:
    """Seeds and positions of any sign and size."""
    return torch.randint(-(2**63), 2**63 - 1, (n, 2), generator=torch.Generator().manual_seed(seed))


def normal_layer(n: int, H: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, H).to(dtype), (2 / math.sqrt(H) * torch.randn(V, H)).to(dtype)


def whole_numbers(n: int, H: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits are whole numbers within some 30 of 0, exact on every path, and most of them have equals."""
    return torch.randint(-2, 3, (n, H)).to(dtype), torch.randint(-2, 3, (V, H)).to(dtype)


# ------------------------------------------------------------------------------------------------------ by definition


class Drawn(NamedTuple):
    ids: Tensor
    logprobs: Tensor
    entropy: Tensor
    kept: Tensor  # [B, V] bool


def by_definition(
    logits: Tensor,  # [B, V] float64
    keys: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Drawn:
    """From a full sort in float64, ids breaking ties, and the noise of every token."""
    B, V = logits.shape
    temperature = torch.as_tensor(temperature, dtype=torch.float64).expand(B)[:, None]
    greedy = temperature == 0
    z = logits / temperature.masked_fill(greedy, 1.0)
    ordered, order = z.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1:
        cumulative = ordered.softmax(1).cumsum(1)
        before = torch.cat([torch.zeros(B, 1, dtype=torch.float64), cumulative[:, :-1]], 1)
        ordered[before >= top_p] = -torch.inf
    kept = torch.zeros(B, V, dtype=torch.bool).scatter_(1, order, ordered > -torch.inf)
    z = z.masked_fill(~kept, -torch.inf)
    noise = gumbel(keys, torch.arange((V + 3) // 4)[None], torch.float64).flatten(1)[:, :V]
    ids = (z + noise.masked_fill(greedy, 0.0)).argmax(1)
    logp = z.log_softmax(1)
    entropy = -(logp.exp() * logp.masked_fill(~kept, 0.0)).sum(1)
    return Drawn(ids, logp.gather(1, ids[:, None])[:, 0], entropy, kept)


def kept_mask(kept_ids: Tensor, V: int) -> Tensor:
    """[B, V] bool."""
    return torch.zeros(len(kept_ids), V + 1, dtype=torch.bool).scatter_(1, kept_ids % (V + 1), True)[:, :V]


def assert_drawn(got: tuple[Tensor, ...], expected: Drawn, tolerance: float = 2e-5) -> None:
    ids, logprobs, entropy, *kept = got
    assert torch.equal(ids, expected.ids)
    assert torch.allclose(logprobs.double(), expected.logprobs, rtol=1e-6, atol=tolerance)
    assert torch.allclose(entropy.double(), expected.entropy, rtol=1e-6, atol=tolerance)
    if kept:
        V = expected.kept.shape[1]
        assert torch.equal(kept_mask(kept[0], V), expected.kept)
        assert torch.equal((kept[0] >= 0).sum(1), expected.kept.sum(1))
        assert (kept[0].diff(dim=1)[kept[0][:, 1:] < 0] <= 0).all()  # filled up at the end


def test_philox_gives_the_published_words():
    """The known answers that come with Random123."""

    def words(*numbers: int) -> list[str]:
        x = [torch.tensor(number) for number in numbers]
        return [f"{int(word):08x}" for word in philox(tuple(x[:4]), tuple(x[4:]))]

    ones = 2**32 - 1
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    assert words(0, 0, 0, 0, 0, 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words(ones, ones, ones, ones, ones, ones) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    assert words(*pi) == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cut",
    [
        *({}, {"top_k": 1}, {"top_k": 7}, {"top_k": 300}, {"top_k": 3001}, {"top_p": 0.9}, {"top_p": 1e-9}),
        *({"top_k": 40, "top_p": 0.7}, {"top_k": 3000, "top_p": 0.999}, {"top_p": 0.5, "max_kept": 3001}),
    ],
    ids=str,
)
def test_exact_with_ties(cpu_backend, dtype, cut):
    """Sets, draws and values of logits that are exact on every path, each with many equals."""
    B, V = 35, 3001
    hidden, weight = whole_numbers(B, 6, V, dtype)
    bias = torch.randint(-2, 3, (V,)).to(dtype)
    keys, temperature = make_keys(B), 0.3 + 3 * torch.rand(B)
    temperature[::5] = 0
    if "top_k" in cut:
        cut = {"max_kept": V, **cut}
    logits = 0.5 * (hidden.double() @ weight.double().t() + bias.double())
    top_k = cut.get("top_k", min(cut.get("max_kept", 1024), V) if "top_p" in cut else None)
    expected = by_definition(logits, keys, temperature, top_k, cut.get("top_p", 1.0))
    got = linear_sample(
        *(hidden, weight),
        bias=bias,
        logit_scale=0.5,
        temperature=temperature,
        keys=keys,
        return_entropy=True,
        return_kept=bool(cut),
        **cut,
    )
    assert got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_drawn(got, expected)
    if cut:
        assert got[3].shape == (B, top_k)
        values = logits.gather(1, got[3].clamp(min=0))
        step = values.diff(dim=1)
        both = got[3][:, 1:] >= 0
        assert (step[both] <= 0).all()  # most probable first, the lower id first among equals
        assert (got[3].diff(dim=1)[both & (step == 0)] > 0).all()


@pytest.mark.parametrize("top_k", [1, 10, 500])
@pytest.mark.parametrize("order", ["ascending", "descending", "equal", "two values"])
def test_exact_in_any_order(cpu_backend, threads, top_k, order):
    """Logits that arrive in the worst order for a list of candidates, and ones that no floor can tell apart."""
    V = 6000
    values = torch.arange(V) / 512
    values = {"descending": -values, "equal": 0 * values, "two values": (torch.arange(V) % 3 == 1).float()}.get(
        order, values
    )
    keys = make_keys(2)
    expected = by_definition(values.double().expand(2, V), keys, 2.0, top_k)
    for count in (1, 3):
        threads(count)
        got = linear_sample(
            *(torch.ones(2, 1), values[:, None]),
            temperature=2.0,
            top_k=top_k,
            keys=keys,
            return_entropy=True,
            return_kept=True,
        )
        assert_drawn(got, expected)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("cut", [{}, {"top_k": 50}, {"top_p": 0.8}], ids=str)
def test_values_are_as_exact_as_pytorch(cpu_backend, as_exact_as, dtype, cut):
    B, H, V = 33, 257, 5003
    hidden, weight = normal_layer(B, H, V, dtype)
    bias, temperature = torch.randn(V).to(dtype), 0.5 + torch.rand(B)
    got = linear_sample(
        *(hidden, weight),
        bias=bias,
        softcap=5.0,
        logit_scale=0.8,
        temperature=temperature,
        keys=make_keys(B),
        return_entropy=True,
        return_kept=bool(cut),
        **cut,
    )

    def values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        z = (hidden.to(dtype) @ weight.to(dtype).t() + bias.to(dtype)) * 0.8
        z = 5.0 * torch.tanh(z / 5.0) / temperature.to(dtype)[:, None]
        if cut:
            z = z.masked_fill(~kept_mask(got[3], V), -torch.inf)
        logp = z.log_softmax(1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(1)
        return logp.gather(1, got[0][:, None])[:, 0], entropy

    for x, single, exact in zip(got[1:3], values(torch.float32), values(torch.float64), strict=True):
        as_exact_as(x, single, exact, times=2)


def test_a_share_of_one_keeps_everything(cpu_backend):
    hidden, weight = normal_layer(5, 16, 2000, torch.float32)
    plain = linear_sample(hidden, weight, keys=make_keys(5), return_entropy=True)
    for same in (
        linear_sample(hidden, weight, keys=make_keys(5), top_p=1, return_entropy=True),
        linear_sample(hidden, weight, keys=make_keys(5), top_p=1.0, max_kept=3, return_entropy=True),
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    for cut in ({"top_k": 5000}, {"top_k": 2000, "top_p": 1.0}):
        ids, logprobs, entropy = linear_sample(
            hidden, weight, keys=make_keys(5), max_kept=2000, return_entropy=True, **cut
        )
        assert torch.equal(ids, plain[0])
        assert torch.allclose(logprobs, plain[1], atol=1e-5)
        assert torch.allclose(entropy, plain[2], atol=1e-5)


def test_a_share_is_of_the_tokens_that_max_kept_leaves(cpu_backend):
    """As the docstring says: top-p implies top_k = max_kept."""
    V = 400
    arguments = {"hidden": torch.ones(1, 1), "weight": torch.zeros(V, 1), "keys": make_keys(1), "return_kept": True}
    for max_kept, kept in ((100, 50), (1000, 200)):
        got = linear_sample(**arguments, top_p=0.5, max_kept=max_kept)[2]
        assert got.shape == (1, min(max_kept, V))
        assert torch.equal(got[0, :kept], torch.arange(kept))
        assert (got[0, kept:] == -1).all()
    same = linear_sample(**arguments, top_p=0.5, max_kept=V, top_k=100)[2]
    assert torch.equal(same[0, :51], torch.tensor([*range(50), -1]))
    with pytest.raises(ValueError, match="top_k must be at most max_kept, 100, got 101"):
        linear_sample(**arguments, top_k=101, max_kept=100)


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.4}], ids=str)
def test_temperature_zero_takes_the_first_of_the_largest(cpu_backend, cut):
    logits = torch.tensor([[0.0, 3, 3, 1, 3], [2, 2, 2, 2, 2], [-1, -2, -3, -4, 0]])
    for temperature in (0, 0.0, torch.tensor(0), torch.zeros(3)):
        ids, logprobs = linear_sample(torch.eye(3), logits.t(), temperature=temperature, keys=make_keys(3), **cut)
        assert ids.tolist() == [1, 0, 4]
        if not cut:
            assert torch.allclose(logprobs, logits.log_softmax(1).amax(1), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [{"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_kept_sets_score_the_same(cpu_backend, dtype, cut):
    """What training re-scores on the set is the log-prob that was sampled."""
    hidden, weight = normal_layer(40, 64, 3000, dtype)
    layer = {
        "bias": torch.randn(3000).to(dtype),
        "softcap": 4.0,
        "logit_scale": 1.5,
        "temperature": 0.5 + torch.rand(40),
    }
    ids, logprobs, entropy, kept_ids = linear_sample(
        hidden, weight, **layer, keys=make_keys(40), return_entropy=True, return_kept=True, **cut
    )
    scored = linear_selected_logprobs(hidden, weight, ids, **layer, kept_ids=kept_ids, return_entropy=True)
    for a, b in zip(scored, (logprobs, entropy), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- the distribution


def chi_square(ids: Tensor, probabilities: Tensor, smallest: float) -> float:
    """How probable deviations as large as those of the ids are; tokens are joined in order of probability until each
    bin expects ``smallest`` draws."""
    n = len(ids)
    ordered, order = probabilities.sort(descending=True)
    bins = torch.empty_like(order)
    bins[order] = (ordered.cumsum(0) * n / smallest).ceil().long()
    bins = bins.unique(return_inverse=True)[1]
    count = int(bins.max()) + 1
    expected = torch.zeros(count, dtype=torch.float64).index_add_(0, bins, probabilities * n)
    seen = torch.bincount(bins[ids], minlength=count).double()
    enough = expected >= smallest / 2
    statistic = ((seen - expected).square() / expected)[enough].sum()
    assert enough.sum() > 50
    return float(torch.special.gammaincc(torch.as_tensor((int(enough.sum()) - 1) / 2.0).double(), statistic / 2))


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=str)
def test_the_distribution_over_a_large_vocabulary(cut):
    """Chi-square of one row drawn many times; without a cut half of the bins are tail, of thousands of tokens each."""
    V, n = 151_936, 6_400 if cut else 12_800
    hidden, weight = torch.ones(1, 2), 2.5 * torch.randn(V, 2, generator=torch.Generator().manual_seed(3))
    draw = torch.arange(n)
    keys = torch.stack([draw // 100, draw % 100], 1)
    ids = linear_sample(hidden.expand(n, 2), weight, keys=keys, **cut)[0]
    logits = (hidden.double() @ weight.double().t())[0]
    if cut:
        kept = linear_sample(hidden, weight, keys=keys[:1], return_kept=True, **cut)[2][0]
        kept = kept[kept >= 0]
        logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
    probabilities = logits.softmax(0)
    assert (probabilities[ids] > 0).all()
    assert chi_square(ids, probabilities, 50) > 1e-3


def test_equal_tokens_are_equally_likely():
    """151,936 of them: whatever the draw's resolution, every token and every lane has its share."""
    V, n = 151_936, 6_400
    keys = torch.stack([torch.arange(n), torch.full((n,), 5)], 1)
    ids, logprobs = linear_sample(torch.zeros(n, 1), torch.zeros(V, 1), keys=keys)
    assert torch.allclose(logprobs, torch.full((n,), -math.log(V)), atol=1e-5, rtol=0)
    for bins in (ids % 64, ids * 64 // V):
        seen = torch.bincount(bins, minlength=64).double()
        statistic = ((seen - n / 64).square() / (n / 64)).sum()
        assert float(torch.special.gammaincc(torch.tensor(31.5).double(), statistic / 2)) > 1e-3
    repeats = n - len(ids.unique())
    assert abs(repeats - n**2 / (2 * V)) < 5 * math.sqrt(n**2 / (2 * V))


# ------------------------------------------------------------------------------------------------- bits of the C++ path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "max_kept": 60}], ids=str)
def test_a_row_does_not_depend_on_the_others(isa, threads, dtype, cut):
    """Batches split, merged, and in another order; any number of threads; greedy rows and wild ones among them."""
    B, V = 40, 1999
    hidden, weight = normal_layer(B, 61, V, dtype)
    keys, temperature = make_keys(B), 0.3 + torch.rand(B)
    temperature[3] = 0
    hidden[5] *= 1000

    def draw(rows: Any) -> tuple[Tensor, ...]:
        return linear_sample(
            *(hidden[rows], weight),
            temperature=temperature[rows],
            keys=keys[rows],
            return_entropy=True,
            return_kept=bool(cut),
            **cut,
        )

    threads(1)
    alone = [torch.cat(x) for x in zip(*(draw(slice(i, i + 1)) for i in range(B)), strict=True)]
    mixed = torch.randperm(B)
    for count in (1, 2, 3):
        threads(count)
        for rows in (slice(0, B), slice(0, 17), slice(7, 23), slice(4, 6), mixed):
            assert all(torch.equal(x, y[rows]) for x, y in zip(draw(rows), alone, strict=True)), (count, rows)


def test_a_row_without_a_distribution_leaves_the_others_alone(isa):
    hidden, weight = normal_layer(20, 8, 3000, torch.float32)
    keys = make_keys(20)
    for top_k in (0, 10):
        rest = (None, None, keys, None, 1.0, top_k, 1.0, True, top_k > 0)
        expected = torch.ops.ppo_fast.linear_sample(hidden, weight, *rest)
        broken = hidden.clone()
        broken[3, 0] = torch.nan
        got = torch.ops.ppo_fast.linear_sample(broken, weight, *rest)
        assert got[0][3] == 0
        assert got[1][3].isnan()
        others = torch.arange(20) != 3
        assert all(torch.equal(x[others], y[others]) for x, y in zip(got, expected, strict=True) if len(x))


@pytest.mark.skipif(backends.available()[:2] == ["eager"], reason="needs the C++ extension")
@pytest.mark.parametrize(("n", "V", "cut"), [(1100, 60, {}), (70, 150_000, {"top_k": 150_000, "max_kept": 150_000})])
def test_groups_of_rows_change_no_bit(n, V, cut):
    """More rows than share a pass over the weight, and lists so long that few rows do."""
    hidden, weight = normal_layer(n, 4, V, torch.float32)
    keys = make_keys(n)
    whole = linear_sample(hidden, weight, keys=keys, **cut)
    for i in (0, 31, n - 1):
        alone = linear_sample(hidden[i : i + 1], weight, keys=keys[i : i + 1], **cut)
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(whole, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(isa, dtype):
    hidden, weight = normal_layer(7, 63, 700, dtype)
    keys = make_keys(7)
    expected = linear_sample(hidden, weight, keys=keys, top_k=20)
    for h in (hidden.t().contiguous().t(), hidden.repeat(1, 2)[:, :63], hidden.repeat_interleave(2, 0)[::2]):
        for w in (weight.t().contiguous().t(), weight.repeat(1, 3)[:, 63:126], weight.repeat_interleave(2, 0)[::2]):
            got = linear_sample(h, w, keys=keys.t().contiguous().t(), top_k=20)
            assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


# ------------------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("cut", [{}, {"top_k": 8}, {"top_p": 0.9}], ids=str)
def test_a_banned_token_is_never_drawn(cpu_backend, cut):
    n = 400
    bias = torch.zeros(7)
    bias[[0, 1, 4]] = -torch.inf
    ids, logprobs, entropy, *kept = linear_sample(
        *(torch.zeros(n, 2), torch.zeros(7, 2)),
        bias=bias,
        keys=make_keys(n),
        return_entropy=True,
        return_kept=bool(cut),
        **cut,
    )
    assert ids.unique().tolist() == [2, 3, 5, 6]
    assert torch.allclose(logprobs, torch.full((n,), -math.log(4)))
    assert torch.allclose(entropy, torch.full((n,), math.log(4)))
    if kept:
        assert kept[0][0].tolist() == [2, 3, 5, 6, -1, -1, -1]


@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_is_an_error(cpu_backend, cut, value):
    hidden, weight = torch.zeros(3, 1), torch.zeros(5, 1)
    bias = torch.full((5,), value) if value == -math.inf else torch.tensor([0, 0, value, 0, 0])
    with pytest.raises(
        ValueError, match=r"hidden and weight .* the logits of row 0 hold NaN or \+inf, or are all -inf"
    ):
        linear_sample(hidden, weight, bias=bias, keys=make_keys(3), return_entropy=True, **cut)
    hidden[1] = math.nan
    with pytest.raises(ValueError, match="row 1"):
        linear_sample(hidden, weight, keys=make_keys(3), **cut)


@pytest.mark.parametrize("cut", [{}, {"top_k": 100}, {"top_p": 0.9}], ids=str)
def test_extreme_logits_and_temperatures(cpu_backend, cut):
    """Certain tokens, logits far from 0, nearly equal probabilities, and scales at either end of float32."""
    keys = make_keys(4)
    weight = torch.stack([torch.arange(1000) / 1000, torch.ones(1000)], 1)
    hidden = torch.tensor([[1.0, 0.0], [1.0, -1e4], [1e5, 0.0], [1e-6, 3e4]])
    logits = hidden.double() @ weight.double().t()
    for temperature in (1.0, 1e-3, 1e-30, 1e30):
        ids, logprobs, entropy = linear_sample(
            hidden, weight, temperature=temperature, keys=keys, return_entropy=True, **cut
        )
        assert (logprobs <= 0).all()
        assert (entropy >= 0).all()
        assert ids[2] == 999 or temperature == 1e30
        if temperature == 1e-30:
            assert ids[0] == 999
            assert logprobs[0] == entropy[0] == 0
        top_k = cut.get("top_k", 1000 if cut else None)
        expected = by_definition(logits[:1], keys[:1], temperature, top_k, cut.get("top_p", 1.0))
        assert abs(float(logprobs[0] - expected.logprobs)) < 1e-4 or int(ids[0]) != int(expected.ids)


@pytest.mark.parametrize("V", [1, 2, 3, 5, 31, 191, 193])
def test_small_vocabularies(cpu_backend, V):
    hidden, weight = whole_numbers(3, 2, V, torch.float32)
    keys = make_keys(3)
    logits = hidden.double() @ weight.double().t()
    assert_drawn(linear_sample(hidden, weight, keys=keys, return_entropy=True), by_definition(logits, keys))
    got = linear_sample(hidden, weight, keys=keys, top_p=0.7, return_entropy=True, return_kept=True)
    assert_drawn(got, by_definition(logits, keys, top_p=0.7))


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}], ids=str)
def test_no_rows(cpu_backend, cut):
    got = linear_sample(
        torch.zeros(0, 3),
        torch.zeros(5, 3),
        keys=torch.zeros(0, 2, dtype=torch.int64),
        return_entropy=True,
        return_kept=bool(cut),
        **cut,
    )
    assert [tuple(x.shape) for x in got] == [(0,), (0,), (0,), *([(0, 3)] if cut else [])]


# ------------------------------------------------------------------------------------------------------------- promises


def test_every_path_is_named(cpu_backend):
    assert backends()["linear_sample"]["cpu"] == cpu_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(opcheck, dtype):
    hidden, weight = normal_layer(3, 4, 30, dtype)
    for top_k, top_p in ((0, 1.0), (5, 0.9)):
        arguments = (hidden, weight, None, torch.ones(3), make_keys(3), None, 1.0, top_k, top_p, True, top_k > 0)
        opcheck(torch.ops.ppo_fast.linear_sample.default, arguments)


def test_compiles_into_one_graph_for_any_number_of_rows(cpu_backend):
    weight = normal_layer(1, 4, 300, torch.float32)[1]
    counter = CompileCounter()

    def step(hidden: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        return linear_sample(torch.relu(hidden), weight, keys=keys, temperature=0.7, top_p=0.9, return_kept=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for n in (3, 5, 16):
            hidden, keys = torch.randn(n, 4), make_keys(n)
            assert all(torch.equal(x, y) for x, y in zip(compiled(hidden, keys), step(hidden, keys), strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_gradient_is_refused(name):
    arguments = {"hidden": torch.randn(2, 3), "weight": torch.randn(5, 3), "bias": torch.randn(5)}
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires grad, but linear_sample has no derivative"):
        linear_sample(**arguments, keys=make_keys(2))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not linear_sample(**arguments, keys=make_keys(2))[1].requires_grad


def test_autocast_and_mixed_dtypes_compute_in_the_dtype_of_the_weight(cpu_backend):
    hidden, weight = normal_layer(4, 16, 300, torch.float32)
    keys = make_keys(4)
    expected = linear_sample(hidden.bfloat16(), weight.bfloat16(), keys=keys)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_sample(hidden, weight, keys=keys)
    for got in (cast, linear_sample(hidden, weight.bfloat16(), keys=keys)):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_what_cannot_be_kept():
    with pytest.raises(ValueError, match="return_kept needs top_k, or top_p below 1"):
        linear_sample(torch.zeros(2, 3), torch.zeros(5, 3), keys=make_keys(2), top_p=1.0, return_kept=True)


def test_direct_calls_are_checked(isa):
    """torch.ops.ppo_fast.linear_sample without its wrapper: an error, never a read or a write out of bounds."""
    right = [torch.zeros(2, 3), torch.zeros(5, 3), None, None, make_keys(2), None, 1.0, 0, 1.0, False, False]
    torch.ops.ppo_fast.linear_sample(*right)
    wrong = {
        "hidden": [(0, torch.zeros(2, 4)), (0, torch.zeros(2, 3).double())],
        "bias": [(2, torch.zeros(4)), (2, torch.zeros(5).double())],
        "temperature": [(3, torch.ones(3))],
        "keys": [(4, make_keys(3)), (4, make_keys(2).int()), (4, make_keys(2).t())],
        "top_k": [(7, 6), (7, -1), (8, 0.5), (10, True)],
        "top_p": [(8, 0.0), (8, 1.5), (8, math.nan)],
    }
    for name, values in wrong.items():
        for place, value in values:
            with pytest.raises(ValueError, match=f"{name} must be"):
                torch.ops.ppo_fast.linear_sample(*right[:place], value, *right[place + 1 :])
