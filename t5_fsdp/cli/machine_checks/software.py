"""Python and the packages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import metadata

from t5_fsdp.cli.machine_checks.finding import Finding, note, ok, problem
from t5_fsdp.config import Config
from t5_fsdp.errors import UserError
from t5_fsdp.packages import is_installed

_OLDEST_PYTHON = (3, 10)
# The lower bounds of pyproject.toml; a test compares them. "": any.
OLDEST: dict[str, str] = {
    "datasets": "4.0", "docstring-parser": "0.15", "filelock": "", "huggingface_hub": "1.0",
    "jsonargparse": "4.40", "numpy": "", "peft": "0.18", "protobuf": "", "pyarrow": "",
    "pyyaml": "6.0", "rouge-score": "0.1.2", "safetensors": "", "sentencepiece": "0.2",
    "sentencex": "1.0", "tensorboard": "", "torch": "2.11", "tqdm": "", "transformers": "5.17",
}  # fmt: skip


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """The interpreter's version."""
    found, oldest = (".".join(map(str, v[:3])) for v in (version, _OLDEST_PYTHON))
    if version[:2] < _OLDEST_PYTHON:
        return problem(
            "Python", f"{found}, {oldest} is needed; `make setup PYTHON=/path/to/python{oldest}`"
        )
    return ok("Python", found)


def check_packages(version_of: Callable[[str], str] = metadata.version) -> list[Finding]:
    """Installed and new enough."""
    from packaging.version import Version

    absent, old, versions = [], [], {}
    for name, oldest in OLDEST.items():
        try:
            versions[name] = version_of(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if oldest and Version(versions[name]) < Version(oldest):
            old.append(f"{name} {versions[name]} (at least {oldest})")
    found = []
    remedy = "`pip install -r requirements.txt`, or `make setup`"
    if absent:
        found.append(problem("packages", f"not installed: {', '.join(absent)}; {remedy}"))
    if old:
        found.append(problem("packages", f"too old: {', '.join(old)}; {remedy}"))
    if not found:
        leading = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
        found.append(ok("packages", f"{leading} and {len(versions) - 2} more"))
    return found


def check_compiler(config: Config, on_gpu: bool) -> list[Finding]:
    """What parallel.compile builds its kernels with."""
    if not config.parallel.compile or config.parallel.compile_backend != "inductor":
        return []
    if on_gpu:
        if not is_installed("triton"):
            return [problem("compiler", "parallel.compile needs triton; `pip install triton`")]
        return [ok("compiler", "triton")]
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return [
            problem(
                "compiler",
                "parallel.compile needs a C++ compiler on a CPU; install g++, or set "
                "parallel.compile: false",
            )
        ]
    return [ok("compiler", found)]


def check_trackers(config: Config) -> list[Finding]:
    """The packages of the chosen trackers."""
    from t5_fsdp.training.trackers import trackers

    try:
        trackers.check_trackers(config.logging)
    except UserError as error:
        return [problem("trackers", text) for text in error.problems]
    chosen = trackers.chosen_trackers(config.logging)
    return [ok("trackers", ", ".join(chosen))] if chosen else [note("trackers", "none is chosen")]
