"""report.html: self-contained, escaped, complete, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ppo_fast.evaluation.heldout import Evaluation, Reply, compare, save
from ppo_fast.reporting import report
from ppo_fast.reporting.plots import Panel, draw_panels
from ppo_fast.reporting.report import render, report_summary_lines, write_report
from ppo_fast.reporting.run import load_run
from ppo_fast.reporting.units import duration, size
from ppo_fast.reporting.verdict import judge_run

pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install "ppo-fast[demo]"')
MakeRun = Callable[..., Path]
_VOID = {"meta", "br", "rect", "path", "use", "line", "circle"}


@pytest.fixture(autouse=True)
def _draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most pages here show the same curves, and drawing them is nearly all of a page's time."""
    monkeypatch.setattr(report, "draw_panels", lambda metrics: _drawn(json.dumps(metrics)))


@functools.cache
def _drawn(metrics: str) -> list[Panel]:
    return draw_panels(json.loads(metrics))


class Outline(HTMLParser):
    """Checks nesting and gathers tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_but_itself(make_run: MakeRun, evaluation: Evaluation) -> None:
    folder = make_run(evaluation)
    path = write_report(folder)
    assert path == folder / "report.html"
    html = path.read_text(encoding="utf-8")
    outline = Outline(html)
    assert {"script", "link", "img", "iframe", "a"}.isdisjoint(outline.tags)
    assert all(value.startswith("#") for name, value in outline.attributes if name in ("href", "src", "xlink:href"))
    assert not re.search(r"https?:|@import|url\((?!#)", html)
    ids = [value for name, value in outline.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for name, value in outline.attributes if name == "href"} | set(re.findall(r"url\(#(\w+)\)", html))
    assert used <= set(ids)


def test_the_page_tells_the_whole_story_in_order(make_run: MakeRun, evaluation: Evaluation) -> None:
    run = load_run(make_run(evaluation))
    text = Outline(render(run)).text
    parts = [
        judge_run(run).headline, "Before and after, on held-out prompts", "Distinct-2", "Training",
        "Distance from the reference", "Size of the updates", "The same prompt and sampling seed", "Largest gain",
        "Median change", "Drawn at random", "Record", "checkpoint-18", "Settings", "learning_rate: 0.0002",
    ]  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "7 min 31 s" in text
    assert "2.18 GiB" in text
    assert "gae: cpu" in text


def test_the_table_shows_the_computed_numbers(make_run: MakeRun, evaluation: Evaluation) -> None:
    html = render(load_run(make_run(evaluation)))
    for name, factor, digits in (("reward", 1, 3), ("judge", 1, 3), ("finished", 100, 1), ("distinct_2", 1, 3)):
        difference = evaluation.differences[name]
        interval = difference.interval
        assert interval.low is not None
        assert interval.high is not None
        before, after = (f"{value * factor:.{digits}f}" for value in (difference.before, difference.after))
        change, low, high = (
            f"{value * factor:+.{digits}f}".replace("-", "−")
            for value in (interval.estimate, interval.low, interval.high)
        )
        row = f'<td class="n">{before}</td><td class="n">{after}</td><td class="n"><b>{change}</b></td>'
        assert f'{row}<td class="n">{low} to {high}</td>' in html


def test_warnings_stand_on_the_page(make_run: MakeRun, evaluation: Evaluation) -> None:
    worse = [
        dataclasses.replace(r, judge=-1.0, completion=f"so sweet so sweet {i}") for i, r in enumerate(evaluation.after)
    ]
    run = load_run(make_run(compare(evaluation.before, worse, resamples=200)))
    text = Outline(render(run)).text
    assert "Look before you trust it" in text
    assert "The judge disagrees with the reward" in text
    assert 'open with "so sweet so"' in text
    assert "Look before you trust it" not in Outline(render(load_run(make_run(evaluation, name="fine")))).text


EVIL = "<script>alert(\"x\")</script> & <b onclick='y'>`code`</b> http://example.org {0} \x00"


def test_everything_from_outside_is_escaped(make_run: MakeRun, evaluation: Evaluation) -> None:
    def evil(reply: Reply) -> Reply:
        return dataclasses.replace(reply, prompt=EVIL + reply.prompt, completion=EVIL * 2 + reply.completion)

    before, after = ([evil(reply) for reply in side] for side in (evaluation.before, evaluation.after))
    folder = make_run(compare(before, after, resamples=100, about={EVIL: EVIL}))
    (folder / "config.yaml").write_text("a: '<script>z</script>'\n")
    (folder / "run_record.json").write_text(
        '{"finished": "<script>1</script>", "model": {"name": "<script>2</script>"}, "<script>3</script>": {"k": 1}}'
    )
    html = write_report(folder).read_text(encoding="utf-8")
    outline = Outline(html)
    assert "script" not in outline.tags
    assert "<b onclick" not in html
    assert "<script>alert(\"x\")</script> & <b onclick='y'>`code`</b>" in outline.text
    assert "<script>z</script>" in outline.text
    folder = make_run(name="training")
    for path in (folder / "completions").iterdir():
        path.write_text('{"prompt": "<script>p</script>", "completion": "<script>c</script>", "score": null}\n')
    outline = Outline(render(load_run(folder)))
    assert "script" not in outline.tags
    assert "<script>c</script>" in outline.text


def test_lone_surrogates_do_not_stop_the_report(make_run: MakeRun, evaluation: Evaluation) -> None:
    after = [dataclasses.replace(reply, completion="half \ud83d") for reply in evaluation.after]
    folder = make_run(compare(evaluation.before, after, resamples=100))
    assert "half" in write_report(folder).read_text(encoding="utf-8")


def test_replies_are_the_extremes_the_median_and_some_at_random(make_run: MakeRun) -> None:
    def side(gains: list[float]) -> list[Reply]:
        return [
            Reply(f"prompt {i}", f"reply {i}", 3, True, gain, gain, None, 0.0, 1.0) for i, gain in enumerate(gains)
        ]  # fmt: skip

    gains = [0.5, -0.9, 0.1, 0.8, 0.0, 0.2, 0.3, -0.2, 0.15]
    folder = make_run(compare(side([0.0] * 9), side(gains), resamples=100))
    text = Outline(render(load_run(folder))).text
    replies = text[text.index("Largest gain") : text.index("Record")]
    sections = re.split(r"Largest gain|Median change|Largest loss|Drawn at random", replies)[1:]
    shown = [re.findall(r"prompt (\d)", section) for section in sections]
    assert shown[:3] == [["3", "0"], ["8"], ["1", "7"]]
    assert len(shown[3]) == 4
    assert len(set().union(*shown)) == 9

    risen = make_run(compare(side([0.0] * 9), side([1 + gain for gain in gains]), resamples=100), name="risen")
    assert "Smallest gain" in render(load_run(risen))
    unscored = [dataclasses.replace(reply, reward=None, penalised=None) for reply in side(gains)]
    html = render(load_run(make_run(compare(unscored, unscored, resamples=100), name="unscored")))
    assert "Drawn at random" in html
    assert "Largest" not in html
    assert "no reward" in html


def test_without_evaluation_the_page_says_so_and_shows_training_replies(make_run: MakeRun) -> None:
    folder = make_run()
    text = Outline(write_report(folder).read_text(encoding="utf-8")).text
    assert "ppo-fast eval has not been run on this folder" in text
    assert "Before and after" not in text
    assert "Iteration 1" in text
    assert "Iteration 18" in text
    for path in (folder / "completions").iterdir():
        path.unlink()
    assert "Replies during training" not in render(load_run(folder))


def test_a_second_report_replaces_the_first(make_run: MakeRun, evaluation: Evaluation) -> None:
    folder = make_run()
    first = write_report(folder).read_text(encoding="utf-8")
    save(evaluation, folder / "evaluation.json")
    second = write_report(folder).read_text(encoding="utf-8")
    assert first != second
    assert write_report(folder).read_text(encoding="utf-8") == second
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_summary_lines_are_the_verdict(make_run: MakeRun, evaluation: Evaluation) -> None:
    run = load_run(make_run(evaluation))
    verdict = judge_run(run)
    lines = report_summary_lines(run)
    assert lines[0] == verdict.headline
    assert lines[1].startswith("  Judge: Agrees with the reward")
    assert len(lines) == 1 + len(verdict.findings) + len(verdict.warnings)
    assert report_summary_lines(load_run(make_run(name="bare")))[-1].startswith("! `ppo-fast eval` has not been run")


def test_units() -> None:
    assert [duration(s) for s in (0.4, 38, 59.6, 451, 7500)] == [
        "0 s",
        "38 s",
        "1 min 00 s",
        "7 min 31 s",
        "2 h 05 min",
    ]
    assert [size(b) for b in (2**20 * 512, 2**30 * 2.5)] == ["512 MiB", "2.50 GiB"]
