"""The two ways a Triton kernel is tested without a GPU, each in its own process.

TRITON_INTERPRET is read when a kernel is defined, so one process can either interpret kernels on CPU tensors
(``interpret/``) or compile them for GPUs (``aot/``): `make test` runs both, anything else skips the half it can't run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE / "interpret" in item.path.parents and not INTERPRETING:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1, run by make test"))
        if HERE / "aot" in item.path.parents and INTERPRETING:
            item.add_marker(pytest.mark.skip(reason="needs a process without TRITON_INTERPRET, run by make test"))
