"""Examples that a program holds in memory, written as the files that a run reads.

So they go through the same reading, audit, tokenization and hashing as anybody's files, a resumed
run finds the same content, and an evaluation in another process has them as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from t5_fsdp.data.parts import SPLITS
from t5_fsdp.errors import UserError


class _Items(Protocol):
    """A dataset class as torch has it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


# A pair (document, summary), or a mapping with the columns of both and maybe an id.
Example: TypeAlias = tuple[str, str] | Sequence[str] | Mapping[str, Any]
Examples: TypeAlias = Iterable[Example] | _Items
# Of the training split alone, or by split.
GivenData: TypeAlias = Examples | Mapping[str, Examples]


def by_split(data: GivenData) -> dict[str, Examples]:
    """The examples of each split; those that name none are for training.

    Raises:
        UserError: a split of another name, or no training split.
    """
    if not isinstance(data, Mapping):
        return {"train": data}
    if unknown := [name for name in data if name not in SPLITS]:
        raise UserError(f"data has the split {unknown[0]!r}; name splits {', '.join(SPLITS)}")
    if "train" not in data:
        raise UserError('data has no training split; give it as data["train"]')
    return dict(data)


def write_given(
    data: Mapping[str, Examples], folder: Path, columns: tuple[str, str]
) -> dict[str, str]:
    """Write each split as JSON Lines; the path of each.

    A file is named by its content, so the same examples are written once.

    Args:
        folder: made if it is not there.
        columns: what a pair's document and summary are called.

    Raises:
        UserError: a split has no example, or one is no pair and no mapping, or can't be written as
            JSON.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {
        split: _write(given_rows(examples, split, columns), folder)
        for split, examples in data.items()
    }


def given_rows(
    examples: Examples, split: str, columns: tuple[str, str]
) -> Iterator[dict[str, Any]]:
    """Each example as a mapping from column to value.

    Raises:
        UserError: there is none, or one is no pair and no mapping.
    """
    number = -1
    for number, example in enumerate(_items(examples, split)):
        if isinstance(example, Mapping):
            yield dict(example)
        elif isinstance(example, Sequence) and not isinstance(example, str) and len(example) == 2:
            yield dict(zip(columns, example, strict=True))
        else:
            raise UserError(
                f"data, {split}, example {number} is {show(example)}; give a pair (document, "
                f"summary), or a mapping with {columns[0]} and {columns[1]}"
            )
    if number < 0:
        raise UserError(
            f"data, {split} has no example; give at least one (an iterator gives its only once)"
        )


def _items(examples: Any, split: str) -> Iterator[Any]:
    if hasattr(examples, "itertuples"):  # iterating over it gives the columns' names
        raise UserError(f'data, {split} is a DataFrame; give its rows: .to_dict("records")')
    is_one_text = isinstance(examples, str | Mapping)
    if hasattr(examples, "__iter__") and not is_one_text:
        return iter(examples)
    if hasattr(examples, "__getitem__") and hasattr(examples, "__len__") and not is_one_text:
        # torch's datasets need not raise IndexError at their end, on which iter() relies.
        return (examples[index] for index in range(len(examples)))
    raise UserError(
        f"data, {split} is {show(examples)}; give a list of pairs (document, summary), or a "
        "dataset with __len__ and __getitem__"
    )


def _write(rows: Iterable[dict[str, Any]], folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    partial = folder / f".{uuid.uuid4().hex}.partial"
    try:
        with partial.open("wb") as file:
            for number, row in enumerate(rows):
                line = (_json(row, number) + "\n").encode()
                digest.update(line)
                file.write(line)
        path = folder / f"{digest.hexdigest()}.jsonl"
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return str(path)


def _json(row: dict[str, Any], number: int) -> str:
    # pandas has NaN where a text is missing; as JSON it would be read as a text.
    plain = {name: None if _is_nan(value) else value for name, value in row.items()}
    try:
        return json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data, example {number} can't be written as JSON ({error}); give texts"
        ) from None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def show(value: Any) -> str:
    """Type and beginning of a wrong value, for messages."""
    text, kind = " ".join(repr(value).split()), type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"{article} {kind}: " + (text if len(text) <= 60 else text[:57] + "...")
