"""Every family: a tiny random model trains, saves, resumes, generates and exports on 2 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import read_metrics, tiny_options

BASE = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "t5": ({}, False),
    "t5 v1.1 and flan": (
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        True,
    ),
    "mt5": ({"model_type": "mt5"}, True),
    "umt5": ({"model_type": "umt5"}, True),
    # ByT5: a deep encoder over a shallow decoder.
    "byt5": (
        {"num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False},
        True,
    ),
    # As a check of generality: other names in the configuration, positions with an end, a bias on
    # the logits, in Pegasus parameters that are never trained.
    "bart": (BART | {"model_type": "bart"}, False),
    "pegasus": (BART | {"model_type": "pegasus"}, False),
}  # fmt: skip


QUICK = ("t5 v1.1 and flan", "umt5", "bart")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FAMILIES],
)
def test_a_family_goes_all_the_way(pools: Any, corpus: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForSeq2SeqLM

    from t5_fsdp.checkpoint.format import complete_checkpoints, read_state

    extra, own_head = FAMILIES[family]
    run_dir = tmp_path / "run"
    shape = extra if "encoder_layers" in extra else BASE | extra
    options = {"model.config": json.dumps(shape), "evaluation.max_examples": 3}
    for max_steps in (2, 3):
        argv = tiny_options(corpus, run_dir, **options, **{"train.max_steps": max_steps})
        code, out, err = pools(2).command("train", argv)
        assert code == 0, err
    assert "(step 2)" in out and "adapter" not in out
    assert [row["step"] for row in read_metrics(run_dir, "train")] == [1, 2, 3]
    assert read_state(complete_checkpoints(run_dir)[-1]).spec.own_head is own_head
    code, out, err = pools(2).command("eval_rouge", ["--checkpoint", run_dir])
    assert code == 0, err
    code, _, err = pools(1).command(
        "export_hf", ["--checkpoint", run_dir, "--output", tmp_path / "hf"]
    )
    assert code == 0, err
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied is not own_head


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("bart", "fsdp1"),
        pytest.param("bart", "ddp", marks=pytest.mark.long),
        pytest.param("pegasus", "fsdp1", marks=pytest.mark.long),
        ("pegasus", "ddp"),
    ],
)
def test_what_is_no_t5_resumes_exactly_under_other_engines(
    pools: Any, corpus: Path, tmp_path: Path, family: str, engine: str
) -> None:
    shape, _ = FAMILIES[family]
    options = {"model.config": json.dumps(shape), "evaluation.max_examples": 1,
               "checkpoint.every_steps": 2, "train.max_steps": 4}  # fmt: skip
    losses = {}
    for name in ("fsdp2", engine):
        argv = tiny_options(corpus, tmp_path / name, **options, **{"parallel.engine": name})
        code, _, err = pools(2).command("train", argv)
        assert code == 0, err
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name, "train")]
    assert losses[engine] == pytest.approx(losses["fsdp2"], rel=1e-5)
    start = {"checkpoint.resume": tmp_path / engine / "checkpoints/step-00000002"}
    argv = tiny_options(corpus, tmp_path / "on", **options, **start)
    code, _, err = pools(2).command("train", argv)
    assert code == 0, err
    resumed = [row["loss"] for row in read_metrics(tmp_path / "on", "train")]
    assert resumed == pytest.approx(losses["fsdp2"][2:], rel=1e-5)


def test_lengths_without_positions_are_refused_before_step_1(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    shape = BART | {"model_type": "bart", "max_position_embeddings": 30}
    run_dir = tmp_path / "run"
    argv = tiny_options(corpus, run_dir, **{"model.config": json.dumps(shape)})
    code, _, err = pools(2).command("train", argv)
    first, second = err.splitlines()
    assert code == 2 and first.startswith("error: data.max_source_tokens is 64, but this bart has")
    assert "positions for 30 tokens" in first and "data.max_target_tokens is 32" in second
    assert not run_dir.exists()
    # A T5 has no such end, whatever its configuration says.
    argv = tiny_options(corpus, run_dir, **{"data.max_source_tokens": 20000, "train.max_steps": 1})
    assert pools(2).command("train", argv)[0] == 0


def test_special_tokens_of_a_new_bart_are_the_tokenizers(corpus: Path) -> None:
    from t5_fsdp.config import ModelConfig
    from t5_fsdp.data.tokenization import load_tokenizer
    from t5_fsdp.model.configuration import resolve_spec

    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    for family, start in (("bart", 1), ("pegasus", 0), ("t5", 0)):
        options = ModelConfig(name=None, init="random", config={"model_type": family})
        config = resolve_spec(options, tokenizer).config
        assert (config.pad_token_id, config.eos_token_id) == (0, 1)
        assert config.decoder_start_token_id == start
        if family != "t5":
            assert config.forced_eos_token_id == 1
