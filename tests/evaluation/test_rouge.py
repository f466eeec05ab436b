"""ROUGE equals rouge-score pair by pair; its files are whole and its errors name the line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation import rouge
from t5_fsdp.evaluation.rouge import METRICS, Scores, score_pairs, split_sentences

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


def some_pairs(count: int) -> tuple[list[str], list[str]]:
    generator = np.random.default_rng(0)
    words = ["wash", "the", "slicing", "apples.", "Then", "runners", "open,", "close", "it!", "7"]
    texts = [
        [" ".join(generator.choice(words, generator.integers(1, 20))) for _ in range(count)]
        for _ in range(2)
    ]
    return texts[0], texts[1]


def summary_of(fmeasure: np.ndarray, **options: int) -> dict:
    return Scores(fmeasure, fmeasure, fmeasure).summary(**options)


def test_every_pair_equals_rouge_score():
    predictions, references = map(list, zip(*PAIRS, strict=True))
    scores = score_pairs(predictions, references)
    expected = np.stack([direct_values(*pair) for pair in PAIRS])
    assert scores.fmeasure.dtype == np.float64
    assert scores.fmeasure.shape == (len(PAIRS), 4)
    np.testing.assert_array_equal(stacked(scores), expected)
    assert scores.precision[0, 0] != scores.recall[2, 0]


odd_text = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from("aAbsing 19.!?\n\r\té。\u2028\x00\ud800"), max_size=60),
    st.lists(st.sampled_from(["cats", "cat.", "Ran", "running", "e.g.", "\n"])).map(" ".join),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(odd_text, odd_text)
def test_odd_strings_equal_rouge_score(prediction: str, reference: str):
    values = stacked(score_pairs([prediction], [reference]))[0]
    np.testing.assert_array_equal(values, direct_values(prediction, reference))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(odd_text)
def test_splitting_only_adds_newlines(text: str):
    plain = text.replace("\ud800", "\ufffd").replace("\n", "")
    assert split_sentences(text).replace("\ud800", "\ufffd").replace("\n", "") == plain


def test_swapped_sentences_count_by_sentence():
    for separator in (" ", "\n"):
        sentences = ["the cat sat.", "a dog ran home."]
        scores = score_pairs([separator.join(sentences[::-1])], [separator.join(sentences)])
        assert scores.fmeasure[0, 2] == pytest.approx(0.5714, abs=5e-5)
        assert scores.fmeasure[0, 3] == 1.0


def test_lines_are_sentences_and_other_texts_are_split():
    assert split_sentences("One. Two.\nThree.") == "One. Two.\nThree."
    one_line = [line.strip() for line in split_sentences("Dr. Smith came. He left.\n").split("\n")]
    assert [line for line in one_line if line] == ["Dr. Smith came.", "He left."]


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


def test_processes_below_one_are_refused():
    with pytest.raises(ValueError, match="processes is 0"):
        score_pairs(["a"], ["a"], processes=0)


def test_several_processes_give_the_same_in_the_same_order(monkeypatch):
    predictions, references = some_pairs(rouge.MIN_PAIRS_FOR_WORKERS + 1)
    single = score_pairs(predictions, references)
    # Spawned workers import the module anew, so only scoring in this process would meet this.
    monkeypatch.setattr(rouge, "_pair_scorer", lambda: pytest.fail("scored in the caller"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        several = score_pairs(predictions, references, processes=2)
    np.testing.assert_array_equal(stacked(several), stacked(single))


def test_few_pairs_start_no_process(monkeypatch):
    monkeypatch.setattr(rouge, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("a pool"))
    assert len(score_pairs(*some_pairs(20), processes=4)) == 20


def test_lost_workers_do_not_lose_the_scores(monkeypatch):
    class DyingPool:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def map(self, function, chunks):
            yield function(chunks[0])
            raise BrokenProcessPool("a worker died")

    predictions, references = some_pairs(rouge.MIN_PAIRS_FOR_WORKERS)
    single = score_pairs(predictions, references)
    monkeypatch.setattr(rouge, "ProcessPoolExecutor", DyingPool)
    with pytest.warns(RuntimeWarning, match="a worker died"):
        several = score_pairs(predictions, references, processes=2)
    np.testing.assert_array_equal(stacked(several), stacked(single))


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_workers_end_when_the_caller_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import multiprocessing, time
            from concurrent.futures import ProcessPoolExecutor
            from t5_fsdp.evaluation.rouge import _start_worker
            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start_worker)
                pool.submit(int).result()
                print("ready", flush=True)
                time.sleep(60)
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    caller = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert caller.stdout.readline() == "ready\n"
        started = time.monotonic()
        caller.send_signal(signal.SIGKILL)
        # The worker holds the other end of the pipe: it closes when the worker is gone.
        caller.communicate(timeout=10)
        assert time.monotonic() - started < 10
    finally:
        caller.kill()


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


def test_interval_is_seeded_and_has_the_width_of_theory():
    values = np.random.default_rng(1).random((2000, 4))
    assert summary_of(values) == summary_of(values)
    other = summary_of(values, bootstrap_seed=2)["scores"]["rouge1"]
    interval = summary_of(values)["scores"]["rouge1"]
    assert other["fmeasure_low"] != interval["fmeasure_low"]
    width = interval["fmeasure_high"] - interval["fmeasure_low"]
    assert width == pytest.approx(2 * 1.96 * values[:, 0].std() / 2000**0.5, rel=0.1)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 3, 97])
def test_interval_of_equal_scores_contains_their_mean(value, count):
    got = summary_of(np.full((count, 4), value))["scores"]["rougeL"]
    assert got["fmeasure_low"] <= got["fmeasure"] <= got["fmeasure_high"]
    assert got["fmeasure_high"] - got["fmeasure_low"] < 1e-12


def test_bootstrap_of_many_examples_takes_little_memory():
    values = np.random.default_rng(0).random((40_000, 4))
    tracemalloc.start()
    try:
        rouge.bootstrap_interval(values, seed=1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # All counts at once would take 320 MB.
    assert peak_bytes < 60e6


def test_lead_baseline_takes_as_many_words_as_the_reference():
    documents = ["One two,\n three four. Five", "short", "anything"]
    assert rouge.lead_baseline(documents, ["a b\tc", "x y z", " "]) == [
        "One two, three",
        "short",
        "",
    ]
    with pytest.raises(ValueError, match="3 documents but 1 references"):
        rouge.lead_baseline(documents, ["a"])


def test_predictions_come_back_as_written(tmp_path):
    path = tmp_path / "new" / "predictions.jsonl"
    rows = [
        {"id": 1, "reference": "Äpfel\u2028\nwaschen", "prediction": "", "rouge1": 0.25},
        {"id": "b", "reference": "\ud800 alone", "prediction": "完全"},
    ]
    rouge.write_predictions(path, rows)
    assert rouge.read_predictions(path) == rows
    assert "Äpfel" in path.read_text(encoding="utf-8")
    assert os.listdir(path.parent) == ["predictions.jsonl"]


def test_blank_lines_marks_and_nan_are_read(tmp_path):
    path = tmp_path / "predictions.jsonl"
    line = b'{"reference": "a", "prediction": "b", "score": NaN}'
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n  \r\n" + line)
    row = {"reference": "a", "prediction": "b", "score": None}
    assert rouge.read_predictions(path) == [row, row]


GOOD_LINE = b'{"reference": "a", "prediction": "b"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD_LINE + b'{"reference": "a", "pred', "line 2 is not JSON .*each line must be"),
        (GOOD_LINE + b"\n" + b'{"reference": "a"}', "line 3 has no 'prediction'.*fields: refer"),
        (b'{"prediction": "a", "summary": "b"}', "line 1 has no 'reference'.*prediction, summary"),
        (b'{"reference": "a", "prediction": null}', "line 1: 'prediction' is null, not a string"),
        (b'{"reference": ["a"], "prediction": ""}', "line 1: 'reference' is list, not a string"),
        (b'["a", "b"]', "line 1 is a JSON list"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (GOOD_LINE + '{"reference": "é"}'.encode("latin-1"), "line 2 is not UTF-8 .*save the file"),
        (GOOD_LINE.decode().encode("utf-16"), "line 1 is not UTF-8"),
        (b"", "has no predictions"),
        (b"\n \n", "has no predictions"),
    ],
)
def test_malformed_predictions_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "predictions.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        rouge.read_predictions(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_predictions_name_the_file(tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot read predictions from") as caught:
            rouge.read_predictions(path)
        assert str(path) in str(caught.value)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        rouge.write_rouge(path, {"scores": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        rouge.write_predictions(path, [{"rouge1": 1.0}, {"rouge1": float("inf")}])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_rouge_json_is_the_summary(tmp_path):
    summary = score_pairs(["a b"], ["a c"]).summary()
    rouge.write_rouge(tmp_path / "rouge.json", summary)
    assert json.loads((tmp_path / "rouge.json").read_text()) == summary


def test_table_is_aligned_and_in_points():
    rows = {
        "model": summary_of(np.array([[0.4307, 0.197, 0.34789, 1.0]])),
        "lead baseline": summary_of(np.array([[0.316, 0.0, 0.278, 0.3]])),
    }
    assert rouge.format_table(rows).split("\n") == [
        "               ROUGE-1  ROUGE-2  ROUGE-L  ROUGE-Lsum",
        "model             43.1     19.7     34.8       100.0",
        "lead baseline     31.6      0.0     27.8        30.0",
    ]


def test_importing_needs_neither_torch_nor_rouge_score():
    code = (
        "import sys, t5_fsdp.evaluation.rouge; "
        "print([m for m in ('torch', 'rouge_score', 'nltk', 'sentencex') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert printed.strip() == "[]"
