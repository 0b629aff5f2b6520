"""The independent judge: does it tell kind from unkind, by other means than VADER, and the same in every process?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

from ppo_fast.evaluation import judge as judge_module
from ppo_fast.evaluation.judge import CLASSES, Judge, default_judge, kindness_judge, load_words

# Kind first, unkind second: the same situation twice.
PAIRS = [
    (
        "Thank you for waiting with my mother until the ambulance came.",
        "You left my mother alone and lied to us about it.",
    ),
    ("The staff were friendly and helped us with our bags.", "The staff were rude and ignored us at the desk."),
    (
        "Your son is a polite boy and helps the younger children.",
        "Your son is a nasty boy and bullies the younger children.",
    ),
    (
        "I was delighted with the soup, and the bread was fresh.",
        "I was disgusted by the soup, and the bread was stale.",
    ),
    (
        "We appreciate the effort that you put into the garden.",
        "We are appalled by the mess that you left in the garden.",
    ),
    ("The team played with courage and deserved the applause.", "The team played carelessly and deserved the jeers."),
    ("It is a charming film with a hopeful ending.", "It is a tedious film with a ridiculous ending."),
    ("Your advice gave me comfort when I needed it most.", "Your advice was cruel and made everything worse."),
    ("The repair was quick, careful and affordable.", "The repair was slow, sloppy and overpriced."),
    ("My neighbour is generous and always welcomes visitors.", "My neighbour is hostile and threatens visitors."),
    ("Please give my love to your wonderful family.", "I despise you and your whole dreadful family."),
    ("The report praises the nurses for their gentle care.", "The report blames the nurses for a fatal mistake."),
    (
        "I forgive you, and I hope that we can be friends again.",
        "I will never forgive you, and I hope that you suffer.",
    ),
    ("The room was spotless and the beds were comfortable.", "The room was filthy and the beds were infested."),
    ("This program is reliable and pleasant to use.", "This program is buggy and annoying to use."),
    (
        "The inspector thanked the cook for the clean kitchen.",
        "The inspector closed the kitchen because of the stench.",
    ),
    ("What a thoughtful gift, it brightened my whole week.", "What a worthless gift, it was an insult."),
    ("The volunteers rescued the dog and nursed it tenderly.", "The owners beat the dog and left it to starve."),
    ("He apologised sincerely and repaired the fence.", "He cursed at us and wrecked the fence."),
    ("I admire your patience with the beginners.", "I am sick of your contempt for the beginners."),
    ("The audience cheered and the singer smiled.", "The audience booed and the singer wept."),
    ("You were brave to tell the truth.", "You were a coward to hide the theft."),
    ("Our guide was cheerful and full of stories.", "Our guide was grumpy and full of complaints."),
    ("The harvest was plentiful and the farmers celebrated.", "The harvest was ruined and the farmers despaired."),
    ("She listened attentively and consoled the boy.", "She mocked the boy and humiliated him."),
    ("Everyone is safe, and the building can be restored.", "Three people are dead, and the building was destroyed."),
]


def test_word_list_is_large_distinct_and_clean() -> None:
    words = load_words()
    sizes = {name: sum(label == name for label in words.values()) for name in CLASSES}
    assert sizes["positive"] >= 900
    assert sizes["negative"] >= 900
    assert sizes["neutral"] >= 1200
    assert all(word.isalpha() and word == word.lower() for word in words)


def test_no_word_stands_twice_in_the_list() -> None:
    text = (judge_module.resources.files("ppo_fast.evaluation") / "judge_words.txt").read_text(encoding="utf-8")
    listed = [word for line in text.splitlines() if line[:1] not in "[#" for word in line.split()]
    assert len(listed) == len(set(listed)) == len(load_words())


def test_held_out_words_of_the_list() -> None:
    """Words it has never seen: a third of the list is held out, and chance is 0.5."""
    words = list(load_words().items())
    order = np.random.default_rng(7).permutation(len(words))
    held_out = [words[index] for index in sorted(order[::3].tolist())]
    judge = Judge(dict(words[index] for index in sorted(set(range(len(words))) - set(order[::3].tolist()))))
    right = [(judge.word_score(word) > 0) == (label == "positive") for word, label in held_out if label != "neutral"]
    assert len(right) > 700
    assert np.mean(right) > 0.8
    plain = [abs(judge.word_score(word)) > judge_module.DEADBAND for word, label in held_out if label == "neutral"]
    assert np.mean(plain) < 0.08


def test_kind_and_unkind_pairs_are_ordered() -> None:
    kind = default_judge().score([pair[0] for pair in PAIRS])
    unkind = default_judge().score([pair[1] for pair in PAIRS])
    assert np.mean(np.array(kind) > np.array(unkind)) > 0.95
    assert np.mean(np.array(kind) > 0) > 0.9
    assert np.mean(np.array(unkind) < 0) > 0.9


def test_agrees_with_vader_without_being_vader(vader: Any) -> None:
    sentences = [sentence for pair in PAIRS for sentence in pair]
    theirs = [vader.polarity_scores(sentence)["compound"] for sentence in sentences]
    correlation = np.corrcoef(default_judge().score(sentences), theirs)[0, 1]
    assert 0.5 < correlation < 0.95


def test_reads_words_that_vader_does_not_list(vader: Any) -> None:
    kind = [
        "She spoke soothingly and was hospitable to the guests.",
        "A neighbourly, mouthwatering and plentiful supper.",
    ]
    unkind = ["He was discourteous and kept the place unhygienic.", "A shoddy, overpriced, flavourless supper."]
    assert all(vader.polarity_scores(sentence)["compound"] == 0 for sentence in kind + unkind)
    assert min(default_judge().score(kind)) > 0.2
    assert max(default_judge().score(unkind)) < -0.2


def test_ignores_words_that_vader_counts(vader: Any) -> None:
    """Plain statements in which VADER finds a listed word: the number a scorer's lexicon invents must not be shared."""
    plain = ["The number 40 bus goes to the natural history museum.", "Please like the page and share the file."]
    theirs = [abs(vader.polarity_scores(sentence)["compound"]) for sentence in plain]
    ours = np.abs(default_judge().score(plain))
    assert min(theirs) > 0.3
    assert max(ours) < 0.2


def test_plain_sentences_are_near_zero() -> None:
    plain = [
        "The meeting begins at nine in the main hall on the second floor.",
        "The samples were taken on Tuesday and measured again on Friday.",
        "The box contains two cables, a charger and a printed manual.",
        "We took the train to the coast and walked along the harbour.",
    ]
    assert max(abs(score) for score in default_judge().score(plain)) < 0.25


@pytest.mark.parametrize(
    ("kinder", "negated"),
    [
        ("The food was good.", "The food was not good."),
        ("He is kind to animals.", "He isn't kind to animals."),
        ("The staff were helpful.", "The staff were hardly helpful."),
        ("They treated us with respect.", "They treated us without respect."),
        ("The clerk was polite.", "The clerk wasn\u2019t polite."),
    ],
)
def test_negation_turns_praise(kinder: str, negated: str) -> None:
    praise, turned = default_judge().score([kinder, negated])
    assert praise > 0.2
    assert turned < -0.1


def test_negated_blame_is_faint_praise() -> None:
    bad, not_bad, good = default_judge().score(["The food was bad.", "The food was not bad.", "The food was good."])
    assert bad < 0 < not_bad < good


def test_negation_ends_with_its_clause() -> None:
    scores = default_judge().score(
        ["It did not rain, lovely weather.", "He was not there but helpful.", "I cannot thank you enough for this."]
    )
    assert min(scores) > 0.2


def test_negation_reaches_three_words() -> None:
    assert default_judge().score(["We did not walk to the lovely lake."])[0] > 0.2
    assert default_judge().score(["We did not like the lovely lake."])[0] < -0.1


def test_an_inflected_word_counts_once() -> None:
    base = "The train to the lake was wonderful."
    once, again, inflected, another = default_judge().score(
        [base, base + " The walk was wonderful.", base + " The walk went wonderfully.", base + " The walk was lovely."]
    )
    assert again < once
    assert inflected < once
    assert another > once + 0.1


def test_a_kind_of_thing_is_not_kind() -> None:
    of, kind = default_judge().score(["It is a kind of box.", "It is a kind box."])
    assert abs(of) < 0.1 < 0.3 < kind


@pytest.mark.parametrize("text", ["", "   ", "\n", "123 456", "?!", "\U0001f642"])
def test_text_without_words_is_neutral(text: str) -> None:
    assert default_judge().score([text]) == [0.0]


KIND_SENTENCE = "Thank you for your kind letter; it made my day and cheered up the children."


@pytest.mark.parametrize(
    "stuffing",
    [
        "wonderful " * 2,
        "wonderful " * 24,
        "wonderful wonderfully wonders lovely love loving loved",
        "love joy happy kind sweet beautiful amazing great best lovely wonderful perfect",
        "so happy, so happy, so happy, so happy, so happy, so happy",
    ],
)
def test_stuffing_with_sweet_words_does_not_pay(stuffing: str) -> None:
    kind, stuffed = default_judge().score([KIND_SENTENCE, stuffing])
    assert stuffed < kind - 0.1


def test_repeating_lowers_the_score_each_time() -> None:
    scores = default_judge().score(["What a wonderful day." + " wonderful" * times for times in (0, 2, 4, 8, 16)])
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.3 * scores[0]


def test_scores_stay_in_range() -> None:
    texts = [KIND_SENTENCE * 50, "You are a nasty, cruel, hateful liar. " * 50, "a" * 10_000, "\u00e9t\u00e9 caf\u00e9"]
    assert all(-1 <= score <= 1 for score in default_judge().score(texts))


def test_reward_signature_takes_strings_and_chats() -> None:
    text = "What a lovely surprise for the children."
    chat = [{"role": "assistant", "content": text}]
    scores = kindness_judge(["p"] * 3, [text, chat, ""], completion_ids=[[1]] * 3, kind=["letter"] * 3)
    assert scores == [*default_judge().score([text]) * 2, 0.0]
    assert scores[0] is not None
    assert scores[0] > 0.2


def test_same_bits_in_another_process_with_more_threads() -> None:
    sentences = [sentence for pair in PAIRS for sentence in pair]
    code = (
        "import sys, json; from ppo_fast.evaluation.judge import Judge;"
        "print(json.dumps([score.hex() for score in Judge().score(json.load(sys.stdin))]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads() + 1), "PYTHONHASHSEED": "12345"}
    command, data = [sys.executable, "-c", code], json.dumps(sentences)
    out = subprocess.run(command, input=data, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert json.loads(out) == [score.hex() for score in default_judge().score(sentences)]


def test_trains_within_two_seconds_of_one_core() -> None:
    started = time.process_time()
    Judge()
    assert time.process_time() - started < 2
    assert default_judge() is default_judge()


def test_bad_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"words: got the labels \['good'\], expected"):
        Judge({"fine": "good"})
    with pytest.raises(ValueError, match="got no negative and no neutral word"):
        Judge({"fine": "positive"})
