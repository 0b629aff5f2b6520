"""report.html: what came of a run, on one page that needs nothing but itself."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

import ppo_fast
from ppo_fast.evaluation.heldout import Difference, Evaluation, Reply
from ppo_fast.evaluation.statistics import Interval
from ppo_fast.files import write_atomically
from ppo_fast.reporting.page import page, prose
from ppo_fast.reporting.plots import Panel, draw_panels
from ppo_fast.reporting.run import Run, load_run
from ppo_fast.reporting.units import duration, size
from ppo_fast.reporting.verdict import Verdict, judge_run

_MEASURES = (  # name, title, explanation, digits, factor
    ("reward", "Reward", "the task's reward alone", 3, 1),
    ("penalised", "Penalised reward", "unfinished replies charged as in training", 3, 1),
    ("judge", "Judge", "a scorer that training never saw", 3, 1),
    ("length", "Length", "tokens per reply", 1, 1),
    ("finished", "Finished", "% of replies that end by themselves", 1, 100),
    ("distinct_2", "Distinct-2", "distinct word pairs over all word pairs: variety", 3, 1),
    ("ref_nll", "Surprise", "of the starting model, nats per token: low is fluent or formulaic", 3, 1),
)
_EXTREMES, _AT_RANDOM, _TRAINING = 2, 4, 3  # replies shown of each kind


def write_report(run_folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into the folder of a run and return its path.

    Raises UserError when the folder holds no run, or matplotlib is missing.
    """
    run = load_run(run_folder)
    path = run.folder / "report.html"
    write_atomically(path, render(run))
    return path


def report_summary_lines(run: Run) -> list[str]:
    """The verdict for a console: the headline, the findings, then the warnings, each marked with ``!``."""
    verdict = judge_run(run)
    return [
        verdict.headline,
        *(f"  {finding.label}: {finding.text}" for finding in verdict.findings),
        *(f"! {warning}" for warning in verdict.warnings),
    ]


def render(run: Run) -> str:
    """The page."""
    sections = [_head(run), _verdict(judge_run(run), run.evaluation)]
    if run.evaluation is not None:
        sections.append(_table(run.evaluation))
    sections.append(_curves(draw_panels(run.metrics)))
    sections.append(_replies(run.evaluation) if run.evaluation is not None else _training_replies(run))
    sections += [_record(run.record, run.evaluation), _settings(run.config)]
    sections.append(f'<footer class="soft">Written by ppo_fast {escape(ppo_fast.__version__)}.</footer>')
    return page(f"PPO run {run.folder.resolve().name}", "\n".join(sections))


def _head(run: Run) -> str:
    model, cost = _mapping(run.record.get("model")), _mapping(run.record.get("cost"))
    last = run.metrics[-1]
    facts = [
        str(model.get("name", "")),
        f"{last['iteration']} iterations" + (f", {last['episodes']} episodes" if "episodes" in last else ""),
        duration(float(cost["seconds"])) if "seconds" in cost else "",
        str(run.record.get("finished") or "not finished").split("T")[0],
    ]
    name = escape(run.folder.resolve().name)
    return f'<h1>PPO run {name}</h1>\n<div class="soft">{" · ".join(escape(fact) for fact in facts if fact)}</div>'


def _verdict(verdict: Verdict, evaluation: Evaluation | None) -> str:
    findings = "".join(
        f'<dt class="{finding.tone}">{prose(finding.label)}</dt><dd>{prose(finding.text)}</dd>'
        for finding in verdict.findings
    )
    level = "" if evaluation is None else f"{evaluation.confidence:.0%}"
    note = f'<p class="soft">Brackets hold {level} confidence intervals.</p>' if level else ""
    html = (
        f'<section class="card verdict {verdict.tone}"><p class="headline">{prose(verdict.headline)}</p>'
        f'<dl class="findings">{findings}</dl>{note}</section>'
    )
    if verdict.warnings:
        items = "".join(f"<li>{prose(warning)}</li>" for warning in verdict.warnings)
        html += f'\n<section class="card warnings"><b>Look before you trust it</b><ul>{items}</ul></section>'
    return html


def _table(evaluation: Evaluation) -> str:
    rows = "".join(
        _table_row(title, hint, evaluation.differences[name], digits, factor)
        for name, title, hint, digits, factor in _MEASURES
        if name in evaluation.differences
    )
    before, after = evaluation.text_before, evaluation.text_after
    for title, hint, old, new in (
        ("Commonest trigram", "share of all three-word phrases", before.top_trigram, after.top_trigram),
        ("Commonest opening", "share of replies that begin with it", before.opening, after.opening),
    ):
        cells = "".join(
            f'<td class="n">{share.value:.1%}<br><small>{escape(share.phrase)}</small></td>' for share in (old, new)
        )
        rows += f'<tr><th scope="row">{title}<small>{hint}</small></th>{cells}<td></td><td></td><td></td></tr>'
    level = f"{evaluation.confidence:.0%}"
    kl = evaluation.kl
    replies = len(evaluation.before)
    return (
        "<section><h2>Before and after, on held-out prompts</h2>"
        f'<p class="soft">{evaluation.prompts} prompts that training never saw, {replies} replies a side, paired: '
        f"same prompt, same sampling seed. Intervals come from resampling whole prompts; a change is clear when its "
        f"interval leaves out zero, the thin line. After training a reply lies {_plain(kl, 2)} nats from the "
        "starting model.</p>"
        '<div class="card scroll"><table><thead><tr><th></th><th class="n">before</th><th class="n">after</th>'
        f'<th class="n">change</th><th class="n">{level} interval</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _table_row(title: str, hint: str, difference: Difference, digits: int, factor: float) -> str:
    interval = difference.interval
    low, high = interval.low, interval.high
    bounds = (
        "one prompt"
        if low is None or high is None
        else f"{_signed(low * factor, digits)} to {_signed(high * factor, digits)}"
    )
    return (
        f'<tr><th scope="row">{title}<small>{hint}</small></th>'
        f'<td class="n">{_number(difference.before * factor, digits)}</td>'
        f'<td class="n">{_number(difference.after * factor, digits)}</td>'
        f'<td class="n"><b>{_signed(interval.estimate * factor, digits)}</b></td>'
        f'<td class="n">{bounds}</td><td>{_bar(interval)}</td></tr>'
    )


def _bar(interval: Interval) -> str:
    """The interval as a drawing, zero in the middle, scaled to its own width."""
    if interval.low is None or interval.high is None:
        return ""
    reach = 1.1 * max(abs(interval.low), abs(interval.high), 1e-12)
    low, estimate, high = (75 + 72 * value / reach for value in (interval.low, interval.estimate, interval.high))
    return (
        '<svg class="bar" viewBox="0 0 150 18" aria-hidden="true"><line x1="75" x2="75" y1="0" y2="18"/>'
        f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="9" y2="9"/>'
        f'<circle cx="{estimate:.1f}" cy="9" r="4"/></svg>'
    )


def _curves(panels: list[Panel]) -> str:
    return (
        '<section><h2>Training</h2><p class="soft">One point an iteration.</p>'
        f'<div class="panels">{"".join(map(_panel, panels))}</div></section>'
    )


def _panel(panel: Panel) -> str:
    keys = "".join(
        f'<span class="key"><i{" class=dashed" if dashed else ""} style="color: var(--series-{number})"></i>'
        f"{escape(label)}</span>"
        for number, label, dashed in panel.keys
    )
    return (
        f'<figure class="card"><figcaption><b>{escape(panel.title)}</b> {keys}<small>{escape(panel.hint)}</small>'
        f"</figcaption>{panel.svg}</figure>"
    )


def _replies(evaluation: Evaluation) -> str:
    html = (
        "<section><h2>Replies</h2>"
        '<p class="soft">The same prompt and sampling seed before and after training, picked by the change in reward '
        "and at random: numbers say how much, only reading says what.</p>"
    )
    for heading, indices in _pick(evaluation):
        cards = "".join(_reply(evaluation.before[i], evaluation.after[i]) for i in indices)
        html += f"<h3>{heading}</h3>{cards}"
    return html + "</section>"


def _pick(evaluation: Evaluation) -> Iterator[tuple[str, list[int]]]:
    """Headings and the pairs under them; no pair appears twice."""
    gains = {
        i: new.reward - old.reward
        for i, (old, new) in enumerate(zip(evaluation.before, evaluation.after, strict=True))
        if old.reward is not None and new.reward is not None
    }
    order = sorted(gains, key=lambda i: gains[i])
    shown: set[int] = set()
    if order:
        best, worst = order[::-1][:_EXTREMES], order[:_EXTREMES]
        middle = len(order) // 2
        groups = (
            ("Largest gain" if gains[best[0]] > 0 else "Smallest loss", best),
            ("Median change", order[middle : middle + 1]),
            ("Largest loss" if gains[worst[0]] < 0 else "Smallest gain", worst),
        )
        for heading, candidates in groups:
            fresh = [i for i in candidates if i not in shown]
            shown.update(fresh)
            if fresh:
                yield heading, fresh
    rest = [i for i in range(len(evaluation.before)) if i not in shown]
    drawn = random.Random(evaluation.seed).sample(rest, min(_AT_RANDOM, len(rest)))
    if drawn:
        yield "Drawn at random", drawn


def _reply(old: Reply, new: Reply) -> str:
    return _card(
        old.prompt,
        ("before", old.completion, _badges(old)),
        ("after", new.completion, _badges(new)),
    )


def _card(prompt: str, *sides: tuple[str, str, str]) -> str:
    """A prompt and, side by side, (heading, reply, facts)."""
    columns = "".join(
        f"<div><small>{escape(heading)}</small>{_said(reply)}<small>{escape(facts)}</small></div>"
        for heading, reply, facts in sides
    )
    return (
        f'<article class="card reply"><div class="prompt"><small>prompt</small>{_said(prompt)}</div>'
        f'<div class="sides">{columns}</div></article>'
    )


def _said(text: str) -> str:
    return f'<div class="said">{escape(text)}</div>'


def _badges(reply: Reply) -> str:
    parts = [
        "no reward" if reply.reward is None else f"reward {_number(reply.reward, 2)}",
        "" if reply.judge is None else f"judge {_number(reply.judge, 2)}",
        f"{reply.length} tokens",
        "" if reply.finished else "cut off",
    ]
    return " · ".join(part for part in parts if part)


def _training_replies(run: Run) -> str:
    """Without an evaluation: what the policy wrote first and last, on whatever prompts those iterations had."""
    first, last = run.metrics[0]["iteration"], run.metrics[-1]["iteration"]
    html = ""
    for number in dict.fromkeys((first, last)):
        if not run.has_completions(number):
            continue
        cards = "".join(
            _card(
                _text(row.get("prompt")), ("reply", _text(row.get("completion")), f"score {_score(row.get('score'))}")
            )
            for row in run.completions(number)[:_TRAINING]
        )
        html += f"<h3>Iteration {number}</h3>{cards}"
    return f"<section><h2>Replies during training</h2>{html}</section>" if html else ""


def _record(record: Mapping[str, Any], evaluation: Evaluation | None) -> str:
    loose = {key: value for key, value in record.items() if not isinstance(value, Mapping)}
    tables = {"run": loose} | {key: value for key, value in record.items() if isinstance(value, Mapping)}
    if evaluation is not None and evaluation.about:
        tables["evaluation"] = evaluation.about
    cards = "".join(
        f'<div class="card"><h3>{escape(title.replace("_", " ").capitalize())}</h3>'
        f"<table><tbody>{_facts(table)}</tbody></table></div>"
        for title, table in tables.items()
        if table
    )
    hint = '<p class="soft">What it takes to repeat this run.</p>'
    return f'<section><h2>Record</h2>{hint}<div class="facts">{cards}</div></section>'


def _facts(table: Mapping[str, Any], prefix: str = "") -> str:
    rows = ""
    for key, value in table.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            rows += _facts(value, f"{name}: ")
            continue
        if str(key).endswith("_bytes") and isinstance(value, (int, float)):
            name, value = name.removesuffix(" bytes"), size(float(value))
        elif str(key) == "seconds" and isinstance(value, (int, float)):
            name, value = name.removesuffix("seconds") + "time", duration(float(value))
        rows += f"<tr><th>{escape(name)}</th><td>{escape('none' if value is None else _text(value))}</td></tr>"
    return rows


def _settings(config: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return (
        '<section><h2>Settings</h2><details class="card"><summary>config.yaml</summary>'
        f"<pre>{escape(text)}</pre></details></section>"
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else str(value)


def _score(value: object) -> str:
    return _number(float(value), 2) if isinstance(value, (int, float)) else "none"


def _plain(interval: Interval, digits: int) -> str:
    if interval.low is None or interval.high is None:
        return _number(interval.estimate, digits)
    return f"{_number(interval.estimate, digits)} [{_number(interval.low, digits)}, {_number(interval.high, digits)}]"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")
