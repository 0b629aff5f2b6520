"""The demo's reward: VADER's compound score of the reply alone."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ppo_fast.errors import UserError
from ppo_fast.recipes import rewards
from ppo_fast.recipes.rewards import completion_text, kindness


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_completion_text_of_both_forms() -> None:
    assert completion_text("plain") == "plain"
    assert completion_text(chat("said")) == "said"
    assert completion_text([]) == ""
    turns = [*chat("first"), {"role": "tool", "content": "42"}, {"role": "user", "content": "go on"}, *chat("second")]
    assert completion_text(turns) == "first\nsecond"


@pytest.mark.parametrize("bad", [None, 3, {"role": "assistant", "content": "x"}, ["x"], [{"role": "assistant"}]])
def test_completion_text_refuses_what_is_no_reply(bad: object) -> None:
    with pytest.raises(TypeError, match=r"completion: got .* expected"):
        completion_text(bad)  # type: ignore[arg-type]


def test_kindness_is_vaders_compound_of_the_reply_alone(vader: Any) -> None:
    replies = ["I love this place, thank you!", "It was a horrible, rude evening.", "The table has four legs."]
    expected = [vader.polarity_scores(reply)["compound"] for reply in replies]
    got = kindness(["I hate it, it is awful and"] * 3, replies, completion_ids=[[1], [2], [3]], kind=["review"] * 3)
    assert got == expected
    assert got == kindness(["a lovely wonderful"] * 3, [chat(reply) for reply in replies])
    assert expected[0] > 0.5 > expected[2] > -0.5 > expected[1]


@pytest.mark.usefixtures("vader")
def test_an_empty_reply_is_neutral() -> None:
    assert kindness(["p"] * 4, ["", "  \n", chat(""), []]) == [0.0] * 4


def test_the_analyzer_is_built_once(vader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Counting(type(vader)):  # type: ignore[misc]
        def __init__(self) -> None:
            built.append(1)
            super().__init__()

    monkeypatch.setattr("vaderSentiment.vaderSentiment.SentimentIntensityAnalyzer", Counting)
    rewards._vader.cache_clear()
    try:
        for _ in range(3):
            kindness(["p"], ["nice"])
        assert built == [1]
    finally:
        rewards._vader.cache_clear()


def test_missing_vader_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    rewards._vader.cache_clear()
    with pytest.raises(UserError, match=r'pip install "ppo-fast\[demo\]"'):
        kindness(["p"], ["nice"])
