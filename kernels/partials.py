"""Statistics of rows whose vocabulary is walked in pieces: a tile at a time, and in splits that several programs share.

A program keeps, for each of its rows, the largest logit so far and, relative to it, the sums of
e = exp((logit - largest) / temperature) and of e * log2(e); a larger logit rescales them (`folded`). What it has in the
end it leaves as the first numbers of its split's part. A second kernel brings the splits together in order: the largest
of all (`highest`), then each split's sums relative to that (`of_split`). The split that has the maximum enters with
factor 1, so that the sum is at least 1: no log-prob is above 0, no entropy below.

While nothing but -inf has been seen, 0 stands in for the maximum. -inf contributes 0 to the sum of e * log2(e), not
0 * -inf. Exponents of a rescaling are bounded from below: -inf times a sum of 0 would be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_fast.kernels.common import NEG_INF


@triton.jit
def folded(
    z,  # [rows, columns] logits of a tile, -inf where there is none
    top,  # [rows]
    mass,  # [rows]
    moment,  # [rows]
    scale,  # [rows] log2(e) / temperature
    MOMENT: tl.constexpr,  # whether the moment is asked for
):
    """(top, mass, moment) with a tile added, and the finite number [rows] that the tile's exponents were taken from."""
    new_top = tl.maximum(top, tl.max(z, axis=1))
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    drop = tl.maximum((top - base) * scale, -16384.0)  # 2^-16384 is 0
    shrink = tl.exp2(drop)
    u = (z - base[:, None]) * scale[:, None]
    e = tl.exp2(u)
    if MOMENT:
        moment = shrink * (moment + drop * mass) + tl.sum(tl.where(e == 0.0, 0.0, e * u), axis=1)
    mass = shrink * mass + tl.sum(e, axis=1)
    return new_top, mass, moment, base


@triton.jit
def folded_by_lane(
    z,  # [lanes] logits of one row's tile, -inf where there is none
    top,  # []
    mass,  # [lanes]
    moment,  # [lanes]
    scale,  # [] log2(e) / temperature
    MOMENT: tl.constexpr,  # whether the moment is asked for
):
    """(top, mass, moment) of one row with a tile added; the sums stay apart until the last."""
    new_top = tl.maximum(top, tl.max(z, axis=0))
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    drop = tl.maximum((top - base) * scale, -16384.0)  # 2^-16384 is 0 in either dtype
    shrink = tl.exp2(drop)
    u = (z - base) * scale
    e = tl.exp2(u)
    if MOMENT:
        moment = shrink * (moment + drop * mass) + tl.where(e == 0.0, 0.0, e * u)
    return new_top, shrink * mass + e, moment


@triton.jit
def highest(
    part_ptr,  # [rows] of pointers to the maximum in the first split's part
    stored,  # [rows] whether the row is one
    step,  # int64, elements from one part to the next
    n_splits,
):
    """The largest logit [rows] of all splits, and the finite number [rows] to take exponents from."""
    top = tl.full(stored.shape, NEG_INF, tl.float32)
    for split in range(n_splits):
        top = tl.maximum(top, tl.load(part_ptr + split * step, mask=stored, other=NEG_INF))
    return top, tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def of_split(
    part_ptr,  # [rows] of pointers to the maximum in the split's part; the mass lies n further
    moment_ptr,  # [rows] of pointers, or None: not asked for
    stored,  # [rows]
    n,
    base,  # [rows]
    scale,  # [rows]
):
    """(mass, moment, behind) of a split, mass and moment relative to ``base``; its maximum lies ``behind`` it."""
    behind = tl.load(part_ptr, mask=stored, other=NEG_INF) - base
    drop = tl.maximum(behind * scale, -16384.0)
    shrink = tl.exp2(drop)
    mass = tl.load(part_ptr + n, mask=stored, other=0.0)
    moment = tl.zeros(stored.shape, tl.float32)
    if moment_ptr is not None:
        moment = shrink * (tl.load(moment_ptr, mask=stored, other=0.0) + drop * mass)
    return shrink * mass, moment, behind
