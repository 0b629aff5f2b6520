"""Log-probs and entropy from hidden states, for scoring: a GEMM whose epilogue takes the statistics of its tile.

Pipeline. A program has a block of tokens and one split of the vocabulary, which it walks tile by tile: products of the
tile by tensor cores, then, on the accumulators, bias, logit scale, softcap, the running statistics of every token
(`partials`) and its own token's logit. No logit reaches memory: a program leaves four numbers a token. A second kernel
adds the splits up in order. Neighbouring programs are different tokens on the same split, so that a tile of the weight
is read from memory once and from the cache by the others.

The split is fixed by shape and tile, and no program adds to another's memory: the same inputs give the same bits.

Numerics. Accumulators and statistics are float32. float32 operands are multiplied in full precision, or as TF32 where
torch.get_float32_matmul_precision() allows that. Maxima start at -inf; columns past V become -inf before the maximum
and before exp.

Interpreted on CPU tensors and compiled for sm_80, 89, 90, 100, 120 and gfx942 by the tests; not run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from ppo_fast.kernels.common import COMPILE, LOG2_E, NEG_INF, chip, on_device_of
from ppo_fast.kernels.logits import finished, over, shaped
from ppo_fast.kernels.partials import folded, highest, of_split


class Tile(NamedTuple):
    """A launch configuration."""

    tokens: int
    columns: int  # of the vocabulary
    depth: int  # of H, a step
    warps: int
    stages: int  # of the pipeline that loads operands


# By chip and width of the operands in bytes. Chosen by what the compiler makes of them: no spills with every option on,
# and within the chip's shared memory (tests/kernels/aot holds them to both and prints registers); not measured. "other"
# is what chips that aren't named take. float32 in full precision runs on ordinary arithmetic units: small tiles.
_TILES = {
    ("sm_90", 2): Tile(128, 128, 64, 8, 4),
    ("sm_100", 2): Tile(128, 128, 64, 8, 4),
    ("gfx942", 2): Tile(128, 128, 64, 8, 2),
    ("other", 2): Tile(128, 128, 64, 8, 3),
    ("other", 4): Tile(64, 64, 16, 8, 2),
}
# For at most 16 tokens.
_FEW_TILES = {
    2: Tile(16, 128, 64, 4, 3),
    4: Tile(16, 64, 32, 4, 3),
}
_MIN_DEPTH = 16
# Tried by autotuning only. 128 x 256 spills on sm_90, with 8 warps and with 16.
_LARGE_TILES = {2: [Tile(64, 256, 64, 8, 3)], 4: []}
_FEW = 16
# Programs that a launch should have: four for each of a large chip's 132 multiprocessors. Fixed, not asked of the
# device: the split decides the order of the sums.
_PROGRAMS = 512
# Tokens up to which scoring goes through this kernel. There the weight is read once either way, and not storing the
# logits saves traffic; beyond it the product decides, where the vendor's GEMM is the safer bet until measured.
_FUSED_TOKENS = 256
# Rows combined at a time, in one warp.
_COMBINE_ROWS = 32


@triton.jit
def tile_logits(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    row,  # [BLOCK_N] int64, of hidden
    columns,  # [BLOCK_V], of the vocabulary
    cap,
    factor,
    H,
    V,
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
    """Logits [BLOCK_N, BLOCK_V] before the temperature, -inf past V."""
    depth = tl.arange(0, BLOCK_H)
    column = tl.minimum(columns, V - 1).to(tl.int64)
    hidden_ptrs = hidden_ptr + row[:, None] * hidden_row + depth.to(tl.int64)[None, :] * hidden_column
    weight_ptrs = weight_ptr + column[None, :] * weight_row + depth.to(tl.int64)[:, None] * weight_column
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, H, BLOCK_H):
        step = tl.cast(start, tl.int64)
        if EVEN_H:
            a = tl.load(hidden_ptrs + step * hidden_column)
            b = tl.load(weight_ptrs + step * weight_column)
        else:
            inside = start + depth < H
            a = tl.load(hidden_ptrs + step * hidden_column, mask=inside[None, :], other=0.0)
            b = tl.load(weight_ptrs + step * weight_column, mask=inside[:, None], other=0.0)
        z = tl.dot(a, b, z, input_precision=PRECISION)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column)[None, :]
    z = shaped(z, bias, cap, factor, HAS_SOFTCAP)
    return tl.where((columns < V)[None, :], z, NEG_INF)


@triton.jit(do_not_specialize=["n", "tiles_per_split"])
def _score_kernel(
    hidden_ptr,  # [n, H], any strides
    weight_ptr,  # [V, H], any strides
    bias_ptr,  # [V] float32, or None
    token_ids_ptr,  # [n] int64
    temperature_ptr,  # [n] float32, or None: 1
    parts_ptr,  # [n_splits, 3 or 4, n] float32: maximum, mass, the token's logit, moment if asked for
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
    ENTROPY: tl.constexpr,
    EVEN_H: tl.constexpr,  # H is a multiple of BLOCK_H
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    n_blocks = (n + BLOCK_N - 1) // BLOCK_N
    split = tl.program_id(0) // n_blocks
    rows = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last one, and are not stored.
    row = tl.minimum(rows, n - 1).to(tl.int64)
    token = tl.load(token_ids_ptr + row)
    temperature = tl.full((BLOCK_N,), 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    scale = over(1.0, temperature) * LOG2_E
    cap = tl.full((), softcap, tl.float32)
    factor = tl.full((), logit_scale, tl.float32)
    top = tl.full((BLOCK_N,), NEG_INF, tl.float32)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    target = tl.zeros((BLOCK_N,), tl.float32)

    first = split * tiles_per_split
    for tile in range(first, tl.minimum(first + tiles_per_split, tl.cdiv(V, BLOCK_V))):
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        z = tile_logits(
            hidden_ptr, weight_ptr, bias_ptr, row, columns, cap, factor, H, V,
            hidden_row, hidden_column, weight_row, weight_column,
            HAS_SOFTCAP, EVEN_H, PRECISION, BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        target += tl.sum(tl.where(columns[None, :] == token[:, None], z, 0.0), axis=1)
        top, mass, moment, _ = folded(z, top, mass, moment, scale, ENTROPY)

    n_parts: tl.constexpr = 4 if ENTROPY else 3
    parts_ptr += split.to(tl.int64) * n_parts * n + rows
    stored = rows < n
    tl.store(parts_ptr, top, mask=stored)
    tl.store(parts_ptr + n, mass, mask=stored)
    tl.store(parts_ptr + 2 * n, target, mask=stored)
    if ENTROPY:
        tl.store(parts_ptr + 3 * n, moment, mask=stored)


@triton.jit(do_not_specialize=["n", "V", "n_splits"])
def _combine_splits_kernel(
    parts_ptr,  # [n_splits, 3 or 4, n] float32
    token_ids_ptr,  # [n] int64
    temperature_ptr,  # [n] float32, or None: 1
    logprobs_ptr,  # [n] float32
    entropy_ptr,  # [n] float32, or None: not asked for
    peak_ptr,  # [n] float32
    total_ptr,  # [n] float32
    n,
    V,
    n_splits,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stored = rows < n
    temperature = tl.full((ROWS,), 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + rows, mask=stored, other=1.0)
    scale = over(1.0, temperature) * LOG2_E
    parts = 3
    if entropy_ptr is not None:
        parts = 4
    step = tl.cast(parts, tl.int64) * n

    top, base = highest(parts_ptr + rows, stored, step, n_splits)
    mass = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    target = tl.zeros((ROWS,), tl.float32)
    for split in range(n_splits):
        part_ptr = parts_ptr + split * step + rows
        moment_ptr = None
        if entropy_ptr is not None:
            moment_ptr = part_ptr + 3 * n
        part_mass, part_moment, _ = of_split(part_ptr, moment_ptr, stored, n, base, scale)
        mass += part_mass
        moment += part_moment
        target += tl.load(part_ptr + 2 * n, mask=stored, other=0.0)

    token = tl.load(token_ids_ptr + rows, mask=stored, other=0)
    known = (token >= 0) & (token < V)
    logprob, entropy, peak, total = finished(top, mass, moment, target, known, temperature)
    tl.store(logprobs_ptr + rows, logprob, mask=stored)
    tl.store(peak_ptr + rows, peak, mask=stored)
    tl.store(total_ptr + rows, total, mask=stored)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + rows, entropy, mask=stored)


def chosen(hidden: Tensor, weight: Tensor) -> bool:
    """Whether scoring takes this kernel rather than the vendor's GEMM and a row kernel.

    ``PPO_FAST_SCORING=fused`` or ``vendor`` decides it; else the number of tokens. Never for float64.
    """
    asked = os.environ.get("PPO_FAST_SCORING", "")
    if asked not in ("", "fused", "vendor"):
        raise ValueError(f"PPO_FAST_SCORING must be fused or vendor, got {asked!r}")
    if weight.dtype == torch.float64:
        return False
    return asked == "fused" or (asked == "" and hidden.shape[0] <= _FUSED_TOKENS)


def tile_for(n: int, weight: Tensor) -> Tile:
    """The fixed configuration for so many tokens."""
    width = weight.element_size()
    tile = _FEW_TILES[width] if n <= _FEW else _TILES.get((chip(weight.device), width), _TILES["other", width])
    return fitted(tile, weight.shape[1])


def fitted(tile: Tile, H: int) -> Tile:
    """With steps that divide H where there are such: masked and unaligned loads take registers."""
    depth = tile.depth
    while depth > _MIN_DEPTH and H % depth:
        depth //= 2
    return tile._replace(depth=depth)


def precision(weight: Tensor) -> str:
    """How float32 operands are multiplied: as PyTorch's own products are."""
    tf32 = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else "ieee"


def splits(n: int, V: int, tile: Tile) -> tuple[int, int]:
    """(number of splits, tiles in each) of the vocabulary."""
    n_tiles = triton.cdiv(V, tile.columns)
    wanted = min(n_tiles, triton.cdiv(_PROGRAMS, triton.cdiv(n, tile.tokens)))
    tiles_per_split = triton.cdiv(n_tiles, wanted)
    return triton.cdiv(n_tiles, tiles_per_split), tiles_per_split


def score(
    hidden: Tensor,  # [n, H], n >= 1
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V] float32
    softcap: float | None,
    logit_scale: float,
    token_ids: Tensor,  # [n] int64
    temperature: Tensor | None,  # [n] float32
    results: tuple[Tensor, Tensor, Tensor, Tensor],  # logprobs [n], entropy [n] or [0], peak [n], total [n]: written
) -> None:
    """Statistics of the rows' logits. ``PPO_FAST_AUTOTUNE=1`` times candidate tiles at the first call of a shape, and
    gives up on results that are the same from one process to the next."""
    arguments = (hidden, weight, bias, softcap, logit_scale, token_ids, temperature, results)
    n, (V, H) = hidden.shape[0], weight.shape
    tile = tile_for(n, weight)
    if os.environ.get("PPO_FAST_AUTOTUNE") == "1":
        problem = (chip(weight.device), weight.dtype, triton.next_power_of_2(n), H, V, results[1].numel() > 0)
        if problem not in _fastest:
            _fastest[problem] = _timed(arguments)
        tile = _fastest[problem]
    _score(*arguments, tile)


# By problem, where PPO_FAST_AUTOTUNE=1 has timed it.
_fastest: dict[tuple[object, ...], Tile] = {}


def _timed(arguments: tuple[Any, ...]) -> Tile:
    """The fastest of all tiles for a problem, those that don't fit into the chip left out."""
    width = arguments[1].element_size()
    tiles = [
        _FEW_TILES[width],
        *_LARGE_TILES[width],
        *(tile for (_, of_width), tile in _TILES.items() if of_width == width),
    ]
    times = {}
    for tile in dict.fromkeys(tiles):
        with contextlib.suppress(OutOfResources):
            times[tile] = do_bench(functools.partial(_score, *arguments, tile))
    return min(times, key=times.__getitem__)


def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    token_ids: Tensor,
    temperature: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    tile: Tile,
) -> None:
    logprobs, entropy, peak, total = results
    (n, H), V = hidden.shape, weight.shape[0]
    want_entropy = entropy.numel() > 0
    n_splits, tiles_per_split = splits(n, V, tile)
    parts = logprobs.new_empty((n_splits, 4 if want_entropy else 3, n))
    with on_device_of(weight):
        _score_kernel[(triton.cdiv(n, tile.tokens) * n_splits,)](
            hidden,
            weight,
            bias,
            token_ids,
            temperature,
            parts,
            1.0 if softcap is None else softcap,
            logit_scale,
            n,
            H,
            V,
            tiles_per_split,
            *hidden.stride(),
            *weight.stride(),
            HAS_SOFTCAP=softcap is not None,
            ENTROPY=want_entropy,
            EVEN_H=H % tile.depth == 0,
            PRECISION=precision(weight),
            BLOCK_N=tile.tokens,
            BLOCK_V=tile.columns,
            BLOCK_H=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **COMPILE,
        )
        _combine_splits_kernel[(triton.cdiv(n, _COMBINE_ROWS),)](
            parts,
            token_ids,
            temperature,
            logprobs,
            entropy if want_entropy else None,
            peak,
            total,
            n,
            V,
            n_splits,
            ROWS=_COMBINE_ROWS,
            num_warps=1,
            **COMPILE,
        )
