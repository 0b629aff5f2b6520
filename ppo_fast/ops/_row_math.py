"""The softmax of a row of logits, met tile by tile: its statistics, and the logits turned into their own gradient.

A row is never needed whole. `RowSums` folds one tile of columns at a time into the maximum so far, the sum of
exponentials against it and that sum weighted by the shifted logit; from these come the log-prob of the row's token and
the entropy. `gradient_` then overwrites a tile of logits by

    g_j = (dlogit_j / dz_j) * (c * (1[j = y] - p_j) - e * p_j * (log p_j + entropy)),    c = dL/dlogp, e = dL/dentropy

with the chain through temperature, softcap and logit scale included. Numerics: everything is float32 (float64 for
float64 heads). Exponentials see ``logit - maximum``, exact for near neighbours even where all logits are -1e4; the
entropy is a sum of two terms that are never negative. Shifted logits are cut off at `FLOOR`, whose exponential is zero
in either dtype, so that a logit of -inf contributes 0 and not 0 * inf. A row of nothing but -inf has log-prob -inf,
entropy 0 and gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_fast.ops._library import stat_dtype
from ppo_fast.ops._memory import fresh

FLOOR = -1000.0


class Head(NamedTuple):
    """The output layer: ``z = hidden @ weight.T + bias``, and what is done to z before the softmax."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    logit_scale: float

    @property
    def stat_dtype(self) -> torch.dtype:
        return stat_dtype(self.weight.dtype)


class Rows(NamedTuple):
    """One row per token."""

    hidden: Tensor  # [N, H], in the dtype of the weight
    token_ids: Tensor  # [N] int64
    temperature: Tensor | None  # [N] stat dtype; None for 1
    kept_ids: Tensor | None  # [N, K] int64, -1 where there is none; None for the whole vocabulary

    def take(self, index: Tensor | slice) -> Rows:
        return Rows(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]


class Statistics(NamedTuple):
    """What a row of logits amounts to."""

    logprobs: Tensor  # [n]
    entropy: Tensor  # [n], or [0] where it wasn't asked for
    peak: Tensor  # [n] maximum of the row, 0 where that is -inf
    total: Tensor  # [n] sum of exp(logit - peak)

    def take(self, index: Tensor) -> Statistics:
        return Statistics(*(x[index] if x.numel() else x for x in self))


@dataclass(frozen=True)
class Gradients:
    """Where the gradients go; None for what nobody asked for."""

    hidden: Tensor | None  # [N, H], written
    weight: Tensor | None  # [V, H] stat dtype, added to
    bias: Tensor | None  # [V] stat dtype, added to

    @classmethod
    def zeros(cls, head: Head, rows: Rows, hidden: torch.dtype | None, weight: bool, bias: bool) -> Gradients:
        """Buffers for what is asked for; ``hidden`` is the dtype of that gradient, None for none."""
        like, dtype = head.weight, head.stat_dtype
        return cls(
            None if hidden is None else like.new_zeros(rows.hidden.shape, dtype=hidden),
            fresh(like, *like.shape, zero=True) if weight else None,
            like.new_zeros(like.shape[0], dtype=dtype) if bias else None,
        )

    @property
    def wanted(self) -> bool:
        return not (self.hidden is None and self.weight is None and self.bias is None)


def shape_logits_(z: Tensor, bias: Tensor | None, head: Head, temperature: Tensor | None) -> None:
    """Logits from the bare products ``z`` [n, columns], in place: bias, logit scale, softcap, temperature."""
    if bias is not None:
        z += bias
    if head.logit_scale != 1.0:
        z *= head.logit_scale
    if head.softcap is not None:
        z.div_(head.softcap).tanh_().mul_(head.softcap)
    if temperature is not None:
        z /= temperature[:, None]


class RowSums:
    """Running sums over the columns of ``n`` rows."""

    def __init__(self, n: int, like: Tensor, want_entropy: bool) -> None:
        self.peak = like.new_full((n,), -torch.inf)
        self.total = like.new_zeros(n)
        self.weighted = like.new_zeros(n) if want_entropy else None
        self.target = like.new_full((n,), torch.nan)  # stays NaN where no column is the token's

    def fold(self, z: Tensor, column: Tensor, shifted: Tensor, scratch: Tensor) -> None:
        """Add a tile ``z`` [n, columns], of which ``column`` [n] is the token's if it lies in the tile.

        ``shifted`` and ``scratch`` are buffers of z's shape; ``shifted`` may be z itself.
        """
        inside = (column >= 0) & (column < z.shape[1])
        picked = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        self.target = torch.where(inside, picked, self.target)

        previous, self.peak = self.peak, torch.maximum(self.peak, z.amax(1))
        reference = torch.where(self.peak == -torch.inf, 0.0, self.peak)
        drop = (previous - reference).clamp_(min=FLOOR)
        rescale = drop.exp()
        torch.sub(z, reference[:, None], out=shifted)
        shifted.clamp_(min=FLOOR)
        if self.weighted is None:
            self.total = self.total * rescale + shifted.exp_().sum(1)
            return
        torch.exp(shifted, out=scratch)
        tile_total = scratch.sum(1)
        self.weighted = (self.weighted + drop * self.total) * rescale + scratch.mul_(shifted).sum(1)
        self.total = self.total * rescale + tile_total

    def statistics(self) -> Statistics:
        empty = self.peak == -torch.inf
        peak = torch.where(empty, 0.0, self.peak)
        log_total = self.total.log()
        logprobs = torch.where(empty, -torch.inf, (self.target - peak) - log_total)
        if self.weighted is None:
            entropy = peak.new_empty(0)
        else:
            entropy = torch.where(empty, 0.0, log_total - self.weighted / self.total)
        return Statistics(logprobs, entropy, peak, self.total)


class RowFactors(NamedTuple):
    """``gradient_`` as ``exp(shifted) * (constant + slope * shifted)``, plus ``hit`` at the token's column."""

    constant: Tensor  # [n]
    slope: Tensor | None  # [n]
    hit: Tensor  # [n]
    peak: Tensor  # [n]
    cap: Tensor | None  # [n] temperature / softcap, turns a logit back into the tanh it came from
    bound: Tensor  # [n] no element of the gradient is larger in magnitude


def row_factors(
    head: Head, temperature: Tensor | None, statistics: Statistics, c: Tensor, e: Tensor | None
) -> RowFactors:
    _, entropy, peak, total = statistics
    empty = total == 0
    scale = head.logit_scale if temperature is None else head.logit_scale / temperature
    c = torch.where(empty, 0.0, c * scale)
    total = torch.where(empty, 1.0, total)
    constant, slope, bound = -c / total, None, c.abs()
    if e is not None:
        e = torch.where(empty, 0.0, e * scale)
        slope = -e / total
        constant = constant + slope * (entropy - total.log())
        bound = bound + e.abs() * (0.37 + entropy)  # p * |log p| <= 1/e
    cap = None
    if head.softcap is not None:
        cap = torch.full_like(peak, 1.0 / head.softcap) if temperature is None else temperature / head.softcap
    return RowFactors(constant, slope, c, peak, cap, bound)


def gradient_(z: Tensor, column: Tensor, factors: RowFactors, scratch: tuple[Tensor, Tensor]) -> None:
    """Overwrite a tile of logits ``z`` [n, columns] by the gradient of the bare products hidden @ weight.T + bias."""
    constant, slope, hit, peak, cap, _ = factors
    squash = None
    if cap is not None:
        squash = torch.mul(z, cap[:, None], out=scratch[1])
        squash.square_().neg_().add_(1.0).clamp_(min=0.0)
    z.sub_(peak[:, None]).clamp_(min=FLOOR)
    if slope is None:
        z.exp_().mul_(constant[:, None])
    else:
        p = torch.exp(z, out=scratch[0])
        z.mul_(slope[:, None]).add_(constant[:, None]).mul_(p)
    inside = (column >= 0) & (column < z.shape[1])
    z.scatter_add_(1, column.clamp(0, z.shape[1] - 1)[:, None], torch.where(inside, hit, 0.0)[:, None])
    if squash is not None:
        z.mul_(squash)
