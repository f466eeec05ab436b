"""The commands round a trained checkpoint, each on the same small run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, make_pairs, tiny_options


@pytest.fixture(scope="module")
def exported(pools: Any, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("exported") / "hf"
    argv = ["--checkpoint", trained, "--output", output]
    code, _, err = pools(1).command("export_hf", argv)
    assert code == 0, err
    return output


def test_exported_folder_gives_the_logits_of_the_checkpoint(trained: Path, exported: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from t5_fsdp.checkpoint.format import complete_checkpoints, read_state
    from t5_fsdp.checkpoint.stored_weights import read_weights
    from t5_fsdp.model.build import build_with_weights

    checkpoint = complete_checkpoints(trained)[-1]
    ours = build_with_weights(read_state(checkpoint).spec, read_weights(checkpoint)).eval()
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer("summarize: rinse rice blue door.", return_tensors="pt")
    labels = torch.tensor([[7, 8, 1]])
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(**inputs, labels=labels).logits,
            ours(**inputs, labels=labels).logits,
            rtol=1e-5,
            atol=1e-5,
        )


def test_a_checkpoint_keeps_its_model(pools: Any, trained: Path) -> None:
    argv = ["--checkpoint", trained, "--model.lora_rank", 2, "--model.adapter", "lora"]
    code, _, err = pools(1).command("eval_rouge", argv)
    assert code == 2 and len(err.splitlines()) == 2
    assert "--model.lora_rank 2" in err and "trained with 16" in err and "--model.adapter" in err


def test_exported_folder_summarizes_by_itself_and_may_be_read_by_others(
    pools: Any, trained: Path, exported: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(make_pairs(1, 7)[0]["document"])
    outputs = [
        pools(1).command(
            "summarize", ["--checkpoint", source, "--parallel.param_dtype", "fp32", path]
        )
        for source in (trained, exported)
    ]
    assert outputs[0] == outputs[1] and outputs[0][0] == 0
    assert len({file.stat().st_mode for file in exported.iterdir() if file.is_file()}) == 1


def test_a_misspelt_checkpoint_is_said_to_be_no_folder(pools: Any, tmp_path: Path) -> None:
    code, _, err = pools(1).command("summarize", ["--checkpoint", "runs/nope", tmp_path])
    assert code == 2 and "no folder here" in err


def test_output_that_nobody_reads_is_no_error(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("rinse rice\n" * 3)
    command = f"{sys.executable} {ROOT}/scripts/summarize.py --help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("usage: summarize")


def test_a_warm_up_longer_than_the_run_is_told(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = {"schedule.warmup_steps": 200, "data.test_files": corpus / "train.jsonl"}
    argv = tiny_options(corpus, tmp_path / "run", **options)
    code, out, err = pools(1).command("train", [*argv, "--check", "true"])
    assert code == 0, err
    assert "warning: schedule.warmup_steps is 200, but the run has 10 steps" in out
    assert "warning: 60 documents of test in train" in out


def test_exported_folder_is_evaluated_like_the_checkpoint(
    pools: Any, corpus: Path, trained: Path, exported: Path, tmp_path: Path
) -> None:
    found = []
    for source in (trained, exported):
        output = tmp_path / source.name
        argv = tiny_options(corpus, tmp_path / "unused")
        argv += ["--checkpoint", str(source), "--output_dir", str(output)]
        code, _, err = pools(1).command("eval_rouge", argv)
        assert code == 0, err
        found.append((output / "predictions.jsonl").read_text())
    assert found[0] == found[1]


def test_an_exported_folder_does_not_know_its_data(pools: Any, exported: Path) -> None:
    code, _, err = pools(1).command("eval_rouge", ["--checkpoint", str(exported)])
    assert code == 2 and "has no data options" in err and "give --config FILE.yaml" in err
    assert "wikihow" not in err


def test_evaluation_sees_that_a_data_file_has_changed(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    test_file = tmp_path / "test.jsonl"
    test_file.write_text((corpus / "test.jsonl").read_text())
    run_dir = tmp_path / "run"
    options = tiny_options(corpus, run_dir, **{"data.test_files": test_file, "train.max_steps": 1})
    assert pools(1).command("train", options)[0] == 0
    test_file.write_text("".join((corpus / "test.jsonl").read_text().splitlines(True)[:4]))
    code, _, err = pools(1).command("eval_rouge", ["--checkpoint", run_dir])
    assert code == 0, err
    folder = run_dir / "evaluation/step-00000001/test"
    assert json.loads((folder / "rouge.json").read_text())["examples"] == 4


def test_predictions_are_scored_without_a_model(pools: Any, tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    path.write_text('{"reference": "a b", "prediction": "a b"}\n')
    code, out, err = pools(1).command("eval_rouge", ["--predictions", path])
    assert code == 0, err
    assert "100.0" in out and "nothing is written; --output_dir DIR" in out
    code, _, err = pools(1).command("eval_rouge", ["--predictions", path, "--seed", "x"])
    assert code == 2 and "seed" in err


def test_check_writes_nothing_and_says_what_would_be_trained(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    code, out, err = pools(2).command("train", [*tiny_options(corpus, run_dir), "--check", "true",
                                              "--parallel.explain", "true"])  # fmt: skip
    assert code == 0, err
    for words in ("the configuration is sound", "60 training examples", "10 in all", "(root)"):
        assert words in out
    by_size = {"parallel.explain": "true", "parallel.wrap": "size",
               "parallel.wrap_min_parameters": 2000}  # fmt: skip
    code, out, err = pools(2).command(
        "train", [*tiny_options(corpus, run_dir, **by_size), "--check", "true"]
    )
    assert code == 0 and "DenseReluDense.wi" in out, err
    assert not run_dir.exists()


def test_warm_start_takes_weights_and_overrides_from_a_checkpoint(
    pools: Any, corpus: Path, trained: Path, tmp_path: Path
) -> None:
    from t5_fsdp.checkpoint.format import complete_checkpoints, read_state
    from t5_fsdp.checkpoint.stored_weights import read_weights

    start = complete_checkpoints(trained)[-1]
    options = {
        "model.name": start,
        "model.init": "pretrained",
        "model.config": '{"dropout_rate": 0.25}',
        "optimizer.lr": 0,
        "train.max_steps": 1,
    }
    run_dir = tmp_path / "run"
    code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
    assert code == 0, err
    warm = run_dir / "checkpoints/step-00000001"
    assert read_state(warm).spec.config.dropout_rate == 0.25
    expected, found = read_weights(start), read_weights(warm)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    options["model.config"] = '{"d_model": 64}'
    code, _, err = pools(2).command("train", tiny_options(corpus, tmp_path / "other", **options))
    assert code == 2 and "d_model is 32 there and 64 now" in err


@pytest.mark.parametrize(
    "command",
    ["train", "prepare_data", "eval_rouge", "summarize", "export_hf", "launch_check", "plan"],
)
def test_help_is_quick_and_imports_no_torch(command: str) -> None:
    program = (
        "import sys\n"
        f"from t5_fsdp.cli.{command} import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--train.epochs" in done.stdout
    assert time.perf_counter() - began < 5  # 0.3 s alone; the rest is for a busy machine
