"""Every T5 family: a tiny random model trains, saves, resumes, generates and exports on 2 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import read_metrics, tiny_options

BASE = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
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
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_all_the_way(pools: Any, corpus: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForSeq2SeqLM

    from t5_fsdp.checkpoint.format import complete_checkpoints, read_state

    extra, own_head = FAMILIES[family]
    run_dir = tmp_path / "run"
    options = {"model.config": json.dumps(BASE | extra), "evaluation.max_examples": 3}
    for max_steps in (2, 3):
        argv = tiny_options(corpus, run_dir, **options, **{"train.max_steps": max_steps})
        code, out, err = pools(2).command("train", argv)
        assert code == 0, err
    assert "(step 2)" in out
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


@pytest.mark.parametrize("first", ["fsdp2", "fsdp1", "ddp"])
def test_a_checkpoint_of_one_engine_goes_on_under_the_others(
    pools: Any, corpus: Path, tmp_path: Path, first: str
) -> None:
    options = {"train.max_steps": 6, "checkpoint.every_steps": 3, "evaluation.max_examples": 2}
    whole = tmp_path / "whole"
    argv = tiny_options(corpus, whole, **options, **{"parallel.engine": first})
    code, _, err = pools(2).command("train", argv)
    assert code == 0, err
    expected = [row["loss"] for row in read_metrics(whole, "train")]
    start = {"checkpoint.resume": whole / "checkpoints/step-00000003"}
    for engine, world_size in (("fsdp2", 4), ("fsdp1", 2), ("ddp", 1), ("ddp", 2)):
        run_dir = tmp_path / f"{engine}-{world_size}"
        argv = tiny_options(corpus, run_dir, **options, **start, **{"parallel.engine": engine})
        code, _, err = pools(world_size).command("train", argv)
        assert code == 0, err
        found = [row["loss"] for row in read_metrics(run_dir, "train")]
        assert found == pytest.approx(expected[3:], rel=1e-5)
