"""The disk under run_dir, and the shared memory."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from t5_fsdp.cli.machine_checks.finding import GIB, Finding, note, ok, problem

_LEAST_FREE = 1 * GIB
_LITTLE_FREE = 40 * GIB  # a checkpoint of T5-3B has 34 GB
_SLOW_BYTES_PER_SECOND = 100e6
_WRITTEN_BYTES = 64 * 2**20
_LEAST_SHARED_MEMORY = 1 * GIB
_IN_MEMORY = {"tmpfs", "ramfs"}


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the one above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path


def check_run_dir(run_dir: Path) -> list[Finding]:
    """Whether there is room, how fast it takes a file, and whether it is there tomorrow.

    Leaves nothing behind.
    """
    folder = nearest_folder(run_dir)
    if not folder.is_dir():
        return [
            problem("run_dir", f"{folder} is no folder; move it away, or give another --run_dir")
        ]
    free = shutil.disk_usage(folder).free
    found = [_judge_room(run_dir, free)]
    if free > _WRITTEN_BYTES + _LEAST_FREE:
        found.append(_check_writing(run_dir, folder))
    return [*found, *_judge_keeping(run_dir, file_system(folder), disk_models(folder))]


def _judge_room(run_dir: Path, free: int) -> Finding:
    text = f"{free / GIB:,.1f} GiB free at {run_dir}"
    if free < _LEAST_FREE:
        return problem("disk", f"{text}; make room, or give another --run_dir")
    if free < _LITTLE_FREE:
        return note(
            "disk",
            f"{text}; a checkpoint of T5-3B takes 34 GB, and up to four exist at a time (`train "
            "--check true` counts them for a configuration)",
        )
    return ok("disk", text)


def _check_writing(run_dir: Path, folder: Path) -> Finding:
    probe = folder / f".t5-fsdp-doctor-{secrets.token_hex(4)}"
    block = os.urandom(2**20)
    began = time.perf_counter()
    try:
        with probe.open("wb") as file:
            for _ in range(_WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return problem(
            "disk",
            f"{folder} can't be written ({error.strerror}); change its permissions, or give "
            "another --run_dir",
        )
    finally:
        probe.unlink(missing_ok=True)
    return judge_speed(_WRITTEN_BYTES / (time.perf_counter() - began))


def judge_speed(bytes_per_second: float) -> Finding:
    """Of writing, flushed to the disk."""
    text = f"writes {bytes_per_second / 1e6:,.0f} MB/s"
    if bytes_per_second < _SLOW_BYTES_PER_SECOND:
        minutes = 34e9 / bytes_per_second / 60
        return note(
            "disk",
            f"{text}, so a checkpoint of T5-3B (34 GB) takes {minutes:,.0f} minutes; raise "
            "checkpoint.every_steps, or use a faster disk",
        )
    return ok("disk", text)


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Its type, e.g. ext4 or tmpfs; empty where the system does not tell."""
    real = folder.resolve()
    best, kind = -1, ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        place = Path(line.split()[1].replace("\\040", " "))
        if (place == real or place in real.parents) and len(place.parts) >= best:
            best, kind = len(place.parts), line.split()[2]
    return kind


def disk_models(folder: Path, devices: Path = Path("/sys/dev/block")) -> set[str]:
    """How the disks under the folder call themselves, through partitions, RAID and LVM."""
    number = folder.stat().st_dev
    start = devices / f"{os.major(number)}:{os.minor(number)}"
    models, waiting = set(), [start.resolve()] if start.exists() else []
    while waiting:
        device = waiting.pop()
        waiting += [path.resolve() for path in device.glob("slaves/*")]
        for place in (device, device.parent):  # a partition stands in its disk's folder
            model = place / "device" / "model"
            if model.is_file():
                models.add(model.read_text().strip())
    return models


def _judge_keeping(run_dir: Path, kind: str, models: set[str]) -> list[Finding]:
    if kind in _IN_MEMORY:
        lost = f"{run_dir} is in memory ({kind})"
    elif kind == "overlay":
        lost = f"{run_dir} is inside a container and goes with it"
    elif any("Instance Storage" in model for model in models):
        lost = f"{run_dir} is on an instance store, which is lost when the instance stops"
    else:
        return []
    return [note("disk", f"{lost}; give a --run_dir that outlives it (EBS, FSx, a volume)")]


def check_shared_memory(on_gpu: bool, folder: Path = Path("/dev/shm")) -> Finding:
    """NCCL passes tensors through it where GPUs don't reach each other; containers have 64 MB."""
    if not folder.is_dir():
        return note("shared memory", f"there is no {folder}")
    size = shutil.disk_usage(folder).total
    text = f"{folder} has {size / GIB:.2f} GiB"
    if size >= _LEAST_SHARED_MEMORY:
        return ok("shared memory", text)
    text += "; start the container with `--ipc=host` or `--shm-size=8g`"
    return problem("shared memory", text) if on_gpu else note("shared memory", text)
