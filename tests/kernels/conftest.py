"""The two ways in which a Triton kernel is tested without a GPU, each in its own process.

TRITON_INTERPRET is read when a kernel is defined, so one process can either interpret kernels on CPU tensors
(``interpret/``) or compile them for GPUs (``aot/``): `make test` runs both, anything else skips the half it can't run.
``gpu/`` is for bench/gpu.sh.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for launches.py

INTERPRET = Path(__file__).parent / "interpret"
INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETING:
        return
    for item in items:
        if INTERPRET in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1, run by make test"))


@pytest.fixture(scope="session", autouse=True)
def hardware_bfloat16() -> Iterator[None]:
    """bfloat16 as GPUs have it. The interpreter keeps it as 16-bit integers: it rounds towards zero, and multiplies the
    integers in tl.dot."""
    if not INTERPRETING:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast, convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def rounded(value: Any) -> Any:
        as_torch = torch.from_numpy(value.data.copy()).to(torch.bfloat16)
        return TensorHandle(as_torch.view(torch.uint16).numpy(), tl.bfloat16)

    def is_rounding(source: Any, target: Any) -> bool:
        return source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16

    def widened(self: Any, x: Any) -> Any:
        return self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *rest: dot(self, widened(self, a), widened(self, b), *rest),
        )
        patch.setattr(
            InterpreterBuilder, "cast_impl", lambda self, x, to: rounded(x) if is_rounding(x, to) else cast(self, x, to)
        )
        patch.setattr(
            InterpreterBuilder,
            "create_fp_to_fp",
            lambda self, x, to, mode: rounded(x) if is_rounding(x, to) else convert(self, x, to, mode),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def scan_as_a_tree() -> Iterator[None]:
    """Associative scans by doubling, as GPUs make them. The interpreter takes one element after the other: the same for
    a map that isn't associative, and a thousand times slower."""
    if not INTERPRETING:
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import ScanOps

    def scan(self: Any, inputs: Any) -> list[Any]:
        arrays, types = [x.handle.data for x in inputs], [x.dtype for x in inputs]
        size = arrays[0].size
        assert arrays[0].shape == (size,)
        shift = 1
        while shift < size:
            before = [self.to_tensor(np.roll(x, shift), t) for x, t in zip(arrays, types, strict=True)]
            here = [self.to_tensor(x, t) for x, t in zip(arrays, types, strict=True)]
            both = self.combine_fn.fn(*before, *here)
            has_one = np.arange(size) >= shift
            arrays = [np.where(has_one, y.handle.data, x) for x, y in zip(arrays, both, strict=True)]
            shift *= 2
        return [self.to_tensor(x, t) for x, t in zip(arrays, types, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScanOps, "generic_scan", scan)
        yield
