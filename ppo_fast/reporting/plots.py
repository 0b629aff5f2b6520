"""The curves of a run as small SVG panels that take their colours from the page around them.

Each panel has one subject; where it shows two units it has two rows above one another, never two scales on one axis.
matplotlib draws with stand-in colours that are then replaced by CSS variables (``var(--series-1)`` ...), so that the
same SVG is readable on light and dark pages.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_fast.errors import UserError

Metrics = Sequence[Mapping[str, Any]]

_INK, _GRID = "#0a0b01", "#0a0b02"
_SERIES = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14")
_VARIABLES = {_INK: "--ink-soft", _GRID: "--grid"} | {c: f"--series-{i}" for i, c in enumerate(_SERIES, 1)}
_SIZE = (4.6, 2.5)  # inches: the viewBox; the page scales it


@dataclass(frozen=True)
class Line:
    """One series of a row."""

    metric: str
    label: str
    scale: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Row:
    """One axis: its lines and the unit on it. ``span`` fixes the axis; else it fits the data."""

    unit: str
    lines: tuple[Line, ...]
    span: tuple[float, float] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class Panel:
    """A drawn panel: ``keys`` are (series number from 1, label, dashed) for a legend in the page's own type."""

    title: str
    hint: str
    keys: tuple[tuple[int, str, bool], ...]
    svg: str


_PANELS: tuple[tuple[str, str, tuple[Row, ...]], ...] = (
    (
        "Reward",
        "Mean score of the replies sampled in each iteration, on training prompts.",
        (
            Row(
                "score",
                (
                    Line("reward/mean", "task reward alone"),
                    Line("objective/scores", "unfinished replies penalised"),
                ),
            ),
        ),
    ),
    (
        "Distance from the reference",
        "KL of whole replies. A steady climb is the price of the reward; a jump deserves a look at the replies.",
        (
            Row(
                "nats per reply",
                (Line("objective/kl", "mean"), Line("objective/kl_p95", "95th percentile", dashed=True)),
                from_zero=True,
            ),
        ),
    ),
    (
        "Entropy",
        "How undecided the policy is about the next token. Near zero it says the same thing every time.",
        (Row("nats per token", (Line("policy/entropy_avg", "mean"),), from_zero=True),),
    ),
    (
        "Replies",
        "Length, and the share that ended by themselves rather than at the limit.",
        (
            Row("tokens", (Line("completions/mean_length", "mean length"),), from_zero=True),
            Row("%", (Line("completions/finished_frac", "finished", scale=100),), span=(0, 100)),
        ),
    ),
    (
        "Size of the updates",
        "Share of tokens whose gradient the clip cut off, and the KL between the policy before and after.",
        (
            Row("%", (Line("policy/clipfrac_avg", "clipped", scale=100),), from_zero=True),
            Row("nats per token", (Line("policy/approxkl_avg", "approximate KL"),), from_zero=True),
        ),
    ),
    (
        "Critic",
        "Explained variance is 1 for a perfect forecast of the return, 0 for a constant, negative for worse.",
        (
            Row("loss", (Line("loss/value_avg", "value loss"),), from_zero=True),
            Row("fraction", (Line("critic/explained_var", "explained variance"),)),
        ),
    ),
    (
        "Advantages",
        "Their spread before whitening. Near zero there is nothing left to learn from.",
        (Row("score", (Line("advantages/std", "standard deviation"),), from_zero=True),),
    ),
)

_PHASES = (("time/rollout", "rollout"), ("time/score", "scoring"), ("time/update", "update"))


def draw_panels(metrics: Metrics) -> list[Panel]:
    """The panels for which ``metrics`` (rows with ``iteration``) has data.

    Raises UserError when matplotlib is missing.
    """
    panels = [_line_panel(title, hint, rows, metrics) for title, hint, rows in _PANELS]
    return [panel for panel in (*panels, _time_panel(metrics)) if panel is not None]


def _line_panel(title: str, hint: str, rows: Sequence[Row], metrics: Metrics) -> Panel | None:
    shown = [(row, drawn) for row in rows if (drawn := _drawn(row, metrics))]
    if not shown:
        return None
    figure, axes = _figure(len(shown))
    x = [row["iteration"] for row in metrics]
    keys: list[tuple[int, str, bool]] = []
    for axis, (row, lines) in zip(axes, shown, strict=True):
        for line in lines:
            y = [value * line.scale for value in _values(metrics, line.metric)]
            axis.plot(
                x,
                y,
                color=_SERIES[len(keys)],
                linestyle=(0, (3, 2)) if line.dashed else "-",
                linewidth=1.8,
                marker="o" if len(x) <= 30 else None,
                markersize=2.6,
                clip_on=False,
                solid_capstyle="round",
            )
            keys.append((len(keys) + 1, line.label, line.dashed))
        axis.set_ylabel(row.unit)
        if row.span:
            axis.set_ylim(*row.span)
        elif row.from_zero:
            axis.set_ylim(bottom=0, top=None if axis.get_ylim()[1] > 0 else 1)
    axes[-1].set_xlabel("iteration")
    return Panel(title, hint, tuple(keys), _svg(figure, _alt(title, shown, metrics)))


def _time_panel(metrics: Metrics) -> Panel | None:
    phases = [(name, label) for name, label in _PHASES if _has_values(metrics, name)]
    if not phases:
        return None
    figure, (axis,) = _figure(1)
    x = [row["iteration"] for row in metrics]
    floor = [0.0] * len(x)
    for i, (name, _) in enumerate(phases):
        height = [0.0 if math.isnan(value) else value for value in _values(metrics, name)]
        axis.bar(x, height, bottom=floor, width=0.72, color=_SERIES[i], linewidth=0, clip_on=False)
        floor = [a + b for a, b in zip(floor, height, strict=True)]
    axis.set_ylabel("seconds")
    axis.set_xlabel("iteration")
    keys = tuple((i, label, False) for i, (_, label) in enumerate(phases, 1))
    alt = f"Time per iteration, stacked by phase; the last took {floor[-1]:.3g} seconds"
    return Panel("Time", "Where an iteration's seconds go.", keys, _svg(figure, alt))


def _values(metrics: Metrics, name: str) -> list[float]:
    """The metric's values, with NaN (a gap in the line) where a row has none or it isn't finite."""
    values = (row.get(name) for row in metrics)
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in values]


def _drawn(row: Row, metrics: Metrics) -> list[Line]:
    """The lines with data, each once: without a rule for unfinished replies both rewards are the same line."""
    lines: dict[tuple[str, ...], Line] = {}
    for line in row.lines:
        if _has_values(metrics, line.metric):
            lines.setdefault(tuple(map(repr, _values(metrics, line.metric))), line)
    return list(lines.values())


def _has_values(metrics: Metrics, name: str) -> bool:
    return any(not math.isnan(value) for value in _values(metrics, name))


def _alt(title: str, shown: Sequence[tuple[Row, Sequence[Line]]], metrics: Metrics) -> str:
    parts = []
    for row, lines in shown:
        for line in lines:
            values = [value * line.scale for value in _values(metrics, line.metric) if not math.isnan(value)]
            parts.append(f"{line.label} from {values[0]:.3g} to {values[-1]:.3g} {row.unit}")
    return f"{title} by iteration: {'; '.join(parts)}"


def _figure(rows: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UserError(
            'the report\'s curves need matplotlib, which is not installed: pip install "ppo-fast[demo]"'
        ) from error
    with rc_context({"font.size": 9, "axes.unicode_minus": True, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=_SIZE)
        # Fixed margins, not a fitted layout: the axes of all panels line up on the page.
        figure.subplots_adjust(left=0.14, right=0.985, bottom=0.18, top=0.97, hspace=0.3)
        axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
        for axis in axes:
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.spines["bottom"].set_color(_GRID)
            axis.grid(axis="y", color=_GRID, linewidth=0.8)
            axis.set_axisbelow(True)
            axis.tick_params(length=0, labelcolor=_INK)
            axis.yaxis.set_major_locator(MaxNLocator(3 if rows > 1 else 5, steps=[1, 2, 2.5, 5, 10]))
            axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
            axis.margins(x=0.02)
            axis.yaxis.set_label_coords(-0.125, 0.5)
    return figure, axes


def _svg(figure: Any, alt: str) -> str:
    """The figure as one ``<svg>`` element for a page: CSS variables for colours, the page's font, no ids to clash."""
    from html import escape

    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r"<svg[^>]*?viewBox=(\"[^\"]*\")[^>]*>",
        lambda match: f'<svg viewBox={match[1]} role="img" aria-label="{escape(alt)}" stroke-linejoin="round">',
        svg,
    )
    svg = re.sub(r'<g id="(?:figure|axes|matplotlib|patch|line2d|text|xtick|ytick)[^"]*"', "<g", svg)
    svg = re.sub(r"<g\s*/>", "", svg).replace("xlink:href", "href")
    svg = re.sub(r"font-family: [^;]*; ", "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.strip()
