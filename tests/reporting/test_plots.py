"""The panels: well-formed, self-contained, coloured by the page, and drawn where the data are."""

from __future__ import annotations

import builtins
import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from ppo_fast.errors import UserError
from ppo_fast.reporting.plots import Panel, draw_panels

pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install "ppo-fast[demo]"')

ROWS = [
    {
        "iteration": i,
        "objective/scores": 0.1 * i,
        "reward/mean": 0.1 * i + 0.2,
        "objective/kl": 0.5 * i,
        "objective/kl_p95": 0.9 * i,
        "completions/finished_frac": 0.25,
        "time/rollout": 3.0,
        "time/update": 5.0,
    }
    for i in (1, 2, 3)
]


def by_title(rows: list[dict[str, Any]]) -> dict[str, Panel]:
    return {panel.title: panel for panel in draw_panels(rows)}


def test_panels_without_data_are_left_out() -> None:
    panels = by_title(ROWS)
    assert list(panels) == ["Reward", "Distance from the reference", "Replies", "Time"]
    assert panels["Reward"].keys == ((1, "task reward alone", False), (2, "unfinished replies penalised", False))
    assert panels["Replies"].keys == ((1, "finished", False),)
    assert draw_panels([{"iteration": 1}]) == []


def test_every_panel_of_a_whole_run_is_drawn(make_run: Any) -> None:
    from ppo_fast.reporting.run import load_run

    titles = list(by_title(list(load_run(make_run()).metrics)))
    assert titles == ["Reward", "Distance from the reference", "Entropy", "Replies", "Size of the updates", "Critic",
                      "Advantages", "Time"]  # fmt: skip


def test_svg_stands_alone_and_takes_the_pages_colours() -> None:
    for panel in by_title(ROWS).values():
        root = ElementTree.fromstring(panel.svg)
        assert root.tag == "svg"
        assert root.get("viewBox") == "0 0 331.2 180"
        assert {"font-family", "http", "<style", "#0a0b"}.isdisjoint(
            re.findall(r"font-family|http|<style|#0a0b", panel.svg)
        )
        assert set(re.findall(r"#[0-9a-f]{6}", panel.svg)) == set()
        assert "var(--series-1)" in panel.svg
        assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', panel.svg))


def _line(svg: str, variable: str) -> list[tuple[float, float]]:
    """The points of the path drawn in that colour."""
    for element in ElementTree.fromstring(svg).iter("path"):
        style = element.get("style", "")
        if f"stroke: var({variable})" in style and "fill: none" in style:
            return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", element.get("d", ""))]
    raise AssertionError(f"no line in {variable}")


def test_lines_go_where_the_numbers_say() -> None:
    svg = by_title(ROWS)["Reward"].svg
    raw, penalised = _line(svg, "--series-1"), _line(svg, "--series-2")
    (x1, y1), (x2, y2), (x3, y3) = raw
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.01)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.01)  # up on the page is a smaller y
    assert y1 > y2
    # 0.2 apart in value, where 0.1 is one step between iterations
    assert penalised[0][1] - raw[0][1] == pytest.approx(2 * (y1 - y2), abs=0.02)


def test_a_missing_or_infinite_value_is_a_gap_and_not_a_zero() -> None:
    rows = [dict(row) for row in ROWS]
    del rows[1]["objective/scores"]
    rows[1]["reward/mean"] = float("inf")
    svg = by_title(rows)["Reward"].svg
    whole = by_title(ROWS)["Reward"].svg
    for variable in ("--series-1", "--series-2"):
        gap = _line(svg, variable)
        assert len(gap) == 2
        assert [x for x, _ in gap] == [_line(whole, variable)[i][0] for i in (0, 2)]


def test_one_iteration_shows_as_a_point() -> None:
    svg = by_title(ROWS[:1])["Reward"].svg
    assert svg.count("<use ") >= 2


def test_without_a_rule_for_unfinished_replies_the_reward_is_one_line() -> None:
    rows = [{**row, "reward/mean": row["objective/scores"]} for row in ROWS]
    assert by_title(rows)["Reward"].keys == ((1, "task reward alone", False),)


def test_time_is_stacked() -> None:
    panel = by_title(ROWS)["Time"]
    assert panel.keys == ((1, "rollout", False), (2, "update", False))
    assert "the last took 8 seconds" in panel.svg


def test_the_same_numbers_give_the_same_bytes() -> None:
    assert draw_panels(ROWS) == draw_panels(ROWS)


def test_missing_matplotlib_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r'pip install "ppo-fast\[demo\]"'):
        draw_panels(ROWS)
