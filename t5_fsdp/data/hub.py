"""Datasets of the Hugging Face Hub, and local ones of `save_to_disk`, as splits of plain rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import DataConfig
from t5_fsdp.data.readers import BadRow, Row
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    import datasets

_ROWS_A_BATCH = 1000


def saved_problems(data: DataConfig) -> list[str]:
    """What is wrong with the folder of `source: saved`, without reading it."""
    folder = Path(data.dataset or "").expanduser()
    if data.dataset is None:
        return ["data.source: saved needs data.dataset, the folder that save_to_disk wrote"]
    marks = ("dataset_dict.json", "dataset_info.json", "state.json")
    if not folder.is_dir() or not any((folder / mark).is_file() for mark in marks):
        return [f"data.dataset {folder} is no folder of save_to_disk; check the path"]
    return []


def open_splits(
    data: DataConfig, splits: tuple[str, ...], note: Callable[[str], None] = lambda text: None
) -> dict[str, datasets.Dataset]:
    """The dataset's splits by our names, as far as it has them.

    Args:
        data: dataset, subset and the names of its splits.
        splits: of train, validation and test, those that are wanted.
        note: told of a split that is not there.

    Raises:
        UserError: not to be had, another subset is needed, or it lacks the training split.
    """
    found = _stream_splits(data, splits) if data.streaming else _open(data)
    opened = {}
    for split, name in _split_names(data).items():
        if split not in splits:
            continue
        if name in found:
            opened[split] = found[name]
        elif split == "train":
            raise UserError(
                f"data.dataset {data.dataset} has no split {name!r} (it has: "
                f"{', '.join(map(str, found))}); set data.train_split"
            )
        else:
            note(f"{data.dataset} has no split {name!r}: there is no {split} split")
    return opened


def content_digest(data: DataConfig, splits: tuple[str, ...]) -> str:
    """Hex digest of all rows of the splits, in order."""
    digest = hashlib.blake2b(digest_size=32)
    for split, rows in open_splits(data, splits).items():
        digest.update(f"\n{split}".encode())
        for _, row in iterate(rows):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def iterate(rows: datasets.Dataset) -> Iterator[tuple[int, Row | BadRow]]:
    """Rows with their number, from 1."""
    number = 0
    rows = rows.with_format(None)  # a saved dataset may ask for numpy arrays or tensors
    for batch in rows.iter(_ROWS_A_BATCH):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(names, values, strict=True))


def stream(data: DataConfig) -> Iterator[tuple[int, Row | BadRow]]:
    """Rows of the training split with their number, without downloading it first.

    Raises:
        UserError: not to be had, also in the middle.
    """
    if data.source == "saved":
        yield from iterate(open_splits(data, ("train",))["train"])
        return
    import datasets

    try:
        rows = datasets.load_dataset(
            data.dataset, data.subset, split=data.train_split, streaming=True
        )
        yield from enumerate(rows, 1)
    except Exception as error:
        raise _unreadable(data, error) from None


def _stream_splits(data: DataConfig, splits: tuple[str, ...]) -> Any:
    """The held-out splits alone, in memory: nothing of a training split that is streamed."""
    if data.source == "saved":
        return _open(data)
    import datasets

    wanted = [name for split, name in _split_names(data).items() if split in splits]
    try:
        names = datasets.get_dataset_split_names(data.dataset, data.subset)
        return {
            name: datasets.Dataset.from_list(
                list(datasets.load_dataset(data.dataset, data.subset, split=name, streaming=True))
            )
            for name in wanted
            if name in names
        }
    except Exception as error:
        raise _unreadable(data, error) from None


def _split_names(data: DataConfig) -> dict[str, str]:
    names = {
        "train": data.train_split,
        "validation": data.validation_split,
        "test": data.test_split,
    }
    return {split: name for split, name in names.items() if name is not None}


def _open(data: DataConfig) -> Any:
    """A mapping of the dataset's own split names to its splits."""
    import datasets

    try:
        if data.source == "hub":
            return datasets.load_dataset(data.dataset, data.subset)
        found = datasets.load_from_disk(str(Path(data.dataset or "").expanduser()))
    except Exception as error:  # each builder, pyarrow and the Hub client have errors of their own
        raise _unreadable(data, error) from None
    return {data.train_split: found} if isinstance(found, datasets.Dataset) else found


def _unreadable(data: DataConfig, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    subset = f", subset {data.subset}" if data.subset else ""
    return UserError(
        f"data.dataset {data.dataset}{subset} is not to be had ({reason}); check the name, "
        "data.subset and the network"
    )
