"""The live table: what it prints to a file, what it draws on a terminal, and that it gives the terminal back."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ppo_fast.reporting.console import LiveTable

LOGS = {
    "objective/scores": 0.3125,
    "objective/kl": 1.256,
    "policy/entropy_avg": 2.98,
    "completions/mean_length": 21.34,
    "completions/finished_frac": 0.45,
    "policy/clipfrac_avg": 0.081,
    "loss/value_avg": 0.12,
    "critic/explained_var": -0.31,
    "perf/tokens_per_second": 98.4,
}
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, height=40, _environ={"TERM": "xterm"}), out


def begin(table: LiveTable, done: int = 0, total: int = 18) -> None:
    table.on_train_begin(None, SimpleNamespace(global_step=done, max_steps=total), None)


def log(table: LiveTable, iteration: int, **changes: Any) -> None:
    table.on_log(None, None, None, logs={"iteration": iteration, **LOGS, **changes})


def drawn(table: LiveTable) -> str:
    """What the table shows now, as plain text."""
    plain = Console(file=io.StringIO(), width=100, color_system=None)
    with plain.capture() as capture:
        plain.print(table._render())
    return capture.get()


def test_lines_where_there_is_no_terminal() -> None:
    clock = Clock()
    to, out = console(terminal=False)
    table = LiveTable(to, clock=clock)
    begin(table)
    table.on_progress("rollout", 10, 768)
    clock.now += 38
    log(table, 1)
    clock.now += 42
    log(table, 2, **{"critic/explained_var": None, "objective/kl": float("nan")})
    table.on_train_end(None, None, None)
    first, second = out.getvalue().splitlines()
    assert first == (
        "iteration 1/18 | score 0.312 | KL 1.26 | entropy 2.98 | length 21.3 | finished 45% | clipped 8.1% | "
        "value loss 0.120 | explained variance -0.31 | tokens/s 98 | 38.0 s | 10 min 46 s left"
    )
    assert "KL nan" in second
    assert "explained variance" not in second
    assert second.endswith("42.0 s | 10 min 40 s left")
    assert "\x1b" not in out.getvalue()


def test_the_last_iteration_has_no_time_left() -> None:
    to, out = console(terminal=False)
    table = LiveTable(to, clock=Clock())
    begin(table, total=1)
    log(table, 1)
    assert out.getvalue().endswith("| 0.0 s\n")


def test_logs_that_are_no_iteration_are_passed_over() -> None:
    to, out = console(terminal=False)
    table = LiveTable(to, clock=Clock())
    begin(table)
    table.on_log(None, None, None, logs={"train_runtime": 3.0})
    table.on_log(None, None, None, logs=None)
    assert out.getvalue() == ""


def test_a_resumed_run_estimates_from_its_own_iterations() -> None:
    clock = Clock()
    to, out = console(terminal=False)
    table = LiveTable(to, clock=clock)
    begin(table, done=10, total=13)
    clock.now += 60
    log(table, 11)
    assert out.getvalue().rstrip().endswith("60.0 s | 2 min 00 s left")


def test_table_phase_bar_and_estimate() -> None:
    clock = Clock()
    to, _ = console(terminal=True)
    with LiveTable(to, clock=clock, rows=3) as table:
        begin(table)
        assert "0 of 18 iterations\n" in "\n".join(line.rstrip() for line in drawn(table).splitlines()) + "\n"
        for iteration in range(1, 6):
            clock.now += 30
            log(table, iteration, **{"objective/scores": iteration / 10})
        table.on_progress("rollout", 300, 1768)
        clock.now += 10
        text = drawn(table)
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("30.0")]
    assert [row[:2] for row in rows] == [["3", "0.300"], ["4", "0.400"], ["5", "0.500"]]
    assert rows[0] == ["3", "0.300", "1.26", "2.98", "21.3", "45%", "8.1%", "0.120", "-0.31", "98", "30.0"]
    assert "rollout" in text
    assert "300 of 1,768 tokens" in text
    assert "5 of 18 iterations, 6 min 20 s left" in text  # 13 more at 30 s, 10 s of them gone


def test_the_table_fits_eighty_columns() -> None:
    clock = Clock()
    table = LiveTable(console(terminal=False)[0], clock=clock)
    begin(table, total=1800)
    clock.now += 100
    log(table, 1234, **{"objective/scores": -10.123, "perf/tokens_per_second": 12345.0, "objective/kl": 123.45})
    narrow = Console(file=io.StringIO(), width=80, color_system=None)
    with narrow.capture() as capture:
        narrow.print(table._render())
    assert "…" not in capture.get()
    for cell in ("1234", "-10.123", "123.45", "12345", "-0.31", "100.0"):
        assert cell in capture.get()


def test_missing_metrics_are_dashes() -> None:
    table = LiveTable(console(terminal=False)[0], clock=Clock())
    begin(table)
    table.on_log(None, None, None, logs={"iteration": 1, "objective/scores": 1.0})
    (row,) = [line.split() for line in drawn(table).splitlines() if "1.000" in line]
    assert row == ["1", "1.000", *"--------", "0.0"]


def test_the_terminal_is_given_back_at_the_end_and_keeps_the_table() -> None:
    to, out = console(terminal=True)
    table = LiveTable(to, clock=Clock())
    begin(table, total=1)
    assert HIDE in out.getvalue()
    log(table, 1)
    table.on_train_end(None, None, None)
    text = out.getvalue()
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert "1 of 1 iterations, 0 s" in text


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_given_back_on_an_exception(error: type[BaseException]) -> None:
    to, out = console(terminal=True)
    table = LiveTable(to, clock=Clock())

    def train() -> None:
        with table:
            begin(table)
            assert SHOW not in out.getvalue()
            raise error

    with pytest.raises(error):
        train()
    assert out.getvalue().count(SHOW) == 1
    table.stop()
    assert out.getvalue().count(SHOW) == 1


def test_without_the_context_manager_the_exit_of_the_interpreter_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Any] = []
    monkeypatch.setattr("atexit.register", exits.append)
    monkeypatch.setattr("atexit.unregister", exits.remove)
    to, out = console(terminal=True)
    table = LiveTable(to, clock=Clock())
    begin(table)
    (at_exit,) = exits
    at_exit()
    assert out.getvalue().count(SHOW) == 1
    assert exits == []


def test_a_second_run_starts_afresh() -> None:
    to, _ = console(terminal=True)
    with LiveTable(to, clock=Clock()) as table:
        begin(table, total=1)
        log(table, 1)
        table.on_train_end(None, None, None)
        begin(table, total=7)
        assert "0 of 7 iterations" in drawn(table)
        assert "0.312" not in drawn(table)


def test_it_hears_transformers_events() -> None:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    to, out = console(terminal=False)
    handler = CallbackHandler([LiveTable(to, clock=Clock())], None, None, None, None)
    state, control = TrainerState(max_steps=2), TrainerControl()
    handler.on_train_begin(None, state, control)
    handler.on_log(None, state, control, logs={"iteration": 1, **LOGS})
    handler.on_train_end(None, state, control)
    assert out.getvalue().startswith("iteration 1/2 | score 0.312")


def test_bad_rows_is_named() -> None:
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        LiveTable(rows=0)
