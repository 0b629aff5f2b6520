"""Prints what every compiled kernel takes, after the tests."""

from __future__ import annotations

import pytest

_ROWS: list[tuple[str, str, int, int, int]] = []


@pytest.fixture
def resource_table() -> list[tuple[str, str, int, int, int]]:
    """Rows to add to: kernel, target, registers a lane, bytes of shared memory, bytes of stack."""
    return _ROWS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _ROWS:
        return
    targets = list(dict.fromkeys(target for _, target, *_ in _ROWS))
    cells = {(name, target): f"{r}/{s / 1024:.3g}/{stack}" for name, target, r, s, stack in _ROWS}
    names = list(dict.fromkeys(name for name, *_ in _ROWS))
    wide = max(map(len, names))
    terminalreporter.section("registers a lane / shared memory in KiB / stack in bytes")
    terminalreporter.write_line(" ".join([" " * wide, *(f"{target:>12}" for target in targets)]))
    for name in names:
        columns = (f"{cells.get((name, target), ''):>12}" for target in targets)
        terminalreporter.write_line(" ".join([f"{name:{wide}}", *columns]))
