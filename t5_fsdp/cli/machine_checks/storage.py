"""The disk under run_dir, and the shared memory."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from t5_fsdp.cli.machine_checks.finding import GIB, Finding, note, ok, problem, shorten

_LEAST_FREE_BYTES = 1 * GIB
_LITTLE_FREE_BYTES = 40 * GIB  # a checkpoint of T5-3B has 34 GB
_SLOW_BYTES_PER_SECOND = 100e6
_WRITTEN_BYTES = 64 * 2**20
_LEAST_SHARED_MEMORY_BYTES = 1 * GIB
_IN_MEMORY = {"tmpfs", "ramfs"}


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the one above it that exists.

    Raises:
        OSError: a folder above it may not be searched.
    """
    path = path.absolute()
    while not _exists(path):
        path = path.parent
    return path


def _exists(path: Path) -> bool:
    """As os.path.lexists, to which a folder that may not be searched holds nothing."""
    try:
        path.lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise
    return True


def check_run_dir(run_dir: Path) -> list[Finding]:
    """Whether there is room, how fast it takes a file, and whether it is there tomorrow.

    Leaves nothing behind.
    """
    try:
        folder = nearest_folder(run_dir)
        if not folder.is_dir():
            return [
                problem(
                    "run_dir", f"{folder} is no folder; move it away, or give another --run_dir"
                )
            ]
        free_bytes = shutil.disk_usage(folder).free
        found = [_judge_room(run_dir, free_bytes)]
        if free_bytes > _WRITTEN_BYTES + _LEAST_FREE_BYTES:
            found.append(_check_writing(run_dir, folder))
        return [*found, *_judge_keeping(run_dir, file_system(folder), disk_models(folder))]
    except (OSError, ValueError) as error:  # e.g. a folder that may not be searched, a NUL
        return [_unwritable(run_dir, error)]


def _unwritable(run_dir: Path, error: OSError | ValueError) -> Finding:
    reason = getattr(error, "strerror", None) or error
    return problem(
        "run_dir",
        f"{shorten(str(run_dir))} can't be written ({reason}); change its permissions, or give "
        "another --run_dir",
    )


def _judge_room(run_dir: Path, free_bytes: int) -> Finding:
    text = f"{free_bytes / GIB:,.1f} GiB free at {shorten(str(run_dir))}"
    if free_bytes < _LEAST_FREE_BYTES:
        return problem("disk", f"{text}; make room, or give another --run_dir")
    if free_bytes < _LITTLE_FREE_BYTES:
        return note(
            "disk",
            f"{text}; a checkpoint of T5-3B takes 34 GB, and up to four exist at a time (`train "
            "--check true` counts them for a configuration)",
        )
    return ok("disk", text)


def _check_writing(run_dir: Path, folder: Path) -> Finding:
    probe = folder / f".t5-fsdp-doctor-{secrets.token_hex(4)}"
    block = os.urandom(2**20)
    try:
        # The folders that a run would make: a file system may refuse their names.
        names = run_dir.absolute().relative_to(folder).parts
        inner = probe.joinpath(*(name for name in names if name != ".."))
        inner.mkdir(parents=True)
        began = time.perf_counter()
        with (inner / "probe").open("wb") as file:
            for _ in range(_WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    except OSError as error:
        return _unwritable(run_dir, error)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return judge_speed(_WRITTEN_BYTES / seconds)


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
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        place = Path(_unescaped(fields[1]))
        if (place == real or place in real.parents) and len(place.parts) >= best:
            best, kind = len(place.parts), _unescaped(fields[2])
    return kind


def _unescaped(field: bytes) -> str:
    """The kernel writes blanks, tabs, line ends, # and backslashes as three octal digits."""
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda code: bytes([int(code[1], 8)]), field))


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
                models.add(model.read_text(encoding="utf-8", errors="replace").strip())
    return models


def _judge_keeping(folder: Path, kind: str, models: set[str]) -> list[Finding]:
    run_dir = shorten(str(folder))
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
    size_bytes = shutil.disk_usage(folder).total
    text = f"{folder} has {size_bytes / GIB:.2f} GiB"
    if size_bytes >= _LEAST_SHARED_MEMORY_BYTES:
        return ok("shared memory", text)
    text += "; start the container with `--ipc=host` or `--shm-size=8g`"
    return problem("shared memory", text) if on_gpu else note("shared memory", text)
