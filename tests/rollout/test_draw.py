"""One token from one number: the inverse of the cumulative distribution, over small and real vocabularies."""

from __future__ import annotations

import pytest
import torch

from ppo_fast.rollout.generate import _draw

P = torch.tensor([0.0, 0.1, 0.0, 0.25, 0.5, 0.0, 0.15, 0.0], dtype=torch.float64)
ALMOST_ONE = 1 - 2.0**-53


def _drawn(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return _draw(logits.expand(len(uniforms), -1), temperature, uniforms)


def test_draw_counts_are_exact():
    """At a thousand evenly spaced numbers a token of probability 0.25 comes up 250 times."""
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = _drawn(P.log().float(), uniforms).bincount(minlength=8)
    assert counts.tolist() == [0, 100, 0, 250, 500, 0, 150, 0]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draw_counts_at_a_temperature(temperature):
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = _drawn(P.log().float(), uniforms, temperature).bincount(minlength=8)
    expected = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
    assert (counts - 1000 * expected).abs().max() <= 1


def test_draw_fits_by_chi_square():
    """Independent numbers, 40 tokens, 20,000 draws: the statistic's own 99.99% quantile at 39 degrees is 82.4."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, generator=generator)
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=generator)
    expected = 20_000 * logits.double().softmax(-1)
    counts = _drawn(logits, uniforms).bincount(minlength=40)
    statistic = float(((counts - expected).square() / expected).sum())
    assert 11.1 < statistic < 82.4


@pytest.mark.parametrize("uniform", [0.0, 2.0**-60, ALMOST_ONE])
def test_tokens_of_probability_zero_are_never_drawn(uniform):
    """At the edges too: numbers of [0, 1) whose product with the total rounds up to the total."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(500, 30, generator=generator)
    logits[:, :5] = -torch.inf
    logits[:, 20:] = -torch.inf
    logits[torch.rand(500, 30, generator=generator) < 0.3] = -torch.inf
    logits[:, 11] = 0.0  # one is left in every row
    ids = _draw(logits, 1.0, torch.full((500,), uniform, dtype=torch.float64))
    assert torch.isfinite(logits.gather(1, ids[:, None])).all()
    if uniform < 0.5:
        assert torch.equal(ids, (logits > -torch.inf).int().argmax(1))


def test_a_point_mass():
    logits = torch.full((7,), -torch.inf)
    logits[3] = 2.5
    assert _drawn(logits, torch.tensor([0.0, 0.5, ALMOST_ONE], dtype=torch.float64)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_draw(dtype):
    logits = torch.tensor([[0.1, 3.0, -1.0], [5.0, 4.9, 5.1]], dtype=dtype)
    assert _draw(logits, 0.0, torch.tensor([0.99, 0.0], dtype=torch.float64)).tolist() == [1, 2]


def test_draw_over_151936_tokens():
    """Equal logits: number (k + 1/2) / V is token k."""
    vocabulary = 151_936
    tokens = torch.tensor([0, 1, 2, 777, 75_968, 100_003, 151_930, 151_934, 151_935])
    uniforms = (tokens.double() + 0.5) / vocabulary
    assert torch.equal(_drawn(torch.zeros(vocabulary), uniforms), tokens)


def test_rare_tokens_among_151936_are_drawn_at_their_own_numbers():
    """Of probability below 1e-8, far into the vocabulary: float32 sums there are further apart than that."""
    logits = 3 * torch.randn(151_936, generator=torch.Generator().manual_seed(0))
    probabilities = logits.softmax(-1).double()
    cumulative = probabilities.cumsum(0)
    rare = (probabilities[100_000:] < 1e-8).nonzero()[:, 0] + 100_000
    assert rare.numel() > 50
    rare = rare[:50]
    uniforms = (cumulative[rare] - probabilities[rare] / 2) / cumulative[-1]
    assert torch.equal(_drawn(logits, uniforms), rare)
