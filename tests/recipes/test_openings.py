"""The demo's prompts: enough of them, all different, and not kind by themselves."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from importlib import resources
from typing import Any

import numpy as np

LINES = (resources.files("ppo_fast.recipes") / "openings.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]
PROMPTS = [row["prompt"] for row in ROWS]
KINDS = ["review", "letter", "report"]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9'-]+", text.lower())


def test_every_line_is_a_prompt_and_its_kind() -> None:
    assert len(ROWS) >= 360
    assert all(list(row) == ["prompt", "kind"] and row["kind"] in KINDS for row in ROWS)


def test_a_third_of_each_kind_in_any_stretch_of_the_file() -> None:
    counts = Counter(row["kind"] for row in ROWS)
    assert all(abs(counts[kind] / len(ROWS) - 1 / 3) < 0.03 for kind in KINDS)
    for start in range(0, len(ROWS) - 30, 30):
        assert all(sum(row["kind"] == kind for row in ROWS[start : start + 30]) == 10 for kind in KINDS)


def test_prompts_are_unfinished_beginnings_of_one_sentence() -> None:
    for prompt in PROMPTS:
        assert prompt == " ".join(prompt.split())
        assert 5 <= len(prompt.split()) <= 18
        assert prompt[0].isupper() or prompt[0].isdigit()
        assert prompt[-1] not in ".!?"
        assert prompt.isascii() or "é" in prompt


def test_no_two_begin_alike() -> None:
    beginnings = Counter(tuple(words(prompt)[:4]) for prompt in PROMPTS)
    assert [beginning for beginning, count in beginnings.items() if count > 1] == []


def test_no_near_duplicates() -> None:
    sets = [frozenset(words(prompt)) for prompt in PROMPTS]
    closest = max(len(a & b) / len(a | b) for a, b in itertools.combinations(sets, 2))
    assert closest < 0.5


def test_no_template_filled_many_times() -> None:
    """Three words in a row, such as a template would leave everywhere, are shared by few prompts."""
    triples: Counter[tuple[str, ...]] = Counter()
    for prompt in PROMPTS:
        triples.update(set(zip(words(prompt), words(prompt)[1:], words(prompt)[2:], strict=False)))
    assert triples.most_common(1)[0][1] <= 6


def test_openings_are_not_kind_by_themselves(vader: Any) -> None:
    scores = np.array([vader.polarity_scores(prompt)["compound"] for prompt in PROMPTS])
    assert scores.mean() < 0.02
    assert np.mean(scores > 0.5) < 0.02
    for kind in KINDS:
        assert scores[[row["kind"] == kind for row in ROWS]].mean() < 0.1
