"""The files of an evaluation are whole, and what is wrong in one is named with its line."""

from __future__ import annotations

import json
import os

import pytest

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation import predictions
from t5_fsdp.evaluation.rouge import score_pairs

GOOD_LINE = b'{"reference": "a", "prediction": "b"}\n'


def test_predictions_come_back_as_written(tmp_path):
    path = tmp_path / "new" / "predictions.jsonl"
    rows = [
        {"id": 1, "reference": "Äpfel\u2028\nwaschen", "prediction": "", "rouge1": 0.25},
        {"id": "b", "reference": "\ud800 alone", "prediction": "完全", "document": "x"},
        {"id": "c", "references": ["a", "b"], "prediction": "a"},
    ]
    predictions.write_predictions(path, rows)
    assert predictions.read_predictions(path) == rows
    assert "Äpfel" in path.read_text(encoding="utf-8")
    assert os.listdir(path.parent) == ["predictions.jsonl"]


def test_blank_lines_marks_and_nan_are_read(tmp_path):
    path = tmp_path / "predictions.jsonl"
    line = b'{"reference": "a", "prediction": "b", "score": NaN}'
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n  \r\n" + line)
    row = {"reference": "a", "prediction": "b", "score": None}
    assert predictions.read_predictions(path) == [row, row]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD_LINE + b'{"reference": "a", "pred', "line 2 is not JSON .*each line must be"),
        (GOOD_LINE + b"\n" + b'{"reference": "a"}', "line 3 has no 'prediction'.*fields: refer"),
        (b'{"prediction": "a", "summary": "b"}', "line 1 has no 'reference'.*prediction, summary"),
        (b'{"reference": "a", "prediction": null}', "line 1: 'prediction' is null, not a string"),
        (b'{"reference": ["a"], "prediction": ""}', "line 1: 'reference' is list, not a string"),
        (b'["a", "b"]', "line 1 is a JSON list"),
        (b'{"references": [], "prediction": "a"}', "line 1: 'references' is an empty list"),
        (b'{"references": "b", "prediction": "a"}', "line 1: 'references' is str; give a list"),
        (b'{"references": ["b", 3], "prediction": "a"}', "line 1: 'references' holds int"),
        (b'{"references": ["b"], "reference": "b", "prediction": "a"}', "line 1 has .*give one"),
        (b'{"references": ["b"]}', "line 1 has no 'prediction'"),
        (GOOD_LINE[:-2] + b', "document": 3}', "line 1: 'document' is int, not a string"),
        (GOOD_LINE[:-2] + b', "id": true}', "line 1: 'id' is bool; give a string"),
        (GOOD_LINE[:-2] + b', "id": 1.5}', "line 1: 'id' is float; give a string"),
        ((GOOD_LINE[:-2] + b', "id": 1}\n') * 2, "line 2: id 1 stands in line 1 too"),
        (GOOD_LINE + GOOD_LINE[:-2] + b', "id": 1}', "line 2 has an id, unlike those before"),
        (GOOD_LINE[:-2] + b', "id": 1}\n' + GOOD_LINE, "line 2 has no id, unlike those before"),
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
        predictions.read_predictions(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_predictions_name_the_file(tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot read predictions from") as caught:
            predictions.read_predictions(path)
        assert str(path) in str(caught.value)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        predictions.write_rouge(path, {"scores": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        predictions.write_predictions(path, [{"rouge1": 1.0}, {"rouge1": float("inf")}])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_rouge_json_is_the_summary(tmp_path):
    summary = score_pairs(["a b"], ["a c"]).summary()
    predictions.write_rouge(tmp_path / "rouge.json", summary)
    assert json.loads((tmp_path / "rouge.json").read_text()) == summary


def test_an_id_or_document_of_null_is_none(tmp_path):
    path = tmp_path / "predictions.jsonl"
    path.write_bytes((GOOD_LINE[:-2] + b', "id": null, "document": null}\n') * 2)
    assert predictions.read_predictions(path) == [{"reference": "a", "prediction": "b"}] * 2


def test_stored_rows_are_those_of_the_same_settings_and_texts(tmp_path):
    rows = [{"id": n, "document": f"d{n}", "reference": "r", "prediction": f"p{n}"} for n in (1, 2)]
    predictions.write_predictions(tmp_path / "predictions.jsonl", rows)
    predictions.write_rouge(tmp_path / "rouge.json", {"settings": {"num_beams": 4, "other": 1}})
    examples = [{"id": "x", "document": "d2", "reference": "r"}]
    found = predictions.stored_rows(tmp_path, {"num_beams": 4}, examples)
    assert found == rows[1:]
    assert predictions.stored_rows(tmp_path, {"num_beams": 2}, examples) is None
    assert predictions.stored_rows(tmp_path, {"new": None}, examples) is None
    for other in ({"document": "d3", "reference": "r"}, {"document": "d2", "reference": "s"}):
        assert predictions.stored_rows(tmp_path, {"num_beams": 4}, [other]) is None
    (tmp_path / "predictions.jsonl").write_text("{}")
    assert predictions.stored_rows(tmp_path, {"num_beams": 4}, examples) is None
    assert predictions.stored_rows(tmp_path / "none", {}, examples) is None
