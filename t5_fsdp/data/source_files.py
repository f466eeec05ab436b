"""Which files the options of a source stand for, and what is wrong with one."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from t5_fsdp.config import DataConfig
from t5_fsdp.data import wikihow
from t5_fsdp.data.parts import SPLITS
from t5_fsdp.data.readers import EXTENSIONS, format_of

# A link to data/sample, so that the installed package has it as well.
SAMPLE_FOLDER = Path(__file__).parents[1] / "bundled_sample"


def split_patterns(data: DataConfig, split: str) -> list[str]:
    """Paths, folders and patterns that the option for a split's files names."""
    value = getattr(data, f"{split}_files")
    return [value] if isinstance(value, str) else value


def expand_pattern(option: str, pattern: str) -> tuple[list[Path], str | None]:
    """The files that a path, a folder or a pattern such as `part-*.jsonl` stands for, sorted."""
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        found = [inner for inner in sorted(path.iterdir()) if inner.is_file() and format_of(inner)]
        kinds = ", ".join(EXTENSIONS)
        return found, None if found else f"{option}: the folder {path} has no {kinds} files in it"
    if not path.exists() and glob.has_magic(pattern):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        found = [match for match in matches if match.is_file()]
        return found, None if found else f"{option}: no file matches {pattern}; check the pattern"
    return [path], None


def file_problem(option: str, path: Path) -> str | None:
    """What is in the way of reading a file, in a line that begins with the option's name."""
    if not path.exists():
        return f"{option}: {path} does not exist; check the path"
    if format_of(path) is None:
        return (
            f"{option}: {path} has the unknown extension {path.suffix!r}; use one of "
            f"{', '.join(EXTENSIONS)} (all but .parquet also with .gz)"
        )
    if not os.access(path, os.R_OK):
        return f"{option}: {path} may not be read; change its permissions"
    if path.stat().st_size == 0:
        return f"{option}: {path} is empty; give a file with rows or leave it out"
    return None


def files_by_split(data: DataConfig) -> dict[str, list[Path]]:
    """The files of each split (files, sample), or all files under one name (wikihow)."""
    if data.source == "sample":
        return {split: [SAMPLE_FOLDER / f"{split}.jsonl"] for split in SPLITS}
    if data.source == "wikihow":
        folder = Path(data.path)
        lists = [folder / wikihow.LIST_NAMES[split] for split in wikihow.present_lists(folder)]
        return {"all": [folder / wikihow.CSV_NAMES[data.wikihow_version], *lists]}
    return {
        split: [
            path
            for pattern in split_patterns(data, split)
            for path in expand_pattern("", pattern)[0]
        ]
        for split in SPLITS
    }


def split_files(data: DataConfig, split: str) -> list[Path]:
    """The files of one split, for sources that have a file or more a split."""
    return files_by_split(data)[split]
