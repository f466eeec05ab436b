"""What was found in the data: lengths, what is cut or unknown, duplicates; and what to change."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5_fsdp.data.tokenization import Encoder
from t5_fsdp.quantities import counted

# Above these shares the audit warns.
HIGH_UNKNOWN_SHARE = 0.005
HIGH_TRUNCATED_SHARE = 0.25

_SHOWN_CHARACTERS = 10


class SplitAudit:
    """Gathers the figures of one split while it is tokenized.

    Args:
        encoder: knows the unknown token.
        max_source_tokens, max_target_tokens: the limits that ids are cut to.
    """

    def __init__(self, encoder: Encoder, max_source_tokens: int, max_target_tokens: int) -> None:
        self._encoder = encoder
        self._limits = (max_source_tokens, max_target_tokens)
        self._lengths = (array("i"), array("i"))  # before truncation
        self._num_tokens = 0
        self._num_unknown = 0
        self._unknown: Counter[str] = Counter()
        self._documents = array("Q")
        # Of the kept ids in order: equal means equal training data.
        self._content = hashlib.blake2b(digest_size=32)

    def add_texts(self, documents: Sequence[str]) -> None:
        """Take the documents of a batch, for duplicates."""
        self._documents.extend(map(_normalized_hash, documents))

    def add_lengths(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> None:
        """Take ids in full length."""
        for lengths, rows in zip(self._lengths, (sources, targets), strict=True):
            lengths.extend(map(len, rows))

    def add_ids(self, source: np.ndarray, target: np.ndarray, texts: tuple[str, str]) -> None:
        """Take one example's ids as they are kept."""
        self._content.update(np.array([len(source), len(target)], "<i4").tobytes())
        unknown = 0
        for ids in (source, target):
            self._content.update(ids.astype("<i4", copy=False).tobytes())
            self._num_tokens += len(ids)
            if self._encoder.unknown_id is not None:
                unknown += int(np.count_nonzero(ids == self._encoder.unknown_id))
        if unknown:
            self._num_unknown += unknown
            for text in texts:
                for character, count in Counter(text).items():
                    if self._encoder.is_unknown(character):
                        self._unknown[character] += count

    @property
    def content_hash(self) -> str:
        """Hex digest of all kept ids, in order."""
        return self._content.hexdigest()

    @property
    def document_hashes(self) -> np.ndarray:
        """Of each document, case and white space aside, uint64 [examples]."""
        return np.frombuffer(self._documents, np.uint64)

    def figures(self) -> dict[str, Any]:
        """The split's part of the audit, see `PreparedData.audit`."""
        source, target = (np.frombuffer(lengths, np.int32) for lengths in self._lengths)
        documents = self.document_hashes
        return {
            "source_tokens": _distribution(source),
            "target_tokens": _distribution(target),
            "source_truncated": float(np.mean(source > self._limits[0])),
            "target_truncated": float(np.mean(target > self._limits[1])),
            "unknown_tokens": self._num_unknown / max(1, self._num_tokens),
            "unknown_characters": dict(self._unknown.most_common(_SHOWN_CHARACTERS)),
            "duplicates": len(documents) - len(np.unique(documents)),
        }


def duplicates_across(hashes: dict[str, np.ndarray]) -> dict[str, int]:
    """How many documents of one split stand in an earlier one too, e.g. "test in train"."""
    names = list(hashes)
    found = {}
    for position, later in enumerate(names):
        for earlier in names[:position]:
            count = int(np.isin(hashes[later], hashes[earlier]).sum())
            found[f"{later} in {earlier}"] = count
    return found


def warnings_of(audit: dict[str, Any], max_source_tokens: int, max_target_tokens: int) -> list[str]:
    """What in an audit may spoil a run, each with the option to change."""
    warnings = []
    for name, split in audit["splits"].items():
        for side, limit in (("source", max_source_tokens), ("target", max_target_tokens)):
            share = split[f"{side}_truncated"]
            if share > HIGH_TRUNCATED_SHARE:
                warnings.append(
                    f"{name}: {100 * share:.0f} % of the {side}s are cut at {limit} tokens (the "
                    f"longest has {split[f'{side}_tokens']['max']:,}); raise "
                    f"data.max_{side}_tokens if the memory allows"
                )
        if split["unknown_tokens"] > HIGH_UNKNOWN_SHARE:
            characters = " ".join(split["unknown_characters"])
            warnings.append(
                f"{name}: {100 * split['unknown_tokens']:.1f} % of the tokens are unknown to the "
                f"tokenizer and can't be written in a summary (commonest characters: {characters})"
                "; choose model.tokenizer, or another model, for this text"
            )
    for pair, count in audit["duplicates_across"].items():
        if count:
            warnings.append(
                f"{counted(count, 'document')} of {pair}: a score on such a one measures "
                "memory; take it out of one of the splits"
            )
    return warnings


def _normalized_hash(document: str) -> int:
    text = " ".join(document.casefold().split())
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _distribution(lengths: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(np.mean(lengths)),
        "median": float(np.median(lengths)),
        "p90": float(np.percentile(lengths, 90)),
        "max": int(np.max(lengths)),
    }
