"""The intervals against exact enumeration, classical formulas, and their own promise: 95% means 95%."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from ppo_fast.evaluation import statistics
from ppo_fast.evaluation.statistics import Interval, bootstrap_mean, cluster_codes, jackknife, student_quantile
from ppo_fast.evaluation.text import distinct_n, distinct_n_without_each


@pytest.mark.parametrize(
    ("confidence", "dof", "t"),  # from any printed table of Student's t
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 5, 2.57058), (0.95, 10, 2.22814), (0.99, 3, 5.84091),
     (0.95, 59, 2.00100), (0.80, 4, 1.53321)],
)  # fmt: skip
def test_student_quantile_matches_the_table(confidence: float, dof: int, t: float) -> None:
    assert student_quantile(confidence, dof) == pytest.approx(t, abs=6e-6 * max(1, t))


def test_student_quantile_tends_to_the_normal() -> None:
    assert student_quantile(0.95, 100_000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=3e-5)


def test_codes_number_labels_by_first_appearance() -> None:
    assert cluster_codes(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]


def test_bootstrap_matches_the_enumerated_distribution() -> None:
    values, clusters = [0.0, 1.0, 5.0, 2.0, 2.0, 4.0], ["a", "a", "b", "c", "c", "c"]
    groups = ([0.0, 1.0], [5.0], [2.0, 2.0, 4.0])
    means = sorted(
        sum(map(sum, draw)) / sum(map(len, draw)) for draw in itertools.product(groups, repeat=3)
    )  # 27 draws of three clusters, equally likely; the mean is over replies, not over cluster means
    tail = NormalDist().cdf(-math.sqrt(3 / 2) * student_quantile(0.5, 2))
    interval = bootstrap_mean(values, clusters, confidence=0.5, resamples=40_000)
    assert interval.estimate == pytest.approx(14 / 6)
    assert interval.low == pytest.approx(means[math.floor(tail * 27)])
    assert interval.high == pytest.approx(means[math.floor((1 - tail) * 27)])


def test_bootstrap_of_equal_values_is_a_point() -> None:
    assert bootstrap_mean([0.25] * 6, list("aabbcc"), resamples=100) == Interval(0.25, 0.25, 0.25)


def test_bootstrap_agrees_with_the_analytic_interval() -> None:
    n = 200
    x = np.random.default_rng(3).normal(0.3, 1.0, n)
    half = student_quantile(0.95, n - 1) * x.std(ddof=1) / math.sqrt(n)
    interval = bootstrap_mean(x, range(n), resamples=40_000)
    # A quantile of 40,000 draws has a standard error of 0.7% of the half-width; 3% is four of them.
    assert interval.low == pytest.approx(x.mean() - half, abs=0.03 * half)
    assert interval.high == pytest.approx(x.mean() + half, abs=0.03 * half)


def _coverage(n_clusters: int, size: int, spread: float, seeds: int, *, by_reply: bool = False) -> float:
    """How often the interval holds the true mean 0.4 of paired differences that share a cluster effect."""
    hits = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        before = rng.normal(size=(n_clusters, size))
        shift = 0.4 + spread * rng.normal(size=(n_clusters, 1))
        after = before + shift + 0.5 * rng.normal(size=(n_clusters, size))
        labels = np.repeat(np.arange(n_clusters), size).tolist()
        clusters = range(n_clusters * size) if by_reply else labels
        interval = bootstrap_mean((after - before).ravel(), clusters, resamples=1000, seed=seed)
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 0.4 <= interval.high
    return hits / seeds


def test_coverage_is_95_percent_within_binomial_error() -> None:
    assert abs(_coverage(40, 3, 0.7, 400) - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / 400)


def test_coverage_holds_with_ten_prompts() -> None:
    # Plain percentiles would cover 90%, five binomial errors too few.
    assert abs(_coverage(10, 2, 0.7, 600) - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / 600)


def test_replies_to_one_prompt_are_not_independent() -> None:
    assert _coverage(40, 4, 0.7, 200, by_reply=True) < 0.8
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=30), 4) + 0.1 * rng.normal(size=120)
    prompts = bootstrap_mean(values, np.repeat(np.arange(30), 4).tolist())
    replies = bootstrap_mean(values, range(120))
    assert prompts.low is not None
    assert prompts.high is not None
    assert replies.low is not None
    assert replies.high is not None
    ratio = (prompts.high - prompts.low) / (replies.high - replies.low)
    assert ratio == pytest.approx(2.0, rel=0.1)  # four near-copies of each value: sqrt(4) times too narrow


def test_the_seed_decides_and_blocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).normal(size=50)
    whole = bootstrap_mean(values, range(50), resamples=500, seed=7)
    assert bootstrap_mean(values, range(50), resamples=500, seed=7) == whole
    assert bootstrap_mean(values, range(50), resamples=500, seed=8) != whole
    monkeypatch.setattr(statistics, "_BLOCK", 50 * 7)
    assert bootstrap_mean(values, range(50), resamples=500, seed=7) == whole


def test_one_prompt_gives_no_interval() -> None:
    interval = bootstrap_mean([1.0, 2.0], ["a", "a"])
    assert interval == Interval(1.5, None, None)
    assert not interval.excludes_zero
    assert jackknife(0.5, [0.4]) == Interval(0.5, None, None)


def test_zero_inside_at_and_outside_the_interval() -> None:
    assert Interval(0.5, 0.1, 0.9).above_zero
    assert Interval(-0.5, -0.9, -0.1).below_zero
    assert not Interval(0.1, -0.1, 0.3).excludes_zero
    assert not Interval(0.0, 0.0, 0.0).excludes_zero


def test_jackknife_of_a_mean_is_the_t_interval() -> None:
    x = np.random.default_rng(0).normal(size=12)
    without_each = (x.sum() - x) / 11
    half = student_quantile(0.95, 11) * x.std(ddof=1) / math.sqrt(12)
    interval = jackknife(float(x.mean()), without_each)
    assert interval.low == pytest.approx(x.mean() - half, rel=1e-12)
    assert interval.high == pytest.approx(x.mean() + half, rel=1e-12)


def test_coverage_of_the_change_in_distinct_2() -> None:
    def texts(rng: np.random.Generator, skew: float) -> list[str]:
        p = np.arange(1, 121.0) ** -skew
        words = rng.choice(120, size=(30, 20), p=p / p.sum())
        topic = rng.integers(0, 120, size=(30, 2))  # words that one prompt's reply keeps coming back to
        words = np.where(rng.random((30, 20)) < 0.3, topic[:, rng.integers(0, 2, 20)], words)
        return [" ".join(map(str, row)) for row in words]

    rng = np.random.default_rng(0)
    truth = np.mean([distinct_n(texts(rng, 1.3), 2) - distinct_n(texts(rng, 1.0), 2) for _ in range(1000)])
    hits = 0
    for _ in range(300):
        before, after = texts(rng, 1.0), texts(rng, 1.3)
        prompts = list(range(30))
        interval = jackknife(
            distinct_n(after, 2) - distinct_n(before, 2),
            distinct_n_without_each(after, prompts, 2) - distinct_n_without_each(before, prompts, 2),
        )
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= truth <= interval.high
    assert abs(hits / 300 - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": [], "clusters": []}, "non-empty"),
        ({"values": [1.0], "clusters": ["a", "b"]}, "2 clusters"),
        ({"values": [1.0, math.nan], "clusters": ["a", "b"]}, "got nan at position 1"),
        (
            {"values": [1.0, 2.0], "clusters": ["a", "b"], "confidence": 95},
            "confidence must lie between 0 and 1, got 95",
        ),
        ({"values": [1.0, 2.0], "clusters": ["a", "b"], "resamples": 0}, "resamples"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(**arguments)


def test_jackknife_refuses_what_is_not_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        jackknife(0.1, [0.1, math.inf])
    with pytest.raises(ValueError, match="dof"):
        student_quantile(0.95, 0)
