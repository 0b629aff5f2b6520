"""What each Triton kernel reads, writes and multiplies, against the least any algorithm for its task could.

    python bench/kernel_bytes.py          prints docs/kernels.md
    python bench/kernel_bytes.py --write  writes it

The counts are those of the kernels' own loads and stores: tests/kernels/interpret/test_bytes.py runs every kernel in
Triton's interpreter and finds these formulas exact. They are what programs ask for; what the caches answer never
reaches memory. The least is every input read once and every output written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppo_fast.kernels import head_scores, kept, linear_sample, ppo_loss, value_loss

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
ID, INT, STAT, WIDE, BOOL = 8, 4, 4, 8, 1  # bytes of an int64 id, an int32, a float32, a float64, a mask's element


@dataclass(frozen=True)
class Count:
    """Of one launch; bytes, and multiplications and additions in matrix products."""

    reads: int
    writes: int
    flops: int
    least: int  # bytes


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


# ------------------------------------------------------------------------------------------------------ rows of logits


def selected_logprobs_forward(n: int, V: int, width: int) -> Count:
    """All rows live, with mask and entropy; ``width`` is the bytes of a logit."""
    row = width + ID + STAT + BOOL
    return Count(n * (V * width + row), n * 3 * STAT, 0, n * (V * width + ID + STAT + BOOL + 3 * STAT))


def selected_logprobs_backward(n: int, V: int, width: int) -> Count:
    """With mask, both upstream gradients, and a log-sum-exp of at most 128."""
    row = BOOL + ID + 5 * STAT
    return Count(n * (V * width + row), n * V * width, 0, n * (2 * V * width + row))


# ------------------------------------------------------------------------------------------------------- output layer


def head_statistics(n: int, V: int, shaped: bool) -> Count:
    """Of float32 products, with entropy and temperature; ``shaped`` with a bias, which stores the logits."""
    row = ID + STAT
    reads, writes = V * STAT + row, 4 * STAT
    least = reads + writes
    if shaped:
        reads, writes, least = reads + V * STAT, writes + V * STAT, least + V * STAT
    return Count(n * reads, n * writes, 0, n * least + (V * STAT if shaped else 0))


def head_gradient(n: int, V: int, width: int) -> Count:
    """Over float32 logits, with temperature and an entropy's gradient; ``width`` is the bytes of an operand."""
    row = ID + 6 * STAT
    moved = V * STAT + row
    return Count(n * moved, n * V * width, 0, n * (moved + V * width))


def head_score(n: int, H: int, V: int, width: int, tile: head_scores.Tile) -> Count:
    """The GEMM that leaves statistics, with entropy and temperature, without bias."""
    row_blocks, n_tiles = _blocks(n, tile.tokens), _blocks(V, tile.columns)
    n_splits, _ = head_scores.splits(n, V, tile)
    depth = _blocks(H, tile.depth) * tile.depth
    operands = row_blocks * n_tiles * (tile.tokens + tile.columns) * H * width
    rows = row_blocks * n_splits * tile.tokens * (ID + STAT)
    return Count(
        operands + rows,
        n_splits * n * 4 * STAT,
        2 * row_blocks * tile.tokens * n_tiles * tile.columns * depth,
        (n + V) * H * width + n * (ID + STAT + 4 * STAT),
    )


def sample_race(n: int, H: int, V: int, width: int, tile: head_scores.Tile) -> Count:
    """The GEMM that draws, with temperature, without bias: two keys a row in place of the token's id."""
    products, n_splits = head_score(n, H, V, width, tile), head_scores.splits(n, V, tile)[0]
    return Count(
        products.reads + _blocks(n, tile.tokens) * tile.tokens * n_splits * ID,
        n_splits * n * 6 * STAT,
        products.flops,
        (n + V) * H * width + n * (2 * ID + STAT + ID + 2 * STAT),
    )


def sample_finish(n: int, n_splits: int) -> Count:
    """Of the splits' five numbers and id a row, the maximum read twice."""
    results = ID + 2 * STAT
    return Count(
        n * (n_splits * (6 * STAT + INT) + STAT),
        n * results,
        0,
        n * (n_splits * (5 * STAT + INT) + STAT + results),
    )


def head_combine(n: int, n_splits: int) -> Count:
    """Of the splits' four numbers a token, the maximum read twice."""
    return Count(
        n * (n_splits * 5 * STAT + ID + STAT),
        n * 4 * STAT,
        0,
        n * (n_splits * 4 * STAT + ID + STAT + 4 * STAT),
    )


# ---------------------------------------------------------------------------------------------------------- kept sets


def kept_forward(n: int, K: int, H: int, width: int) -> Count:
    """Full sets, with temperature and entropy, without bias."""
    row = ID + STAT
    reads = K * ID + K * H * width + _blocks(K, kept._ROWS) * H * width + row
    writes = K * STAT + 2 * STAT
    return Count(n * reads, n * writes, 2 * n * K * H, n * (K * ID + (K + 1) * H * width + row + writes))


def kept_gradient(n: int, K: int) -> Count:
    row = ID + 3 * STAT
    return Count(n * (2 * K * (STAT + ID) + row), n * K * STAT, 0, n * (K * (2 * STAT + ID) + row))


def kept_d_hidden(n: int, K: int, H: int, width: int) -> Count:
    """No candidate with a zero gradient."""
    columns = _blocks(H, kept._COLUMNS)
    return Count(
        n * (columns * K * (STAT + ID) + K * H * width),
        n * H * STAT,
        2 * n * K * H,
        n * (K * (STAT + ID) + K * H * width + H * STAT),
    )


def kept_d_weight(n: int, K: int, H: int, width: int, distinct: int) -> Count:
    """All pairs of ids and tokens, ``distinct`` ids among them."""
    pairs, columns = n * K, _blocks(H, kept._SUM_COLUMNS)
    # Each program its own id and, but for the first, the one before; each pair its place, its gradient, its token's
    # hidden state and, but for the last, the next id.
    per_column = pairs * ID + (pairs - 1) * ID + pairs * (ID + STAT) + (pairs - 1) * ID
    return Count(
        columns * per_column + (pairs * width + distinct * STAT) * H,
        distinct * H * STAT,
        2 * pairs * H,
        pairs * (2 * ID + STAT) + n * H * width + 2 * distinct * H * STAT,
    )


# ---------------------------------------------------------------------------------------------------------- [B, T] rows


def gae_scan(B: int, T: int) -> Count:
    """All positions live, with bootstrap values."""
    reads, writes = T * (BOOL + 2 * STAT) + STAT, T * 2 * STAT + 3 * WIDE
    return Count(B * reads, B * writes, 0, B * (T * (BOOL + 4 * STAT) + STAT) + 3 * WIDE)


def gae_moments(B: int) -> Count:
    return Count(B * 5 * WIDE, 3 * WIDE, 0, B * 3 * WIDE + 3 * WIDE)


def ppo_loss_tokens(n: int, rows: int) -> Count:
    """All live, with entropy and a reference; ``rows`` is B."""
    sums = (ppo_loss._N_SUMS + 1) * WIDE
    return Count(
        n * (BOOL + 6 * STAT),
        n * 2 * STAT + _blocks(n, ppo_loss._BLOCK) * sums,
        0,
        n * (BOOL + 7 * STAT) + rows * STAT + sums,
    )


def value_loss_tokens(n: int, rows: int) -> Count:
    """All live, clipped; ``rows`` is B."""
    sums = (value_loss._N_SUMS + 1) * WIDE
    return Count(
        n * (BOOL + 4 * STAT),
        n * STAT + _blocks(n, value_loss._BLOCK) * sums,
        0,
        n * (BOOL + 4 * STAT) + rows * STAT + sums,
    )


def combined_sums(n: int, n_sums: int) -> Count:
    """Of the programs that the losses of ``n`` tokens take."""
    reads, writes = _blocks(n, ppo_loss._BLOCK) * (n_sums + 1) * WIDE, STAT + n_sums * WIDE
    return Count(reads, writes, 0, reads + writes)


# ------------------------------------------------------------------------------------------------------------- the page

N, H, V, K = 2048, 4096, 151_936, 64
B, T = 512, 1024
WIDTH = 2  # bfloat16
_TILE = head_scores._TILES["sm_90", WIDTH]
_FEW = head_scores._FEW_TILES[WIDTH]
_RACE_SPLITS = head_scores.splits(64, V, linear_sample._TILES[WIDTH])[0]

ROWS: list[tuple[str, str, Callable[[], Count]]] = [
    ("selected_logprobs", "forward, logits bf16", lambda: selected_logprobs_forward(N, V, WIDTH)),
    ("selected_logprobs", "backward, logits bf16", lambda: selected_logprobs_backward(N, V, WIDTH)),
    ("linear_head", "statistics", lambda: head_statistics(N, V, False)),
    ("linear_head", "statistics, bias added", lambda: head_statistics(N, V, True)),
    ("linear_head", "gradient to bf16", lambda: head_gradient(N, V, WIDTH)),
    ("head_scores", f"GEMM, {N} tokens", lambda: head_score(N, H, V, WIDTH, _TILE)),
    ("head_scores", f"splits of {N} tokens", lambda: head_combine(N, head_scores.splits(N, V, _TILE)[0])),
    ("head_scores", "GEMM, 256 tokens", lambda: head_score(256, H, V, WIDTH, _TILE)),
    ("head_scores", "GEMM, 16 tokens", lambda: head_score(16, H, V, WIDTH, _FEW)),
    ("linear_sample", "GEMM, 64 rows", lambda: sample_race(64, H, V, WIDTH, linear_sample._TILES[WIDTH])),
    ("linear_sample", "splits of 64 rows", lambda: sample_finish(64, _RACE_SPLITS)),
    ("linear_sample", "GEMM, 16 rows", lambda: sample_race(16, H, V, WIDTH, linear_sample._FEW_TILES[WIDTH])),
    ("kept", "forward", lambda: kept_forward(N, K, H, WIDTH)),
    ("kept", "gradient of logits", lambda: kept_gradient(N, K)),
    ("kept", "d_hidden", lambda: kept_d_hidden(N, K, H, WIDTH)),
    ("kept", "d_weight, all ids distinct", lambda: kept_d_weight(N, K, H, WIDTH, N * K)),
    ("kept", "d_weight, the same set everywhere", lambda: kept_d_weight(N, K, H, WIDTH, K)),
    ("gae", "scan", lambda: gae_scan(B, T)),
    ("gae", "moments of rows", lambda: gae_moments(B)),
    ("ppo_loss", "tokens", lambda: ppo_loss_tokens(B * T, B)),
    ("ppo_loss", "sums of programs", lambda: combined_sums(B * T, ppo_loss._N_SUMS)),
    ("value_loss", "tokens", lambda: value_loss_tokens(B * T, B)),
    ("value_loss", "sums of programs", lambda: combined_sums(B * T, value_loss._N_SUMS)),
]


def _size(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def page() -> str:
    """docs/kernels.md."""
    lines = [
        "# Bytes and operations of the Triton kernels",
        "",
        f"Written by `python bench/kernel_bytes.py --write`. N = {N} tokens, H = {H}, V = {V}, K = {K}",
        f"candidates, [B, T] = [{B}, {T}]; hidden states and weights bfloat16, statistics float32, every option on,",
        "nothing masked; the tile of sm_90. Reads and writes are what the programs ask for, counted in Triton's",
        "interpreter; what the caches answer never reaches memory. The least is every input read once and every output",
        "written once. FLOP are those of matrix products; beside them a logit costs one exponential a pass. Compiled,",
        "not run on a GPU.",
        "",
        "| kernel | pass | reads | writes | FLOP | least bytes | asked / least |",
        "|---|---|---|---|---|---|---|",
    ]
    for kernel, what, count in ROWS:
        x = count()
        flop = f"{x.flops:.3g}" if x.flops else ""
        ratio = (x.reads + x.writes) / x.least
        lines.append(
            f"| {kernel} | {what} | {_size(x.reads)} | {_size(x.writes)} | {flop} | {_size(x.least)} | {ratio:.3g} |"
        )
    return "\n".join(lines) + "\n" + _PATHS


def _path(trainable: bool, chunk: int) -> float:
    """Bytes of one token of the actor loss: GEMMs from and to memory once, and the two row kernels."""
    weight = V * H * WIDTH / chunk
    gemms = (H * WIDTH + V * STAT + weight) + (V * WIDTH + H * STAT + weight)
    if trainable:
        gemms += V * WIDTH + H * WIDTH + 2 * V * H * STAT / chunk
    rows = [head_statistics(1, V, False), head_gradient(1, V, WIDTH)]
    return gemms + sum(x.reads + x.writes for x in rows)


_CHUNK = 1536
_PATHS = f"""
The actor loss from hidden states moves, a token, in chunks of {_CHUNK} rows:

- with a frozen head {_size(_path(False, _CHUNK))} for {4 * V * H / 1e9:.2f} GFLOP, \
{_size(V * (3 * STAT + 2 * WIDTH))} of it logits;
- with a trainable head {_size(_path(True, _CHUNK))} for {6 * V * H / 1e9:.2f} GFLOP, \
{_size(V * (3 * STAT + 3 * WIDTH))} of it logits; with chunks of 512 rows {_size(_path(True, 512))}.

Logits are written once by GEMM 1, read by the statistics, read and replaced by their gradient, read by GEMMs 2 and 3.
The weight and its gradient are read, and the gradient written, once a chunk.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/kernels.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    main()
