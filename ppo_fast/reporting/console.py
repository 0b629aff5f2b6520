"""A run as it goes: a live table on a terminal, one line an iteration anywhere else."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ppo_fast.reporting.units import duration
from ppo_fast.training.callbacks import ProgressCallback


@dataclass(frozen=True)
class _Column:
    """A metric: its heading in the table, its name in a line, and how a value reads."""

    metric: str
    heading: str
    name: str
    form: str


_COLUMNS = (
    _Column("objective/scores", "score", "score", "{:.3f}"),
    _Column("objective/kl", "KL", "KL", "{:.2f}"),
    _Column("policy/entropy_avg", "entropy", "entropy", "{:.2f}"),
    _Column("completions/mean_length", "length", "length", "{:.1f}"),
    _Column("completions/finished_frac", "fin-\nished", "finished", "{:.0%}"),
    _Column("policy/clipfrac_avg", "clip-\nped", "clipped", "{:.1%}"),
    _Column("loss/value_avg", "value\nloss", "value loss", "{:.3f}"),
    _Column("critic/explained_var", "expl.\nvar.", "explained variance", "{:.2f}"),
    _Column("perf/tokens_per_second", "tok/s", "tokens/s", "{:.0f}"),
)


class LiveTable(ProgressCallback):
    """Shows a run on the console while it trains.

    On a terminal: the last ``rows`` iterations as a table, a bar for the current phase in tokens and one for the run
    with the time left, redrawn in place. Elsewhere (a file, a CI log): one line when an iteration ends.

    Use it as a context manager around training, or an exception leaves the terminal in the live display until the
    interpreter exits::

        with LiveTable() as table:
            PPOTrainer(model, reward_funcs, args, dataset, callbacks=[table]).train()

    Args:
        console: where to write; None is standard output.
        clock: seconds from any fixed moment.
        rows: iterations the table keeps.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic, rows: int = 12
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        self._console = console or Console()
        self._clock = clock
        self._kept = rows
        self._live: Live | None = None
        self._phase: tuple[str, int, int] | None = None
        self._rows: tuple[tuple[int, dict[str, Any], float], ...] = ()
        self._ended = 0.0
        self._begin(0, 0)

    def __enter__(self) -> LiveTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the display. A resumed run begins at ``state.global_step`` of ``state.max_steps``."""
        self.stop()
        self._begin(state.global_step, state.max_steps)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # The display's thread draws from values that are replaced whole, never changed in place.
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
            atexit.register(self.stop)
            self._live.start(refresh=True)

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Move the bar of the current phase."""
        self._phase = (phase, done, total)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Show an iteration's metrics; logs without ``iteration`` are not an iteration's and are passed over."""
        if logs is None or "iteration" not in logs:
            return
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        self._done = int(logs["iteration"])
        self._rows = (*self._rows, (self._done, dict(logs), seconds))[-self._kept :]
        self._phase = None
        if self._live is None:
            self._console.print(
                self._line(self._done, logs, seconds), markup=False, highlight=False, soft_wrap=True, emoji=False
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the table on the screen, without its bars."""
        self._finished = True
        self.stop()

    def stop(self) -> None:
        """Give the terminal back. Safe to call twice."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self.stop)

    def _begin(self, done: int, total: int) -> None:
        self._first = self._done = done
        self._total = total
        self._started = self._ended = self._clock()
        self._phase = None
        self._rows = ()
        self._finished = False

    def _seconds_left(self) -> float | None:
        """By the mean iteration of this process so far; None before the first has ended."""
        if self._done <= self._first:
            return None
        each = (self._ended - self._started) / (self._done - self._first)
        return max(0.0, each * (self._total - self._done) - (self._clock() - self._ended))

    def _line(self, iteration: int, logs: Mapping[str, Any], seconds: float) -> str:
        parts = [f"{column.name} {_cell(column, logs)}" for column in _COLUMNS if logs.get(column.metric) is not None]
        left = self._seconds_left()
        ending = [] if left is None or iteration >= self._total else [f"{duration(left)} left"]
        return " | ".join([f"iteration {iteration}/{self._total}", *parts, f"{seconds:.1f} s", *ending])

    def _render(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
        table.add_column("iter", justify="right", no_wrap=True, vertical="bottom")
        for column in _COLUMNS:
            table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
        table.add_column("secs", justify="right", no_wrap=True, vertical="bottom")
        for iteration, logs, seconds in self._rows:
            table.add_row(str(iteration), *(_cell(column, logs) for column in _COLUMNS), f"{seconds:.1f}")
        if self._finished:
            spent = duration(self._ended - self._started)
            return Group(table, Text(f"\n{self._done} of {self._total} iterations, {spent}"))
        bars = Table.grid(padding=(0, 1))
        phase, done, total = self._phase or ("starting", 0, 0)
        bars.add_row(phase, _bar(done, total), f"{done:,} of {total:,} tokens" if total else "")
        left = self._seconds_left()
        ending = "" if left is None else f", {duration(left)} left"
        bars.add_row("run", _bar(self._done, self._total), f"{self._done} of {self._total} iterations{ending}")
        return Group(table, Text(), bars)


def _cell(column: _Column, logs: Mapping[str, Any]) -> str:
    value = logs.get(column.metric)
    if value is None:
        return "-"
    return column.form.format(value) if math.isfinite(value) else str(value)


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=28)
