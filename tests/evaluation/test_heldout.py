"""The paired comparison and evaluation.json."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from ppo_fast.errors import UserError
from ppo_fast.evaluation.heldout import Reply, compare, load, save
from ppo_fast.evaluation.statistics import bootstrap_mean, jackknife
from ppo_fast.files import write_atomically


def reply(prompt: str = "p", completion: str = "some words here", **changes: object) -> Reply:
    plain = Reply(
        prompt, completion, length=4, finished=True, reward=0.0, penalised=0.0, judge=0.0, kl=0.0, ref_nll=2.0
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def sides() -> tuple[list[Reply], list[Reply]]:
    before = [reply(f"prompt {i // 2}", f"reply {i} says this", reward=0.1 * i, length=5 + i) for i in range(12)]
    after = [
        reply(f"prompt {i // 2}", "thank you so much", reward=0.1 * i + 0.3 + 0.01 * (i % 3), length=9, kl=1.0 + i,
              finished=i % 4 > 0, judge=None if i == 5 else -0.5, ref_nll=1.5)
        for i in range(12)
    ]  # fmt: skip
    return before, after


def test_differences_are_paired_means(sides: tuple[list[Reply], list[Reply]]) -> None:
    found = compare(*sides, resamples=500, seed=3)
    reward = found.differences["reward"]
    assert (reward.before, reward.after) == (pytest.approx(0.55), pytest.approx(0.86))
    assert reward.interval.estimate == pytest.approx(0.31)
    assert (reward.pairs, reward.prompts) == (12, 6)
    gains = [new.reward - old.reward for old, new in zip(*sides, strict=True)]  # type: ignore[operator]
    assert reward.interval == bootstrap_mean(gains, [r.prompt for r in sides[0]], resamples=500, seed=3)
    assert found.differences["length"].interval.estimate == pytest.approx(9 - 10.5)
    assert found.differences["finished"].interval.estimate == pytest.approx(-0.25)
    assert found.differences["ref_nll"].interval.estimate == pytest.approx(-0.5)
    assert found.kl.estimate == pytest.approx(6.5)
    assert found.prompts == 6


def test_pairs_without_a_score_are_left_out_pairwise_and_counted(sides: tuple[list[Reply], list[Reply]]) -> None:
    before, after = sides
    before[0] = dataclasses.replace(before[0], judge=None)
    found = compare(before, after, resamples=100)
    assert found.unscored == {"reward": 0, "penalised": 0, "judge": 2, "length": 0, "finished": 0, "ref_nll": 0}
    judge = found.differences["judge"]
    assert (judge.pairs, judge.before, judge.after) == (10, 0.0, -0.5)


def test_a_measure_that_no_pair_has_is_absent() -> None:
    found = compare([reply(judge=None)], [reply(judge=1.0)], resamples=10)
    assert "judge" not in found.differences
    assert found.unscored["judge"] == 1


def test_distinct_2_on_both_sides_and_its_interval(sides: tuple[list[Reply], list[Reply]]) -> None:
    found = compare(*sides, resamples=10, confidence=0.9)
    distinct = found.differences["distinct_2"]
    # Before, 12 replies "reply i says this": two pairs of each are its own, "says this" is shared: 25 of 36.
    assert distinct.before == found.text_before.distinct_2 == pytest.approx(25 / 36)
    assert distinct.after == found.text_after.distinct_2 == pytest.approx(3 / 36)
    without = 3 / 30 - 21 / 30  # whichever prompt is left out
    assert distinct.interval == jackknife(3 / 36 - 25 / 36, [without] * 6, confidence=0.9)
    assert found.text_after.opening == (1.0, "thank you so")
    assert found.text_after.top_trigram.value == 0.5


def test_prompts_are_the_unit_of_resampling(sides: tuple[list[Reply], list[Reply]]) -> None:
    before, after = sides
    alone = compare(
        [dataclasses.replace(r, prompt=str(i)) for i, r in enumerate(before)],
        [dataclasses.replace(r, prompt=str(i)) for i, r in enumerate(after)],
    )
    clustered = compare(before, after)
    wide, narrow = clustered.kl, alone.kl  # kl rises with i, so replies to one prompt are alike
    assert wide.high - wide.low > 1.2 * (narrow.high - narrow.low)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([], [], "non-empty"),
        ([reply()], [reply(), reply()], "got 1 and 2"),
        ([reply("a")], [reply("b")], "pair 0 has two prompts: 'a' before and 'b' after"),
        ([reply()], [reply(reward=float("nan"))], r"after\[0\].reward must be finite or None, got nan"),
        ([reply(kl=float("inf"))], [reply()], r"before\[0\].kl"),
    ],
)
def test_bad_sides_are_named(before: list[Reply], after: list[Reply], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(before, after)


def test_evaluation_json_round_trip(sides: tuple[list[Reply], list[Reply]], tmp_path: Path) -> None:
    before, after = sides
    after[1] = dataclasses.replace(
        after[1], completion='naïve \ud800 "quoted"\n<b>'
    )  # a lone surrogate as data can hold
    found = compare(before, after, resamples=50, about={"judge": "word list", "seeds": [1, 2]})
    path = tmp_path / "evaluation.json"
    save(found, path)
    assert load(path) == found
    assert "naïve" in path.read_text(encoding="utf-8")
    plain = json.loads(path.read_text(encoding="utf-8"))
    assert set(plain) == {"format", "about", "settings", "summary", "before", "after"}
    assert len(plain["before"]) == len(plain["after"]) == 12


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evaluation.json"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "summary": {}}'])
def test_what_is_not_an_evaluation_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(text)
    with pytest.raises(UserError, match="run `ppo-fast eval` again"):
        load(path)
