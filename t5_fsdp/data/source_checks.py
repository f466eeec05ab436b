"""What is wrong with a source before anything is read."""

from __future__ import annotations

from pathlib import Path

from t5_fsdp.config import DataConfig
from t5_fsdp.data import hub, wikihow
from t5_fsdp.data.parts import SPLITS, parts_of
from t5_fsdp.data.source_files import expand_pattern, file_problem, files_by_split, split_patterns


def source_problems(data: DataConfig) -> list[str]:
    """What can be said against the data without reading it, one line each; empty when nothing.

    Cheap (no torch, no datasets): a command calls it before it loads a model.
    """
    problems = []
    for part in parts_of(data):
        prefix = f"data.mixture, {part.name}: " if data.mixture else ""
        problems += [prefix + problem for problem in _part_problems(part.data)]
    return problems


def _part_problems(data: DataConfig) -> list[str]:
    if data.source == "wikihow":
        return _wikihow_problems(data)
    if data.source == "sample":
        return [
            f"data.source: sample needs {path}, which is not there; "
            "make it with `python -m t5_fsdp.data.sample`"
            for paths in files_by_split(data).values()
            for path in paths
            if not path.is_file()
        ]
    if data.source == "saved":
        return hub.saved_problems(data)
    if data.source == "files":
        problems = []
        for split in SPLITS:
            for pattern in split_patterns(data, split):
                paths, problem = expand_pattern(f"data.{split}_files", pattern)
                problems += [problem] if problem else []
                problems += [
                    found for path in paths if (found := file_problem(f"data.{split}_files", path))
                ]
        return problems
    return []


def _wikihow_problems(data: DataConfig) -> list[str]:
    folder, name = Path(data.path), wikihow.CSV_NAMES[data.wikihow_version]
    if not (folder / name).exists():
        return [
            f"data.path {folder} has no {name}; download it and put it there "
            "(data/README.md says from where), or set data.path"
        ]
    problems = [file_problem("data.path", folder / name), wikihow.list_problem(folder)]
    return [problem for problem in problems if problem]
