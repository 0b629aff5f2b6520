"""An independent second opinion on kindness, for replies that were trained against another scorer.

The judge learns at first use, in under a second, from ``judge_words.txt``, a word list of this project's own: a softmax
regression over character n-grams puts any English word, listed or not, between friendly (+1) and unfriendly (-1), with
neutral words as a third class near 0. A text's score is

    tanh(GAIN * thinning * sum of the values of its distinct charged words / sqrt(words + OFFSET))
    thinning = min(1, (plain words + GRACE) / (PLAIN_PER_CHARGED * charged words))

Every word is added once, however often and in whatever inflection it comes back, while each repetition still counts in
the length; a text that is mostly charged words is no sentence, and thinned. Negation turns the next few words of the
clause. So the judge shares neither lexicon nor method with VADER, and a reply stuffed with sweet words loses by it. It
is a bag of words all the same: it can't tell sense from nonsense.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from ppo_fast.recipes.rewards import completion_text

CLASSES = ("positive", "negative", "neutral")
SHORTEST, LONGEST = 3, 5
"""Lengths of the character n-grams, word borders included as characters."""

L2 = 1e-5
"""Weight decay of the regression, whose loss is a mean over words. Held-out accuracy is flat from 1e-6 to 1e-4."""

ITERATIONS = 60
"""Enough for three digits of the word values."""

NEUTRAL_ODDS = 8.0
"""An unlisted word is this much likelier to be neutral than the list's shares say: most charged words are listed."""

DEADBAND = 0.25
"""Values this small are 0. With both settings one unlisted neutral word in twenty is still read as charged."""

GAIN, OFFSET = 1.5, 6.0
PLAIN_PER_CHARGED, GRACE = 1.5, 2
"""How many plain words a charged one needs beside it, so that "wonderful lovely amazing ..." is not read as praise."""

NEGATION_REACH = 3
"""Words after a negation that it turns, if the clause lasts that long."""

_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|[.,;:!?()\n\u2014]")
_NOT_SENTIMENT = re.compile(
    r"\b(?:kind|sort)s? of\b|\bnot (?:only|just)\b|\bno doubt\b|\bfair (?:amount|number|share)\b"
    r"|\b(?:can't|cannot|can not|couldn't|could not) (?=thank|praise|recommend|help but|wait)"
)
_NEGATION = re.compile(
    r"not|no|never|none|nobody|nothing|neither|nor|without|hardly|barely|scarcely|cannot|lacks?|.+n't"
)
_TURN = re.compile(r"but|yet|however|although|though")
_ENDING = re.compile(
    r"(?<=\w{3})(?:(?:ful|ous|less)?ness|(?:ing|ed|ous|ful|i)?ly|ments?|ings?|ie[sd]|est|ful|ous|ers?|ed|es|[sye])$"
)


def load_words() -> dict[str, str]:
    """The shipped list: word -> "positive", "negative" or "neutral", in the order of the file."""
    label, words = "", {}
    text = resources.files("ppo_fast.evaluation").joinpath("judge_words.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("["):
            label = line.strip("[]")
        elif not line.startswith("#"):
            words.update(dict.fromkeys(line.split(), label))
    return words


class Judge:
    """A kindness scorer trained on labelled words.

    Args:
        words: word -> one of ``CLASSES``; the shipped list if None. Training is deterministic: the same words in the
            same order give the same scores in every process, whatever the number of threads.

    Raises:
        ValueError: a label that is none of ``CLASSES``, or a class without a word.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        words = load_words() if words is None else words
        if unknown := set(words.values()) - set(CLASSES):
            raise ValueError(f"words: got the labels {sorted(unknown)}, expected {list(CLASSES)}")
        if absent := set(CLASSES) - set(words.values()):
            raise ValueError(f"words: got no {' and no '.join(sorted(absent))} word, expected some of each class")
        self._listed = frozenset(words)
        self._columns: dict[str, int] = {}
        self._weight = _train(words, self._columns)  # one row of three logits per n-gram
        self._values: dict[str, float] = {}

    def word_score(self, word: str) -> float:
        """P(positive) - P(negative) of one lower-case word, in [-1, 1], listed or not."""
        if word not in self._values:
            grams = _ngrams(word)
            logits = [0.0, 0.0, 0.0]  # no bias: a word without a known n-gram is as likely kind as unkind
            for gram in grams:
                if (column := self._columns.get(gram)) is not None:
                    for label in range(3):
                        logits[label] += self._weight[column][label] / math.sqrt(len(grams))
            top = max(logits)
            odds = [math.exp(logit - top) for logit in logits]
            if word not in self._listed:
                odds[2] *= NEUTRAL_ODDS
            self._values[word] = (odds[0] - odds[1]) / sum(odds)
        return self._values[word]

    def score(self, texts: Sequence[str]) -> list[float]:
        """One number in [-1, 1] per text: kind above 0, unkind below. A text without words gets 0.0."""
        return [self._score(text) for text in texts]

    def _score(self, text: str) -> float:
        total, count, charged, reach = 0.0, 0, 0, 0
        counted = set()
        for token in _TOKEN.findall(_NOT_SENTIMENT.sub(" ", text.lower().replace("\u2019", "'"))):
            if not token[0].isalpha() or _TURN.fullmatch(token):
                reach = 0
            if not token[0].isalpha():
                continue
            count += 1
            if _NEGATION.fullmatch(token):
                reach = NEGATION_REACH
                continue
            word = token.removesuffix("'s")
            value = self.word_score(word)
            negated, reach = reach > 0, max(reach - 1, 0)
            if abs(value) <= DEADBAND:
                continue
            charged += 1
            value = math.copysign((abs(value) - DEADBAND) / (1 - DEADBAND), value)
            if negated:  # "not good" is unkind, "not bad" only half a compliment
                value *= -0.8 if value > 0 else -0.4
            if (key := (_stem(word), negated)) not in counted:
                counted.add(key)
                total += value
        thinning = min(1.0, (count - charged + GRACE) / (PLAIN_PER_CHARGED * charged)) if charged else 1.0
        return math.tanh(GAIN * thinning * total / math.sqrt(count + OFFSET))


@functools.cache
def default_judge() -> Judge:
    """The judge of the shipped word list, trained once in a process."""
    return Judge()


def kindness_judge(
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[dict[str, Any]]],
    completion_ids: Sequence[Sequence[int]] | None = None,
    **columns: Any,
) -> list[float | None]:
    """The judge with a reward function's signature: the score of each reply alone, in [-1, 1], 0.0 for an empty one."""
    return list(default_judge().score([completion_text(completion) for completion in completions]))


def _ngrams(word: str) -> list[str]:
    """The distinct character n-grams of "^word$", in order of first appearance."""
    marked = f"^{word}$"
    spans = ((start, start + size) for size in range(SHORTEST, LONGEST + 1) for start in range(len(marked) - size + 1))
    return list(dict.fromkeys(marked[start:stop] for start, stop in spans))


def _stem(word: str) -> str:
    """The word without its endings, so that its inflections count as one. Never shorter than three letters."""
    while (shorter := _ENDING.sub("", word)) != word:
        word = shorter
    return word


def _train(words: Mapping[str, str], columns: dict[str, int]) -> list[list[float]]:
    """Fit the softmax regression; fills ``columns`` (n-gram -> row) and returns the weights as rows of three numbers.

    Accelerated gradient descent with a step from the largest curvature and a fixed number of iterations: nothing in it
    branches on a value, so that a different last bit on another machine stays one.
    """
    grams = [_ngrams(word) for word in words]
    ids = torch.tensor([columns.setdefault(gram, len(columns)) for of_word in grams for gram in of_word])
    counts = torch.tensor([len(of_word) for of_word in grams])  # [words]
    starts, row_of_id = counts.cumsum(0) - counts, torch.arange(len(grams)).repeat_interleave(counts)
    scale = counts.to(torch.float64).rsqrt()[:, None]  # rows of the feature matrix have length 1
    targets = torch.tensor([[label == name for name in CLASSES] for label in words.values()]).to(torch.float64)

    def logits_of(weight: Tensor) -> Tensor:  # [n-grams, k] -> [words, k]
        return torch.nn.functional.embedding_bag(ids, weight, starts, mode="sum") * scale

    def pull_back(error: Tensor) -> Tensor:  # [words, k] -> [n-grams, k], the transpose
        return error.new_zeros(len(columns), error.shape[1]).index_add_(0, ids, (error * scale)[row_of_id])

    with torch.no_grad(), _one_thread():
        direction = torch.ones(len(columns), 1, dtype=torch.float64)
        for _ in range(20):
            direction = pull_back(logits_of(direction))
            eigenvalue = direction.norm()
            direction = direction / eigenvalue
        # A softmax curves by at most 1/2; 5% because the power iteration comes from below.
        step = 1 / (0.5 * 1.05 * eigenvalue / len(grams) + L2)
        weight = torch.zeros(len(columns), len(CLASSES), dtype=torch.float64)
        ahead = weight
        for iteration in range(ITERATIONS):
            error = (torch.softmax(logits_of(ahead), dim=1) - targets) / len(grams)
            stepped = ahead - step * (pull_back(error) + L2 * ahead)
            ahead = stepped + iteration / (iteration + 3) * (stepped - weight)
            weight = stepped
    return weight.tolist()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over several threads depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
