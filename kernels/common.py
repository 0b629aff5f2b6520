"""What every kernel family shares: choosing the device, the exact constants, and adding up per-program sums.

Sums over tokens are float64. A program never adds to another program's memory: it stores its own sums as one row of a
table, and `combine_kernel`, a single program, adds the table up in an order fixed by the shape. No atomics, so the same
inputs give the same bits every time.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))

# Compile options of every launch. Multiply-adds may be fused: no kernel relies on a product being rounded before it is
# added. Said here because Triton's default depends on its version.
COMPILE = {"enable_fp_fusion": True}

# Rows of the table added at a time: 32 x 16 doubles are 16 a lane in one warp.
_COMBINE_ROWS = 32


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics are float32 whatever the input, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chip(device: torch.device) -> str:
    """Architecture of a GPU, ``sm_90`` or ``gfx942``, say; ``cpu`` where kernels are interpreted."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current one, which the dispatcher does not set."""
    return contextlib.nullcontext() if tensor.device.type == "cpu" else torch.cuda.device(tensor.device)


@triton.jit(do_not_specialize=["n_rows"])
def combine_kernel(
    table_ptr,  # [n_rows, N_SUMS + 1] float64: the weighted loss, then the sums
    loss_ptr,  # [] stat dtype
    sums_ptr,  # [N_SUMS] float64
    n_rows,
    N_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least N_SUMS + 1
):
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)
    used = columns <= N_SUMS
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(0, n_rows, ROWS):
        row = start + rows
        cells = row.to(tl.int64) * (N_SUMS + 1) + columns[None, :]
        total += tl.load(table_ptr + cells, mask=(row < n_rows) & used[None, :], other=0.0)
    total = tl.sum(total, axis=0)
    tl.store(loss_ptr + columns, total.to(loss_ptr.dtype.element_ty), mask=columns == 0)
    tl.store(sums_ptr + columns - 1, total, mask=used & (columns > 0))


def combine(
    table: Tensor,  # [n_rows, 1 + n_sums] float64
    loss: Tensor,  # [] stat dtype, written
    sums: Tensor,  # [n_sums] float64, written
) -> None:
    """Add up the programs' rows: column 0 into ``loss``, the others into ``sums``."""
    n_rows, width = table.shape
    combine_kernel[(1,)](
        table,
        loss,
        sums,
        n_rows,
        N_SUMS=width - 1,
        ROWS=_COMBINE_ROWS,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=1,
        **COMPILE,
    )
