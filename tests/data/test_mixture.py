"""Several sources at once: what each epoch draws, and what each source brings along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5_fsdp.config import Config, DataConfig, ModelConfig
from t5_fsdp.config_problems import value_problems
from t5_fsdp.data.epoch_plan import MixturePart, draw_mixture
from t5_fsdp.data.preparation import prepare
from t5_fsdp.data.source_checks import source_problems

SIZES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=5)


def parts_of(sizes: list[tuple[int, float]]) -> list[MixturePart]:
    parts, start = [], 0
    for size, weight in sizes:
        parts.append(MixturePart(start, start + size, weight))
        start += size
    return parts


@given(SIZES, st.integers(0, 5))
def test_an_epoch_has_the_size_of_all_and_each_source_its_share(
    sizes: list[tuple[int, float]], epoch: int
) -> None:
    parts = parts_of(sizes)
    total = parts[-1].stop
    drawn = draw_mixture(parts, seed=1, epoch=epoch)
    assert len(drawn) == total
    weight_sum = sum(weight for _, weight in sizes)
    for part in parts:
        count = int(((drawn >= part.start) & (drawn < part.stop)).sum())
        assert abs(count - total * part.weight / weight_sum) < 1


@given(SIZES, st.integers(1, 6))
def test_no_example_is_ahead_of_another_by_more_than_one_turn(
    sizes: list[tuple[int, float]], epochs: int
) -> None:
    parts = parts_of(sizes)
    drawn = np.concatenate([draw_mixture(parts, seed=1, epoch=e) for e in range(epochs)])
    times = np.bincount(drawn, minlength=parts[-1].stop)
    for part in parts:
        assert np.ptp(times[part.start : part.stop]) <= 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    parts = parts_of([(30, 1.0), (10, 3.0)])
    draws = [
        draw_mixture(parts, seed=seed, epoch=epoch).tolist()
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert draws[0] == draws[1] and draws[0] not in (draws[2], draws[3])


@pytest.fixture
def mixture(tmp_path: Path) -> DataConfig:
    entries = []
    for name, count in (("news", 4), ("chats", 2)):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"text": f"{name} document {i}", "short": f"{name} {i}"} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        entries.append(
            {
                "name": name,
                "source": "files",
                "train_files": str(path),
                "document_column": "text",
                "summary_column": "short",
                "prefix": f"{name}: ",
            }
        )
    return DataConfig(mixture=entries)


def test_sources_keep_their_prefix_and_place(
    mixture: DataConfig, corpus: Path, tmp_path: Path
) -> None:
    model = ModelConfig(tokenizer=str(corpus / "tokenizer"))
    said: list[str] = []
    prepared = prepare(mixture, model, tmp_path / "cache", said.append)
    assert [(part.name, part.start, part.stop) for part in prepared.parts] == [
        ("news", 0, 4),
        ("chats", 4, 6),
    ]
    from t5_fsdp.data.tokenization import load_tokenizer

    tokenizer = load_tokenizer(str(prepared.tokenizer_directory))
    split = prepared.split("train")
    assert split is not None
    for index, text in ((0, "news: news document 0"), (5, "chats: chats document 1")):
        assert split.source(index).tolist() == tokenizer(text)["input_ids"]
    # Weights decide about epochs, not about what is prepared.
    for entry in mixture.mixture:
        entry["weight"] = 2.0
    again = prepare(mixture, model, tmp_path / "cache", said.append)
    assert again.reused
    mixture.mixture[0]["prefix"] = "other: "
    assert not prepare(mixture, model, tmp_path / "cache", said.append).reused


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"source": "files"}], ["source 0", "data.train_files"]),
        ([{"source": "sample", "weight": 0}], ["source 0", "weight", "above 0"]),
        ([{"source": "sample", "weight": 1}, {"source": "sample"}], ["every source", "weight"]),
        ([{"sauce": "files"}], ["sauce", "source"]),
        ([{"source": "filez"}], ["'filez'", "wikihow", "files"]),
        ([{"source": "sample", "prefix": 3}], ["prefix", "a text"]),
        ([{"source": "files", "train_files": 3}], ["train_files", "a path"]),
        ([{"source": "sample", "max_train_examples": 0}], ["max_train_examples", "above 0"]),
        ([{"source": "hub"}], ["data.dataset"]),
    ],
)
def test_wrong_entries_are_named(entries: list[dict[str, Any]], words: list[str]) -> None:
    config = Config(data=DataConfig(mixture=entries), model=ModelConfig(name="x"))
    [problem] = [text for text in value_problems(config) if "mixture" in text]
    assert all(word in problem for word in words), problem


def test_missing_files_name_their_source() -> None:
    data = DataConfig(mixture=[{"name": "mine", "source": "files", "train_files": "/no/such.csv"}])
    [problem] = source_problems(data)
    assert "data.mixture, mine" in problem and "/no/such.csv" in problem


def test_a_source_without_usable_rows_is_named(mixture: DataConfig, tmp_path: Path) -> None:
    from t5_fsdp.data.sources import load_splits
    from t5_fsdp.errors import UserError

    path = Path(mixture.mixture[1]["train_files"])
    path.write_text('{"text": "a", "short": ""}\n')
    with pytest.raises(UserError, match=r"data\.mixture, chats: no usable rows"):
        load_splits(mixture, tmp_path / "work")


def test_training_on_a_mixture_draws_by_weight(pools: Any, corpus: Path, tmp_path: Path) -> None:
    from tests.conftest import make_pairs, read_metrics, tiny_options, write_jsonl

    rare = write_jsonl(tmp_path / "rare.jsonl", make_pairs(4, 77))
    base = {"source": "files", "train_files": str(corpus / "train.jsonl")}
    losses = {}
    for weight in (0.01, 30.0):
        entries = [{**base, "weight": 1.0},
                   {**base, "train_files": str(rare), "weight": weight}]  # fmt: skip
        run_dir = tmp_path / f"run-{weight}"
        options = {"data.mixture": json.dumps(entries), "train.max_steps": 12}
        code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
        assert code == 0, err
        rows = read_metrics(run_dir, "train")
        assert rows[3]["examples_seen"] == 64  # four steps are one epoch of 64
        losses[weight] = rows[-1]["loss"]
    # Four examples over and over are learned by heart.
    assert losses[30.0] < losses[0.01] - 0.1
