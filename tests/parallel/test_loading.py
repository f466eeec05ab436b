"""A model's weights on their way from one rank's files into all ranks' shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from t5_fsdp.config import ParallelConfig
from tests.conftest import tiny_options
from tests.measure_loading import KINDS, measure, write_model
from tests.parallel.test_engines import spec
from tests.workers import joined_world, run_command

SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


class Failing(Mapping[str, torch.Tensor]):
    """Weights of which the last but one can't be read."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        from t5_fsdp.errors import UserError

        if name == list(self._weights)[-2]:
            raise UserError(f"{name} can't be read")
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def load_and_fail(engine: str, kind: str) -> tuple[str, list[float]]:
    """On a rank of the pool: how loading failed, and a sum over the ranks afterwards."""
    from t5_fsdp.model.build import build_on_meta, draw_weights
    from t5_fsdp.parallel.engine import parallelize

    described = spec(False)
    with joined_world() as world:
        weights: Mapping[str, torch.Tensor] = {}
        if world.is_main:
            drawn = draw_weights(described, seed=1)
            if kind == "unreadable":
                weights = Failing(drawn)
            elif kind == "shape":
                weights = drawn | {"shared.weight": torch.zeros(3, 24)}
            else:
                weights = {name: tensor for name, tensor in drawn.items() if "norm" not in name}
        options = ParallelConfig(engine=engine)  # type: ignore[arg-type]
        loaded = parallelize(build_on_meta(described), options, world)
        try:
            loaded.load_full(weights)
            said = "loaded"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        total = world.sum([1.0])
        del loaded
    return said, total


@pytest.mark.parametrize(
    ("kind", "message"),
    [("unreadable", "can't be read"), ("shape", "[3, 24]"), ("names", "they lack")],
)
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_all_ranks_hear_when_rank_0_fails_between_two_tensors(
    pools: Any, engine: str, kind: str, message: str
) -> None:
    [first, *others] = pools(2).run(load_and_fail, engine, kind)
    assert first[0].startswith("UserError") and message in first[0]
    assert [total for _, total in (first, *others)] == [[2.0], [2.0]]
    assert [said for said, _ in others] == ["PeerFailed: another rank ended with code 2"]


def write_t5(folder: Path, corpus: Path) -> Path:
    """A Hugging Face folder in bf16, in several files, with the tokenizer of the corpus."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(8)
    config = T5Config(vocab_size=256, dropout_rate=0.0, decoder_start_token_id=0, **SHAPE)
    return save(T5ForConditionalGeneration(config), folder, corpus)


def write_pegasus(folder: Path, corpus: Path) -> Path:
    """As `write_t5`, a Pegasus with a bias on its logits."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    torch.manual_seed(8)
    config = PegasusConfig(
        vocab_size=256, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = PegasusForConditionalGeneration(config)
    model.final_logits_bias.normal_()
    return save(model, folder, corpus)


def save(model: Any, folder: Path, corpus: Path) -> Path:
    from transformers import AutoTokenizer

    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    AutoTokenizer.from_pretrained(corpus / "tokenizer").save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def pretrained_options(corpus: Path, run_dir: Path, model: Path, **more: Any) -> list[str]:
    names = {"model.name": model, "model.init": "pretrained", "model.tokenizer": "null"}
    options = {"model.config": "{}", "optimizer.lr": 0, "train.max_steps": 1} | names | more
    return tiny_options(corpus, run_dir, **options)


@pytest.mark.parametrize(
    ("engine", "write"),
    [("fsdp2", write_t5), ("fsdp1", write_t5), ("ddp", write_t5),
     ("fsdp2", write_pegasus), ("fsdp1", write_pegasus)],
)  # fmt: skip
def test_training_starts_from_the_files_weights(
    pools: Any, corpus: Path, tmp_path: Path, engine: str, write: Callable[[Path, Path], Path]
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    from t5_fsdp.checkpoint.stored_weights import read_weights
    from t5_fsdp.model.build import unique_state_dict

    folder = write(tmp_path / "hf", corpus)
    expected = unique_state_dict(AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32))
    start: Path = folder
    # From the files, then warm from the checkpoint that came of it.
    for name in ("cold", "warm"):
        options = pretrained_options(
            corpus, tmp_path / name, start,
            **{"parallel.engine": engine, "evaluation.max_examples": 1},
        )  # fmt: skip
        code, out, err = pools(2).command("train", options)
        assert code == 0 and "rank 0's memory" not in out, err
        start = tmp_path / name / "checkpoints/step-00000001"
        found = read_weights(start)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def train_while_the_file_shrinks(options: list[str], folder: str) -> tuple[int, str, str]:
    """On a rank of the pool: the command, whose files are cut after they were checked."""
    from t5_fsdp.cli import trainer_assembly

    original = trainer_assembly._build_engine

    def cut_first(*arguments: Any) -> Any:
        for path in Path(folder).glob("*.safetensors"):
            os.truncate(path, 3000)
        return original(*arguments)

    trainer_assembly._build_engine = cut_first
    try:
        return run_command("train", options)
    finally:
        trainer_assembly._build_engine = original


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_a_file_that_shrinks_while_it_is_read_is_told_once(
    pools: Any, corpus: Path, tmp_path: Path, engine: str
) -> None:
    folder = write_t5(tmp_path / "hf", corpus)
    options = pretrained_options(corpus, tmp_path / "run", folder, **{"parallel.engine": engine})
    results = pools(2).run(train_while_the_file_shrinks, options, str(folder))
    assert [code for code, _, _ in results] == [2, 2]
    [line] = "".join(err for _, _, err in results).splitlines()
    assert line.startswith("error: the weights file") and "it ends early" in line
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_truncated_file_is_refused_before_anything_is_written(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    folder = write_t5(tmp_path / "hf", corpus)
    path = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(path, path.stat().st_size - 10)
    code, _, err = pools(2).command("train", pretrained_options(corpus, tmp_path / "run", folder))
    assert code == 2 and len(err.splitlines()) == 1
    assert path.name in err and "fetch it again" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_holds_the_whole_model_while_it_is_loaded(tmp_path: Path, kind: str) -> None:
    # Two ranks that end up with a half each; 1.5 on rank 0 where it holds everything meanwhile.
    assert max(measure(write_model(tmp_path, kind), "fsdp2")) <= 0.8
