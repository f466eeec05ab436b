"""Where figures go beside metrics.jsonl; a tracker whose package is not installed is skipped."""

from __future__ import annotations

import http.server
import importlib.util
import io
import json
import os
import shlex
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from t5_fsdp.config import LoggingConfig
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.packages import is_installed
from t5_fsdp.training.trackers import trackers as module
from t5_fsdp.training.trackers.mlflow_runs import MlflowRuns, allowed_name
from t5_fsdp.training.trackers.tensorboard_events import TensorBoardEvents
from t5_fsdp.training.trackers.tracker import Ending, TrackedRun, Tracker
from t5_fsdp.training.trackers.trackers import Trackers, check_trackers
from t5_fsdp.training.trackers.trackio_runs import TrackioRuns
from t5_fsdp.training.trackers.weights_and_biases import WeightsAndBiases
from tests.conftest import ROOT, read_metrics, tiny_options
from tests.launch import run, torchrun


def tracked_run(run_dir: Path, first_step: int = 1) -> TrackedRun:
    config = {"seed": 1, "model": {"config": {}, "name": None}, "optimizer": {"lr": 0.25}}
    return TrackedRun(run_dir, "mine", "summaries", config, first_step)


class Memory:
    """A tracker that keeps what it gets; `trouble` is called before each row."""

    name = "memory"

    def __init__(self, trouble: Any = lambda: None) -> None:
        self.trouble = trouble
        self.got: list[Any] = []

    def start(self, run: TrackedRun) -> str:
        return "look here"

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.trouble()
        self.got.append((step, figures))

    def log_text(self, step: int, name: str, markdown: str) -> None:
        self.got.append((step, name, markdown))

    def finish(self, ending: Ending) -> None:
        self.got.append(ending)


def test_trackers_get_numbers_texts_and_the_ending(tmp_path: Path) -> None:
    stream, memory = io.StringIO(), Memory()
    both = Trackers([memory], tracked_run(tmp_path), Console(stream=stream))
    both.log(3, {"train/loss": 2.5, "train/mfu": None, "train/odd": True, "train/tokens": 7})
    both.log_text(3, "summaries/1", "# one")
    both.finish("preempted")
    both.finish("failed")
    assert memory.got == [
        (3, {"train/loss": 2.5, "train/tokens": 7}), (3, "summaries/1", "# one"), "preempted",
    ]  # fmt: skip
    assert stream.getvalue() == "memory: look here\n"


def test_a_tracker_that_fails_is_told_of_once_and_leaves_the_others_alone(tmp_path: Path) -> None:
    def fail() -> None:
        raise ConnectionError("no route to host\nand more")

    stream, memory = io.StringIO(), Memory()
    both = Trackers([Memory(fail), memory], tracked_run(tmp_path), Console(stream=stream))
    for step in range(1, 5):
        both.log(step, {"loss": 1.0})
    both.finish("finished")
    assert [entry[0] for entry in memory.got[:-1]] == [1, 2, 3, 4]
    [line] = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert "memory has failed (no route to host)" in line and "metrics.jsonl" in line


class Panic(BaseException):
    """As of a package written in Rust."""


@pytest.mark.parametrize(
    ("error", "words"), [(SystemExit(1), "SystemExit: 1"), (Panic(), "Panic: Panic")]
)
def test_a_tracker_that_would_end_the_program_is_told_of_as_well(
    tmp_path: Path, error: BaseException, words: str
) -> None:
    def end() -> None:
        raise error

    stream = io.StringIO()
    trackers = Trackers([Memory(end)], tracked_run(tmp_path), Console(stream=stream))
    trackers.log(1, {"loss": 1.0})
    trackers._senders[0].join(20)
    trackers.log(2, {"loss": 1.0})
    trackers.finish("finished")
    [line] = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert f"memory has failed ({words})" in line


def test_a_tracker_that_has_failed_gathers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    stream = io.StringIO()
    failing = Trackers([Memory(fail)], tracked_run(tmp_path), Console(stream=stream))
    failing.log(1, {"loss": 1.0})
    failing._senders[0].join(20)
    for step in range(2, 10):
        failing.log(step, {"loss": 1.0})
    failing.finish("finished")
    assert stream.getvalue().count("warning") == 1


def test_a_tracker_that_hangs_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 5)
    monkeypatch.setattr(module, "_SECONDS_AT_THE_END", 0.2)
    goes_on = threading.Event()
    stream, memory = io.StringIO(), Memory(lambda: goes_on.wait(20))
    began = time.monotonic()
    hangs_too = Memory(lambda: goes_on.wait(20))
    both = Trackers([memory, hangs_too], tracked_run(tmp_path), Console(stream=stream))
    for step in range(1, 21):
        both.log(step, {"loss": 1.0})
    both.finish("finished")
    assert time.monotonic() - began < 5
    goes_on.set()
    warnings = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == 4
    assert all("5 rows behind" in line for line in warnings[:2])
    assert all("not taken all within" in line for line in warnings[2:])


def test_an_absent_package_is_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = LoggingConfig(tensorboard=False, wandb=True, trackio=True)
    with pytest.raises(UserError) as caught:
        check_trackers(options)
    assert caught.value.problems == (
        "logging.wandb is true, but the package wandb is not installed here; `pip install wandb`, "
        "or set logging.wandb: false",
        "logging.trackio is true, but the package trackio is not installed here; `pip install "
        "trackio`, or set logging.trackio: false",
    )


def test_a_folder_called_like_a_package_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    if is_installed("trackio"):
        pytest.skip("trackio is installed")
    with pytest.raises(UserError, match="not installed here"):
        check_trackers(LoggingConfig(trackio=True))
    assert is_installed("json") and is_installed("sys") and not is_installed("no_such_package")


def test_it_is_said_before_anything_is_written(pools: Any, corpus: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio") is not None:
        pytest.skip("trackio is installed")
    run_dir = tmp_path / "run"
    argv = tiny_options(corpus, run_dir, **{"logging.trackio": "true"})
    code, _, err = pools(2).command("train", argv)
    assert code == 2 and err.startswith("error: logging.trackio is true") and err.count("\n") == 1
    assert not run_dir.exists()


def test_a_run_is_known_again_when_it_is_resumed(tmp_path: Path) -> None:
    first = tracked_run(tmp_path)
    assert first.known_id("wandb") is None
    first.remember_id("wandb", "w1")
    first.remember_id("mlflow", "m1")
    resumed = tracked_run(tmp_path, first_step=4)
    assert (resumed.known_id("wandb"), resumed.known_id("mlflow")) == ("w1", "m1")
    assert tracked_run(tmp_path).known_id("wandb") is None  # begun anew in the same folder
    for spoilt in ('{"wandb": "w', "[]", "3", "null", '{"wandb": ["w"]}', "[" * 100_000):
        (tmp_path / "trackers.json").write_text(spoilt)
        assert resumed.known_id("wandb") is None
    resumed.remember_id("wandb", "w2")
    assert resumed.known_id("wandb") == "w2"


# ---------------------------------------------------------------- the packages themselves


def tensorboard_rows(run_dir: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    rows = {event.step: event.value for event in events.Scalars("train/loss")}
    assert len(rows) == len(events.Scalars("train/loss"))  # none is shown twice
    return rows


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """Of all offline runs in the folder: a file is a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        content, place, record = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if (left := 32768 - place % 32768) < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", content, place)
            record += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or its last part
                parsed = Record()
                parsed.ParseFromString(record)
                yield parsed
                record = b""


def wandb_rows(run_dir: Path) -> dict[int, float]:
    rows: dict[int, float] = {}
    for record in wandb_records(run_dir):
        items = record.history.item
        values = {item.key or "/".join(item.nested_key): item.value_json for item in items}
        if "train/loss" in values:
            rows[int(values["trainer/step"])] = json.loads(values["train/loss"])
    return rows


def mlflow_runs(run_dir: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir.resolve()}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("summaries")
    return client, list(client.search_runs([experiment.experiment_id]))


def mlflow_rows(run_dir: Path) -> dict[int, float]:
    client, [run] = mlflow_runs(run_dir)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    return {metric.step: metric.value for metric in history}


READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
assert SQLiteStorage.get_runs("summaries") == ["mine"]
print(json.dumps(SQLiteStorage.get_logs("summaries", "mine")))
"""


def trackio_rows(run_dir: Path) -> dict[int, float]:
    # In a process of its own: trackio knows one folder a process.
    environment = {**os.environ, "TRACKIO_DIR": str(run_dir / "trackio")}
    command = [sys.executable, "-c", READ_TRACKIO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


ADAPTERS = {
    "tensorboard": (TensorBoardEvents, tensorboard_rows),
    "wandb": (WeightsAndBiases, wandb_rows),
    "mlflow": (MlflowRuns, mlflow_rows),
    "trackio": (TrackioRuns, trackio_rows),
}


@pytest.fixture
def no_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and nothing in the environment that points elsewhere."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Set by the first trackio run of a process and then fixed; monkeypatch takes it back.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "run/trackio"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("package", ADAPTERS)
def test_rows_and_those_of_a_resume_arrive_in_one_run(no_servers: Path, package: str) -> None:
    pytest.importorskip(package)
    make, read = ADAPTERS[package]
    stream = io.StringIO()
    for first_step, last_step in ((1, 5), (4, 8)):  # steps 4 and 5 are done again
        tracker: Tracker = make()
        tracked = tracked_run(no_servers, first_step)
        opened = Trackers([tracker], tracked, Console(stream=stream))
        for step in range(first_step, last_step + 1):
            opened.log(step, {"train/loss": 1 / step, "train/tokens": step, "val/f": float("inf")})
            opened.log_text(step, "summaries/1", "**a** <b>")
        opened.finish("preempted" if last_step == 5 else "finished")
        if package == "wandb":
            time.sleep(1.1)  # its folders are named by the second
    assert "warning" not in stream.getvalue()
    assert read(no_servers) == pytest.approx({step: 1 / step for step in range(1, 9)})
    if package == "wandb":
        ids = {record.run.run_id for record in wandb_records(no_servers) if record.run.run_id}
        assert len(ids) == 1
    if package == "mlflow":
        client, [run] = mlflow_runs(no_servers)
        assert run.info.status == "FINISHED" and run.data.params["optimizer.lr"] == "0.25"
        texts = client.list_artifacts(run.info.run_id, "summaries/1")
        assert len(texts) == 8


def test_trackio_says_where_a_second_run_of_a_process_is(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from t5_fsdp.training.trackers.tracker import TrackedRun\n"
        "from t5_fsdp.training.trackers.trackio_runs import TrackioRuns\n"
        "for name in ('one run', 'two'):\n"
        "    tracker = TrackioRuns()\n"
        "    run = TrackedRun(Path(sys.argv[1]) / name, name, 'summaries', {}, 1)\n"
        "    run.run_dir.mkdir()\n"
        "    print('told:', tracker.start(run))\n"
        "    tracker.log(1, {'train/loss': 1.0})\n"
        "    tracker.finish('finished')\n"
        "    assert 'TRACKIO_DIR' not in os.environ\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRACKIO_")}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("told:")]
    assert all(f"TRACKIO_DIR='{tmp_path}/one run/trackio' trackio show" in line for line in told)
    assert ["one folder a process" in line for line in told] == [False, True]


def test_wandb_is_offline_where_it_can_not_be_online(no_servers: Path) -> None:
    from t5_fsdp.training.trackers import weights_and_biases

    settings = SimpleNamespace(
        api_key=None, identity_token_file=None, base_url="http://127.0.0.1:9"
    )
    assert weights_and_biases._why_offline(settings) == "not logged in"
    (no_servers.parent / ".netrc").write_text("machine 127.0.0.1 login user password key\n")
    (no_servers.parent / ".netrc").chmod(0o600)
    assert "can't be reached" in weights_and_biases._why_offline(settings)

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        settings.base_url = f"http://127.0.0.1:{server.server_port}"
        assert weights_and_biases._why_offline(settings) == ""


def test_an_mlflow_store_that_does_not_know_the_run_gets_a_new_one(no_servers: Path) -> None:
    pytest.importorskip("mlflow")
    tracked_run(no_servers).remember_id("mlflow", "0" * 32)
    tracker = MlflowRuns()
    tracker.start(tracked_run(no_servers, first_step=3))
    tracker.log(3, {"train/loss": 0.5})
    assert mlflow_rows(no_servers) == {3: 0.5}


@pytest.mark.parametrize("whole", [False, True])
def test_an_mlflow_run_that_was_deleted_is_begun_anew(no_servers: Path, whole: bool) -> None:
    pytest.importorskip("mlflow")
    first = MlflowRuns()
    first.start(tracked_run(no_servers))
    first.log(1, {"train/loss": 1.0})
    client, [run] = mlflow_runs(no_servers)
    resumed = tracked_run(no_servers, first_step=2)
    if whole:
        client.delete_experiment(run.info.experiment_id)
        with pytest.raises(ValueError, match="experiment summaries is deleted; restore it"):
            MlflowRuns().start(resumed)
        return
    client.delete_run(run.info.run_id)
    second = MlflowRuns()
    second.start(resumed)
    second.log(2, {"train/loss": 0.5})
    assert mlflow_rows(no_servers) == {2: 0.5}


def test_names_that_mlflow_forbids_are_changed(no_servers: Path) -> None:
    pytest.importorskip("mlflow")
    tracker = MlflowRuns()
    tracker.start(tracked_run(no_servers))
    odd = ["v/f@1", "v//x", "v/../x", "/v", "v/", "..", "v/\u00e9 %", "v/" + "n" * 400]
    tracker.log(1, {name: float(number) for number, name in enumerate(odd)} | {"train/loss": 9.0})
    client, [run] = mlflow_runs(no_servers)
    found = client.get_run(run.info.run_id).data.metrics
    assert (
        len(found) == len({*map(allowed_name, odd)}) + 1 == 8
        and found["v/f_1"] == 0.0
        and found["train/loss"] == 9.0
    )


def test_what_mlflow_prints_can_be_pasted(no_servers: Path) -> None:
    pytest.importorskip("mlflow")
    run_dir = no_servers / "my runs' #1 5%"
    tracker = MlflowRuns()
    told = tracker.start(tracked_run(run_dir)).removesuffix(" shows it").strip("`")
    assert shlex.split(told)[-1] == f"sqlite:///{run_dir}/mlflow/mlflow.db"
    tracker.log(1, {"train/loss": 1.0})
    assert mlflow_rows(run_dir) == {1: 1.0}
    for name in ("what?", "a%20b"):
        with pytest.raises(ValueError, match="in its name; set MLFLOW_TRACKING_URI"):
            MlflowRuns().start(tracked_run(no_servers / name))


@pytest.mark.long
def test_a_real_run_and_its_resume_log_to_all_trackers(corpus: Path, no_servers: Path) -> None:
    for package in ADAPTERS:
        pytest.importorskip(package)
    options = {f"logging.{package}": "true" for package in ADAPTERS}
    options |= {"logging.project": "summaries", "logging.run_name": "mine"}
    for steps in (3, 6):
        argv = tiny_options(corpus, no_servers, **options | {"train.max_steps": steps})
        done = run(torchrun("train", argv))
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stdout
    expected = {row["step"]: row["loss"] for row in read_metrics(no_servers, "train")}
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    for package, (_, read) in ADAPTERS.items():
        assert read(no_servers) == pytest.approx(expected, rel=1e-6), package
