"""How varied and how repetitive a set of replies is: cheap audits that a reward alone would not show.

Words are what whitespace separates, lowercased; punctuation stays with its word. All figures are over the whole set, so
they compare two sets fairly only when these answer the same prompts: distinct-n falls as texts grow longer or more
numerous, whatever their quality.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ppo_fast.evaluation.statistics import cluster_codes

Ngram = tuple[str, ...]
OPENING_WORDS = 3


class Share(NamedTuple):
    """A share in [0, 1] and the phrase it belongs to, lowercased (empty when there is none)."""

    value: float
    phrase: str


@dataclass(frozen=True)
class TextAudit:
    """The audits of one set of replies."""

    distinct_2: float
    """Distinct word pairs over all word pairs, in [0, 1]: 1 means that no pair of words ever recurs."""
    top_trigram: Share
    """The commonest three-word phrase and its share of all three-word phrases."""
    opening: Share
    """The commonest first three words and the share of replies that begin with them."""
    mean_words: float
    """Words per reply."""


def audit(texts: Sequence[str]) -> TextAudit:
    """All audits of ``texts``. Raises ValueError for an empty list."""
    return TextAudit(distinct_n(texts, 2), top_ngram_share(texts, 3), opening_share(texts), mean_words(texts))


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Unique n-grams over all n-grams of all texts (Li et al. 2016, "distinct-1" and "distinct-2").

    n-grams do not cross from one text to the next. 0 when no text has n words: nothing is not varied. Raises ValueError
    for an empty list and n < 1.
    """
    _check(texts)
    grams = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(grams)) / max(1, len(grams))


def distinct_n_without_each(texts: Sequence[str], clusters: Sequence[Hashable], n: int) -> npt.NDArray[np.float64]:
    """``distinct_n`` with each cluster of texts left out in turn, [C] in order of the clusters' first appearance.

    One pass: leaving a cluster out removes the n-grams that only it has. 0 where nothing is left.
    """
    _check(texts)
    if len(texts) != len(clusters):
        raise ValueError(f"texts and clusters must be equally long, got {len(texts)} and {len(clusters)}")
    codes = cluster_codes(clusters)
    C = int(codes.max()) + 1
    owner: dict[Ngram, int] = {}  # the only cluster with this n-gram, or -1 for several
    totals = np.zeros(C)
    for text, code in zip(texts, codes.tolist(), strict=True):
        for gram in ngrams(text, n):
            totals[code] += 1
            if owner.setdefault(gram, code) != code:
                owner[gram] = -1
    alone = np.bincount([code for code in owner.values() if code >= 0], minlength=C)
    return (len(owner) - alone) / np.maximum(1, totals.sum() - totals)


def top_ngram_share(texts: Sequence[str], n: int = 3) -> Share:
    """The commonest n-gram's count over all n-grams; the first seen wins a tie. Raises ValueError as ``distinct_n``."""
    _check(texts)
    counts = Counter(gram for text in texts for gram in ngrams(text, n))
    if not counts:
        return Share(0.0, "")
    gram, count = counts.most_common(1)[0]
    return Share(count / counts.total(), " ".join(gram))


def opening_share(texts: Sequence[str], words: int = OPENING_WORDS) -> Share:
    """The share of texts with the commonest first ``words`` words. A shorter text's opening is all of it.

    An empty text's opening is "": a set of empty replies has share 1. Raises ValueError for an empty list.
    """
    _check(texts)
    phrase, count = Counter(" ".join(split_words(text)[:words]) for text in texts).most_common(1)[0]
    return Share(count / len(texts), phrase)


def mean_words(texts: Sequence[str]) -> float:
    """Words per text. Raises ValueError for an empty list."""
    _check(texts)
    return sum(len(split_words(text)) for text in texts) / len(texts)


def split_words(text: str) -> list[str]:
    """The lowercased words of ``text``."""
    return text.lower().split()


def ngrams(text: str, n: int) -> Iterator[Ngram]:
    """The runs of ``n`` words of ``text``, in order. Raises ValueError for n < 1."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    words = split_words(text)
    return zip(*(words[start:] for start in range(n)), strict=False)


def _check(texts: Sequence[str]) -> None:
    if not texts:
        raise ValueError("texts must not be empty")
