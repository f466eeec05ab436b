"""Limits of the system on this process: open files, memory, cores."""

from __future__ import annotations

import os
from pathlib import Path

from t5_fsdp.cli.machine_checks.finding import GIB, Finding, note, ok, problem

_LEAST_NUM_OPEN_FILES = 1024
_LEAST_PROCESS_MEMORY_BYTES = 2 * GIB
_CGROUPS = Path("/sys/fs/cgroup")


def check_open_files() -> Finding:
    """`ulimit -n` of this process."""
    try:
        import resource
    except ImportError:  # not on Windows
        return note("open files", "this system does not tell")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _LEAST_NUM_OPEN_FILES:
        return problem(
            "open files",
            f"at most {soft} at a time, {_LEAST_NUM_OPEN_FILES} are needed (data shards, sockets, "
            f"checkpoints); `ulimit -n 65535` before the start (up to {hard} as this user)",
        )
    return ok("open files", f"at most {soft:,}" if soft >= 0 else "no limit")


def check_locked_memory(has_rdma: bool) -> list[Finding]:
    """`ulimit -l`: EFA and InfiniBand pin the memory they send from."""
    if not has_rdma:
        return []
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= soft < GIB:
        return [
            problem(
                "locked memory",
                f"at most {soft / 2**10:,.0f} KiB, and the network adapters pin more; `ulimit -l "
                "unlimited`, or `--ulimit memlock=-1` for a container",
            )
        ]
    return [ok("locked memory", "no limit" if soft < 0 else f"at most {soft / GIB:,.0f} GiB")]


def memory_limit_bytes(cgroups: Path = _CGROUPS) -> int | None:
    """Of the container or job, in bytes; None without one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroups / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # older kernels write a huge number for none
            return int(text)
    return None


def host_memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """Of this machine, or of the container or job where that has less.

    Raises:
        AttributeError, ValueError, OSError: the system does not tell.
    """
    total_bytes = _total_bytes()
    return min(total_bytes, memory_limit_bytes(cgroups) or total_bytes)


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(num_processes: int, cgroups: Path = _CGROUPS) -> Finding:
    """Of the host: each process holds its shards of a checkpoint that is being written."""
    total_bytes, usable_bytes = _total_bytes(), host_memory_bytes(cgroups)
    text = f"{usable_bytes / GIB:,.1f} GiB"
    if usable_bytes < total_bytes:
        text += f" for this container, of {total_bytes / GIB:,.1f}"
    if usable_bytes < num_processes * _LEAST_PROCESS_MEMORY_BYTES:
        return problem(
            "host memory",
            f"{text}, for {num_processes} processes; {_LEAST_PROCESS_MEMORY_BYTES // GIB} GiB each "
            "are needed: raise the container's or job's memory limit",
        )
    return ok("host memory", text)


def check_cores(num_processes: int) -> Finding:
    """That this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if num_cores < num_processes:
        return note(
            "cores",
            f"{num_cores} for {num_processes} processes, which wait for each other; ask the "
            "scheduler for more (Slurm: --cpus-per-task)",
        )
    return ok("cores", str(num_cores))
