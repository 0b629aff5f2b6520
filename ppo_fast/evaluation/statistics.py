"""Intervals for differences on held-out prompts, with prompts as the unit of chance.

Replies to one prompt resemble each other, so an interval that treats every reply as a fresh draw is too narrow. Both
methods here draw or leave out whole prompts (clusters), and all replies of a prompt come along:

- ``bootstrap_mean`` for means: resample prompts with replacement, take percentiles of the resampled mean.
- ``jackknife`` for statistics that count distinct things: leave each prompt out once. Resampling with replacement is
  wrong for those: a prompt drawn twice adds to the total but nothing new to the distinct count, so that every resampled
  value lies far below the observed one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_BLOCK = 2_000_000  # drawn cluster indices held at once: 16 MB, whatever the number of prompts


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; ``low`` and ``high`` are None when one prompt alone was seen."""

    estimate: float
    low: float | None
    high: float | None

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low is not None and self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval lies below zero."""
        return self.high is not None and self.high < 0

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.above_zero or self.below_zero


def bootstrap_mean(
    values: Sequence[float] | npt.NDArray[np.float64],  # [n]
    clusters: Sequence[Hashable],  # n labels: replies with equal labels stay together
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean of ``values`` with a percentile bootstrap interval over clusters.

    The mean is over values, not over cluster means: a resample's mean is the sum of the drawn clusters' sums over the
    sum of their sizes. The percentiles are the expanded ones of Hesterberg (2015, "What teachers should know about the
    bootstrap"): ``Phi(-sqrt(C / (C - 1)) * t_{C-1})`` for C clusters. Plain percentiles are too narrow by the ratio of
    the normal to the t quantile and by sqrt((C - 1) / C), which matters below some thirty prompts and fades above. The
    same inputs and seed give the same interval.

    Raises ValueError for no values, non-finite values, a length mismatch, and settings out of range.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0 or x.size != len(clusters):
        raise ValueError(
            f"values and clusters must be non-empty and equally long, got values of shape {x.shape} and "
            f"{len(clusters)} clusters"
        )
    if not np.isfinite(x).all():
        raise ValueError(f"values must be finite, got {x[~np.isfinite(x)][0]} at position {np.argmin(np.isfinite(x))}")
    _check_confidence(confidence)
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")

    codes = cluster_codes(clusters)
    sizes = np.bincount(codes).astype(np.float64)  # [C]
    sums = np.bincount(codes, weights=x)  # [C]
    estimate = float(x.mean())
    C = len(sizes)
    if C < 2:
        return Interval(estimate, None, None)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _BLOCK // C)
    for start in range(0, resamples, step):
        drawn = rng.integers(0, C, (min(step, resamples - start), C))
        means[start : start + step] = sums[drawn].sum(1) / sizes[drawn].sum(1)
    tail = NormalDist().cdf(-math.sqrt(C / (C - 1)) * student_quantile(confidence, C - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))


def jackknife(
    estimate: float,
    without_each: Sequence[float] | npt.NDArray[np.float64],  # [C]: the statistic with one cluster left out
    *,
    confidence: float = 0.95,
) -> Interval:
    """Symmetric interval ``estimate +- t * se`` with the leave-one-cluster-out standard error.

    ``se^2 = (C - 1) / C * sum (theta_c - mean)^2``; it errs on the wide side (Efron and Stein 1981). Raises ValueError
    for non-finite values and a confidence out of range.
    """
    theta = np.asarray(without_each, dtype=np.float64)
    if not (math.isfinite(estimate) and np.isfinite(theta).all()):
        raise ValueError("estimate and without_each must be finite")
    _check_confidence(confidence)
    C = theta.size
    if C < 2:
        return Interval(estimate, None, None)
    half = student_quantile(confidence, C - 1) * math.sqrt((C - 1) / C * float(((theta - theta.mean()) ** 2).sum()))
    return Interval(estimate, estimate - half, estimate + half)


def student_quantile(confidence: float, dof: int) -> float:
    """The t with ``P(|T| < t) = confidence`` for ``dof`` degrees of freedom.

    Bisection on the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4 in the angle ``atan(t / sqrt(dof))``.
    """
    _check_confidence(confidence)
    if dof < 1:
        raise ValueError(f"dof must be at least 1, got {dof}")
    odd = dof % 2
    steps = np.arange(1, (dof - 1) // 2 if odd else dof // 2, dtype=np.float64)
    ratios = 2 * steps / (2 * steps + 1) if odd else (2 * steps - 1) / (2 * steps)
    coefficients = np.concatenate([[1.0], np.cumprod(ratios)]) if dof > 1 else np.zeros(0)
    powers = 2 * np.arange(len(coefficients)) + odd

    def inside(angle: float) -> float:
        series = math.sin(angle) * float((coefficients * math.cos(angle) ** powers).sum())
        return (angle + series) * 2 / math.pi if odd else series

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(dof)


def cluster_codes(clusters: Sequence[Hashable]) -> npt.NDArray[np.intp]:
    """Integers 0..C-1 for the labels, numbered by first appearance: ``["b", "a", "b"]`` gives ``[0, 1, 0]``."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in clusters], dtype=np.intp)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
