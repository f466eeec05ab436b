"""The numbers of training: equal to a plain loop, on any number of ranks, across a resume."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import DROPOUT_MODEL, make_pairs, read_metrics, tiny_options, write_jsonl


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir, "train")]


def train(pool: Any, corpus: Path, run_dir: Path, **overrides: Any) -> tuple[str, str]:
    code, out, err = pool.command("train", tiny_options(corpus, run_dir, **overrides))
    assert code == 0, err
    return out, err


@dataclass
class PlainRun:
    """Figures of `plain_run`: a loss and a gradient norm (before clipping) a step."""

    losses: list[float]
    grad_norms: list[float]
    validation_loss: float


def _read_pairs(corpus: Path, split: str, tokenizer: Any) -> tuple[list[list[int]], ...]:
    rows = [json.loads(line) for line in (corpus / f"{split}.jsonl").read_text().splitlines()]
    return (
        [tokenizer("summarize: " + row["document"])["input_ids"] for row in rows],
        [tokenizer(row["summary"])["input_ids"] for row in rows],
    )


def _summed_loss(model: Any, source: list[int], target: list[int]) -> torch.Tensor:
    # One row at a time: no padding anywhere.
    logits = model(input_ids=torch.tensor([source]), labels=torch.tensor([target])).logits[0]
    return -logits.log_softmax(-1)[range(len(target)), target].sum()


@functools.cache
def plain_run(corpus: Path, steps: int, global_batch_size: int = 16) -> PlainRun:
    """Training by transformers and torch alone: of ours only the data's order and the weights."""
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    from t5_fsdp.data.epoch_plan import plan_epoch
    from t5_fsdp.model.build import ModelSpec, draw_weights

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    sources, targets = _read_pairs(corpus, "train", tokenizer)
    config = T5Config(
        vocab_size=(len(tokenizer) + 127) // 128 * 128,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    weights = draw_weights(ModelSpec(config, own_head=False), seed=1)
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses: list[float] = []
    norms: list[float] = []
    for epoch in itertools.count():
        plan = plan_epoch(
            torch.tensor([len(s) for s in sources]).numpy(),
            torch.tensor([len(t) for t in targets]).numpy(),
            global_batch_size=global_batch_size,
            batching="length_grouped",
            seed=1,
            epoch=epoch,
        )
        for place in range(len(plan)):
            batch = plan.batch(place)
            optimizer.zero_grad()
            loss_sum = sum(
                (_summed_loss(model, sources[i], targets[i]) for i in batch), torch.zeros(())
            )
            mean = loss_sum / sum(len(targets[i]) for i in batch)
            mean.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            losses.append(mean.item())
            if len(losses) == steps:
                return PlainRun(losses, norms, _plain_validation_loss(corpus, model, tokenizer))
    raise AssertionError


def _plain_validation_loss(corpus: Path, model: Any, tokenizer: Any) -> float:
    sources, targets = _read_pairs(corpus, "validation", tokenizer)
    with torch.no_grad():
        total = sum(
            float(_summed_loss(model, source, target))
            for source, target in zip(sources, targets, strict=True)
        )
    return total / sum(map(len, targets))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_tokens", [90, 5000])
def test_losses_equal_a_plain_loop(
    pools: Any, corpus: Path, tmp_path: Path, world_size: int, micro_batch_tokens: int
) -> None:
    run_dir = tmp_path / "run"
    train(pools(world_size), corpus, run_dir, **{"train.micro_batch_tokens": micro_batch_tokens})
    plain = plain_run(corpus, 10)
    assert losses(run_dir) == pytest.approx(plain.losses, rel=1e-5)
    # AdamW hardly sees the scale of a gradient; its norm does.
    norms = [row["grad_norm"] for row in read_metrics(run_dir, "train")]
    assert norms == pytest.approx(plain.grad_norms, rel=1e-4)
    [validation] = read_metrics(run_dir, "validation")
    assert validation["loss"] == pytest.approx(plain.validation_loss, rel=1e-5)


def test_losses_are_the_same_when_each_micro_batch_is_reduced(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"train.micro_batch_tokens": 90, "parallel.sync_every_micro_batch": "true"}
    train(pools(2), corpus, run_dir, **options)
    plain = plain_run(corpus, 10)
    assert losses(run_dir) == pytest.approx(plain.losses, rel=1e-5)
    norms = [row["grad_norm"] for row in read_metrics(run_dir, "train")]
    assert norms == pytest.approx(plain.grad_norms, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_few_examples_train_on_two_ranks(
    pools: Any, corpus: Path, tmp_path: Path, count: int
) -> None:
    write_jsonl(tmp_path / "few.jsonl", make_pairs(count, 5))
    seen = []
    for world_size in (1, 2):
        run_dir = tmp_path / f"run-{world_size}"
        few = {"data.train_files": tmp_path / "few.jsonl", "train.max_steps": 3}
        train(pools(world_size), corpus, run_dir, **few)
        seen.append(losses(run_dir))
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def final_weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    from t5_fsdp.checkpoint.stored_weights import read_weights

    return read_weights(run_dir / "checkpoints" / f"step-{step:08d}")


DROPOUT = {
    "model.config": DROPOUT_MODEL,
    "train.max_steps": 12,
    "schedule.name": "linear",
    "checkpoint.every_steps": 6,
    "parallel.param_dtype": "bf16",
}


def test_twelve_steps_equal_six_and_six_with_dropout(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pools(2), corpus, whole, **DROPOUT, **{"logging.every_steps": 4})
    half = whole / "checkpoints" / "step-00000006"
    out, _ = train(
        pools(2), corpus, parts, **DROPOUT, **{"logging.every_steps": 4, "checkpoint.resume": half}
    )
    assert f"resuming from {half} (step 6)" in out
    # The window of steps 5 to 8 was open at the checkpoint and goes on.
    assert losses(parts) == losses(whole)[1:]
    expected, found = final_weights(whole, 12), final_weights(parts, 12)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_same_command_again_resumes_and_then_has_nothing_to_do(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(pools(2), corpus, run_dir, **{"train.max_steps": 4})
    out, _ = train(pools(2), corpus, run_dir, **{"train.max_steps": 6})
    assert "resuming from" in out and "(step 4)" in out
    assert len(losses(run_dir)) == 6
    out, _ = train(pools(2), corpus, run_dir, **{"train.max_steps": 6})
    assert "nothing to do" in out
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 6


@pytest.mark.parametrize("own_head", [False, True])
def test_head_stays_as_it_is_through_train_resume_and_export(
    pools: Any, corpus: Path, tmp_path: Path, own_head: bool
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    run_dir, exported = tmp_path / "run", tmp_path / "hf"
    shape = json.loads(DROPOUT["model.config"]) | {"tie_word_embeddings": not own_head}
    options = {"model.config": json.dumps(shape)}
    train(pools(2), corpus, run_dir, **options, **{"train.max_steps": 2})
    train(pools(2), corpus, run_dir, **options, **{"train.max_steps": 4})
    weights = final_weights(run_dir, 4)
    embeddings = [name for name, value in weights.items() if value.shape[0] == 256]
    assert embeddings == ["shared.weight"] + ["lm_head.weight"] * own_head
    code, _, err = pools(1).command(
        "export_hf",
        ["--checkpoint", str(run_dir / "checkpoints/step-00000004"), "--output", str(exported)],
    )
    assert code == 0, err
    model = AutoModelForSeq2SeqLM.from_pretrained(exported)
    tied = model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()
    assert tied is not own_head
    named = dict(model.named_parameters())
    assert all(torch.equal(weights[name], named[name]) for name in weights)
    stored = json.loads((exported / "config.json").read_text())
    assert stored["tie_word_embeddings"] is not own_head


def test_evaluation_is_the_same_on_any_number_of_ranks(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(pools(2), corpus, run_dir)
    found = []
    for world_size in (1, 2, 4):
        output = tmp_path / f"eval-{world_size}"
        code, out, err = pools(world_size).command(
            "eval_rouge",
            ["--checkpoint", str(run_dir), "--output_dir", str(output),
             "--evaluation.batch_tokens", "100"],
        )  # fmt: skip
        assert code == 0, err
        assert "lead baseline" in out
        found.append((output / "predictions.jsonl").read_text())
        assert json.loads((output / "rouge.json").read_text())["examples"] == 11
    assert found[0] == found[1] == found[2]
    rows = [json.loads(line) for line in found[0].splitlines()]
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(11)]


def test_a_step_that_is_not_finite_stops_before_the_weights_change(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # The first step with this rate makes the weights so large that the second one overflows.
    options = tiny_options(corpus, run_dir, **{"optimizer.lr": "1e30", "checkpoint.every_steps": 1})
    code, _, err = pools(2).command("train", options)
    assert code == 2 and err.startswith("error: step 2: loss ") and len(err.splitlines()) == 1
    assert "step-00000001" in err and "Examples: row-" in err
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "failed" and status["checkpoint"].endswith("step-00000001")
    assert all(value.isfinite().all() for value in final_weights(run_dir, 1).values())


def test_smoothing_and_z_loss_change_training_but_not_what_is_logged(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    seen = []
    options = {"train.label_smoothing": 0.2, "train.z_loss": 1e-2, "train.loss_chunk_rows": 11}
    for world_size in (1, 2):
        run_dir = tmp_path / f"run-{world_size}"
        train(pools(world_size), corpus, run_dir, **options, **{"train.max_steps": 4})
        seen.append(losses(run_dir))
    plain = plain_run(corpus, 10).losses
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    # Before the first update the weights are the same, and so is the plain cross-entropy.
    assert seen[0][0] == pytest.approx(plain[0], rel=1e-5)
    assert seen[0][3] != pytest.approx(plain[3], rel=1e-3)


def test_wider_padding_changes_no_number(pools: Any, corpus: Path, tmp_path: Path) -> None:
    train(pools(2), corpus, tmp_path / "run", **{"train.width_multiple": 16})
    assert losses(tmp_path / "run") == pytest.approx(plain_run(corpus, 10).losses, rel=1e-5)
    rows = read_metrics(tmp_path / "run", "train")
    assert rows[0]["padding_share"] > 0.2


@pytest.mark.long
def test_a_compiled_run_goes_on_uncompiled(pools: Any, corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = {
        "parallel.compile": "true",
        "parallel.compile_backend": "aot_eager",
        "parallel.activation_checkpointing": "selective",
        # Graphs of validation, of a single row and of other coincidences would be as many again.
        "train.max_steps": 1,
        "train.micro_batch_tokens": 5000,
        "data.validation_files": "[]",
    }
    out, _ = train(pools(2), corpus, run_dir, **options)
    assert " compiled, of 16 at most" in out
    train(pools(2), corpus, run_dir)
    assert losses(run_dir) == pytest.approx(plain_run(corpus, 10).losses, rel=1e-5)
