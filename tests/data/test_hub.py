"""Datasets of the Hub and of save_to_disk; the Hub itself is stood in for by local folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from t5_fsdp.config import Config, DataConfig, normalize
from t5_fsdp.data import hub
from t5_fsdp.data.fingerprint import source_fingerprint
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.data.sources import load_splits
from t5_fsdp.errors import UserError

ROWS = [{"article": f"Article {i}.", "highlights": f"Point {i}."} for i in range(5)]
COLUMNS = {"document_column": "article", "summary_column": "highlights"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    whole = datasets.Dataset.from_list(ROWS)
    splits = {"train": whole.select(range(3)), "val": whole.select([3]), "test": whole.select([4])}
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data files, which load_dataset takes like a repository of the Hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    for split, rows in (("train", ROWS[:3]), ("validation", ROWS[3:4]), ("test", ROWS[4:])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def documents(loaded: Any) -> dict[str, list[str]]:
    return {split: rows["document"][:] for split, rows in loaded.splits.items()}


EXPECTED = {
    "train": ["Article 0.", "Article 1.", "Article 2."],
    "validation": ["Article 3."],
    "test": ["Article 4."],
}


def test_a_saved_dataset_with_its_own_split_names(saved: Path, tmp_path: Path) -> None:
    data = DataConfig(source="saved", dataset=str(saved), validation_split="val", **COLUMNS)
    assert source_problems(data) == []
    assert documents(load_splits(data, tmp_path / "work")) == EXPECTED
    data.validation_split = "dev"
    loaded = load_splits(data, tmp_path / "work")
    assert documents(loaded) == {k: v for k, v in EXPECTED.items() if k != "validation"}
    assert "has no split 'dev'" in loaded.audit["notes"][0]
    data.train_split = "training"
    with pytest.raises(UserError, match=r"no split 'training' \(it has: train, val, test\)"):
        load_splits(data, tmp_path / "work")


def test_one_saved_split_is_the_training_split(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    data = DataConfig(source="saved", dataset=str(tmp_path / "one"), **COLUMNS)
    assert documents(load_splits(data, tmp_path / "work")) == {
        "train": [row["article"] for row in ROWS]
    }


def test_what_is_no_saved_dataset_is_said(tmp_path: Path) -> None:
    assert "needs data.dataset" in source_problems(DataConfig(source="saved"))[0]
    data = DataConfig(source="saved", dataset=str(tmp_path))
    assert "no folder of save_to_disk" in source_problems(data)[0]
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match="is not to be had"):
        load_splits(data, tmp_path / "work")


def test_the_fingerprint_of_a_saved_dataset_is_of_its_content(saved: Path, tmp_path: Path) -> None:
    data = DataConfig(source="saved", dataset=str(saved), validation_split="val", **COLUMNS)
    first = source_fingerprint(data)
    copy = tmp_path / "copy"
    datasets.load_from_disk(str(saved)).save_to_disk(copy)
    data.dataset = str(copy)
    assert source_fingerprint(data) == first
    other = datasets.Dataset.from_list([*ROWS[:2], {"article": "x", "highlights": "y"}])
    other.save_to_disk(tmp_path / "other")
    changed = DataConfig(source="saved", dataset=str(tmp_path / "other"), **COLUMNS)
    assert source_fingerprint(changed) != first


def test_a_repository_is_read_whole_or_as_a_stream(repository: Path, tmp_path: Path) -> None:
    data = DataConfig(source="hub", dataset=str(repository), **COLUMNS)
    assert documents(load_splits(data, tmp_path / "work")) == EXPECTED
    assert [row["article"] for _, row in hub.stream(data)] == EXPECTED["train"]


def test_a_dataset_that_is_not_to_be_had_is_one_line(tmp_path: Path) -> None:
    data = DataConfig(source="hub", dataset="nobody/nothing")
    with pytest.raises(UserError, match=r"data\.dataset nobody/nothing is not to be had") as error:
        load_splits(data, tmp_path / "work")
    assert len(error.value.problems) == 1
    with pytest.raises(UserError, match="is not to be had"):
        next(hub.stream(data))


@pytest.mark.parametrize(
    ("name", "dataset", "columns"),
    [
        ("cnn_dailymail", "abisee/cnn_dailymail", ("article", "highlights")),
        ("xsum", "EdinburghNLP/xsum", ("document", "summary")),
        ("samsum", "knkarthick/samsum", ("dialogue", "summary")),
        ("me/mine", "me/mine", ("document", "summary")),
    ],
)
def test_naming_a_dataset_is_enough(name: str, dataset: str, columns: tuple[str, str]) -> None:
    data = normalize(Config(data=DataConfig(dataset=name))).data
    assert (data.source, data.dataset) == ("hub", dataset)
    assert (data.document_column, data.summary_column) == columns
    assert data.subset == ("3.0.0" if name == "cnn_dailymail" else None)


def test_a_preset_yields_to_what_the_user_says_and_wikihow_is_its_own_source() -> None:
    own = DataConfig(dataset="cnn_dailymail", subset="2.0.0", document_column="text")
    data = normalize(Config(data=own)).data
    assert (data.subset, data.document_column, data.summary_column) == (
        "2.0.0",
        "text",
        "highlights",
    )
    data = normalize(Config(data=DataConfig(dataset="wikihow"))).data
    assert (data.source, data.dataset) == ("wikihow", None)


def test_streaming_does_not_load_the_training_split(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[Any, bool]] = []
    load_dataset = datasets.load_dataset

    def watched(*args: Any, split: Any = None, streaming: bool = False) -> Any:
        loaded.append((split, streaming))
        return load_dataset(*args, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", watched)
    data = DataConfig(source="hub", dataset=str(repository), streaming=True, **COLUMNS)
    held_out = ("validation", "test")
    source_fingerprint(data, held_out)
    found = documents(load_splits(data, tmp_path / "work", held_out))
    assert found == {k: v for k, v in EXPECTED.items() if k != "train"}
    assert set(loaded) == {("validation", True), ("test", True)}


@pytest.mark.parametrize("layout", ["numpy", "arrow", "pandas"])
def test_a_saved_dataset_with_a_format_gives_plain_rows(tmp_path: Path, layout: str) -> None:
    rows = [{"document": "d", "summary": ["x", "y"]}]
    datasets.Dataset.from_list(rows).with_format(layout).save_to_disk(tmp_path / "one")
    data = DataConfig(source="saved", dataset=str(tmp_path / "one"))
    assert load_splits(data, tmp_path / "work").splits["train"]["summary"][:] == ["x\ny"]
