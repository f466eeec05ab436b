"""A split as token ids: read memory-mapped from disk, so that processes share its pages."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow


class TokenizedSplit:
    """The examples of one split as token ids, with their texts at hand.

    Made by `prepared.PreparedData.split` (memory-mapped) or `from_ids` (in memory).

    Attributes:
        source_lengths: tokens of each source, prefix and end mark included, int32 [examples].
        target_lengths: likewise of each target.
    """

    def __init__(self, sources: _Ragged, targets: _Ragged, texts: _Texts | None) -> None:
        self._sources, self._targets, self._texts = sources, targets, texts
        self.source_lengths = sources.lengths()
        self.target_lengths = targets.lengths()

    def __len__(self) -> int:
        return len(self.source_lengths)

    def source(self, index: int) -> np.ndarray:
        """Token ids of one source, end mark included, int32 [source]; a view, not to be changed."""
        return self._sources.row(index)

    def target(self, index: int) -> np.ndarray:
        """Token ids of one target, end mark included, int32 [target]; a view, not to be changed."""
        return self._targets.row(index)

    def text(self, index: int) -> dict[str, str]:
        """id, document (without prefix) and summary of one example.

        Raises:
            ValueError: the split was made from ids alone.
        """
        if self._texts is None:
            raise ValueError("this split was made from token ids without texts")
        return self._texts.row(index)

    @classmethod
    def from_ids(
        cls,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        texts: Sequence[dict[str, str]] | None = None,
    ) -> TokenizedSplit:
        """A split held in memory, from ready token ids; needs neither pyarrow nor datasets.

        Args:
            sources: token ids of each source, end mark included.
            targets: as many targets.
            texts: id, document and summary of each example.

        Raises:
            ValueError: another number of targets or texts than sources.
        """
        if len(sources) != len(targets) or (texts is not None and len(texts) != len(sources)):
            raise ValueError("sources, targets and texts must be of the same number")
        in_memory = None if texts is None else _ListTexts(texts)
        return cls(_Ragged([flatten(sources)]), _Ragged([flatten(targets)]), in_memory)

    @classmethod
    def from_arrow(cls, path: Path) -> TokenizedSplit:
        """A split of a prepared folder, memory-mapped: rows are read from disk when touched."""
        import pyarrow as pa

        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        sources, targets = (
            _Ragged([_arrow_list(batch.column(name)) for batch in batches])
            for name in ("source_ids", "target_ids")
        )
        texts = pa.Table.from_batches(batches, schema=reader.schema)
        return cls(sources, targets, _ArrowTexts(texts))


class _Ragged:
    """Rows of different length in chunks of (values [tokens], offsets [rows + 1])."""

    def __init__(self, chunks: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._chunks = chunks
        # A plain list: bisect in it takes a fraction of numpy's searchsorted on a single row.
        self._starts = np.cumsum([0, *(len(offsets) - 1 for _, offsets in chunks)]).tolist()

    def row(self, index: int) -> np.ndarray:
        num_rows = self._starts[-1]
        if not -num_rows <= index < num_rows:
            raise IndexError(f"row {index} of a split of {num_rows}")
        index %= num_rows
        chunk = bisect_right(self._starts, index) - 1
        values, offsets = self._chunks[chunk]
        local = index - self._starts[chunk]
        return values[offsets[local] : offsets[local + 1]]

    def lengths(self) -> np.ndarray:
        parts = [np.diff(offsets) for _, offsets in self._chunks]
        return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)


def flatten(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as (values int32 [tokens], offsets int32 [rows + 1])."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    parts = [np.asarray(row, np.int32) for row in rows]
    return np.concatenate([np.empty(0, np.int32), *parts]), offsets


def rows_of(values: np.ndarray, offsets: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of what `flatten` gave, as views."""
    for start, stop in itertools.pairwise(offsets.tolist()):
        yield values[start:stop]


def _arrow_list(array: pyarrow.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return (
        array.values.to_numpy(zero_copy_only=True),
        array.offsets.to_numpy(zero_copy_only=True),
    )


class _ListTexts:
    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self._rows = rows

    def row(self, index: int) -> dict[str, str]:
        return dict(self._rows[index])


class _ArrowTexts:
    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table.select(["id", "document", "summary"])

    def row(self, index: int) -> dict[str, str]:
        return {name: self._table[name][index].as_py() for name in self._table.column_names}


_Texts = _ListTexts | _ArrowTexts
