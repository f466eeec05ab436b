"""fp16 finds its loss scale, steps that are not finite change nothing, devices are told apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from t5_fsdp.config import Config, ParallelConfig, TrainConfig
from t5_fsdp.config_problems import value_problems
from t5_fsdp.model.devices import peak_flops
from t5_fsdp.parallel.precision import (
    emulated_bf16_warning,
    fp16_warning,
    precision_warnings,
    use_tf32,
)
from t5_fsdp.training.loss_scale import LossScale, initial_loss_scale
from t5_fsdp.training.meters import Window
from tests.conftest import read_metrics, tiny_options, write_jsonl
from tests.distributed.test_training import final_weights, losses, train

FP16 = {"parallel.param_dtype": "fp16"}
TOO_LARGE = {**FP16, "parallel.initial_loss_scale": 2**30, "train.epochs": 20}


OVERFLOW, FINE = torch.tensor(1.0), torch.tensor(0.0)


def test_the_scale_halves_at_an_overflow_and_doubles_after_2000_good_steps() -> None:
    scale = LossScale(initial_loss_scale(ParallelConfig(param_dtype="fp16")), {})
    assert scale.factor == 65536
    for expected in (32768, 16384):
        scale.update(OVERFLOW)
        assert scale.factor == expected
    for _ in range(1999):
        scale.update(FINE)
    again = LossScale(65536.0, json.loads(json.dumps(scale.to_json())))
    assert (scale.factor, again.factor) == (16384, 16384)
    again.update(FINE)
    assert again.factor == 32768 and again.to_json()["good_steps"] == 0
    for _ in range(100):
        again.update(OVERFLOW)
    assert again.factor == 1


@pytest.mark.parametrize(
    ("factor", "grown", "shrunk"),
    [(2.0**23, 2.0**24, 2.0**22), (2.0**24, 2.0**24, 2.0**23), (2.0**30, 2.0**30, 2.0**29)],
)
def test_the_scale_grows_to_a_bound_and_a_larger_one_is_left(
    factor: float, grown: float, shrunk: float
) -> None:
    for step, expected in ((FINE, grown), (OVERFLOW, shrunk)):
        scale = LossScale(1.0, {"factor": factor, "good_steps": 1999})
        scale.update(step)
        assert scale.factor == expected


def test_without_fp16_nothing_is_scaled() -> None:
    assert initial_loss_scale(ParallelConfig(reduce_dtype="fp16")) == 65536
    scale = LossScale(initial_loss_scale(ParallelConfig(param_dtype="bf16")), {"factor": 8.0})
    scale.update(OVERFLOW)
    assert scale.factor == 1 and scale.to_json() == {} and not scale.is_dynamic
    loss = torch.tensor(3.0)
    assert scale.scale(loss) is loss


def test_gradients_are_unscaled_exactly() -> None:
    parameters = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    gradient = torch.randn(5)
    parameters[0].grad = gradient * 2**20
    LossScale(2.0**20, {}).unscale(torch.optim.SGD(parameters))
    assert torch.equal(parameters[0].grad, gradient)


def test_a_lost_step_is_left_out_of_the_mean_loss() -> None:
    window = Window(steps=2, loss_sum=30.0, target_tokens=35, lost_tokens=15)
    assert window.row()["loss"] == 1.5
    assert Window(steps=1, target_tokens=15, lost_tokens=15).row()["loss"] is None


def test_what_a_user_is_told_about_dtypes() -> None:
    bf16, fp16, fp32 = (ParallelConfig(param_dtype=d) for d in ("bf16", "fp16", "fp32"))  # type: ignore[arg-type]
    warning = fp16_warning(fp16)
    assert warning is not None and "bf16" in warning and "feed-forward" in warning
    assert fp16_warning(bf16) is None and fp16_warning(fp32) is None
    emulated = emulated_bf16_warning(bf16, "Tesla V100", native=False)
    assert emulated is not None and "Tesla V100" in emulated and "fp32" in emulated
    assert emulated_bf16_warning(bf16, "A100", native=True) is None
    assert emulated_bf16_warning(fp16, "Tesla V100", native=False) is None
    assert precision_warnings(bf16, torch.device("cpu")) == []


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"param_dtype": "fp16", "initial_loss_scale": 1000.0}, "power of two"),
        ({"param_dtype": "bf16", "initial_loss_scale": 1024.0}, "fp16"),
        ({"param_dtype": "fp16", "initial_loss_scale": 0.5}, "smallest"),
        ({"param_dtype": "fp16", "engine": "ddp", "reduce_dtype": "fp16"}, "reduce_dtype"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], part: str) -> None:
    config = Config(parallel=ParallelConfig(**options))
    config.model.name = "some/model"
    [problem] = value_problems(config)
    assert "parallel." in problem and part in problem


def test_tf32_is_a_matter_of_gpus() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        use_tf32(True, torch.device("cpu"))
        assert matmul.fp32_precision == before
        use_tf32(True, torch.device("cuda"))
        assert matmul.fp32_precision == "tf32"
        use_tf32(False, torch.device("cuda"))
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before
    name = "NVIDIA A100-SXM4-40GB"
    assert peak_flops(name, "fp32", tf32=True) == 156e12
    assert peak_flops(name, "fp32") == 19.5e12
    assert peak_flops(name, "bf16", tf32=True) == peak_flops(name, "fp16") == 312e12


def test_fp16_finds_its_scale_and_then_learns(pools: Any, corpus: Path, tmp_path: Path) -> None:
    from t5_fsdp.checkpoint.format import read_state
    from t5_fsdp.model.build import draw_weights

    run_dir = tmp_path / "run"
    options = {**TOO_LARGE, "train.max_steps": 22, "checkpoint.every_steps": 6,
               "checkpoint.keep_last": 9}  # fmt: skip
    out, _ = train(pools(2), corpus, run_dir, **options)
    assert "warning: parallel.param_dtype is fp16" in out
    assert "step 1 is skipped" in out and "at loss scale 1.07374e+09" in out
    rows = read_metrics(run_dir, "train")
    skipped = sum(row["skipped_steps"] for row in rows)
    assert 8 <= skipped <= 16
    assert [row["skipped_steps"] for row in rows] == [1] * skipped + [0] * (22 - skipped)
    scales = [row["loss_scale"] for row in rows]
    assert scales == [2.0 ** (30 - min(step, skipped)) for step in range(22)]
    # The loss of these steps was finite: it was the gradients that overflowed.
    assert rows[0]["grad_norm"] is None and rows[-1]["grad_norm"] < 10
    assert all(row["loss"] is not None for row in rows)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    state = read_state(run_dir / "checkpoints" / "step-00000006")
    assert state.skipped_in_a_row == 6 and state.loss_scale["factor"] == 2**24
    untouched = final_weights(run_dir, 6)
    assert all(torch.equal(w, untouched[n]) for n, w in draw_weights(state.spec, 1).items())


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("fsdp2", marks=pytest.mark.long),
        pytest.param("fsdp1", marks=pytest.mark.exhaustive),
        pytest.param("ddp", marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_search_for_the_scale_equals_the_unbroken_one(
    pools: Any, corpus: Path, tmp_path: Path, engine: str
) -> None:
    options = {**FP16, "parallel.initial_loss_scale": 2**22, "parallel.engine": engine,
               "train.max_steps": 12}  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pools(2), corpus, whole, **options)
    for last in (2, 9, 12):
        train(pools(2), corpus, parts, **{**options, "train.max_steps": last})
    for name in ("loss", "loss_scale", "skipped_steps", "grad_norm"):
        found, expected = ([r[name] for r in read_metrics(d, "train")] for d in (parts, whole))
        assert found == expected, name
        if name == "skipped_steps":
            assert found[:3] == [1, 1, 1] and found[-3:] == [0, 0, 0]
    expected_weights, found_weights = final_weights(whole, 12), final_weights(parts, 12)
    assert all(torch.equal(w, found_weights[n]) for n, w in expected_weights.items())


def second_moment(run_dir: Path, step: int) -> torch.Tensor:
    """AdamW's of the embedding, from a checkpoint."""
    import torch.distributed.checkpoint as dcp

    name = "exp_avg_sq"
    state = {"optimizer": {"state": {"shared.weight": {name: torch.empty(256, 32)}}}}
    dcp.load(state, checkpoint_id=run_dir / "checkpoints" / f"step-{step:08d}", no_dist=True)
    return state["optimizer"]["state"]["shared.weight"][name]


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("fsdp2", marks=pytest.mark.long),
        pytest.param("fsdp1", marks=pytest.mark.exhaustive),
        pytest.param("ddp", marks=pytest.mark.long),
    ],
)
def test_fp16_stays_near_float32(pools: Any, corpus: Path, tmp_path: Path, engine: str) -> None:
    # Not with AdamW's large steps, whose rounding alone drives runs apart.
    options = {"train.max_steps": 50, "train.epochs": 20, "parallel.engine": engine,
               "optimizer.lr": "1e-3"}  # fmt: skip
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    train(pools(2), corpus, exact, **options)
    train(pools(2), corpus, rounded, **{**options, **FP16})
    rows = read_metrics(rounded, "train")
    assert losses(rounded) == pytest.approx(losses(exact), rel=0.02)
    norms = [row["grad_norm"] for row in read_metrics(exact, "train")]
    assert [row["grad_norm"] for row in rows[:5]] == pytest.approx(norms[:5], rel=0.02)
    assert losses(rounded) != losses(exact) and losses(exact)[-1] < 0.8 * losses(exact)[0]
    # AdamW hardly sees the scale of a gradient; its second moment does.
    found, expected = second_moment(rounded, 50), second_moment(exact, 50)
    assert float(found.sum()) == pytest.approx(float(expected.sum()), rel=0.02)


def test_too_many_in_a_row_stop_the_run(pools: Any, corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = {**TOO_LARGE, "train.skip_nonfinite_steps": 3, "checkpoint.every_steps": 2}
    code, out, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
    assert code == 2
    assert "step 3 is skipped" in out and "step 4 is skipped" not in out
    for part in ("step 4:", "are not both finite", "4 steps in a row", "allows 3", "bf16",
                 "step-00000002"):  # fmt: skip
        assert part in err
    assert json.loads((run_dir / "status.json").read_text())["state"] == "failed"


def test_a_bad_batch_is_skipped_and_spoils_nothing(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    """One row of 60 holds a word whose embedding is infinite."""
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    word = "zzz"
    rows = [json.loads(line) for line in (corpus / "train.jsonl").read_text().splitlines()]
    texts = ["summarize: ", *(row[name] for row in rows for name in ("document", "summary"))]
    used = {piece for text in texts for piece in tokenizer(text)["input_ids"]}
    [rare, *_] = [i for i in tokenizer(word)["input_ids"] if i not in used]
    rows[17]["document"] += f" {word}"
    write_jsonl(tmp_path / "train.jsonl", rows)
    torch.manual_seed(1)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                 dropout_rate=0.0, decoder_start_token_id=0)
    )  # fmt: skip
    model.lm_head.weight = nn.Parameter(0.1 * torch.randn_like(model.shared.weight))
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.shared.weight[rare] = float("inf")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {
        "data.train_files": tmp_path / "train.jsonl",
        "model.name": tmp_path / "model",
        "model.init": "pretrained",
        "model.config": "{}",
        "train.max_steps": 4,  # one epoch
        "checkpoint.every_steps": 1,
        "checkpoint.keep_last": 9,
    }
    run_dir, sparse = tmp_path / "run", tmp_path / "sparse"
    train(pools(2), corpus, run_dir, **{**options, "train.skip_nonfinite_steps": 1})
    found = read_metrics(run_dir, "train")
    [bad] = [row["step"] for row in found if row["skipped_steps"] == 1]
    assert [row["loss"] is None for row in found] == [row["step"] == bad for row in found]
    assert all("loss_scale" not in row for row in found)
    if bad > 1:
        before, after = final_weights(run_dir, bad - 1), final_weights(run_dir, bad)
        assert all(torch.equal(before[name], after[name]) for name in before)
    changed = final_weights(run_dir, 4)
    assert not torch.equal(changed["lm_head.weight"], model.lm_head.weight)
    # In a window of several steps it is not counted, nor are its tokens.
    every_4 = {"train.skip_nonfinite_steps": 1, "logging.every_steps": 4}
    train(pools(2), corpus, sparse, **{**options, **every_4})
    [row] = read_metrics(sparse, "train")
    good = [r for r in found if r["step"] != bad]
    tokens = sum(r["target_tokens"] for r in good)
    mean = sum(r["loss"] * r["target_tokens"] for r in good) / tokens
    assert row["loss"] == pytest.approx(mean, rel=1e-9) and row["skipped_steps"] == 1
    assert row["target_tokens"] == sum(r["target_tokens"] for r in found)
    # By default it stops the run, and the examples of its micro-batch are named.
    code, _, err = pools(2).command("train", tiny_options(corpus, tmp_path / "stop", **options))
    assert code == 2 and f"step {bad}: " in err and "in a row" not in err
    named = re.findall(r"row-\d+", err)
    assert "row-17" in named and len(named) <= 8 and "more" not in err
    # No row, checkpoint or validation makes the host read that step at once: it is told a step
    # later, and nothing else is different.
    late = {**options, "logging.every_steps": 50, "checkpoint.every_steps": "null"}
    code, _, late_err = pools(2).command("train", tiny_options(corpus, tmp_path / "late", **late))
    assert code == 2 and f"step {bad}: " in late_err
    assert re.findall(r"row-\d+", late_err) == named
    assert json.loads((tmp_path / "late" / "status.json").read_text())["step"] == bad - 1


def test_a_state_without_a_scale_starts_anew() -> None:
    from t5_fsdp.checkpoint.format import RunState

    fields = {"step": 3, "model": {}, "data_hash": "", "tokenizer_hash": "", "plan": {},
              "window": {"steps": 1, "target_tokens": 9}, "scores": {}, "versions": {},
              "prepared": ""}  # fmt: skip
    state = RunState(**fields)
    assert state.loss_scale == {} and state.skipped_in_a_row == 0
    assert Window(**state.window).lost_tokens == 0
    assert TrainConfig().skip_nonfinite_steps is None
