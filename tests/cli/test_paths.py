"""What is not there is said before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from t5_fsdp.cli.paths import check_paths
from t5_fsdp.config import CheckpointConfig, Config, ModelConfig
from t5_fsdp.errors import UserError
from tests.conftest import ROOT


def test_all_missing_folders_are_said_at_once(tmp_path: Path) -> None:
    model = ModelConfig(name="./no/model", tokenizer=f"{tmp_path}/none")
    with pytest.raises(UserError) as caught:
        check_paths(Config(model=model, checkpoint=CheckpointConfig(resume="no/run")))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "checkpoint.resume", "model.name", "model.tokenizer",
    ]  # fmt: skip


def test_what_is_there_and_hub_ids_pass(tmp_path: Path) -> None:
    check_paths(Config())
    model = ModelConfig(name="google-t5/t5-small", tokenizer="train")
    check_paths(Config(model=model, checkpoint=CheckpointConfig(resume=str(tmp_path))))
    check_paths(Config(model=ModelConfig(name=None, tokenizer=str(tmp_path))))


@pytest.mark.parametrize(
    ("module", "argv", "words"),
    [
        ("train", ["--config", "configs/demo.yaml", "--checkpoint.resume", "none"], "folder none"),
        ("prepare_data", ["--config", "configs/demo.yaml", "--model.tokenizer", "./no"], "./no"),
        ("summarize", ["--checkpoint", "runs", "none.txt"], "none.txt does not exist"),
        ("eval_rouge", ["--checkpoint", "./none"], "no folder none"),
        ("export_hf", ["--checkpoint", "./none", "--output", "out"], "no folder none"),
        ("eval_rouge", ["--checkpoint", "README.md"], "README.md is no folder; give"),
    ],
)
def test_missing_paths_need_no_torch(module: str, argv: list[str], words: str) -> None:
    program = (
        f"import sys; from t5_fsdp.cli.{module} import main; code = main({argv!r}); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 2 and words in found.stderr, found.stderr
