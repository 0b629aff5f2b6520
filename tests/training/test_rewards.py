import logging

import pytest

from ppo_fast.errors import UserError
from ppo_fast.training.data import Prompt
from ppo_fast.training.rewards import RewardFunctions

PROMPTS = [Prompt("p0", {"label": 1}), Prompt([{"role": "user", "content": "p1"}], {"label": 2, "extra": "x"})]


def score(*functions, weights=None):
    return RewardFunctions(functions, weights)(PROMPTS, ["a", "bb"], [[5], [6, 7]])


def test_functions_see_prompts_completions_ids_and_columns():
    seen = {}

    def reward(prompts, completions, completion_ids, label, extra):
        seen.update(locals())
        return [0.0, 1.0]

    score(reward)
    assert seen["prompts"] == ["p0", [{"role": "user", "content": "p1"}]]
    assert seen["completions"] == ["a", [{"role": "assistant", "content": "bb"}]]
    assert seen["completion_ids"] == [[5], [6, 7]]
    assert (seen["label"], seen["extra"]) == ([1, 2], [None, "x"])


def test_several_functions_add_up_with_weights_and_none_means_not_applicable():
    def first(**_):
        return [1.0, None]

    def second(**_):
        return [10.0, 20]

    result = score(first, second, weights=[2.0, 0.5])
    assert result.total == [7.0, 10.0]
    assert result.by_function == {"first": [1.0, None], "second": [10.0, 20.0]}


def test_none_from_every_function_leaves_a_reply_unscored():
    def reward(**_):
        return [None, 3.0]

    assert score(reward).total == [None, 3.0]


def raising(**_):
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising, "the reward function 'raising' raised KeyError"),
        (lambda **_: [1.0], "returned 1 scores for 2 completions"),
        (lambda **_: 3.0, "not a list of numbers"),
        (lambda **_: ["high", "low"], "returned 'high', which isn't a number"),
        (lambda **_: [float("nan"), 0.0], "returned nan"),
    ],
)
def test_first_batch_problems_are_the_users_to_fix(reward, message):
    with pytest.raises(UserError, match=message):
        score(reward)


def test_a_later_failure_leaves_the_batch_unscored_and_says_so(caplog):
    calls = []

    def flaky(**_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("judge is offline")
        return [1.0, 2.0]

    rewards = RewardFunctions([flaky])
    with caplog.at_level(logging.WARNING):
        results = [rewards(PROMPTS, ["a", "b"], [[1], [2]]).total for _ in range(3)]
    assert results == [[1.0, 2.0], [None, None], [1.0, 2.0]]
    assert "judge is offline" in caplog.text


def test_no_function_two_of_a_name_or_too_few_weights_are_refused():
    with pytest.raises(UserError, match="no reward function is given"):
        RewardFunctions([])
    with pytest.raises(UserError, match="share a name"):
        RewardFunctions([raising, raising])
    with pytest.raises(UserError, match="1 reward weights for 2"):
        RewardFunctions([raising, len], [1.0])
