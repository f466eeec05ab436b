"""Each error text that docs/troubleshooting.md quotes is produced by a real call."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from t5_fsdp import summarize
from t5_fsdp.benchmark.workload import read_pairs
from t5_fsdp.checkpoint.format import check_complete
from t5_fsdp.checkpoint.hub import check_push
from t5_fsdp.cli import launch_check
from t5_fsdp.cli.options import parse_layers
from t5_fsdp.cli.run_folder import lock_run_dir
from t5_fsdp.cli.texts import find_files
from t5_fsdp.config import LoggingConfig, ParallelConfig
from t5_fsdp.console import Console
from t5_fsdp.data.readers import read_rows
from t5_fsdp.distributed import Launch, enter_world, pick_device
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.predictions import read_predictions
from t5_fsdp.files import check_new
from t5_fsdp.model.devices import DEVICES
from t5_fsdp.parallel import activation_checkpointing
from t5_fsdp.planning.step_time import step_time
from t5_fsdp.planning.workload import Lengths
from t5_fsdp.report.runs import read_runs
from t5_fsdp.training.trackers.tracker import TrackedRun
from t5_fsdp.training.trackers.trackers import Trackers, check_trackers
from tests.conftest import ROOT, tiny_options, write_jsonl
from tests.distributed.test_hang import train_with_a_hang
from tests.planning.runs import planned
from tests.training.test_out_of_memory import train_with_too_little_memory
from tests.training.test_trackers import Memory

PAGE = ROOT / "docs/troubleshooting.md"
# The rows of "Other errors, by kind": what about, text, what helps, where in the code.
ROW = re.compile(r"^\| (.+?) \| `(error: .+?)` \| .+? \| (`t5_fsdp/.+?) \|$", re.MULTILINE)
QUOTED = re.compile(r"^### (.+?)\n\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```text\n(.+?)\n```$", re.MULTILINE | re.DOTALL)


def quoted_texts() -> dict[str, list[str]]:
    """The texts of each entry by its title."""
    page = PAGE.read_text(encoding="utf-8")
    entries = {title: BLOCK.findall(body) for title, body in QUOTED.findall(page)}
    return entries | {about: [text] for about, text, _ in ROW.findall(page)}


@dataclass
class Desk:
    """What provokers work with."""

    pools: Any
    corpus: Path
    folder: Path
    trained_once: Path
    monkeypatch: pytest.MonkeyPatch

    def options(self, **overrides: Any) -> list[str]:
        return tiny_options(self.corpus, self.folder / "run", **overrides)

    def train(self, *more: str, **overrides: Any) -> str:
        """Train on one rank; all that it says."""
        _, out, err = self.pools(1).command("train", [*self.options(**overrides), *more])
        return out + err

    def trained(self) -> Path:
        """The run folder of a step; its checkpoint is step-00000001."""
        return shutil.copytree(self.trained_once, self.folder / "run")


PROVOKERS: dict[str, list[Callable[[Desk], str]]] = {}


def provokes(title: str) -> Callable[[Callable[[Desk], str]], Callable[[Desk], str]]:
    """The next text of this entry is what the function returns, among other lines."""

    def register(function: Callable[[Desk], str]) -> Callable[[Desk], str]:
        PROVOKERS.setdefault(title, []).append(function)
        return function

    return register


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value.render()


@provokes("The data is not where the recipe looks")
def _(desk: Desk) -> str:
    return desk.train(**{"data.source": "wikihow", "data.path": desk.folder})


@provokes("A column has another name")
def _(desk: Desk) -> str:
    return desk.train(**{"data.document_column": "article"})


@provokes("A row is malformed")
def _(desk: Desk) -> str:
    path = desk.folder / "broken.jsonl"
    path.write_text('{"document": "rinse rice.", "summary": "rice."}\n{"document": "rin\n')
    return desk.train(**{"data.train_files": path})


@provokes("An option is misspelled")
def _(desk: Desk) -> str:
    return desk.train(**{"train.epoch": 3})


@provokes("No GPU")
def _(desk: Desk) -> str:
    desk.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return refusal(lambda: launch_check.check_launch(desk.options()))


@provokes("More processes than GPUs")
def _(desk: Desk) -> str:
    desk.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    desk.monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return refusal(lambda: pick_device(Launch(world_size=8, local_world_size=8)))


@provokes("The model can't be downloaded")
def _(desk: Desk) -> str:
    name = {"model.name": "google-t5/t5-small", "model.init": "pretrained", "model.config": "{}"}
    return desk.train(**name)


@provokes("The tokenizer can't be downloaded")
def _(desk: Desk) -> str:
    return desk.train(**{"model.tokenizer": "google-t5/t5-small"})


@provokes("A tracker is not installed")
def _(desk: Desk) -> str:
    desk.monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return refusal(lambda: check_trackers(LoggingConfig(tensorboard=False, wandb=True)))


@provokes("An example is longer than a micro-batch")
def _(desk: Desk) -> str:
    return desk.train(**{"train.micro_batch_tokens": 20})


@provokes("The disk is too small for the checkpoints")
def _(desk: Desk) -> str:
    from t5_fsdp.checkpoint.retention import check_room

    full = shutil.disk_usage(desk.folder)._replace(free=10**6)
    desk.monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    return refusal(lambda: check_room(desk.folder, 4, 34 * 10**9, 0))


@provokes("Two runs in one folder")
def _(desk: Desk) -> str:
    lock = lock_run_dir(desk.folder, Console(False))
    try:
        return refusal(lambda: lock_run_dir(desk.folder, Console(False), wait_seconds=0.1))
    finally:
        lock.release()


@provokes("There are checkpoints, and none was expected")
def _(desk: Desk) -> str:
    desk.trained()
    return desk.train(**{"checkpoint.resume": "never"})


@provokes("The data or the model is another one than before")
def _(desk: Desk) -> str:
    desk.trained()
    return desk.train(**{"data.prefix": "sum: ", "train.max_steps": 2})


@provokes("The data or the model is another one than before")
def _(desk: Desk) -> str:
    desk.trained()
    return desk.train(**{"model.config": '{"d_model": 64}', "train.max_steps": 2})


@provokes("All checkpoints are damaged")
def _(desk: Desk) -> str:
    checkpoint = desk.trained() / "checkpoints" / "step-00000001"
    [shard] = checkpoint.glob("*.distcp")
    shard.write_bytes(b"")
    return desk.train(**{"train.max_steps": 2})


@provokes("The loss is not finite")
def _(desk: Desk) -> str:
    return desk.train(**{"optimizer.lr": "1e30", "optimizer.grad_clip_norm": "null"})


@provokes("A file can't be written")
def _(desk: Desk) -> str:
    (desk.folder / "run" / "metrics.jsonl").mkdir(parents=True)
    return desk.train()


@provokes("A rank hangs")
def _(desk: Desk) -> str:
    argv = desk.options(**{"train.collective_timeout_seconds": 2})
    results = desk.pools(2).run(train_with_a_hang, argv, 2, 9.0)
    return results[0][2]


@provokes("A tracker has failed")
def _(desk: Desk) -> str:
    def fail() -> None:
        raise ConnectionError("no route to host")

    stream = io.StringIO()
    run = TrackedRun(desk.folder, "run", None, {}, 1)
    trackers = Trackers([Memory(fail)], run, Console(stream=stream))
    trackers.log(1, {"loss": 1.0})
    trackers.finish("finished")
    return stream.getvalue()


@provokes("Memory runs out")
def _(desk: Desk) -> str:
    options = {"train.collective_timeout_seconds": 5, "train.max_steps": 5}
    results = desk.pools(1).run(train_with_too_little_memory, desk.options(**options), 0, True)
    return results[0][2]


@provokes("an option's value")
def _(desk: Desk) -> str:
    return desk.train(**{"train.global_batch_size": 0})


@provokes("a YAML file")
def _(desk: Desk) -> str:
    path = desk.folder / "empty.yaml"
    path.touch()
    return refusal(lambda: parse_layers(["--config", str(path)], command="train", description=""))


@provokes("a data file")
def _(desk: Desk) -> str:
    path = desk.folder / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"document": "a", "summary": "b"}\n')[:-9])
    return refusal(lambda: list(read_rows(path)))


@provokes("the tokenizer")
def _(desk: Desk) -> str:
    return desk.train(**{"model.tokenizer": "./none"})


@provokes("the model, its configuration and weights")
def _(desk: Desk) -> str:
    return desk.train(**{"model.name": "./none", "model.init": "pretrained", "model.config": "{}"})


@provokes("the engine")
def _(desk: Desk) -> str:
    return refusal(lambda: activation_checkpointing.apply(torch.nn.Linear(2, 2), ParallelConfig()))


@provokes("how processes are started")
def _(desk: Desk) -> str:
    desk.monkeypatch.delenv("MASTER_ADDR", raising=False)
    return refusal(lambda: enter_world(Launch(world_size=2, local_world_size=2)))


@provokes("training itself")
def _(desk: Desk) -> str:
    return desk.train(**{"optimizer.lr": "1e30", "optimizer.grad_clip_norm": "null"})


@provokes("a checkpoint or a run folder")
def _(desk: Desk) -> str:
    return refusal(lambda: check_complete(desk.folder / "checkpoints/step-00000001"))


@provokes("exporting")
def _(desk: Desk) -> str:
    (desk.folder / "file").touch()
    return refusal(lambda: check_new(desk.folder, "--output"))


@provokes("the Hub")
def _(desk: Desk) -> str:
    return refusal(lambda: check_push("me/my-t5"))


@provokes("predictions, scores, comparisons")
def _(desk: Desk) -> str:
    path = write_jsonl(desk.folder / "mine.jsonl", [{"reference": "a"}])
    return refusal(lambda: read_predictions(path))


@provokes("texts to summarize")
def _(desk: Desk) -> str:
    return refusal(lambda: find_files([str(desk.folder)]))


@provokes("the report")
def _(desk: Desk) -> str:
    return refusal(lambda: read_runs([desk.folder]))


@provokes("a plan")
def _(desk: Desk) -> str:
    device = dataclasses.replace(DEVICES["t4"], name="CPU")
    return refusal(lambda: step_time(planned(), device, Lengths(512, 150, "")))


@provokes("the benchmark")
def _(desk: Desk) -> str:
    (desk.folder / "pairs.jsonl").touch()
    return refusal(lambda: read_pairs(desk.folder / "pairs.jsonl"))


@provokes("a program that uses the package")
def _(desk: Desk) -> str:
    return refusal(lambda: summarize("one text", desk.folder))


@provokes("`t5-fsdp` and the small commands")
def _(desk: Desk) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "t5_fsdp", "trian"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stderr


@functools.cache
def failing_torchrun() -> str:
    """What torchrun says round a process that fails."""
    environment = {name: os.environ[name] for name in os.environ if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fails.py"
        program.write_text("raise SystemExit(2)")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc_per_node", "2", str(program)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    return done.stderr


@provokes("A block behind the end")
def _(desk: Desk) -> str:
    return failing_torchrun()


@provokes("OMP_NUM_THREADS")
def _(desk: Desk) -> str:
    return failing_torchrun()


@provokes("The port is taken")
def _(desk: Desk) -> str:
    first = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", first.port, is_master=True)
    return str(caught.value)


@pytest.fixture(scope="module")
def trained_once(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    argv = tiny_options(corpus, run_dir, **{"train.max_steps": 1})
    code, _, err = pools(1).command("train", argv)
    assert code == 0, err
    return run_dir


# `make test` has the same hang, and looks for the same text, in tests/distributed/test_hang.py.
LONG = {"A rank hangs"}


def test_every_entry_is_provoked_and_every_provoker_has_an_entry() -> None:
    entries = quoted_texts()
    assert len(entries) >= 40
    assert {title: len(texts) for title, texts in entries.items()} == {
        title: len(functions) for title, functions in PROVOKERS.items()
    }


def modules_with_errors_for_users() -> set[str]:
    made = re.compile(r"\b(?:UserError|DamagedError)\(")
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "t5_fsdp").rglob("*.py")}
    return {
        str(path.relative_to(ROOT))
        for path, text in files.items()
        if made.search(text) and path.name != "errors.py"
    }


def test_every_module_that_has_errors_for_users_has_its_row() -> None:
    places = [
        place
        for *_, cell in ROW.findall(PAGE.read_text(encoding="utf-8"))
        for place in re.findall(r"`(t5_fsdp/[\w./]+)`", cell)
    ]
    modules = modules_with_errors_for_users()
    assert len(modules) > 50
    assert [name for name in modules if not name.startswith(tuple(places))] == []
    unused = [place for place in places if not any(name.startswith(place) for name in modules)]
    assert unused == []


@pytest.mark.parametrize(
    ("title", "number"),
    [
        pytest.param(title, number, marks=[pytest.mark.long] * (title in LONG))
        for title, texts in quoted_texts().items()
        for number in range(len(texts))
    ],
)
def test_the_text_is_what_a_user_sees(
    title: str,
    number: int,
    pools: Any,
    corpus: Path,
    tmp_path: Path,
    trained_once: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quoted = quoted_texts()[title][number]
    said = PROVOKERS[title][number](Desk(pools, corpus, tmp_path, trained_once, monkeypatch))
    pattern = ".+".join(re.escape(part) for part in quoted.split("..."))
    assert any(re.search(pattern, line) for line in said.splitlines()), said
