"""Baselines take from the document what they say."""

from __future__ import annotations

import numpy as np
import pytest

from t5_fsdp.evaluation.baselines import (
    BASELINES,
    baseline_summaries,
    greedy_choice,
    is_baseline,
    lead_baseline,
    medians_of_others,
)
from t5_fsdp.evaluation.rouge import score_pairs

DOCUMENTS = [
    "One dog ran. Two cats sat.\nThree birds flew away. Four.",
    "Rinse the rice. Boil it. Eat it.",
    "Alone here.",
]
REFERENCES = [["Three birds flew.", "x"], ["Rinse rice.\nEat it now."], ["a\nb\nc\nd"]]


def test_lead_baseline_takes_as_many_words_as_the_reference():
    documents = ["One two,\n three four. Five", "short", "anything"]
    assert lead_baseline(documents, ["a b\tc", "x y z", " "]) == [
        "One two, three",
        "short",
        "",
    ]
    with pytest.raises(ValueError, match="3 documents but 1 references"):
        lead_baseline(documents, ["a"])


def test_names_of_baselines():
    assert all(is_baseline(name) for name in ("lead", "lead-3", "lead_words", "random", "oracle"))
    assert not any(is_baseline(name) for name in ("lead-N", "lead-0", "Lead", "runs/lead", ""))
    assert "upper bound" in BASELINES["oracle"]


def test_the_median_is_that_of_the_others():
    lengths = [5, 1, 9, 5, 2, 7]
    expected = [max(1, int(np.median(lengths[:i] + lengths[i + 1 :]))) for i in range(6)]
    assert medians_of_others(lengths, 60) == expected
    assert medians_of_others([4], 60) == [60]
    assert medians_of_others([0, 0], 60) == [1, 1]


def test_lead_takes_the_sentences_that_others_have():
    # Sentences of the references: 1, 2, 4.
    assert baseline_summaries("lead", DOCUMENTS, REFERENCES) == [
        "One dog ran.\nTwo cats sat.\nThree birds flew away.",
        "Rinse the rice.\nBoil it.",
        "Alone here.",
    ]
    assert baseline_summaries("lead-1", DOCUMENTS, REFERENCES)[0] == "One dog ran."
    # Words: 3, 5, 4.
    assert baseline_summaries("lead_words", DOCUMENTS, REFERENCES) == [
        "One dog ran. Two",
        "Rinse the rice.",
        "Alone here.",
    ]


@pytest.mark.parametrize("name", ["lead", "lead_words", "random"])
def test_an_examples_own_reference_is_not_looked_at(name):
    before = baseline_summaries(name, DOCUMENTS, REFERENCES)
    for number in range(3):
        changed = [*REFERENCES]
        changed[number] = ["word. " * 50]
        assert baseline_summaries(name, DOCUMENTS, changed)[number] == before[number]


def test_random_sentences_are_seeded_and_in_order():
    documents = [" ".join(f"Sentence {n} is here." for n in "abcdefgh")] * 40
    references = [["One. Two. Three is it."]] * 40
    found = baseline_summaries("random", documents, references, seed=3)
    assert found == baseline_summaries("random", documents, references, seed=3)
    assert found != baseline_summaries("random", documents, references, seed=4)
    assert len(set(found)) > 20
    for summary in found:
        lines = summary.split("\n")
        assert len(lines) == 3 and lines == sorted(lines)


def test_oracle_takes_what_scores_best():
    assert baseline_summaries("oracle", DOCUMENTS, REFERENCES) == [
        "Three birds flew away.",
        "Rinse the rice.\nEat it.",
        "",
    ]
    oracle = score_pairs(baseline_summaries("oracle", DOCUMENTS, REFERENCES), REFERENCES)
    for name in ("lead", "random"):
        other = score_pairs(baseline_summaries(name, DOCUMENTS, REFERENCES), REFERENCES)
        assert (oracle.fmeasure[:, :2].sum(axis=1) >= other.fmeasure[:, :2].sum(axis=1)).all()


def test_the_greedy_choice_stops_when_nothing_helps():
    sentences = [["a", "b"], ["c", "d"], ["x"], ["a", "b"]]
    assert greedy_choice(sentences, [["a", "b", "c", "d"]]) == [0, 1]
    assert greedy_choice(sentences, [["z"]]) == []
    assert greedy_choice([], [["z"]]) == []
