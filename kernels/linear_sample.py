"""Tokens drawn from the whole vocabulary straight from hidden states: a GEMM whose epilogue runs a race (Gumbel-max).

Pipeline. As in `head_scores`: a program has a block of rows and one split of the vocabulary, multiplies tile by tile,
and takes the statistics of the logits from the accumulators. Beside them it keeps, for every row, the largest of the
keys  logit / temperature - log(E_j),  E_j exponential noise, with its id and logit; the largest of all keys is a draw
from the softmax. A second kernel adds the splits up in order; of equal keys the lower id wins. No logit is stored.

Noise. u_j of token j has 64 bits of Philox4x32-10, keyed by the row's seed, with the counter (j // 4, half, position):
the words of half 0 are the upper ones of four tokens, those of half 1 the lower ones, as in csrc/linear_sample.cpp. It
knows nothing of other rows or of the split, so neither does a draw; how its row is tiled decides only roundings.

Numerics. E = -log1p(-u) to the relative precision of float32 down to u = 2^-64: below 1/32 by its series, above from
1 - u, whose bits are the complement of those of u. Keys are float32: an absolute error of a few 1e-6 where the C++ has
double, so the two may part where the best keys are nearer to each other than that. Rows of temperature 0 race without
noise: the largest logit, the lowest id among equals, with statistics at temperature 1.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_fast.kernels import head_scores
from ppo_fast.kernels.common import COMPILE, LN_2, LOG2_E, NEG_INF, on_device_of
from ppo_fast.kernels.head_scores import tile_logits
from ppo_fast.kernels.logits import over
from ppo_fast.kernels.partials import folded, highest, of_split

# Rows combined at a time, in one warp.
_COMBINE_ROWS = 32


@triton.jit
def _noise(seed, position, blocks):
    """Gumbel noise float32 [rows, 4 blocks] of the tokens of each block of four; seed, position int64 [rows, 1]."""
    key = seed.to(tl.uint64, bitcast=True)
    at = position.to(tl.uint64, bitcast=True)
    low, high = (at & 0xFFFFFFFF).to(tl.uint32), (at >> 32).to(tl.uint32)
    first = blocks.to(tl.uint32)
    a0, a1, a2, a3 = tl.philox(key, first, tl.zeros_like(first), low, high)
    b0, b1, b2, b3 = tl.philox(key, first, tl.full(first.shape, 1, tl.uint32), low, high)
    upper = tl.interleave(tl.interleave(a0, a2), tl.interleave(a1, a3))
    lower = tl.interleave(tl.interleave(b0, b2), tl.interleave(b1, b3))
    u = upper.to(tl.float32) * 2.0**-32 + (lower.to(tl.float32) + 0.5) * 2.0**-64
    rest = (upper ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + ((lower ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-64
    series = 1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6)))))
    exponential = tl.where(u < 0.03125, u * series, -tl.log(rest))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["n", "tiles_per_split"])
def _race_kernel(
    hidden_ptr,  # [n, H], any strides
    weight_ptr,  # [V, H], any strides
    bias_ptr,  # [V] float32, or None
    temperature_ptr,  # [n] float32, 0 for greedy, or None: 1
    keys_ptr,  # [n, 2] int64: seed, position
    parts_ptr,  # [n_splits, 5, n] float32: maximum, mass, moment, best key above the maximum, its logit
    ids_ptr,  # [n_splits, n] int32: whose key it is
    softcap: tl.float64,
    logit_scale: tl.float64,
    n,
    H,
    V,
    tiles_per_split,
    hidden_row,
    hidden_column,
    weight_row,
    weight_column,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_H: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    n_blocks = (n + BLOCK_N - 1) // BLOCK_N
    split = tl.program_id(0) // n_blocks
    rows = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(rows, n - 1).to(tl.int64)
    seed = tl.load(keys_ptr + 2 * row)[:, None]
    position = tl.load(keys_ptr + 2 * row + 1)[:, None]
    temperature = tl.full((BLOCK_N,), 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    inverse = over(1.0, tl.where(greedy, 1.0, temperature))
    scale = inverse * LOG2_E
    cap = tl.full((), softcap, tl.float32)
    factor = tl.full((), logit_scale, tl.float32)
    top = tl.full((BLOCK_N,), NEG_INF, tl.float32)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    best = tl.full((BLOCK_N,), NEG_INF, tl.float32)
    best_logit = tl.full((BLOCK_N,), NEG_INF, tl.float32)
    best_id = tl.zeros((BLOCK_N,), tl.int32)

    first = split * tiles_per_split
    for tile in range(first, tl.minimum(first + tiles_per_split, tl.cdiv(V, BLOCK_V))):
        lanes = tl.arange(0, BLOCK_V)
        columns = tile * BLOCK_V + lanes
        z = tile_logits(
            hidden_ptr, weight_ptr, bias_ptr, row, columns, cap, factor, H, V,
            hidden_row, hidden_column, weight_row, weight_column,
            HAS_SOFTCAP, EVEN_H, PRECISION, BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        new_top, mass, moment, base = folded(z, top, mass, moment, scale, True)
        blocks = tile * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)
        noise = _noise(seed, position, tl.broadcast_to(blocks[None, :], (BLOCK_N, BLOCK_V // 4)))
        key = (z - base[:, None]) * inverse[:, None] + tl.where(greedy[:, None], 0.0, noise)
        key = tl.where(key == key, key, NEG_INF)  # NaN shows in the mass
        ahead, column = tl.max(key, axis=1, return_indices=True)
        logit = tl.sum(tl.where(lanes[None, :] == column[:, None], z, 0.0), axis=1)
        # Keys are differences from the maximum so far: the leader's moves with it.
        best = tl.where(best == NEG_INF, NEG_INF, best + tl.where(top == NEG_INF, 0.0, (top - base) * inverse))
        better = ahead > best
        best = tl.where(better, ahead, best)
        best_logit = tl.where(better, logit, best_logit)
        best_id = tl.where(better, tile * BLOCK_V + column, best_id)
        top = new_top

    stored = rows < n
    parts_ptr += split.to(tl.int64) * 5 * n + rows
    tl.store(parts_ptr, top, mask=stored)
    tl.store(parts_ptr + n, mass, mask=stored)
    tl.store(parts_ptr + 2 * n, moment, mask=stored)
    tl.store(parts_ptr + 3 * n, best, mask=stored)
    tl.store(parts_ptr + 4 * n, best_logit, mask=stored)
    tl.store(ids_ptr + split.to(tl.int64) * n + rows, best_id, mask=stored)


@triton.jit(do_not_specialize=["n", "n_splits"])
def _finish_kernel(
    parts_ptr,  # [n_splits, 5, n] float32
    ids_ptr,  # [n_splits, n] int32
    temperature_ptr,  # [n] float32, 0 for greedy, or None: 1
    drawn_ptr,  # [n] int64
    logprobs_ptr,  # [n] float32
    entropy_ptr,  # [n] float32
    n,
    n_splits,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stored = rows < n
    temperature = tl.full((ROWS,), 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + rows, mask=stored, other=1.0)
    inverse = over(1.0, tl.where(temperature == 0.0, 1.0, temperature))
    scale = inverse * LOG2_E
    width = tl.cast(n, tl.int64)
    step = 5 * width
    top, base = highest(parts_ptr + rows, stored, step, n_splits)
    mass = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS,), NEG_INF, tl.float32)
    logit = tl.zeros((ROWS,), tl.float32)
    drawn = tl.zeros((ROWS,), tl.int32)
    for split in range(n_splits):
        part_ptr = parts_ptr + split * step + rows
        part_mass, part_moment, behind = of_split(part_ptr, part_ptr + 2 * n, stored, n, base, scale)
        mass += part_mass
        moment += part_moment
        key = tl.load(part_ptr + 3 * n, mask=stored, other=NEG_INF)
        key = tl.where(key == NEG_INF, NEG_INF, key + behind * inverse)
        better = key > best
        best = tl.where(better, key, best)
        logit = tl.where(better, tl.load(part_ptr + 4 * n, mask=stored, other=0.0), logit)
        drawn = tl.where(better, tl.load(ids_ptr + split * width + rows, mask=stored, other=0), drawn)

    log_mass = tl.log(mass)
    logprob = (logit - top) * inverse - log_mass
    usable = (mass > 0.0) & (tl.abs(logprob) < float("inf"))
    entropy = log_mass - LN_2 * (moment / mass)
    tl.store(drawn_ptr + rows, tl.where(usable, drawn, 0).to(tl.int64), mask=stored)
    tl.store(logprobs_ptr + rows, tl.where(usable, logprob, float("nan")), mask=stored)
    tl.store(entropy_ptr + rows, tl.where(usable, entropy, float("nan")), mask=stored)


# As in head_scores, but the noise takes registers beside the accumulators: fewer elements a lane, twice the warps.
_TILES = {
    2: head_scores.Tile(64, 64, 64, 8, 3),
    4: head_scores.Tile(32, 64, 32, 8, 2),
}
_FEW_TILES = {
    2: head_scores.Tile(16, 128, 64, 8, 3),
    4: head_scores.Tile(16, 64, 32, 4, 3),
}


def draw(
    hidden: Tensor,  # [n, H], any strides
    weight: Tensor,  # [V, H], any strides; not float64
    bias: Tensor | None,  # [V] float32
    temperature: Tensor | None,  # [n] float32, 0 for greedy
    keys: Tensor,  # [n, 2] int64 contiguous
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ppo_fast::_draw``: (ids [n], logprobs [n] float32, entropy [n] float32) of tokens drawn.

    A row without a distribution gets id 0 and NaN.
    """
    (n, H), V = hidden.shape, weight.shape[0]
    drawn, logprobs = keys.new_empty(n), hidden.new_empty(n, dtype=torch.float32)
    entropy = torch.empty_like(logprobs)
    if n == 0:
        return drawn, logprobs, entropy
    width = weight.element_size()
    tile = head_scores.fitted(_FEW_TILES[width] if n <= head_scores._FEW else _TILES[width], H)
    n_splits, tiles_per_split = head_scores.splits(n, V, tile)
    parts = logprobs.new_empty((n_splits, 5, n))
    ids = torch.empty((n_splits, n), dtype=torch.int32, device=hidden.device)
    with on_device_of(weight):
        _race_kernel[(triton.cdiv(n, tile.tokens) * n_splits,)](
            hidden,
            weight,
            bias,
            temperature,
            keys,
            parts,
            ids,
            1.0 if softcap is None else softcap,
            logit_scale,
            n,
            H,
            V,
            tiles_per_split,
            *hidden.stride(),
            *weight.stride(),
            HAS_SOFTCAP=softcap is not None,
            EVEN_H=H % tile.depth == 0,
            PRECISION=head_scores.precision(weight),
            BLOCK_N=tile.tokens,
            BLOCK_V=tile.columns,
            BLOCK_H=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **COMPILE,
        )
        _finish_kernel[(triton.cdiv(n, _COMBINE_ROWS),)](
            parts,
            ids,
            temperature,
            drawn,
            logprobs,
            entropy,
            n,
            n_splits,
            ROWS=_COMBINE_ROWS,
            num_warps=1,
            **COMPILE,
        )
    return drawn, logprobs, entropy
