"""ROUGE equals rouge-score pair by pair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from rouge_score.rouge_scorer import RougeScorer

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.rouge import METRICS, Scores, score_pairs
from t5_fsdp.evaluation.sentences import split_sentences
from tests.odd_texts import odd_text, some_pairs

REPOSITORY = Path(__file__).parents[2]
PAIRS = [
    ("Wash the apples. Slice them thinly.", "Slice the apples thinly. Wash them first."),
    ("Open the door\nClose the windows", "Close the window\nOpen the doors\nGo"),
    ("Dr. Smith paid $3.50 for 2 pens, e.g. blue ones.", "dr smith payed 3.50 for pens"),
    ("running runs ran runner generously", "run generous runners"),
    ("完全相同的句子。", "完全相同的句子。"),
    ("café naïve", "cafe naive"),
    ("the the the the", "the"),
    ("", "something"),
    ("something", ""),
    ("", ""),
    (" \n\t ", "..."),
    ("\ud83d. lone surrogates. Too", "lone surrogates. \udc00 Too."),
]


def direct_values(prediction: str, reference: str) -> np.ndarray:
    """[3, 4] straight from rouge-score: precision, recall and fmeasure of each metric."""
    whole = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    lines = RougeScorer(["rougeLsum"], use_stemmer=True)
    scores = whole.score(reference, prediction)
    scores |= lines.score(split_sentences(reference), split_sentences(prediction))
    return np.array([scores[metric] for metric in METRICS]).T


def stacked(scores: Scores) -> np.ndarray:
    """[examples, 3, 4]."""
    return np.stack([scores.precision, scores.recall, scores.fmeasure], axis=1)


def test_every_pair_equals_rouge_score():
    predictions, references = map(list, zip(*PAIRS, strict=True))
    scores = score_pairs(predictions, references)
    expected = np.stack([direct_values(*pair) for pair in PAIRS])
    assert scores.fmeasure.dtype == np.float64
    assert scores.fmeasure.shape == (len(PAIRS), 4)
    np.testing.assert_array_equal(stacked(scores), expected)
    assert scores.precision[0, 0] != scores.recall[2, 0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(odd_text, odd_text)
def test_odd_strings_equal_rouge_score(prediction: str, reference: str):
    values = stacked(score_pairs([prediction], [reference]))[0]
    np.testing.assert_array_equal(values, direct_values(prediction, reference))


def test_swapped_sentences_count_by_sentence():
    for separator in (" ", "\n"):
        sentences = ["the cat sat.", "a dog ran home."]
        scores = score_pairs([separator.join(sentences[::-1])], [separator.join(sentences)])
        assert scores.fmeasure[0, 2] == pytest.approx(0.5714, abs=5e-5)
        assert scores.fmeasure[0, 3] == 1.0


def test_empty_texts_score_zero():
    scores = score_pairs(["", "a word", "", "!"], ["a word", "", "", "!"])
    assert not stacked(scores).any()
    assert np.isfinite(stacked(scores)).all()


@pytest.mark.parametrize(
    ("predictions", "references", "error", "message"),
    [
        (["a"], ["a", "b"], ValueError, "1 predictions but 2 references"),
        ([], [], UserError, "no prediction"),
        (["a", None], ["a", "b"], TypeError, r"predictions\[1\] is a NoneType"),
        ("ab", "ab", TypeError, "one string"),
    ],
)
def test_unfit_input_is_refused(predictions, references, error, message):
    with pytest.raises(error, match=message):
        score_pairs(predictions, references)


def test_summary_holds_means_intervals_and_settings():
    scores = score_pairs(*some_pairs(60))
    summary = scores.summary(bootstrap_seed=3)
    assert summary["examples"] == 60
    assert list(summary["scores"]) == list(METRICS)
    for index, metric in enumerate(METRICS):
        got = summary["scores"][metric]
        assert got["precision"] == pytest.approx(scores.precision[:, index].mean())
        assert got["recall"] == pytest.approx(scores.recall[:, index].mean())
        assert got["fmeasure"] == pytest.approx(scores.fmeasure[:, index].mean())
        assert got["fmeasure_low"] < got["fmeasure"] < got["fmeasure_high"]
    kept = summary["settings"]
    assert (kept["stemmer"], kept["preset"]) == (True, "default")
    assert (kept["bootstrap_resamples"], kept["bootstrap_seed"]) == (1000, 3)
    assert kept["rouge_score_version"] == "0.1.2"
    assert "sentencex" in kept["sentence_splitter"]


def test_rows_are_the_f_measures():
    scores = score_pairs(["a dog ran", "x"], ["a dog sat", "x"])
    rows = scores.rows()
    assert [list(row) for row in rows] == [list(METRICS)] * 2
    assert rows[0]["rouge2"] == scores.fmeasure[0, 1] == 0.5
    assert type(rows[0]["rouge2"]) is float


def test_importing_needs_neither_torch_nor_rouge_score():
    code = (
        "import sys, t5_fsdp.evaluation.rouge; "
        "print([m for m in ('torch', 'rouge_score', 'nltk', 'sentencex') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert printed.strip() == "[]"
