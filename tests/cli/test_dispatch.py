"""`t5-fsdp COMMAND`: in this process, with bash's completion, and from an installed package."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import t5_fsdp
from t5_fsdp.cli.completion import main as completion
from t5_fsdp.cli.dispatch import COMMANDS, find, main
from tests.conftest import ROOT
from tests.launch import cpu_environment


def test_every_command_is_there_and_every_script_has_its_command(capsys: Any) -> None:
    for command in COMMANDS.values():
        assert callable(importlib.import_module(command.module).main)
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed and command.help in listed
               for name, command in COMMANDS.items())  # fmt: skip
    assert max(map(len, listed.splitlines())) <= 80
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {name for name in scripts if find(name) is None} == set()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"t5-fsdp {t5_fsdp.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "did you mean train?"), ("prepare", "did you mean prepare-data?"),
     ("xyz", "it has train, prepare-data,"), ("eval", "did you mean evaluate?")],
)  # fmt: skip
def test_an_unknown_command_gets_one_line(capsys: Any, word: str, hint: str) -> None:
    assert main([word, "--config", "c.yaml"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith(f"error: t5-fsdp has no command '{word}'; {hint}")


def test_a_command_gets_its_arguments(capsys: Any) -> None:
    assert main(["train", "--train.epoch", "1"]) == 2
    assert "did you mean --train.epochs?" in capsys.readouterr().err
    assert main(["eval_rouge"]) == 2
    assert "eval_rouge needs --checkpoint" in capsys.readouterr().err


def complete(words: str, tmp_path: Path) -> set[str]:
    """What bash would offer for the last of the words."""
    script = tmp_path / "completion.bash"
    if not script.exists():
        done = subprocess.run(
            [sys.executable, "-m", "t5_fsdp", "completion", "bash"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        script.write_text(done.stdout)
    listed = words.split(" ")
    quoted = " ".join(f"'{word}'" for word in listed)
    program = (
        f"source {script}\ncomplete -p t5-fsdp >&2\nCOMP_WORDS=({quoted})\n"
        f"COMP_CWORD={len(listed) - 1}\n_t5_fsdp\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    )
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True)
    assert done.returncode == 0 and "-F _t5_fsdp t5-fsdp" in done.stderr, done.stderr
    return set(done.stdout.split())


def test_bash_completes(tmp_path: Path) -> None:
    assert complete("t5-fsdp tr", tmp_path) == {"train"}
    assert complete("t5-fsdp train --train.e", tmp_path) == {"--train.epochs"}
    assert complete("t5-fsdp train --ch", tmp_path) >= {"--check", "--checkpoint.keep_last"}
    assert complete("t5-fsdp evaluate --base", tmp_path) == {"--baseline"}
    assert complete("t5-fsdp train --base", tmp_path) == set()
    assert complete("t5-fsdp train --parallel.engine ", tmp_path) == {"fsdp2", "fsdp1", "ddp"}
    assert "null" in complete("t5-fsdp train --parallel.sharding ", tmp_path)
    assert complete("t5-fsdp train --parallel.compile t", tmp_path) == {"true"}
    assert complete("t5-fsdp train --train.epochs ", tmp_path) == set()  # bash offers files
    assert complete("t5-fsdp completion f", tmp_path) == {"fish"}
    assert complete("t5-fsdp report --r", tmp_path) == {"--run"}
    assert complete("t5-fsdp checkpoints --v", tmp_path) == {"--verify"}
    assert complete("t5-fsdp benchmark --mode g", tmp_path) == {"generate"}


def test_other_shells_get_the_same_options(capsys: Any) -> None:
    for shell in ("zsh", "fish"):
        assert completion([shell]) == 0
        script = capsys.readouterr().out
        assert "train.epochs" in script and "fsdp2 fsdp1 ddp" in script
        assert "verify" in script and ("-l verify -r" not in script)
    assert completion(["tcsh"]) == 2 and completion([]) == 2
    assert "give one of bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.long
def test_the_installed_package_has_all_it_needs(tmp_path: Path) -> None:
    source = tmp_path / "source"  # pip builds in there
    tracked = subprocess.run(
        ["git", "ls-files", "t5_fsdp", "data", "pyproject.toml", "README.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    # The packages of the tests' own environment, after those of this one.
    site_packages = Path(importlib.import_module("torch").__file__ or "").parents[1]
    (site / "tests.pth").write_text(f"{site_packages}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install",
         "--quiet", "--no-deps", "--no-index", "--no-build-isolation", source],
        check=True, timeout=240,
    )  # fmt: skip
    installed = {str(path.relative_to(site)) for path in (site / "t5_fsdp").rglob("*.py")}
    assert installed >= {name for name in tracked if name.endswith(".py") and "t5_fsdp/" in name}
    program = tmp_path / "venv/bin/t5-fsdp"
    options = ["--run_dir", "run", "--train.max_steps", "2", "--evaluation.max_examples", "2",
               "--data.max_train_examples", "40", "--checkpoint.keep_best", "0"]  # fmt: skip
    shutil.copy(ROOT / "configs/demo.yaml", tmp_path / "demo.yaml")
    environment = cpu_environment() | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    for command in (
        [program, "--version"],
        [program, "train", "--config", "demo.yaml", "--check", "true", *options],
        [program.with_name("python"), "-m", "torch.distributed.run", "--standalone",
         "--nproc_per_node", "2", "-m", "t5_fsdp", "train", "--config", "demo.yaml", *options],
    ):  # fmt: skip
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    assert "done: trained 2 steps" in done.stdout
    assert (tmp_path / "run/checkpoints/step-00000002/COMPLETE").is_file()
