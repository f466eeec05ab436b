"""Length, novelty, copying and repetition of summaries, against their definitions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from t5_fsdp.evaluation.text_statistics import (
    STATISTICS,
    copied_spans,
    mean_statistics,
    text_statistics,
)


def test_an_example_by_hand():
    found = text_statistics(
        "The cat sat. The cat sat down", ["a cat", "a b c d"], "The cat sat on a mat.", True, 2
    )
    assert list(found) == list(STATISTICS)
    assert found == {
        "document_words": 6,
        "summary_words": 7,
        "reference_words": 3,
        "compression": 6 / 7,
        "novel_1grams": 1 / 4,  # the cat sat [down]
        "novel_2grams": 2 / 4,  # the-cat cat-sat [sat-the sat-down]
        "novel_3grams": 3 / 4,  # the-cat-sat [cat-sat-the sat-the-cat cat-sat-down]
        "novel_4grams": 1.0,
        "repetition": 1 / 5,  # the-cat-sat comes twice
        "coverage": 6 / 7,
        "density": (9 + 9) / 7,
        "cut": True,
        "sentinels": 2,
        "empty": False,
    }


def test_what_is_not_known_or_not_there_is_none():
    found = text_statistics(" ", ["a"])
    assert found["empty"] is True and found["summary_words"] == 0 and found["repetition"] == 0
    unknown = [name for name in STATISTICS if found[name] is None]
    assert {"document_words", "compression", "novel_1grams", "coverage", "cut"} <= set(unknown)
    short = text_statistics("two words", ["a"], "two words")
    assert short["novel_2grams"] == 0.0 and short["novel_3grams"] is None
    assert text_statistics("<extra_id_0> a <extra_id_12>", ["a"])["sentinels"] == 2


def test_means_are_over_the_examples_where_it_is_known():
    rows = [text_statistics("a b c", ["a"], "a b c", cut=True), text_statistics("d", ["a"])]
    means = mean_statistics(rows)
    assert means["summary_words"] == 2 and means["document_words"] == 3 and means["cut"] == 1.0
    assert "cut" not in mean_statistics(rows[1:])


def spans_of_the_paper(article: list[str], summary: list[str]) -> list[int]:
    """Grusky et al. 2018, figure 3, word by word."""
    spans = []
    i = j = 0
    while i < len(summary):
        longest = 0
        while j < len(article):
            if summary[i] != article[j]:
                j += 1
                continue
            k, m = i, j
            while k < len(summary) and m < len(article) and summary[k] == article[m]:
                k, m = k + 1, m + 1
            longest = max(longest, k - i)
            j = m
        spans += [longest] if longest else []
        i, j = i + max(longest, 1), 0
    return spans


@settings(max_examples=300, deadline=None, derandomize=True)
@given(*[st.lists(st.sampled_from("aab"), max_size=14)] * 2)
def test_copied_spans_are_those_of_the_paper(article: list[str], summary: list[str]):
    assert copied_spans(summary, article) == spans_of_the_paper(article, summary)
