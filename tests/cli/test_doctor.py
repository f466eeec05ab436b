"""What `doctor` says of good and bad machines."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from t5_fsdp.cli import doctor
from t5_fsdp.cli.machine_checks import (
    gpus,
    limits,
    network,
    run_state,
    software,
    storage,
)
from t5_fsdp.cli.machine_checks.finding import GIB, Finding, problem
from t5_fsdp.cli.machine_checks.gpus import Gpu, GpuFacts, gather_gpu_facts, judge_gpus
from t5_fsdp.config import CheckpointConfig, Config, ParallelConfig
from tests.conftest import ROOT, tiny_options
from tests.launch import run
from tests.run_folders import make_checkpoint

A100 = Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB, 39 * GIB, has_bf16=True)
V100 = Gpu("Tesla V100", 16 * GIB, 16 * GIB, has_bf16=False)


def states(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.state, finding.subject) for finding in findings]


def p4d(**changes: Any) -> GpuFacts:
    facts = {"gpus": [A100] * 8, "driver": "580.1", "num_gpus_of_driver": 8, "cuda": "13.0",
             "nccl": "2.29"}  # fmt: skip
    return GpuFacts(**{**facts, **changes})


def test_a_p4d_node_is_fit() -> None:
    found = judge_gpus(p4d(), ParallelConfig())
    assert states(found) == [("ok", "GPUs"), ("ok", "bf16")]
    assert found[0].text == (
        "8 x NVIDIA A100-SXM4-40GB, 40.0 GiB; driver 580.1, CUDA 13.0, NCCL 2.29"
    )


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (GpuFacts(), "note", "training runs on the CPU"),
        (p4d(gpus=[], hidden_by=""), "problem", "CUDA_VISIBLE_DEVICES is ''"),
        (p4d(gpus=[], cuda=None), "problem", "build for CPUs"),
        (p4d(gpus=[]), "problem", "too old for CUDA 13.0"),
        (p4d(gpus=[A100] * 4, hidden_by="0,1,2,3"), "note", "CUDA_VISIBLE_DEVICES=0,1,2,3"),
        (p4d(gpus=[A100] * 7 + [V100]), "note", "they differ"),
        (p4d(gpus=[V100] * 8), "problem", "fp32"),
        (p4d(num_pairs_without_access=3), "note", "3 pairs"),
        (
            p4d(gpus=[A100] * 7 + [Gpu(A100.name, 40 * GIB, 10 * GIB, True)]),
            "problem",
            "GPU 7: 30.0 GiB",
        ),
    ],
)
def test_what_is_wrong_with_gpus_is_named(facts: GpuFacts, state: str, words: str) -> None:
    found = judge_gpus(facts, ParallelConfig())
    assert any(finding.state == state and words in finding.text for finding in found), found


def test_bf16_is_asked_for_by_the_configuration_alone() -> None:
    [_, bf16] = judge_gpus(p4d(gpus=[V100] * 8), ParallelConfig(param_dtype="fp32"))
    assert bf16.state == "note"


def test_the_gpus_of_this_machine_are_gathered() -> None:
    facts = gather_gpu_facts()
    assert len(facts.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert facts.cuda == torch.version.cuda


def test_old_python_and_packages() -> None:
    assert software.check_python((3, 9, 2)).state == "problem"
    assert software.check_python((3, 13, 0)).text == "3.13.0"
    assert [finding.state for finding in software.check_packages()] == ["ok"]

    def version_of(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.10.1+cu128"}.get(name, "99.0")

    absent, old = software.check_packages(version_of)
    assert absent.text.startswith("not installed: peft;") and "requirements.txt" in absent.text
    assert old.text.startswith("too old: torch 2.10.1+cu128 (at least 2.11);")


def test_the_oldest_packages_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    [block] = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    found = {}
    for line in re.findall(r'"(.+?)"', block):
        name, _, oldest = line.partition(">=")
        found[name.partition("[")[0]] = oldest
    assert found == software.OLDEST


def test_a_compiler_is_wanted_only_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config = Config()
    assert software.check_compiler(config, on_gpu=False) == []
    config.parallel.compile = True
    [found] = software.check_compiler(config, on_gpu=False)
    assert found.state == "problem" and "parallel.compile: false" in found.text


@contextlib.contextmanager
def limited(name: int, soft: int) -> Iterator[None]:
    old, hard = resource.getrlimit(name)
    resource.setrlimit(name, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(name, (old, hard))


def test_a_small_limit_of_open_files() -> None:
    with limited(resource.RLIMIT_NOFILE, 700):
        found = limits.check_open_files()
    assert found.state == "problem" and "at most 700" in found.text and "ulimit -n" in found.text
    with limited(resource.RLIMIT_NOFILE, 1024):
        assert limits.check_open_files().state == "ok"


def test_locked_memory_counts_beside_adapters_alone() -> None:
    with limited(resource.RLIMIT_MEMLOCK, 65536):
        assert limits.check_locked_memory(has_rdma=False) == []
        [found] = limits.check_locked_memory(has_rdma=True)
    assert found.state == "problem" and "64 KiB" in found.text


def test_the_memory_of_a_container(tmp_path: Path) -> None:
    assert limits.memory_limit_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.memory_limit_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    found = limits.check_memory(8, tmp_path)
    assert found.state == "problem" and found.text.startswith("1.0 GiB for this container, of ")
    assert limits.check_memory(0, tmp_path).state == "ok"


def test_fewer_cores_than_processes() -> None:
    assert limits.check_cores(1).state == "ok"
    assert limits.check_cores(100_000).state == "note"


def test_a_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.check_shared_memory(True, tmp_path / "none").state == "note"
    usage = shutil._ntuple_diskusage(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = storage.check_shared_memory(True, tmp_path)
    assert found.state == "problem" and "0.06 GiB" in found.text and "--ipc=host" in found.text
    assert storage.check_shared_memory(False, tmp_path).state == "note"


def test_a_good_run_dir_is_left_as_it_was(tmp_path: Path) -> None:
    found = storage.check_run_dir(tmp_path / "deep" / "run")
    assert not list(tmp_path.iterdir())
    assert "problem" not in [finding.state for finding in found]
    assert any(finding.text.startswith("writes ") for finding in found)


def test_bad_run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    [found] = storage.check_run_dir(tmp_path / "file" / "run")
    assert found.state == "problem" and "is no folder" in found.text

    opens = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return opens(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)  # root may write anywhere
    found = storage.check_run_dir(tmp_path / "run")[1]
    assert found.state == "problem" and "can't be written (Permission denied)" in found.text
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(GIB, GIB, 5 * 2**20)
    )
    found = storage.check_run_dir(tmp_path / "run")[0]
    assert found.state == "problem" and "0.0 GiB free" in found.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_run_dir(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert storage.check_run_dir(tmp_path)[1].state == "problem"


def test_a_slow_disk() -> None:
    found = storage.judge_speed(20e6)
    assert found.state == "note" and "28 minutes" in found.text
    assert storage.judge_speed(200e6).state == "ok"


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    deep = tmp_path / "a b" / "c"
    deep.mkdir(parents=True)
    inner = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"x / ext4 rw 0 0\nx {inner} tmpfs rw 0 0\ny /elsewhere xfs rw 0 0\n")
    assert storage.file_system(deep, mounts) == "tmpfs"
    assert storage.file_system(tmp_path, mounts) == "ext4"
    assert storage.file_system(tmp_path, tmp_path / "none") == ""


def test_an_instance_store_is_found_below_a_raid(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    raid = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    disk = tmp_path / "nvme1n1"
    (disk / "device").mkdir(parents=True)
    (disk / "device" / "model").write_text("Amazon EC2 NVMe Instance Storage        \n")
    (disk / "nvme1n1p1").mkdir()
    (raid / "slaves").mkdir(parents=True)
    (raid / "slaves" / "nvme1n1p1").symlink_to(disk / "nvme1n1p1")
    models = storage.disk_models(tmp_path, tmp_path)
    assert models == {"Amazon EC2 NVMe Instance Storage"}
    [found] = storage._judge_keeping(tmp_path, "xfs", models)
    assert "lost when the instance stops" in found.text
    [found] = storage._judge_keeping(tmp_path, "tmpfs", set())
    assert "in memory" in found.text
    assert storage._judge_keeping(tmp_path, "ext4", {"Amazon Elastic Block Store"}) == []


def test_adapters_and_their_plugin(tmp_path: Path) -> None:
    assert network.check_adapters(network.rdma_adapters(tmp_path)) == []
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    for number in range(4):
        device = tmp_path / "class" / f"rdmap{number}" / "device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / "efa")
    adapters = network.rdma_adapters(tmp_path / "class")
    [found] = network.check_adapters(adapters, has_plugin=False)
    assert found.state == "note" and "4 (efa)" in found.text and "aws-ofi-nccl" in found.text
    assert network.check_adapters(adapters, has_plugin=True)[0].state == "ok"


def test_an_absent_hub_is_a_problem_for_who_needs_it(tmp_path: Path) -> None:
    config = Config()
    config.model.name = "nobody/has-this"
    found = network.judge_hub_absence("no answer", config)
    assert found.state == "problem" and "hf download nobody/has-this" in found.text
    for name in (None, str(tmp_path)):
        config.model.name = name
        assert network.judge_hub_absence("no answer", config).state == "note"


def test_the_bandwidth_of_peers() -> None:
    assert network.judge_bandwidth(230e9, 8, on_gpu=True).state == "ok"
    assert network.judge_bandwidth(9e9, 8, on_gpu=True).state == "note"
    assert network.judge_bandwidth(0.5e9, 2, on_gpu=False).state == "ok"
    log = "W torch/distributed\nTraceback:\n  File x\nRuntimeError: no route: gone\n[rank0] more"
    assert network.last_error(log) == "RuntimeError: no route: gone"
    failed = network._judge_failed_peers(8, "NCCL error", on_gpu=True)
    assert failed.state == "problem" and "NCCL_DEBUG=INFO" in failed.text


def check_report(text: str, peers: bool) -> None:
    lines = text.splitlines()
    assert lines[-1] == "nothing stands in the way of a run"
    subjects = [line[9:24].strip() for line in lines[:-1] if line[:8].strip()]
    for subject in ("Python", "packages", "configuration", "GPUs", "disk", "Hub"):
        assert subject in subjects
    assert ("peer bandwidth" in subjects) == peers


def test_this_machine_is_fit(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([*tiny_options(corpus, tmp_path / "run"), "--peers", "false"]) == 0
    check_report(capsys.readouterr().out, peers=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_its_processes_reach_each_other(corpus: Path, tmp_path: Path) -> None:
    argv = tiny_options(corpus, tmp_path / "run")
    done = run([sys.executable, str(ROOT / "scripts/doctor.py"), *argv])
    assert done.returncode == 0, done.stdout + done.stderr
    check_report(done.stdout, peers=True)
    assert re.search(r"GB/s between 2 CPU processes", done.stdout)


def test_a_missing_file_and_an_impossible_option_are_problems(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = tiny_options(corpus, tmp_path / "run", **{"data.train_files": "gone.jsonl"})
    code = doctor.main([*argv, "--peers", "false", "--train.epochs", "0"])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err == "error: 2 problems to mend before a run, named above with what to do\n"
    text = " ".join(captured.out.split())
    assert "problem configuration" in text and "gone.jsonl" in text and "train.epochs" in text
    assert "peer" not in captured.out


def test_without_a_configuration_no_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, place in (([], "runs"), (["--run_dir", "runs/mine"], "runs/mine")):
        doctor.main([*argv, "--peers", "false"])
        assert f"GiB free at {place}\n" in capsys.readouterr().out


def test_a_problem_of_the_configuration_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run_dir: {tmp_path / 'mine'}\nmodel: {{name: nobody/has-this}}\n"
        "train: {epochs: 0}\nparallel: {compile: true}\n"
        "data: {source: files, train_files: [gone.jsonl]}\n"
    )
    argv = ["--config", str(config), "--peers", "false"]
    assert doctor.main(argv) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "gone.jsonl does not exist" in text and "train.epochs is 0" in text
    assert "needs a C++ compiler" in text and f"free at {tmp_path / 'mine'}" in text
    assert "model.name nobody/has-this is not in the cache" in text
    assert "has its default" not in text

    assert doctor.main([*argv, "--seed", "x", "--model.config", "3"]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "has its default in all that follows: seed, model.config" in text
    assert "needs a C++ compiler" in text and "nobody/has-this" in text


def test_a_model_that_can_not_be_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a b", "x--y", "m" * 300):
        assert doctor.main(["--model.name", name, "--peers", "false"]) == 2
        assert "is neither a folder nor a name" in " ".join(capsys.readouterr().out.split())


def test_a_run_dir_that_can_not_be_made(tmp_path: Path) -> None:
    for run_dir in (
        tmp_path / ("x" * 300),
        tmp_path / "a" / ("x" * 300),
        Path("/".join(["y"] * 3000)),
    ):
        found = storage.check_run_dir(run_dir)
        assert ("problem", "run_dir") in states(found), found
        assert all(len(finding.text) < 400 for finding in found)
    assert storage.check_run_dir(Path("a\0b"))[0].state == "problem"
    assert storage.check_run_dir(tmp_path / "new/../../up")[0].state != "problem"
    assert not list(tmp_path.iterdir()) and not (tmp_path.parent / "up").exists()


def test_a_run_dir_that_train_refuses(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_state.check_going_on(run_dir, CheckpointConfig()) == []
    model = {"config": {"model_type": "t5"}, "own_head": False}
    newest = make_checkpoint(run_dir, 7, {}, model=model)
    [found] = run_state.check_going_on(run_dir, CheckpointConfig())
    assert found.state == "ok" and found.text.endswith(f"goes on from {newest}")
    [found] = run_state.check_going_on(run_dir, CheckpointConfig(resume="never"))
    assert found.state == "problem" and "checkpoint.resume: never" in found.text
    with FileLock(str(run_dir / ".lock")):
        [found] = run_state.check_going_on(run_dir, CheckpointConfig())
    assert found.state == "problem" and "in use by another run" in found.text


def test_a_folder_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)  # root may search anything
    [found] = storage.check_run_dir(tmp_path)
    assert found.state == "problem" and "(Permission denied)" in found.text


def test_odd_bytes_of_the_system_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, inner = tmp_path / "mounts", tmp_path / "a\tb\\c"
    inner.mkdir()
    name = str(inner).replace("\\", "\\134").replace("\t", "\\011").encode()
    mounts.write_bytes(b"x / ext4 rw\n\nx\ny /mnt/\xff xfs\nz " + name + b" tmpfs rw 0 0\n")
    assert storage.file_system(inner, mounts) == "tmpfs"
    assert storage.file_system(tmp_path, mounts) == "ext4"

    (tmp_path / "memory.max").write_bytes(b"\xff\n")
    assert limits.memory_limit_bytes(tmp_path) is None

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '580\\377.1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpus._ask_driver() == ["580\ufffd.1"]


def test_a_long_finding_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = doctor.as_text(problem("disk", "word " * 40)).splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) > 2
    assert lines[0].startswith("problem  disk ") and lines[1].startswith(" " * 24 + "word")
