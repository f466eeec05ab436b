"""What the audit counts, against counting by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.data.preparation import prepare
from t5_fsdp.data.tokenization import load_tokenizer
from tests.conftest import tiny_options, write_jsonl

TRAIN = [
    {"document": "rinse rice.", "summary": "rice."},
    {"document": "Rinse\n rice. ", "summary": "again."},  # the same but for case and white space
    {"document": "blue door " * 20, "summary": "door " * 9},
    {"document": "sun {☀} ☀", "summary": "sun"},
    {"document": "", "summary": "nothing"},
]
TEST = [{"document": "RINSE RICE.", "summary": "rice"}, {"document": "lamp", "summary": "lamp"}]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return DataConfig(
        source="files",
        train_files=[str(write_jsonl(tmp_path / "train.jsonl", TRAIN))],
        test_files=[str(write_jsonl(tmp_path / "test.jsonl", TEST))],
        max_source_tokens=30,
        max_target_tokens=8,
    )


def test_figures_are_those_of_counting(data: DataConfig, corpus: Path, tmp_path: Path) -> None:
    model = ModelConfig(tokenizer=str(corpus / "tokenizer"))
    audit = prepare(data, model, tmp_path / "cache", lambda _: None).audit
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    ids = {
        "source": [tokenizer("summarize: " + row["document"])["input_ids"] for row in TRAIN[:4]],
        "target": [tokenizer(row["summary"])["input_ids"] for row in TRAIN[:4]],
    }
    train = audit["splits"]["train"]
    for side, limit in (("source", 30), ("target", 8)):
        lengths = [len(row) for row in ids[side]]
        assert train[f"{side}_tokens"] == {
            "mean": np.mean(lengths),
            "median": np.median(lengths),
            "p90": np.percentile(lengths, 90),
            "max": max(lengths),
        }
        assert train[f"{side}_truncated"] == np.mean([length > limit for length in lengths])
    kept = [min(len(row), limit) for side, limit in (("source", 30), ("target", 8))
            for row in ids[side]]  # fmt: skip
    unknown = sum(row.count(tokenizer.unk_token_id) for side in ids.values() for row in side)
    assert train["unknown_tokens"] == unknown / sum(kept) > 0
    assert train["unknown_characters"]["☀"] == 2 and train["unknown_characters"]["{"] == 1
    assert train["duplicates"] == 1 and audit["splits"]["test"]["duplicates"] == 0
    assert audit["duplicates_across"] == {"test in train": 1}
    assert train["dropped"] == {"empty document": 1}


def test_warnings_name_the_option_to_change(data: DataConfig, corpus: Path, tmp_path: Path) -> None:
    data.max_source_tokens = 12
    model = ModelConfig(tokenizer=str(corpus / "tokenizer"))
    audit = prepare(data, model, tmp_path / "cache", lambda _: None).audit
    text = "\n".join(audit["warnings"])
    for words in ("data.max_source_tokens", "model.tokenizer", "☀", "test in train"):
        assert words in text
    write_jsonl(Path(data.train_files[0]), TRAIN[:1])
    data.max_source_tokens, data.test_files = 512, []
    clean = prepare(data, model, tmp_path / "cache", lambda _: None).audit
    assert clean["warnings"] == []


def test_prepare_data_prints_and_stores_it(
    pools: Any, corpus: Path, data: DataConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {
        "data.train_files": data.train_files[0],
        "data.validation_files": "[]",
        "data.test_files": data.test_files[0],
    }
    argv = [*tiny_options(corpus, run_dir, **options), "--list_dropped", "true"]
    code, out, err = pools(2).command("prepare_data", argv)
    assert code == 0, err
    for words in ("train, source", "left out: 1 row, empty document", "documents of test in train",
                  "characters unknown", "warning: ", "lead baseline ROUGE"):  # fmt: skip
        assert words in out
    audit = json.loads((run_dir / "data_audit.json").read_text())
    assert audit["splits"]["train"]["kept"] == 4
    # "RINSE" against "rice", "lamp" against "lamp".
    assert audit["lead_baseline"]["test"]["rouge1"] == 0.5
    [dropped] = (run_dir / "dropped_rows.jsonl").read_text().splitlines()
    assert json.loads(dropped)["row"] == 5
