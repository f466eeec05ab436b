"""The commands of README and docs are run as they stand, as far as this machine can.

Each is run on a desk: a folder with what the pages suppose to be there, among it a finished run as
`runs/mine`. The commands of our scripts are called in warm workers. What needs GPUs has its options
checked, or is among `NOT_RUN` with the reason.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.cli.launch_check import check_launch
from t5_fsdp.cli.options import parse_layers, resolve
from t5_fsdp.errors import UserError
from tests.conftest import ROOT, make_pairs, tiny_options, write_jsonl
from tests.test_documentation import PAGES
from tests.workers import run_command

BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

EXPORT = ".venv/bin/python scripts/export_hf.py"
# The beginning of a command, and why no test runs it.
NOT_RUN = {
    "make setup": "installs packages",
    "make demo": "test_the_quickstart_as_it_stands",
    "make test": "these tests are it",
    "make lint": "checked beside the tests",
    "make docs": "tests/cli/test_option_reference.py",
    "make coverage": "takes half an hour",
    "set -a; . examples/p4d.env; set +a": "tests/test_launch_files.py",
    "sbatch": "tests/test_launch_files.py",
    ".venv/bin/torchrun --nnodes": "tests/test_launch_files.py",
    ".venv/bin/python -m pip": "needs a network",
    ".venv/bin/python -m pytest": "these tests are it",
    ".venv/bin/python -m t5_fsdp.data.sample": "writes data/sample; tests/data/test_sample.py",
    "echo": "an input of the next command",
    f"{EXPORT} --checkpoint runs/mine --output runs/mine/adapter": "needs an adapter",
}
# In place of WikiHow's files, which are not at hand.
OWN_DATA = [
    "--data.source", "files", "--data.train_files", "mine/train-1.jsonl",
    "--data.test_files", "mine/test.csv", "--data.document_column", "article",
    "--data.summary_column", "abstract", "--evaluation.num_beams", "1",
]  # fmt: skip
SCRIPT = re.compile(r"(?:scripts/|-m t5_fsdp )(\w+)(?:\.py)? ?(.*)$")
ON_ALL_RANKS = re.compile(r"torchrun .*(?:scripts/|-m t5_fsdp )")


def commands(page: Path) -> list[str]:
    """Of the page's bash blocks, one a line; without comments."""
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#\s.*", "", line).strip()
            if line and "..." not in line:
                found.append(re.sub(r"\s+", " ", line))
    return found


ALL = {command: page for page in PAGES for command in commands(page)}
RUN = [command for command in ALL if not command.startswith(tuple(NOT_RUN))]


@dataclass
class Desk:
    """A folder for one command, with what the pages name."""

    folder: Path
    pools: Any
    replaced: dict[str, str] = field(default_factory=dict)

    def words(self, text: str) -> list[str]:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return shlex.split(text)


def run_there(folder: str, name: str, argv: list[str], text: str) -> tuple[int, str, str]:
    """On a rank of a pool: a command in that folder, with `text` as its standard input."""
    before, stdin = os.getcwd(), sys.stdin
    os.chdir(folder)
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    try:
        return run_command(name, argv)
    except SystemExit as done:  # after --print_config
        return int(done.code or 0), "", ""
    finally:
        sys.stdin = stdin
        os.chdir(before)


@pytest.fixture(scope="module")
def finished(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of ten steps, evaluated, and its exported model."""
    folder = tmp_path_factory.mktemp("finished")
    options = {"checkpoint.keep_last": 1, "evaluation.max_examples": 4}
    code, _, err = pools(2).command("train", tiny_options(corpus, folder / "run", **options))
    assert code == 0, err
    code, _, err = pools(2).command("eval_rouge", ["--checkpoint", str(folder / "run")])
    assert code == 0, err
    argv = ["--checkpoint", str(folder / "run"), "--output", str(folder / "model")]
    code, _, err = pools(1).command("export_hf", argv)
    assert code == 0, err
    return folder


@pytest.fixture
def desk(pools: Any, finished: Path, command: str, tmp_path: Path) -> Desk:
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("runs/mine", "runs/other", "runs/demo", "runs/slower"):
        if name in command:
            shutil.copytree(finished / "run", tmp_path / name)
    if "/mnt/runs" in command:
        shutil.copytree(finished / "run", tmp_path / "wikihow")
    [predictions] = (finished / "run").glob("evaluation/*/test/predictions.jsonl")
    for name in ("predictions.jsonl", "mine.jsonl"):
        shutil.copyfile(predictions, tmp_path / name)
    texts = [pair["document"] for pair in make_pairs(3, 5)]
    write_jsonl(tmp_path / "articles.jsonl", [{"document": text} for text in texts])
    (tmp_path / "articles").mkdir()
    for path in ("article.txt", "article-1.txt", "articles/1.txt", "one-text-a-line.txt"):
        (tmp_path / path).write_text(texts[0] + "\n")
    (tmp_path / "mine").mkdir()
    rows = [{"article": p["document"], "abstract": p["summary"]} for p in make_pairs(20, 6)]
    for name in ("train-1", "train-2"):
        write_jsonl(tmp_path / f"mine/{name}.jsonl", rows)
    for name in ("validation", "test"):
        with (tmp_path / f"mine/{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    replaced = {
        "/mnt/runs/wikihow-t5-3b": "wikihow",
        "/mnt/runs/": "runs/new-",
        "step-00000500": "step-00000010",
        "google-t5/t5-small": str(finished / "model"),
        "google-t5/t5-3b": str(finished / "model"),
        " --push_to_hub me/my-t5 --private true": "",  # needs a network
    }
    replaced["/mnt/runs/3b"] = "wikihow"
    replaced = dict(sorted(replaced.items(), key=lambda item: -len(item[0])))
    return Desk(tmp_path, pools, replaced)


def test_nothing_is_left_out_without_a_reason() -> None:
    assert len(RUN) >= 35
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in ALL), beginning
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {command.split()[1] for command in ALL if command.startswith("make ")}
    assert {f"{target}:" for target in targets} <= set(re.findall(r"^[\w-]+:", makefile, re.M))


def check_options(desk: Desk, command: str) -> None:
    """`make train` and `make doctor`: their options are known, and nothing but GPU and data lack.

    The options of `doctor` that are not a run's are left to its own tests.
    """
    arguments = dict(word.partition("=")[::2] for word in desk.words(command)[2:])
    argv = shlex.split(arguments.get("ARGS", ""))
    if "CONFIG" in arguments:
        argv = ["--config", arguments["CONFIG"], *argv]
    elif "--config" not in argv:
        argv = ["--config", "configs/wikihow_t5_3b.yaml", *argv]
    try:
        with contextlib.chdir(ROOT) if sys.version_info >= (3, 11) else contextlib.nullcontext():
            check_launch(argv)
    except UserError as error:
        lacking = ("no GPU", "has no wikihowAll.csv", "is not installed", "does not exist")
        unknown = [line for line in error.problems if not any(text in line for text in lacking)]
        assert unknown == []


@pytest.mark.parametrize("command", RUN)
def test_the_command_does_what_the_page_says(desk: Desk, command: str) -> None:
    if command.startswith("make "):
        check_options(desk, command)
        return
    text, redirect, file = command.partition(" < ")
    found = SCRIPT.search(text)
    if found is None:
        run_module(desk, text)
        return
    name, argv = found[1], desk.words(found[2])
    if name == "plan":
        argv += ["--simulate", "false"]  # workers may have no children
    if name == "train":
        if not any("mine/" in word or "demo.yaml" in word for word in argv):
            resolve(parse_layers(argv, command="train", description="", config_required=True))
            return
        argv += ["--run_dir", "runs/new", "--data.max_train_examples", "64"]
        argv += ["--check"] if "--print_config" not in argv else []
    if "configs/wikihow_t5_small.yaml" in argv:
        argv += (
            ["--model.name", desk.replaced["google-t5/t5-small"]] if name != "eval_rouge" else []
        )
        argv += [] if name == "train" else OWN_DATA
    given = (desk.folder / file).read_text() if redirect else ""
    pool = desk.pools(2 if ON_ALL_RANKS.search(text) else 1)
    results = pool.run(run_there, str(desk.folder), name, argv, given)
    assert {code for code, _, _ in results} == {0}, results
    outputs = [argv[argv.index(word) + 1] for word in ("--output", "--json") if word in argv]
    assert all((desk.folder / output).exists() for output in outputs)


def run_module(desk: Desk, text: str) -> None:
    """`.venv/bin/python -m MODULE ...`, a small one."""
    words = desk.words(text)
    assert words[:2] == [".venv/bin/python", "-m"]
    assert importlib.util.find_spec(words[2]) is not None
    done = subprocess.run(
        [sys.executable, "-m", *words[2:]],
        cwd=desk.folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def copy_of_the_checkout(folder: Path) -> Path:
    """Its files as they are now, with this environment as .venv."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    return folder


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_quickstart_as_it_stands(tmp_path: Path) -> None:
    """On a laptop, in one shell; the demo takes 8 steps where the page leaves its length open."""
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    laptop = page.partition("### Install")[2].partition("What else they do:")[0]
    lines = [line for block in BLOCK.findall(laptop) for line in block.splitlines()]
    script = "\n".join(line for line in lines if line != "make setup")
    folder = copy_of_the_checkout(tmp_path)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True,
        timeout=850,
        env={**os.environ, "ARGS": "--train.max_steps 8 --evaluation.max_examples 4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("runs/demo/report.html", "comparison.html", "runs/mine/exported/config.json"):
        assert (folder / name).is_file(), name
    assert "ROUGE-Lsum" in done.stdout
    code = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
