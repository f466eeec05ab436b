"""Training from a stream: the same batches on any number of ranks, across epochs and a resume."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5_fsdp.config import DataConfig
from t5_fsdp.data.streaming import read_pairs, shuffled, stream_digest
from t5_fsdp.errors import UserError
from tests.conftest import make_pairs, read_metrics, tiny_options, write_jsonl

STREAM = {"data.streaming": "true", "data.shuffle_buffer": 20, "train.max_steps": 9}


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir, "train")]


def test_each_pair_once_and_only_within_the_buffer() -> None:
    pairs = [(str(i), "") for i in range(500)]
    order = [int(d) for d, _ in shuffled(iter(pairs), 50, np.random.default_rng(1))]
    assert sorted(order) == list(range(500)) and order != sorted(order)
    assert all(value <= place + 50 for place, value in enumerate(order))


def test_losses_do_not_depend_on_the_ranks_nor_on_micro_batches(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    found = []
    for world_size, limit in ((1, 5000), (2, 200), (4, 5000)):
        run_dir = tmp_path / f"run-{world_size}"
        options = {**STREAM, "train.micro_batch_tokens": limit}
        code, out, err = pools(world_size).command(
            "train", tiny_options(corpus, run_dir, **options)
        )
        assert code == 0, err
        assert "a stream of training examples" in out
        found.append(losses(run_dir))
        rows = read_metrics(run_dir, "train")
        # 60 examples in batches of 16: the fourth step is the small last batch of an epoch.
        assert [row["examples_seen"] for row in rows[:5]] == [16, 32, 48, 60, 76]
        assert [row["epoch"] for row in rows[:5]] == [0, 0, 0, 0, 1]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_an_epoch_has_the_target_tokens_of_all_examples(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    tokens = []
    for name, options in (("prepared", {"train.max_steps": 4}), ("stream", STREAM)):
        run_dir = tmp_path / name
        code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
        assert code == 0, err
        rows = read_metrics(run_dir, "train")[:4]
        tokens.append(
            [sum(row[side] for row in rows) for side in ("source_tokens", "target_tokens")]
        )
    assert tokens[0] == tokens[1]


def test_a_resume_goes_on_in_the_stream(pools: Any, corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {**STREAM, "checkpoint.every_steps": 6}
    assert pools(2).command("train", tiny_options(corpus, whole, **options))[0] == 0
    resume = {"checkpoint.resume": whole / "checkpoints/step-00000006"}
    code, _, err = pools(2).command("train", tiny_options(corpus, parts, **options, **resume))
    assert code == 0, err
    assert losses(parts) == losses(whole)[6:]


def test_every_format_streams(corpus: Path, tmp_path: Path) -> None:
    import datasets

    rows = make_pairs(30, 3)
    data = DataConfig(source="files", train_files=[str(write_jsonl(tmp_path / "a.jsonl", rows))])
    expected = [(row["document"], row["summary"]) for row in rows]
    assert list(read_pairs(data)) == expected
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    saved = DataConfig(source="saved", dataset=str(tmp_path / "saved"))
    assert list(read_pairs(saved)) == expected
    data.max_train_examples = 7
    assert list(read_pairs(data)) == expected[:7]
    digests = {stream_digest(data)}
    data.prefix = "other: "
    digests.add(stream_digest(data))
    write_jsonl(tmp_path / "a.jsonl", rows[1:])
    digests.add(stream_digest(data))
    assert len(digests) == 3


def test_damage_in_a_stream_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"document": "a", "summary": "b"}\n{broken\n{"document":"c","summary":"d"}\n')
    data = DataConfig(source="files", train_files=[str(path)])
    with pytest.raises(UserError, match=r"a\.jsonl, row 2: not valid JSON"):
        list(read_pairs(data))
    data.on_bad_row = "tolerant"
    assert [document for document, _ in read_pairs(data)] == ["a", "c"]
    data.summary_column = "abstract"
    with pytest.raises(UserError, match="no column 'abstract'"):
        list(read_pairs(data))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train.max_steps": "null"}, "train.max_steps"),
        ({"model.tokenizer": "train"}, "model.tokenizer: train"),
        ({"data.source": "sample"}, "data.streaming"),
        ({"data.mixture": '[{"source": "sample"}]'}, "data.mixture"),
        ({"train.micro_batch_tokens": 50}, "micro_batch_tokens"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(
    pools: Any, corpus: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    argv = tiny_options(corpus, tmp_path / "run", **{**STREAM, **options})
    code, _, err = pools(1).command("train", argv)
    assert code == 2 and words in err and err.startswith("error: ")


def test_the_buffer_is_shuffled_anew_each_epoch() -> None:
    from t5_fsdp.seeding import numpy_generator

    pairs = [(str(i), "") for i in range(40)]
    orders = [
        [d for d, _ in itertools.islice(shuffled(iter(pairs), 10, numpy_generator(1, "s", e)), 40)]
        for e in range(2)
    ]
    assert orders[0] != orders[1]
    assert collections.Counter(orders[0]) == collections.Counter(orders[1])
