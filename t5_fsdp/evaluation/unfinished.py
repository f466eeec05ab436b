"""Summaries of an evaluation that is not finished: repeating it goes on from them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from t5_fsdp.evaluation.generation import GeneratedSummary

_FOLDER = ".unfinished"


class Unfinished:
    """Whole batches of summaries, which each rank appends to a file of its own.

    Args:
        folder: the evaluation's; they are kept below it.
        settings: all that decides about the summaries, as JSON; others are not gone on from.
        sources: token ids of the sources.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], sources: Sequence[np.ndarray]
    ) -> None:
        self._folder = folder / _FOLDER
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
        for source in sources:
            digest.update(len(source).to_bytes(4, "big") + np.asarray(source, np.int32).tobytes())
        self._key = digest.hexdigest()

    def read(self) -> dict[int, dict[int, GeneratedSummary]]:
        """The finished batches by number: position -> summary. Call it on rank 0.

        What is there of other settings or examples is deleted.
        """
        found = dict(self._rows())
        if not found:
            self.delete()
        return found

    def _rows(self) -> Iterator[tuple[int, dict[int, GeneratedSummary]]]:
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                    if row["key"] == self._key:
                        yield (
                            int(row["batch"]),
                            {
                                int(position): GeneratedSummary(*values)
                                for position, values in row["summaries"].items()
                            },
                        )
                except (ValueError, TypeError, KeyError):  # torn by a kill
                    continue

    def add(self, rank: int, batch: int, summaries: Mapping[int, GeneratedSummary]) -> None:
        """Keep the summaries of one batch."""
        self._folder.mkdir(parents=True, exist_ok=True)
        row = {
            "key": self._key,
            "batch": batch,
            "summaries": {str(position): astuple(made) for position, made in summaries.items()},
        }
        with (self._folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            # The line before may be torn.
            file.write("\n" + json.dumps(row) + "\n")

    def delete(self) -> None:
        """All of them: they are in predictions.jsonl now, or of no use."""
        shutil.rmtree(self._folder, ignore_errors=True)
