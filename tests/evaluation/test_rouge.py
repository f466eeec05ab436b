"""ROUGE equals rouge-score pair by pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer, _lcs_table
from sentencex import segment

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.rouge import METRICS, RougeSettings, Scores, lcs_length, score_pairs
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


PRESETS = ("default", "t5", "hf", "pegasus")


def prepared(text: str, preset: str) -> str:
    """The text as the project of that preset hands it to rouge-score."""
    sentences = segment("en", text.strip().replace("\ud800", "?").replace("\udc00", "?")
                        .replace("\ud83d", "?"))  # fmt: skip
    if preset == "t5":
        return text.replace(" . ", " .\n")
    if preset == "hf":
        return "\n".join(sentences)
    has_lines = len([line for line in text.split("\n") if line.strip()]) > 1
    return text if preset == "pegasus" or has_lines else "\n".join(sentences)


def direct_values(prediction: str, reference: str, preset: str = "default") -> np.ndarray:
    """[3, 4] straight from rouge-score: precision, recall and fmeasure of each metric."""
    scorer = RougeScorer(list(METRICS), use_stemmer=preset != "t5")
    scores = scorer.score(prepared(reference, preset), prepared(prediction, preset))
    return np.array([scores[metric] for metric in METRICS]).T


def stacked(scores: Scores) -> np.ndarray:
    """[examples, 3, 4]."""
    return np.stack([scores.precision, scores.recall, scores.fmeasure], axis=1)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_pair_equals_rouge_score(preset):
    predictions, references = map(list, zip(*PAIRS, strict=True))
    scores = score_pairs(predictions, references, RougeSettings(preset))
    expected = np.stack([direct_values(*pair, preset) for pair in PAIRS])
    assert scores.fmeasure.dtype == np.float64
    assert scores.fmeasure.shape == (len(PAIRS), 4)
    np.testing.assert_array_equal(stacked(scores), expected)
    assert scores.precision[0, 0] != scores.recall[2, 0]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_sample_equals_rouge_score(preset):
    lines = (REPOSITORY / "data/sample/test.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    rows = [json.loads(line) for line in lines]
    # One text with the summary's lines and one without, in the way of a model without newlines.
    predictions = [
        row["document"][:300].replace("\n", "\n" if number % 2 else " ")
        for number, row in enumerate(rows)
    ]
    references = [row["summary"] for row in rows]
    values = stacked(score_pairs(predictions, references, RougeSettings(preset)))
    expected = [direct_values(*pair, preset) for pair in zip(predictions, references, strict=True)]
    np.testing.assert_array_equal(values, np.stack(expected))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(odd_text, odd_text, st.sampled_from(PRESETS))
def test_odd_strings_equal_rouge_score(prediction: str, reference: str, preset: str):
    values = stacked(score_pairs([prediction], [reference], RougeSettings(preset)))[0]
    np.testing.assert_array_equal(values, direct_values(prediction, reference, preset))


def test_presets_differ_where_they_say():
    texts = ["The running dog . It sat", "It sits . The dogs run"]
    found = {
        preset: score_pairs(texts[:1], texts[1:], RougeSettings(preset)).fmeasure[0]
        for preset in PRESETS
    }
    assert found["t5"][0] < found["pegasus"][0]  # no stemmer
    assert found["pegasus"][3] == found["pegasus"][2]  # no sentences
    assert found["t5"][3] > found["t5"][2]
    lines = "One. Two\nThree. Four", "Two One. Four Three\n"
    hf, default = (
        score_pairs(lines[:1], lines[1:], RougeSettings(preset)).fmeasure[0, 3]
        for preset in ("hf", "default")
    )
    assert hf != default  # hf cuts lines too


@settings(max_examples=200, deadline=None, derandomize=True)
@given(*[st.lists(st.sampled_from("abcd"), max_size=12)] * 2)
def test_the_longest_common_subsequence_is_that_of_the_table(first, second):
    assert lcs_length(first, second) == _lcs_table(first, second)[-1][-1]


REFERENCES = [["cat", "the cat sat down", ""], ["x"], ["one two three", "three two one four"]]


def test_the_best_reference_counts_metric_by_metric():
    predictions = ["the cat ran", "x", "four one two"]
    scores = score_pairs(predictions, REFERENCES)
    scorer = RougeScorer(list(METRICS), use_stemmer=True)
    for row, prediction, several in zip(stacked(scores), predictions, REFERENCES, strict=True):
        expected = scorer.score_multi(several, prediction)
        np.testing.assert_array_equal(row, np.array([expected[m] for m in METRICS]).T)


def test_references_are_averaged():
    averaged = score_pairs(["the cat ran"], [REFERENCES[0]], RougeSettings(references="average"))
    singly = [stacked(score_pairs(["the cat ran"], [text]))[0] for text in REFERENCES[0]]
    np.testing.assert_allclose(stacked(averaged)[0], np.mean(singly, axis=0))
    assert averaged.summary()["settings"]["references"] == "average"


def test_the_unicode_tokenizer_scores_other_scripts():
    pair = (["完全相同的句子。"], ["相同的句子。"])
    assert score_pairs(*pair).fmeasure[0, 0] == 0
    scores = score_pairs(*pair, RougeSettings(tokenizer="unicode"))
    assert scores.precision[0, 0] == 5 / 7 and scores.recall[0, 0] == 1
    assert "any script" in scores.summary()["settings"]["tokenizer"]


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
        (["a"], [[]], ValueError, r"references\[0\] is empty"),
        (["a"], [["b", 3]], TypeError, r"references\[0\] is a int"),
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
        assert got["fmeasure_low"] < got["fmeasure_mid"] < got["fmeasure_high"]
        assert got["fmeasure_mid"] == pytest.approx(got["fmeasure"], abs=0.01)
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
        "import sys, t5_fsdp.evaluation.scoring; "
        "print([m for m in ('torch', 'rouge_score', 'nltk', 'sentencex') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert printed.strip() == "[]"
