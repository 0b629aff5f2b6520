"""Before against after on held-out prompts: the replies, the paired comparison, and evaluation.json.

Pairs are made by position: reply i before and reply i after answer the same prompt with the same sampling seed.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ppo_fast.errors import UserError
from ppo_fast.evaluation.statistics import Interval, bootstrap_mean, jackknife
from ppo_fast.evaluation.text import Share, TextAudit, audit, distinct_n_without_each
from ppo_fast.files import write_atomically

FORMAT = 1
"""Version of evaluation.json; a reader refuses any other."""

MEASURES = ("reward", "penalised", "judge", "length", "finished", "ref_nll")
"""The fields of a reply that are compared by paired means, in the order of the report."""


@dataclass(frozen=True)
class Reply:
    """One sampled reply to one held-out prompt."""

    prompt: str
    completion: str
    length: int
    """Tokens, the end token included."""
    finished: bool
    """Whether it ended by itself and not by the limit."""
    reward: float | None
    """The task reward alone; None when no reward function scored it."""
    penalised: float | None
    """The reward after the rule for unfinished replies."""
    judge: float | None
    """The score of an independent judge that training never saw."""
    kl: float
    """Sum over the reply of log-prob minus reference log-prob, nats."""
    ref_nll: float
    """Mean of minus the reference's log-prob per token, nats: low is fluent, or merely predictable."""


@dataclass(frozen=True)
class Difference:
    """A paired comparison of one measure; means are over the pairs in which both replies have it."""

    before: float
    after: float
    interval: Interval
    """Mean of after minus before."""
    pairs: int
    prompts: int


@dataclass(frozen=True)
class Evaluation:
    """What ``compare`` found, with the replies it was found on."""

    before: tuple[Reply, ...]
    after: tuple[Reply, ...]
    differences: dict[str, Difference]
    """By name: those of MEASURES of which at least one pair has a value, and ``distinct_2``."""
    unscored: dict[str, int]
    """For every one of MEASURES, the pairs left out because one or both replies lack it."""
    kl: Interval
    """Of the replies after training, nats per reply."""
    text_before: TextAudit
    text_after: TextAudit
    confidence: float
    resamples: int
    seed: int
    about: dict[str, Any] = field(default_factory=dict)
    """What was compared, for the report: checkpoint, sampling settings, the judge's name. Plain JSON values."""

    @property
    def prompts(self) -> int:
        """Distinct prompts."""
        return len({reply.prompt for reply in self.before})

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` gives an equal evaluation."""
        return {
            "format": FORMAT,
            "about": self.about,
            "settings": {"confidence": self.confidence, "resamples": self.resamples, "seed": self.seed},
            "summary": {
                "differences": {name: asdict(difference) for name, difference in self.differences.items()},
                "unscored": self.unscored,
                "kl": asdict(self.kl),
                "text": {"before": _text_to_json(self.text_before), "after": _text_to_json(self.text_after)},
            },
            "before": [asdict(reply) for reply in self.before],
            "after": [asdict(reply) for reply in self.after],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """The inverse of ``to_json``. Raises ValueError, KeyError or TypeError for anything else."""
        if data.get("format") != FORMAT:
            raise ValueError(f"format is {data.get('format')!r}, this version reads {FORMAT}")
        summary = data["summary"]
        return cls(
            before=tuple(Reply(**row) for row in data["before"]),
            after=tuple(Reply(**row) for row in data["after"]),
            differences={
                name: Difference(**{**row, "interval": Interval(**row["interval"])})
                for name, row in summary["differences"].items()
            },
            unscored=dict(summary["unscored"]),
            kl=Interval(**summary["kl"]),
            text_before=_text_from_json(summary["text"]["before"]),
            text_after=_text_from_json(summary["text"]["after"]),
            about=dict(data["about"]),
            **data["settings"],
        )


def compare(
    before: Sequence[Reply],
    after: Sequence[Reply],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Compare two sets of replies to the same prompts, paired by position.

    Intervals of means come from a bootstrap over prompts (``statistics.bootstrap_mean``: all replies to a drawn prompt
    come along); that of distinct-2 leaves each prompt out once (``statistics.jackknife``, which says why). A pair in
    which either reply lacks a measure is left out of that measure and counted.

    Raises ValueError when the two sides don't match by prompt or are empty, and for non-finite values.
    """
    if not before or len(before) != len(after):
        raise ValueError(f"before and after must be non-empty and equally long, got {len(before)} and {len(after)}")
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.prompt != new.prompt:
            raise ValueError(f"pair {i} has two prompts: {old.prompt!r} before and {new.prompt!r} after")
        for side, reply in (("before", old), ("after", new)):
            for name in (*MEASURES, "kl"):
                value = getattr(reply, name)
                if value is not None and not math.isfinite(value):
                    raise ValueError(f"{side}[{i}].{name} must be finite or None, got {value}")

    prompts = [reply.prompt for reply in before]
    interval = functools.partial(bootstrap_mean, confidence=confidence, resamples=resamples, seed=seed)
    differences, unscored = {}, {}
    for name in MEASURES:
        old_values = [getattr(reply, name) for reply in before]
        new_values = [getattr(reply, name) for reply in after]
        scored = [
            (float(x), float(y), prompt)
            for x, y, prompt in zip(old_values, new_values, prompts, strict=True)
            if x is not None and y is not None
        ]
        unscored[name] = len(prompts) - len(scored)
        if scored:
            differences[name] = Difference(
                before=sum(x for x, _, _ in scored) / len(scored),
                after=sum(y for _, y, _ in scored) / len(scored),
                interval=interval([y - x for x, y, _ in scored], [prompt for _, _, prompt in scored]),
                pairs=len(scored),
                prompts=len({prompt for _, _, prompt in scored}),
            )

    old_texts, new_texts = [reply.completion for reply in before], [reply.completion for reply in after]
    text_before, text_after = audit(old_texts), audit(new_texts)
    without_each = distinct_n_without_each(new_texts, prompts, 2) - distinct_n_without_each(old_texts, prompts, 2)
    differences["distinct_2"] = Difference(
        before=text_before.distinct_2,
        after=text_after.distinct_2,
        interval=jackknife(text_after.distinct_2 - text_before.distinct_2, without_each, confidence=confidence),
        pairs=len(prompts),
        prompts=len(set(prompts)),
    )
    return Evaluation(
        before=tuple(before),
        after=tuple(after),
        differences=differences,
        unscored=unscored,
        kl=interval([reply.kl for reply in after], prompts),
        text_before=text_before,
        text_after=text_after,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        about=dict(about or {}),
    )


def save(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write evaluation.json: whole or not at all."""
    write_atomically(path, json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load(path: str | os.PathLike[str]) -> Evaluation:
    """Read evaluation.json. Raises UserError when it isn't one, FileNotFoundError when there is none."""
    try:
        return Evaluation.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not an evaluation this version can read ({type(error).__name__}: {error}): "
            f"run `ppo-fast eval` again to rewrite it"
        ) from error


def _text_to_json(text: TextAudit) -> dict[str, Any]:
    return {
        "distinct_2": text.distinct_2,
        "top_trigram": text.top_trigram._asdict(),
        "opening": text.opening._asdict(),
        "mean_words": text.mean_words,
    }


def _text_from_json(data: Mapping[str, Any]) -> TextAudit:
    return TextAudit(
        distinct_2=data["distinct_2"],
        top_trigram=Share(**data["top_trigram"]),
        opening=Share(**data["opening"]),
        mean_words=data["mean_words"],
    )
