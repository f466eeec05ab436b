"""The example programs, as their users start them."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

from t5_fsdp.errors import UserError
from tests.conftest import ROOT
from tests.launch import run


def launch(example: str, *argv: str) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", "2", str(ROOT / "examples" / example), *argv]  # fmt: skip
    return run(command)


@pytest.mark.long
def test_digits_are_learned_alike_by_all_engines() -> None:
    found = launch("digits.py")
    assert found.returncode == 0, found.stderr
    header, *rows = [line.split() for line in found.stdout.splitlines()]
    assert header[:3] == ["engine", "loss", "accuracy"]
    assert [row[0] for row in rows] == ["ddp", "fsdp1", "fsdp2"]
    losses = [float(row[1]) for row in rows]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-3)
    assert min(float(row[2]) for row in rows) > 0.8
    ddp, *sharded = [int(row[3].replace(",", "")) for row in rows]
    assert sharded == pytest.approx([ddp / 2] * 2, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_a_transformer_learns_alike_under_two_engines(model: str) -> None:
    seen = []
    for engine in ("fsdp2", "ddp"):
        found = launch("bert_and_gpt2.py", "--model", model, "--engine", engine, "--steps", "21")
        assert found.returncode == 0, found.stderr
        lines = [line for line in found.stdout.splitlines() if line.startswith("step")]
        seen.append([float(line.rpartition(" ")[2]) for line in lines])
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert seen[0][-1] < 0.9 * seen[0][0]


def test_the_library_is_used_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/finetune_pairs.py"))
    assert re.search(r"\n\['[a-z ]+'\]\n$", capsys.readouterr().out)


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def launch_lines(example: str) -> list[str]:
    """As the example's docstring shows them; an export before them in front of each."""
    text = ast.get_docstring(ast.parse((ROOT / f"examples/{example}.py").read_text())) or ""
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    exports = [line for line in shown if line.startswith("export ")]
    lines = [line for line in shown if f"examples/{example}.py" in line]
    return ["\n".join([*exports, line]) for line in lines]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_launch_lines_find_the_package(example: str) -> None:
    finds_it = "sys.path.insert" in (ROOT / f"examples/{example}.py").read_text()
    lines = launch_lines(example)
    assert lines and all(finds_it or "PYTHONPATH=." in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("own_model", r"\n\['[a-z ]+'\]\n$"),
        ("own_dataset", r"trained 130 steps; ROUGE-1 \d"),
        ("own_metric", r"numbers kept 0\.\d+\non others: 0"),
    ],
)
def test_the_launch_line_is_right(example: str, printed: str, tmp_path: Path) -> None:
    for name in ("examples", "t5_fsdp"):  # as in a checkout, but for what it writes
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    [line] = launch_lines(example)
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout)


def test_fine_tuning_on_pairs_takes_fifteen_lines() -> None:
    tree = ast.parse((ROOT / "examples/finetune_pairs.py").read_text())
    code = [node for node in tree.body if not isinstance(node, ast.Expr) or node is tree.body[-1]]
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in code)
    assert lines <= 15


def load_example() -> Any:
    described = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits.py")
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def test_mnist_files_are_read(tmp_path: Path) -> None:
    digits = load_example()
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    content = bytes([0, 0, 8, 3]) + np.array(images.shape, ">u4").tobytes() + images.tobytes()
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    for name in ("plain", "packed"):
        assert digits.read_idx(tmp_path, name).tolist() == images.tolist()
    for name, broken in (("cut", content[:-3]), ("empty", b""), ("other", b"PK\x03\x04" * 9)):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(UserError, match="no MNIST file"):
            digits.read_idx(tmp_path, name)
    with pytest.raises(UserError, match=r"has no absent or absent\.gz"):
        digits.read_idx(tmp_path, "absent")


SRUN = """#!/bin/sh
echo "$@" > srun-called
sleep 0.05
[ -z "$STATE" ] || printf '{\\n "state": "%s"\\n}' "$STATE" > run/status.json
exit $CODE
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then printf 'node-1\\nnode-2\\n'; else echo "$@" > requeued; fi
"""


@pytest.mark.parametrize(
    ("state", "code", "expected", "requeued"),
    [("finished", 0, 0, False), ("preempted", 1, 0, True), ("failed", 1, 1, False),
     ("", 1, 1, False)],
)  # fmt: skip
def test_the_slurm_script_queues_again_what_was_preempted(
    tmp_path: Path, state: str, code: int, expected: int, requeued: bool
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text('{"state": "preempted"}')  # of an earlier launch
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    time.sleep(0.05)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STATE": state,
        "CODE": str(code),
        "SLURM_JOB_ID": "30007",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    script = [ROOT / "examples/slurm.sbatch", "--config", "c.yaml", "--run_dir", "run"]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    called = (tmp_path / "srun-called").read_text()
    assert "--rdzv_endpoint node-1:30007 " in called and "--nnodes 2 " in called
    assert called.endswith("scripts/train.py --config c.yaml --run_dir run\n")
    words = called.split(".venv/bin/torchrun ")[1].split()
    assert get_args_parser().parse_args(words).training_script == "scripts/train.py"
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 30007\n"


def test_the_slurm_script_wants_a_run_dir(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "examples/slurm.sbatch"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: give --run_dir")
