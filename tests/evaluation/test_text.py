"""Text audits against counts done by hand and against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_fast.evaluation.text import (
    Share,
    audit,
    distinct_n,
    distinct_n_without_each,
    mean_words,
    ngrams,
    opening_share,
    top_ngram_share,
)

CATS = ["The cat sat on the mat", "the CAT sat down", "Dogs bark"]


def test_distinct_counts_over_all_texts_in_lower_case() -> None:
    # the-cat cat-sat sat-on on-the the-mat | the-cat cat-sat sat-down | dogs-bark: 9 pairs, 7 distinct
    assert distinct_n(CATS, 2) == pytest.approx(7 / 9)
    assert distinct_n(CATS, 1) == pytest.approx(8 / 12)
    assert distinct_n(["a b", "b a"], 2) == 1.0


def test_punctuation_stays_with_its_word() -> None:
    assert list(ngrams("Well,\twell  well.", 2)) == [("well,", "well"), ("well", "well.")]


def test_text_without_a_pair_is_not_varied() -> None:
    assert distinct_n(["", "word"], 2) == 0.0


def test_top_trigram() -> None:
    assert top_ngram_share(CATS, 3) == Share(2 / 6, "the cat sat")
    assert top_ngram_share(["a b"], 3) == Share(0.0, "")


def test_opening() -> None:
    assert opening_share(CATS) == Share(2 / 3, "the cat sat")
    assert opening_share(["Yes", "yes", "no way out of here"]) == Share(2 / 3, "yes")
    assert opening_share(["", " "]) == Share(1.0, "")


def test_audit_gathers_them() -> None:
    found = audit(CATS)
    assert found.distinct_2 == pytest.approx(7 / 9)
    assert found.top_trigram.phrase == found.opening.phrase == "the cat sat"
    assert found.mean_words == mean_words(CATS) == 4.0


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), max_size=8).map(" ".join), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_leaving_out_each_cluster_equals_counting_again(rows: list[tuple[str, int]], n: int) -> None:
    texts, clusters = [text for text, _ in rows], [cluster for _, cluster in rows]
    expected = []
    for left_out in dict.fromkeys(clusters):
        rest = [text for text, cluster in rows if cluster != left_out]
        expected.append(distinct_n(rest, n) if rest else 0.0)
    assert distinct_n_without_each(texts, clusters, n).tolist() == pytest.approx(expected)


def test_bad_arguments_are_named() -> None:
    for function in (audit, mean_words, opening_share, top_ngram_share):
        with pytest.raises(ValueError, match="texts must not be empty"):
            function([])
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        distinct_n(["a"], 0)
    with pytest.raises(ValueError, match="equally long, got 1 and 2"):
        distinct_n_without_each(["a"], ["x", "y"], 2)
