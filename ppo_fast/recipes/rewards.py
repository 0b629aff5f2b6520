"""The recipes' reward functions: ``f(prompts, completions, completion_ids=None, **columns) -> list[float | None]``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ppo_fast.errors import UserError


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The words of one reply, whichever way the trainer hands it over.

    Args:
        completion: a string (string prompts) or a list of chat messages (chat prompts); of a list, the contents of the
            assistant's messages count, joined by newlines.

    Raises:
        TypeError: neither a string nor a list of messages with a string as content.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, (list, tuple)) or not all(isinstance(message, dict) for message in completion):
        raise TypeError(f"completion: got {type(completion).__name__}, expected a string or a list of chat messages")
    contents = [message.get("content") for message in completion if message.get("role") == "assistant"]
    for content in contents:
        if not isinstance(content, str):
            raise TypeError(f"completion: got a message whose content is {type(content).__name__}, expected a string")
    return "\n".join(contents)


@functools.cache
def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UserError('the reward "kindness" needs vaderSentiment: run `pip install "ppo-fast[demo]"`') from None
    return SentimentIntensityAnalyzer()


def kindness(
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[dict[str, Any]]],
    completion_ids: Sequence[Sequence[int]] | None = None,
    **columns: Any,
) -> list[float | None]:
    """How friendly each reply's wording is: VADER's compound score of the reply alone, in [-1, 1].

    The prompt is not scored. A reply without words, the empty one included, gets VADER's 0.0: neither friendly nor
    unfriendly. VADER adds up the valences of listed words, so that a heap of sweet words scores as high as a kind
    sentence; ``ppo_fast.evaluation.judge`` is the second opinion.

    Raises:
        UserError: vaderSentiment is not installed.

    Source: Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text",
    ICWSM 2014.
    """
    analyzer = _vader()
    return [float(analyzer.polarity_scores(completion_text(completion))["compound"]) for completion in completions]
