"""The two ways a Triton kernel is tested without a GPU, each in its own process.

TRITON_INTERPRET is read when a kernel is defined, so one process can either interpret kernels on CPU tensors
(``interpret/``) or compile them for GPUs (``aot/``): `make test` runs both, anything else skips the half it can't run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

INTERPRET = Path(__file__).parent / "interpret"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return
    for item in items:
        if INTERPRET in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1, run by make test"))
