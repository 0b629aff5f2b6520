"""What a run comes to, in plain sentences computed from its numbers: a headline, findings, and warnings.

The thresholds say when a change is worth a reader's attention; they flag, they don't condemn (seeds/004: an alert
should lead to an inspection). Each stands here with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ppo_fast.evaluation.heldout import Difference, Evaluation
from ppo_fast.evaluation.statistics import Interval
from ppo_fast.reporting.run import Run

DISTINCT_2_FALL = 0.1
"""A fall of distinct-2 that is flagged whatever its interval: of ten word pairs one more is now a repetition."""
TRIGRAM_RISE = 0.01
"""A rise of the commonest trigram's share that is strong once the share also doubles: in replies of twenty words, 1%
is a phrase in every fifth reply."""
OPENING_RISE = 0.1
"""A rise of the share of replies with the commonest opening: one reply in ten more begins alike."""
NLL_MOVE = 0.5
"""A change of the reference's mean negative log-prob, nats per token: tokens 1.6 times as likely, or as unlikely."""
LENGTH_FACTOR = 2.0
"""A change of the mean length by this factor, up or down (seeds/004's ``max_length_ratio``)."""
FEW_PROMPTS = 20
"""Below this many prompts a bootstrap interval rests on too few draws to be taken at its word."""


@dataclass(frozen=True)
class Finding:
    """One line of the verdict. ``tone`` is good, bad or neutral."""

    label: str
    text: str
    tone: str = "neutral"


@dataclass(frozen=True)
class Verdict:
    """The opening of the report."""

    headline: str
    tone: str
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]


def judge_run(run: Run) -> Verdict:
    """The verdict on a run: on held-out prompts if it was evaluated, else a word on what is missing."""
    if run.evaluation is not None:
        return _on_evaluation(run.evaluation)
    first, last = run.metrics[0], run.metrics[-1]
    findings = [
        Finding(label, f"from {first[name]:.{digits}f} to {last[name]:.{digits}f} {unit}")
        for label, name, digits, unit in (
            ("Training score", "objective/scores", 2, "in the first and last iteration, on the prompts trained on."),
            ("KL", "objective/kl", 2, "nats per reply from the reference."),
            ("Entropy", "policy/entropy_avg", 2, "nats per token."),
            ("Length", "completions/mean_length", 1, "tokens per reply."),
        )
        if first.get(name) is not None and last.get(name) is not None
    ]
    return Verdict(
        "Not yet evaluated: whether the replies improved on prompts the policy was not trained on is not known.",
        "neutral",
        tuple(findings),
        (f"`ppo-fast eval` has not been run on this folder. Run `ppo-fast eval {run.folder}`, then the report again.",),
    )


def _on_evaluation(evaluation: Evaluation) -> Verdict:
    reward = evaluation.differences.get("reward")
    judge = evaluation.differences.get("judge")
    findings = [
        finding
        for finding in (
            _judge(reward, judge),
            _penalised(evaluation),
            _variety(evaluation),
            _fluency(evaluation),
            _length(evaluation),
            _finished(evaluation),
            _kl(evaluation),
        )
        if finding is not None
    ]
    headline, tone = _headline(reward, judge)
    warnings = (
        *_reward_warnings(evaluation.differences),
        *_text_warnings(evaluation),
        *_reply_warnings(evaluation.differences),
        *_data_warnings(evaluation),
    )
    return Verdict(headline, tone, tuple(findings), warnings)


def _headline(reward: Difference | None, judge: Difference | None) -> tuple[str, str]:
    if reward is None:
        return "No held-out reply has a reward both before and after training, so there is nothing to compare.", "bad"
    where = f"from {reward.before:.2f} to {reward.after:.2f}, on {_prompts(reward)}"
    if not reward.interval.excludes_zero:
        return f"No clear change in the reward: {_change(reward.interval)}, {where}.", "neutral"
    if reward.interval.below_zero:
        return f"The reward fell by {_size(reward.interval)}, {where}.", "bad"
    if judge is not None and judge.interval.below_zero:
        return f"The reward rose by {_size(reward.interval)}, {where}, but the judge finds the replies worse.", "bad"
    return f"The reward rose by {_size(reward.interval)}, {where}.", "good"


def _judge(reward: Difference | None, judge: Difference | None) -> Finding:
    if judge is None:
        return Finding("Judge", "No independent judge scored these replies: the reward has only its own word.")
    values = _moved(judge)
    if not judge.interval.excludes_zero:
        return Finding("Judge", f"Says nothing: {values}; the interval includes zero.")
    if reward is None or not reward.interval.excludes_zero:
        direction = "better" if judge.interval.above_zero else "worse"
        return Finding("Judge", f"Finds the replies {direction}, which the reward doesn't show: {values}.")
    if judge.interval.above_zero == reward.interval.above_zero:
        return Finding("Judge", f"Agrees with the reward: {values}.", "good" if judge.interval.above_zero else "bad")
    return Finding("Judge", f"Disagrees with the reward: {values}.", "bad")


def _penalised(evaluation: Evaluation) -> Finding | None:
    penalised = evaluation.differences.get("penalised")
    if penalised is None or penalised == evaluation.differences.get("reward"):
        return None
    tone = "good" if penalised.interval.above_zero else "bad" if penalised.interval.below_zero else "neutral"
    direction = {"good": "Rose", "bad": "Fell", "neutral": "No clear change:"}[tone]
    return Finding(
        "Penalised reward", f"{direction} {_moved(penalised)}, unfinished replies charged as in training.", tone
    )


def _variety(evaluation: Evaluation) -> Finding:
    distinct = evaluation.differences["distinct_2"]
    text = f"distinct-2 {_moved(distinct)}"
    if _variety_fell(distinct):
        return Finding("Variety", f"The text became less varied: {text}.", "bad")
    if distinct.interval.above_zero:
        return Finding("Variety", f"The text became more varied: {text}.", "good")
    return Finding("Variety", f"No clear change: {text}.")


def _fluency(evaluation: Evaluation) -> Finding | None:
    nll = evaluation.differences.get("ref_nll")
    if nll is None:
        return None
    text = f"surprise per token {_moved(nll)} nats"
    if not nll.interval.excludes_zero:
        return Finding("Fluency", f"No clear change: {text}.")
    direction = "less" if nll.interval.above_zero else "more"
    return Finding("Fluency", f"The starting model finds the replies {direction} likely: {text}.")


def _length(evaluation: Evaluation) -> Finding:
    length = evaluation.differences["length"]
    text = f"{_moved(length, 1)} tokens"
    if not length.interval.excludes_zero:
        return Finding("Length", f"No clear change: {text}.")
    return Finding("Length", f"Replies became {'longer' if length.interval.above_zero else 'shorter'}: {text}.")


def _finished(evaluation: Evaluation) -> Finding:
    finished = evaluation.differences["finished"]
    tone = "good" if finished.interval.above_zero else "bad" if finished.interval.below_zero else "neutral"
    return Finding("Finished", f"Percent of replies that end by themselves: {_moved(finished, 0, 100)}.", tone)


def _kl(evaluation: Evaluation) -> Finding:
    kl = evaluation.kl
    bounds = "" if kl.low is None or kl.high is None else f" [{kl.low:.1f}, {kl.high:.1f}]"
    return Finding("KL", f"After training a reply lies {kl.estimate:.1f}{bounds} nats from the starting model.")


def _reward_warnings(differences: Mapping[str, Difference]) -> Iterator[str]:
    reward, judge, penalised = (differences.get(name) for name in ("reward", "judge", "penalised"))
    if reward is None or not reward.interval.above_zero:
        return
    if judge is not None and judge.interval.below_zero:
        yield "The judge disagrees with the reward: the policy may have found what the reward overlooks."
    elif judge is not None and not judge.interval.above_zero:
        yield "The judge does not confirm the gain: its interval includes zero."
    if penalised is not None and penalised.interval.below_zero:
        yield "The reward alone rose, but it fell once unfinished replies are penalised."


def _text_warnings(evaluation: Evaluation) -> Iterator[str]:
    distinct, length, nll = (evaluation.differences.get(name) for name in ("distinct_2", "length", "ref_nll"))
    if distinct is not None and _variety_fell(distinct):
        yield (
            f"The text became less varied: distinct-2, the share of word pairs that are no repetition, fell from "
            f"{distinct.before:.2f} to {distinct.after:.2f}."
        )
        if length is not None and length.interval.above_zero and length.after > 1.1 * length.before:
            yield "The replies also became longer, which by itself lowers distinct-2: not all of it need be repetition."
    old, new = evaluation.text_before.top_trigram, evaluation.text_after.top_trigram
    if new.value - old.value >= TRIGRAM_RISE and new.value >= 2 * old.value:
        yield (
            f'One phrase is taking over: "{new.phrase}" makes up {new.value:.1%} of all three-word phrases; the '
            f"commonest before made up {old.value:.1%}."
        )
    old, new = evaluation.text_before.opening, evaluation.text_after.opening
    if new.value - old.value >= OPENING_RISE:
        opening = f'open with "{new.phrase}"' if new.phrase else "are empty"
        yield f"Replies begin alike: {new.value:.0%} {opening}; the commonest opening before had {old.value:.0%}."
    if nll is not None and nll.interval.excludes_zero and abs(nll.interval.estimate) >= NLL_MOVE:
        moved, worry = ("less", "less fluent") if nll.interval.estimate > 0 else ("more", "formulaic")
        factor = math.exp(abs(nll.interval.estimate))
        yield (
            f"The starting model finds each token {factor:.1f} times {moved} likely than before: the replies may have "
            f"become {worry}."
        )


def _reply_warnings(differences: Mapping[str, Difference]) -> Iterator[str]:
    length, finished = differences["length"], differences["finished"]
    short, long = sorted((length.before, length.after))
    if length.interval.excludes_zero and long >= LENGTH_FACTOR * short:
        yield f"The length changed from {length.before:.1f} to {length.after:.1f} tokens a reply."
    if finished.interval.below_zero:
        yield "More replies are cut off at the limit than before."


def _data_warnings(evaluation: Evaluation) -> Iterator[str]:
    missing = [
        f"{count} have no {name}" for name, count in evaluation.unscored.items() if 0 < count < len(evaluation.before)
    ]
    if missing:
        yield f"Of {len(evaluation.before)} pairs some are left out of a comparison: {', '.join(missing)}."
    if evaluation.prompts < FEW_PROMPTS:
        prompts = _count(evaluation.prompts, "held-out prompt")
        yield f"The comparison rests on {prompts}: take its intervals as rough, and rather too narrow."


def _variety_fell(distinct: Difference) -> bool:
    return distinct.interval.below_zero or distinct.interval.estimate < -DISTINCT_2_FALL


def _moved(difference: Difference, digits: int = 2, scale: float = 1.0) -> str:
    """``from 0.23 to 0.85, +0.62 [+0.55, +0.69]``."""
    before, after = (f"{value * scale:.{digits}f}" for value in (difference.before, difference.after))
    return f"from {before} to {after}, {_change(difference.interval, digits, scale)}"


def _change(interval: Interval, digits: int = 2, scale: float = 1.0) -> str:
    """``+0.62 [+0.55, +0.69]``; without bounds where one prompt gave none."""
    estimate = f"{interval.estimate * scale:+.{digits}f}"
    if interval.low is None or interval.high is None:
        return f"{estimate} (one prompt: no interval)"
    return f"{estimate} [{interval.low * scale:+.{digits}f}, {interval.high * scale:+.{digits}f}]"


def _size(interval: Interval) -> str:
    """The change without its sign: ``0.62 [0.55, 0.69]``. For intervals that exclude zero."""
    bounds = sorted((abs(interval.low or 0.0), abs(interval.high or 0.0)))
    return f"{abs(interval.estimate):.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _prompts(difference: Difference) -> str:
    prompts = _count(difference.prompts, "held-out prompt")
    return prompts if difference.pairs == difference.prompts else f"{prompts} ({difference.pairs} replies)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
