"""The verdict: each sentence and each warning appears when, and only when, the numbers call for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from ppo_fast.evaluation.heldout import Evaluation, Reply, compare
from ppo_fast.reporting.run import Run, load_run
from ppo_fast.reporting.verdict import Verdict, judge_run


def replies(n: int = 40, *, shift: float = 0.0, per_prompt: int = 1, **changes: object) -> list[Reply]:
    """Replies with varied text and noise that is the same on both sides but for a little."""
    rng = random.Random(1)
    rows = []
    for i in range(n):
        noise = rng.gauss(0, 0.3)
        own = random.Random(f"{shift}{i}").gauss(0, 0.05)
        base = Reply(
            prompt=f"prompt {i // per_prompt}",
            completion=" ".join(f"word{rng.randrange(1000)}" for _ in range(12)),
            length=20 + rng.randrange(3),
            finished=True,
            reward=0.2 + noise + own + shift,
            penalised=0.1 + noise + own + shift,
            judge=noise + own + shift,
            kl=1.0 + noise,
            ref_nll=2.5 + own,
        )
        rows.append(dataclasses.replace(base, **changes))  # type: ignore[arg-type]
    return rows


def changed(rows: Sequence[Reply], **rules: Callable[[int, Reply], object]) -> list[Reply]:
    return [
        dataclasses.replace(row, **{name: rule(i, row) for name, rule in rules.items()})  # type: ignore[arg-type]
        for i, row in enumerate(rows)
    ]


def judged(before: list[Reply], after: list[Reply]) -> Verdict:
    evaluation = compare(before, after, resamples=1000)
    return judge_run(Run(Path("runs/x"), {}, ({"iteration": 1},), {}, evaluation))


def finding(verdict: Verdict, label: str) -> tuple[str, str]:
    (found,) = [f for f in verdict.findings if f.label == label]
    return found.text, found.tone


def test_a_rise_that_the_judge_confirms() -> None:
    verdict = judged(replies(), replies(shift=0.6))
    assert verdict.headline.startswith("The reward rose by 0.6")
    assert verdict.headline.endswith("on 40 held-out prompts.")
    assert verdict.tone == "good"
    text, tone = finding(verdict, "Judge")
    assert text.startswith("Agrees with the reward: from ")
    assert tone == "good"
    assert finding(verdict, "Penalised reward")[0].startswith("Rose from ")
    assert verdict.warnings == ()


def test_the_headline_carries_the_computed_numbers() -> None:
    before, after = replies(), replies(shift=0.6)
    reward = compare(before, after, resamples=1000).differences["reward"]
    low, high = reward.interval.low, reward.interval.high
    assert judged(before, after).headline == (
        f"The reward rose by {reward.interval.estimate:.2f} [{low:.2f}, {high:.2f}], from {reward.before:.2f} to "
        f"{reward.after:.2f}, on 40 held-out prompts."
    )


def test_replies_are_counted_where_a_prompt_has_several() -> None:
    verdict = judged(replies(per_prompt=2), replies(shift=0.6, per_prompt=2))
    assert verdict.headline.endswith("on 20 held-out prompts (40 replies).")


def test_a_fall_is_called_one_and_its_size_has_no_sign() -> None:
    verdict = judged(replies(), replies(shift=-0.6))
    assert verdict.headline.startswith("The reward fell by 0.")
    assert verdict.tone == "bad"
    assert finding(verdict, "Judge")[0].startswith("Agrees with the reward")
    low, high = verdict.headline.split("[")[1].split("]")[0].split(", ")
    assert 0 < float(low) < float(high)


def test_no_clear_change() -> None:
    noisy = changed(replies(), reward=lambda i, r: r.reward + (-1) ** i, judge=lambda i, r: r.judge + (-1) ** i)  # type: ignore[operator]
    verdict = judged(replies(), noisy)
    assert verdict.headline.startswith("No clear change in the reward: ")
    assert verdict.tone == "neutral"
    assert "Says nothing" in finding(verdict, "Judge")[0]


def test_a_judge_that_disagrees_is_in_the_headline_and_the_warnings() -> None:
    after = changed(replies(shift=0.6), judge=lambda i, r: r.judge - 1.2)  # type: ignore[operator]
    verdict = judged(replies(), after)
    assert verdict.headline.endswith("but the judge finds the replies worse.")
    assert verdict.tone == "bad"
    assert finding(verdict, "Judge")[1] == "bad"
    assert any(w.startswith("The judge disagrees with the reward") for w in verdict.warnings)


def test_a_judge_that_says_nothing_does_not_confirm() -> None:
    after = changed(replies(shift=0.6), judge=lambda i, r: r.judge - 0.6 + 0.5 * (-1) ** i)  # type: ignore[operator]
    verdict = judged(replies(), after)
    assert verdict.warnings == ("The judge does not confirm the gain: its interval includes zero.",)


def test_a_judge_that_sees_what_the_reward_does_not() -> None:
    after = changed(replies(shift=0.6), reward=lambda i, r: r.reward - 0.6 + 0.5 * (-1) ** i)  # type: ignore[operator]
    text, tone = finding(judged(replies(), after), "Judge")
    assert text.startswith("Finds the replies better, which the reward doesn't show")
    assert tone == "neutral"


def test_without_a_judge_the_reward_has_only_its_own_word() -> None:
    verdict = judged(replies(judge=None), replies(shift=0.6, judge=None))
    assert "only its own word" in finding(verdict, "Judge")[0]
    assert verdict.tone == "good"


def test_without_rewards_there_is_nothing_to_compare() -> None:
    verdict = judged(replies(reward=None, penalised=None), replies(shift=0.6, reward=None, penalised=None))
    assert "nothing to compare" in verdict.headline
    assert not any("left out" in w for w in verdict.warnings)


def test_a_gain_that_unfinished_replies_eat_up() -> None:
    after = changed(
        replies(shift=0.6), penalised=lambda i, r: r.penalised - 1.2, finished=lambda i, r: i % 3 == 0  # type: ignore[operator]
    )  # fmt: skip
    verdict = judged(replies(), after)
    assert finding(verdict, "Penalised reward")[1] == "bad"
    assert "The reward alone rose, but it fell once unfinished replies are penalised." in verdict.warnings
    assert "More replies are cut off at the limit than before." in verdict.warnings
    assert finding(verdict, "Finished")[1] == "bad"


def test_no_rule_for_unfinished_replies_no_second_reward() -> None:
    sides = [changed(side, penalised=lambda i, r: r.reward) for side in (replies(), replies(shift=0.6))]
    assert "Penalised reward" not in [f.label for f in judged(*sides).findings]


def test_repetition_is_warned_of_with_its_phrase_and_opening() -> None:
    after = changed(replies(shift=0.6), completion=lambda i, r: "thank you so much " + r.completion[:40])
    verdict = judged(replies(), after)
    text, tone = finding(verdict, "Variety")
    assert text.startswith("The text became less varied: distinct-2 from ")
    assert tone == "bad"
    less, phrase, alike = verdict.warnings
    assert less.startswith("The text became less varied: distinct-2")
    assert phrase.startswith('One phrase is taking over: "thank you so" makes up ')
    assert alike.startswith('Replies begin alike: 100% open with "thank you so"; the commonest opening before had ')


def test_a_large_fall_of_distinct_2_is_warned_of_whatever_its_interval() -> None:
    # One reply of two collapses: with one degree of freedom nothing is certain, and it still deserves a look.
    after = changed(replies(2, shift=0.6), completion=lambda i, r: "so " * 12 if i == 0 else r.completion)
    distinct = compare(replies(2), after).differences["distinct_2"].interval
    assert distinct.estimate < -0.1
    assert not distinct.excludes_zero
    assert any("less varied" in w for w in judged(replies(2), after).warnings)


def test_longer_replies_are_named_as_a_cause_of_less_variety() -> None:
    longer = changed(
        replies(shift=0.6), completion=lambda i, r: f"{r.completion} {r.completion}", length=lambda i, r: 39
    )
    warnings = judged(replies(), longer).warnings
    assert any("also became longer" in w for w in warnings)
    assert not any(w.startswith("The length changed") for w in warnings)  # 39 is less than twice 21


def test_length_doubled_or_halved() -> None:
    for length, word in ((60, "longer"), (5, "shorter")):
        verdict = judged(replies(), replies(shift=0.6, length=length))
        assert any(w.startswith("The length changed from 2") for w in verdict.warnings)
        assert finding(verdict, "Length")[0].startswith(f"Replies became {word}")


def test_a_strong_move_of_fluency_in_either_direction() -> None:
    for shift, moved in ((0.7, "2.0 times less likely"), (-0.7, "2.0 times more likely")):
        after = changed(replies(shift=0.6), ref_nll=lambda i, r, shift=shift: r.ref_nll + shift)
        assert any(moved in w for w in judged(replies(), after).warnings)
    after = changed(replies(shift=0.6), ref_nll=lambda i, r: r.ref_nll + 0.3)
    verdict = judged(replies(), after)
    assert verdict.warnings == ()
    assert "less likely" in finding(verdict, "Fluency")[0]


def test_missing_scores_and_few_prompts_are_said() -> None:
    after = changed(replies(12, shift=0.6), judge=lambda i, r: None if i < 2 else r.judge)
    warnings = judged(replies(12), after).warnings
    assert "Of 12 pairs some are left out of a comparison: 2 have no judge." in warnings
    assert any(w.startswith("The comparison rests on 12 held-out prompts") for w in warnings)


def test_one_prompt_has_no_interval_and_proves_nothing() -> None:
    verdict = judged(replies(2, per_prompt=2), replies(2, per_prompt=2, shift=5.0))
    assert "(one prompt: no interval)" in verdict.headline
    assert verdict.tone == "neutral"


def test_without_evaluation_the_verdict_says_what_to_run(make_run: Callable[..., Path], evaluation: Evaluation) -> None:
    folder = make_run()
    verdict = judge_run(load_run(folder))
    assert verdict.headline.startswith("Not yet evaluated")
    assert verdict.warnings == (
        f"`ppo-fast eval` has not been run on this folder. Run `ppo-fast eval {folder}`, then the report again.",
    )
    assert finding(verdict, "KL")[0] == "from 0.00 to 8.00 nats per reply from the reference."
    assert judge_run(load_run(make_run(evaluation, name="evaluated"))).tone == "good"
