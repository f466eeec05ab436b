"""What a user gets wrong: one `error:` line in all, code 2, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_options, write_jsonl


def refused(
    pools: Any, command: str, argv: list[Any], *parts: str, world_size: int = 1, lines: int = 1
) -> None:
    code, _, err = pools(world_size).command(command, [str(word) for word in argv])
    assert code == 2, err
    assert len(err.strip().splitlines()) == lines, err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing file": ({"data.train_files": "/no/such.jsonl"}, ("/no/such.jsonl",)),
    "absent column": ({"data.summary_column": "abstract"}, ("abstract", "summary", "train.jsonl")),
    "unknown option": ({"train.epoch": 3}, ("train.epoch", "train.epochs")),
    "wrong type": ({"train.epochs": "three"}, ("train.epochs", "three")),
    "units of a whole copy": (
        {"parallel.engine": "ddp", "parallel.wrap": "size"},
        ("parallel.wrap", "fsdp1 or fsdp2", "block"),
    ),
    "a size without wrapping by it": (
        {"parallel.wrap_min_parameters": 5000},
        ("parallel.wrap_min_parameters", "wrap: size", "1000000"),
    ),
    "compiled units of any size": (
        {"parallel.wrap": "size", "parallel.compile": "true"},
        ("parallel.compile", "wrap: block"),
    ),
    "kept at steps without a checkpoint": (
        {"checkpoint.keep_every": 3, "checkpoint.every_steps": 2},
        ("checkpoint.keep_every 3", "every_steps 2", "multiple"),
    ),
    "kept without any checkpoint": (
        {"checkpoint.keep_every": 3, "checkpoint.every_steps": "null"},
        ("checkpoint.keep_every", "checkpoint.every_steps", "null"),
    ),
    "prefetch that FSDP1 does not know": (
        {"parallel.engine": "fsdp1", "parallel.forward_prefetch": 5},
        ("parallel.forward_prefetch is 5", "0 and 1"),
    ),
    "example above the limit": ({"train.micro_batch_tokens": 20}, ("micro_batch_tokens", "20")),
    "Hub name without network": (
        {"model.name": "google-t5/t5-small", "model.init": "pretrained", "model.config": "{}"},
        ("google-t5/t5-small", "network"),
    ),
    "sharding that does not exist": (
        {"parallel.engine": "ddp", "parallel.sharding": "full_shard"},
        ("parallel.sharding", "ddp", "fsdp2"),
    ),
    "sharding that the ranks do not suit": (
        {"parallel.sharding": "hybrid_shard", "parallel.num_replicas": 2},
        ("parallel.num_replicas 2", "ranks"),
    ),
    "adafactor on flat pieces": (
        {"optimizer.name": "adafactor", "parallel.engine": "fsdp1"},
        ("optimizer.name: adafactor", "fsdp1", "no_shard"),
    ),
    "adafactor with other moments": (
        {"optimizer.name": "adafactor", "optimizer.moments_dtype": "bf16"},
        ("optimizer.moments_dtype", "adamw"),
    ),
    "model option": ({"model.config": '{"d_modl": 3}'}, ("d_modl", "d_model")),
    "resume from nowhere": ({"checkpoint.resume": "/no/such"}, ("checkpoint.resume", "/no/such")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_train_refuses(
    pools: Any, corpus: Path, tmp_path: Path, name: str, world_size: int
) -> None:
    overrides, parts = CASES[name]
    options = tiny_options(corpus, tmp_path / "run", **overrides)
    refused(pools, "train", options, *parts, world_size=world_size)
    assert not (tmp_path / "run").exists()


MODEL_VALUES: dict[str, Any] = {
    "dropout_rate": 2,
    "feed_forward_proj": "foo",
    "dense_act_fn": "foo",
    "relative_attention_num_buckets": 0,
    "decoder_start_token_id": 99999,
    "pad_token_id": -1,
    "return_dict": False,
    "output_attentions": True,
    "tie_word_embeddings": 5,
    "num_layers": "two",
    "num_heads": 0,
    "vocab_size": 5,
}


@pytest.mark.parametrize("name", MODEL_VALUES)
def test_model_values_that_cannot_work(pools: Any, corpus: Path, tmp_path: Path, name: str) -> None:
    base = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = json.dumps(base | {name: MODEL_VALUES[name]})
    options = tiny_options(corpus, tmp_path / "run", **{"model.config": config})
    refused(pools, "train", options, "model")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_wrong_type_in_the_model_is_refused_before_data_are_read(
    pools: Any, corpus: Path, tmp_path: Path, check: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON")
    overrides = {"data.train_files": tmp_path / "bad.jsonl", "data.cache_dir": tmp_path / "cache"}
    options = tiny_options(corpus, tmp_path / "run", **overrides, check=check)
    refused(pools, "train", options, "bad.jsonl")
    words = "model.config.d_kv is 'abc'; it must be a whole number"
    refused(pools, "train", [*options, "--model.config.d_kv", "abc"], words)
    (tmp_path / "named").mkdir()
    (tmp_path / "named/config.json").write_text('{"model_type": "mt5", "d_kv": 8}')
    for config, problem in (
        ('{"d_kv": "abc"}', words),
        ('{"num_heads": 0}', "model.config.num_heads is 0; it must be 1 or more"),
        ('{"d_modl": 8}', "model.config.d_modl is no option of a mt5 model; did you mean d_model"),
    ):
        chosen = ["--model.name", str(tmp_path / "named"), "--model.config", config]
        refused(pools, "train", [*options, *chosen], problem)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model.config", "[]"),
        ("model.config", "null"),
        ("model.config", ""),
        ("model.config", "{1: 2}"),
        ("model.name", ""),
        ("data.train_files", "~nobody-of-this-name/x.csv"),
        ("data.train_files", "x" * 300),
        ("run_dir", "x" * 300),
        ("data.prefix", "\ud800"),
        ("train.epochs", "1e308"),
        ("evaluation.max_new_tokens", 10**20),
        ("data.mixture", '[{"weight": Infinity}, {"weight": 1}]'),
        ("data.mixture", "[{1: 2}]"),
        ("data.mixture", "[3]"),
    ],
)
def test_odd_values(pools: Any, corpus: Path, tmp_path: Path, option: str, value: Any) -> None:
    options = [*tiny_options(corpus, tmp_path / "run"), f"--{option}", str(value)]
    code, _, err = pools(1).command("train", options)
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err, err


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "status.json", "config.yaml"])
def test_a_folder_in_the_place_of_a_file_of_the_run(
    pools: Any, corpus: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    refused(pools, "train", tiny_options(corpus, tmp_path / "run"), name)


def test_a_run_folder_that_is_a_file(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = tiny_options(corpus, tmp_path / "run")
    (tmp_path / "run").write_text("mine")
    refused(pools, "train", options, "is no folder")
    assert (tmp_path / "run").read_text() == "mine"


def test_an_output_that_cannot_be_written(pools: Any, tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    path.write_text('{"reference": "a b", "prediction": "a b"}\n')
    argv = ["--predictions", path, "--output_dir", path]
    refused(pools, "eval_rouge", argv, str(path), "give another path")


def test_a_section_that_is_none_is_not_replaced_by_a_flag(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("train: 3\n")
    options = [*tiny_options(corpus, tmp_path / "run"), "--config", str(wrong)]
    refused(pools, "train", options, "section train is 3", str(wrong))


def test_all_problems_come_at_once(pools: Any, corpus: Path, tmp_path: Path) -> None:
    wrong = {
        "train.epochs": "three",
        "optimizer.lr": -1,
        "train.epoch": 3,
        "data.test_files": "/no/such.jsonl",
    }
    options = tiny_options(corpus, tmp_path / "run", **wrong)
    refused(pools, "train", options, "train.epochs", "optimizer.lr", "--train.epoch;", lines=3)
    del wrong["train.epoch"]
    options = tiny_options(corpus, tmp_path / "run", **wrong)
    refused(pools, "train", options, "train.epochs", "optimizer.lr", "/no/such.jsonl", lines=3)


def test_empty_split(pools: Any, corpus: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "empty.jsonl", [{"document": "text", "summary": ""}])
    options = tiny_options(
        corpus, tmp_path / "run", **{"data.train_files": tmp_path / "empty.jsonl"}
    )
    refused(pools, "train", options, "the train split has no usable rows", "empty summary")


@pytest.mark.parametrize("command", ["eval_rouge", "summarize", "export_hf"])
def test_checkpoint_without_complete(pools: Any, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 4}))
    extra = ["--output", tmp_path / "out"] if command == "export_hf" else []
    refused(pools, command, ["--checkpoint", folder, *extra], "COMPLETE", "a checkpoint that has")
    other = folder.with_name("step-00000002")
    other.mkdir()
    (other / "COMPLETE").touch()
    refused(pools, command, ["--checkpoint", folder, *extra], str(folder), f"give {other},")
    folder.rename(tmp_path / "mine")
    argv = ["--checkpoint", tmp_path / "mine", *extra]
    refused(
        pools,
        command,
        argv,
        f"{tmp_path / 'mine'} holds no complete checkpoint; give a checkpoint's",
    )


def test_resume_never_with_checkpoints(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = tiny_options(corpus, tmp_path / "run", **{"train.max_steps": 1})
    assert pools(1).command("train", options)[0] == 0
    refused(pools, "train", [*options, "--checkpoint.resume", "never"], "resume: never")


def test_other_data_and_other_shape_cannot_resume(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = tiny_options(corpus, tmp_path / "run", **{"train.max_steps": 1})
    assert pools(1).command("train", options)[0] == 0
    changed = [*options, "--data.prefix", "sum: ", "--train.max_steps", "2"]
    why = "data.prefix is 'summarize: ' there and 'sum: ' now"
    refused(pools, "train", changed, "other training data", why, lines=2)
    refused(
        pools,
        "train",
        [*options, "--model.config", '{"d_model": 64}'],
        "holds another model",
        "d_model is 32 there and 64 now",
        lines=7,
    )
    code, out, _ = pools(1).command("train", [*changed, "--checkpoint.accept_changed", "[data]"])
    assert code == 0 and "(step 1)" in out and "checkpoint.accept_changed allows" in out


def test_rows_that_are_left_out_of_an_evaluation_are_told(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    rows = [{"document": "rinse rice.", "summary": "rice."}, {"document": " ", "summary": "rice."}]
    test = write_jsonl(tmp_path / "test.jsonl", rows)
    options = {"train.max_steps": 1, "data.test_files": test}
    assert pools(1).command("train", tiny_options(corpus, tmp_path / "run", **options))[0] == 0
    code, out, err = pools(1).command("eval_rouge", ["--checkpoint", tmp_path / "run"])
    assert code == 0, err
    [line] = [line for line in out.splitlines() if "are left out" in line]
    assert ": 1 " in line
