from __future__ import annotations

import math

import pytest
import torch

from ppo_fast.ops import group_advantages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_values(dtype, correction, scale):
    scores = torch.randn(12).to(dtype)
    got = group_advantages(scores, 4, correction=correction, scale=scale)
    expected = []
    for group in scores.double().split(4):
        std = group.std(correction=correction) + 1e-4 if scale == "std" else 1.0
        expected.append((group - group.mean()) / std)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(got.double(), torch.cat(expected), rtol=4 * torch.finfo(got.dtype).eps, atol=1e-12)


def test_by_hand():
    """0 0 1 1: mean 1/2, population std 1/2, sample std sqrt(1/3)."""
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert torch.equal(group_advantages(scores, 4, eps=0.0), torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    by_sample = group_advantages(scores, 4, correction=1, eps=0.0)
    assert torch.allclose(by_sample, torch.tensor([-1.0, -1.0, 1.0, 1.0]) * math.sqrt(3) / 2)
    assert torch.allclose(group_advantages(scores, 4), torch.tensor([-1.0, -1.0, 1.0, 1.0]) * 0.5 / 0.5001)
    assert torch.equal(group_advantages(scores, 4, scale="none"), torch.tensor([-0.5, -0.5, 0.5, 0.5]))


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
def test_equal_scores_give_exactly_zero(value, scale):
    """The float64 mean of seven equal numbers may miss them by a rounding; without eps that became +-1."""
    scores = torch.cat([torch.full((7,), value, dtype=torch.float64), torch.arange(7.0, dtype=torch.float64)])
    got = group_advantages(scores, 7, eps=0.0, scale=scale)
    assert torch.equal(got[:7], torch.zeros(7, dtype=torch.float64))
    assert got[7:].abs().min() == 0  # the middle of 0..6
    assert got[7:].count_nonzero() == 6


@pytest.mark.parametrize("correction", [0, 1])
def test_groups_of_one(correction):
    assert not group_advantages(torch.randn(3), 1, correction=correction, eps=0.0).any()


def test_nan_stays_in_its_group():
    scores = torch.tensor([torch.nan, 1.0, 0.0, 1.0])
    assert group_advantages(scores, 2).isnan().tolist() == [True, True, False, False]


def test_no_scores_and_detached():
    assert group_advantages(torch.zeros(0), 4).shape == (0,)
    assert not group_advantages(torch.randn(4, requires_grad=True), 2).requires_grad


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((torch.zeros(6), 4), {}, "scores must hold whole groups of group_size = 4, got 6"),
        ((torch.zeros(2, 3), 3), {}, r"scores must have the shape \[B\], got \[2, 3\]"),
        ((torch.zeros(6), 0), {}, "group_size must be an integer >= 1, got 0"),
        ((torch.zeros(6), 2.0), {}, "group_size must be an integer >= 1, got 2.0"),
        ((torch.zeros(6), 2), {"scale": "batch"}, "scale must be one of 'std', 'none', got 'batch'"),
        ((torch.zeros(6), 2), {"correction": 2}, "correction must be 0 or 1, got 2"),
        ((torch.zeros(6), 2), {"eps": -1.0}, "eps must be finite and >= 0, got -1.0"),
        ((torch.zeros(6), 2), {"eps": math.nan}, "eps must be finite and >= 0"),
    ],
)
def test_arguments(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments, **keywords)
    with pytest.raises(TypeError, match="scores must be float32"):
        group_advantages(torch.zeros(6, dtype=torch.long), 2)
