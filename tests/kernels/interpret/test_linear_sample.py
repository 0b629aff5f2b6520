"""The race over the vocabulary in Triton, interpreted: noise, draws and log-probs against plain PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

import ppo_fast.ops as ops
from ppo_fast.kernels import linear_sample as kernels
from ppo_fast.ops._noise import gumbel

# The interpreter computes the branch that tl.where drops, too, and NumPy says so where that is 0 * inf or log(0).
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@triton.jit
def _noise_kernel(keys_ptr, out_ptr, N: tl.constexpr, M: tl.constexpr):
    rows = tl.arange(0, N)[:, None]
    blocks = tl.broadcast_to(tl.arange(0, M)[None, :], (N, M))
    noise = kernels._noise(tl.load(keys_ptr + 2 * rows), tl.load(keys_ptr + 2 * rows + 1), blocks)
    tl.store(out_ptr + rows * 4 * M + tl.arange(0, 4 * M)[None, :], noise)


def make_keys(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (n, 2), generator=generator)


def test_noise_is_that_of_the_other_paths() -> None:
    """Every bit of seed and position counts; float32 near float64."""
    keys, out = make_keys(16), torch.empty(16, 4096)
    _noise_kernel[(1,)](keys, out, 16, 1024)
    exact = gumbel(keys, torch.arange(1024).expand(16, 1024), torch.float64).flatten(1)
    assert float((out - exact).abs().max()) < 4e-6


def make(n: int, H: int, V: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * V)
    hidden = torch.randn(n, H, generator=generator)
    return hidden.to(dtype), (3 / math.sqrt(H) * torch.randn(V, H, generator=generator)).to(dtype)


def keyed(z: Tensor, keys: Tensor) -> Tensor:
    """The race's keys in float64, of logits divided by the temperature."""
    V = z.shape[1]
    blocks = torch.arange(-(-V // 4)).expand(z.shape[0], -1)
    return z + gumbel(keys, blocks, torch.float64).flatten(1)[:, :V]


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 257), (18, 64, 501)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_are_the_argmax_of_the_keys(
    accurate: Callable[..., None], dtype: torch.dtype, shape: tuple[int, int, int], shaped: bool
) -> None:
    n, H, V = shape
    hidden, weight = make(n, H, V, dtype)
    keys = make_keys(n)
    bias, cap, scale = (torch.randn(V), 5.0, 0.8) if shaped else (None, None, 1.0)
    temperature = torch.rand(n) + 0.5 if shaped else None

    def logits(wide: torch.dtype) -> Tensor:
        z = hidden.to(wide) @ weight.to(wide).T
        if shaped:
            z = cap * torch.tanh((z + bias.to(wide)) * scale / cap) / temperature.to(wide)[:, None]
        return z

    with ops.backends.force("triton"):
        ids, logprobs, entropy = ops.linear_sample(
            hidden,
            weight,
            bias=bias,
            softcap=cap,
            logit_scale=scale,
            temperature=1.0 if temperature is None else temperature,
            keys=keys,
            return_entropy=True,
        )
    race = keyed(logits(torch.float64), keys)
    first = race.gather(1, ids[:, None])[:, 0]
    assert bool((first >= race.max(1).values - 1e-4).all())  # the winner, or a rounding away from it
    assert int((ids != race.argmax(1)).sum()) <= n // 10
    results = []
    for wide in (torch.float64, torch.float32):
        table = logits(wide).log_softmax(1)
        results.append((table.gather(1, ids[:, None])[:, 0], -(table.exp() * table).sum(1)))
    for got, exact, theirs in zip((logprobs, entropy), *results, strict=True):
        accurate(got, exact, theirs, unit=True)
    assert bool((logprobs <= 0).all() and (entropy >= 0).all())


def test_temperature_0_takes_the_lowest_of_the_most_probable() -> None:
    hidden, weight = make(4, 16, 300)
    best = (hidden @ weight.T).argmax(1)
    weight = torch.cat([weight, weight[best]])  # equal logits at higher ids
    temperature = torch.tensor([0.0, 0.0, 1.0, 0.0])
    ids, logprobs, _ = kernels.draw(hidden, weight, None, temperature, make_keys(4), None, 1.0)
    greedy = temperature == 0
    assert torch.equal(ids[greedy], best[greedy])
    exact = (hidden.double() @ weight.double().T).log_softmax(1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=2e-6)


def test_a_draw_knows_nothing_of_the_other_rows_or_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = make(20, 16, 1001)
    keys = make_keys(20)
    whole = kernels.draw(hidden, weight, None, None, keys, None, 1.0)
    alone = [kernels.draw(hidden[i : i + 1], weight, None, None, keys[i : i + 1], None, 1.0)[0] for i in range(3)]
    assert torch.equal(torch.cat(alone), whole[0][:3])
    again = kernels.draw(hidden, weight, None, None, keys, None, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    monkeypatch.setattr(kernels.head_scores, "_PROGRAMS", 1)
    assert torch.equal(kernels.draw(hidden, weight, None, None, keys, None, 1.0)[0], whole[0])


def test_far_logits_keep_their_noise() -> None:
    """Keys are differences from the maximum: at -1e4 noise of 1e-3 would be lost."""
    hidden, weight = make(40, 16, 64)
    near, keys = 0.01 * weight, make_keys(40)
    shift = torch.full((64,), -1e4)
    drawn = kernels.draw(hidden, near, shift, None, keys, None, 1.0)[0]
    race = keyed(((hidden @ near.T) + shift).double(), keys)
    assert torch.equal(drawn, race.argmax(1))


def test_distribution() -> None:
    """Chi-square over 8 tokens of unequal probability."""
    n, V = 1500, 8
    z = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -2.0, 1.5, 0.0])
    keys = torch.stack([torch.full((n,), 5), torch.arange(n)], 1)
    ids = kernels.draw(torch.ones(n, 1), z[:, None].contiguous(), None, None, keys, None, 1.0)[0]
    expected = n * z.double().softmax(0)
    statistic = float(((torch.bincount(ids, minlength=V) - expected) ** 2 / expected).sum())
    assert statistic < 24.3  # 0.1% of the distribution with 7 degrees of freedom lie above


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_without_a_distribution(value: float) -> None:
    """Direct: on CPU tensors the public op raises."""
    hidden, weight = make(3, 16, 300)
    keys = make_keys(3)
    clean = kernels.draw(hidden, weight, None, None, keys, None, 1.0)
    broken = hidden.clone()
    broken[1, 0] = value
    ids, logprobs, entropy = kernels.draw(broken, weight, None, None, keys, None, 1.0)
    assert int(ids[1]) == 0
    assert bool(logprobs[1].isnan() and entropy[1].isnan())
    assert torch.equal(ids[[0, 2]], clean[0][[0, 2]])
    ids, logprobs, _ = kernels.draw(hidden, weight, torch.full((300,), -torch.inf), None, keys, None, 1.0)
    assert not bool(ids.any())
    assert bool(logprobs.isnan().all())


@pytest.mark.parametrize("where", [0, 63, 64, 500])
def test_peaked_rows(where: int) -> None:
    """One logit 40 above the rest, in the first tile, on its border, in the last: drawn, and certain to rounding."""
    hidden, weight = make(30, 16, 501)
    bias = torch.zeros(501)
    bias[where] = 40.0
    ids, logprobs, entropy = kernels.draw(hidden, 0.1 * weight, bias, None, make_keys(30), None, 1.0)
    assert bool((ids == where).all())
    assert bool(((logprobs <= 0) & (logprobs > -1e-6)).all())
    assert bool(((entropy >= 0) & (entropy < 1e-6)).all())


def test_banned_tokens_are_never_drawn() -> None:
    hidden, weight = make(30, 16, 300)
    bias = torch.zeros(300)
    bias[:290] = -torch.inf
    ids, logprobs, _ = kernels.draw(hidden, weight, bias, None, make_keys(30), None, 1.0)
    assert bool((ids >= 290).all() and logprobs.isfinite().all())


def test_no_rows_and_the_other_cuts() -> None:
    """Top-k and top-p stay plain PyTorch around the same noise."""
    hidden, weight = make(3, 16, 300)
    assert [x.shape for x in kernels.draw(hidden[:0], weight, None, None, make_keys(0), None, 1.0)] == [(0,)] * 3
    with ops.backends.force("triton"):
        assert ops.backends()["linear_sample"] == {"cpu": "triton", "cuda": "triton"}
        cut = ops.linear_sample(hidden, weight, keys=make_keys(3), top_k=5, return_kept=True)
    with ops.backends.force("eager"):
        plain = ops.linear_sample(hidden, weight, keys=make_keys(3), top_k=5, return_kept=True)
    for a, b in zip(cut, plain, strict=True):
        assert torch.equal(a, b)
