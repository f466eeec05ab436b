"""A folder of prepared data: token ids on disk, in order, with what the audit says of them.

`preparation.prepare` leaves a folder that depends on data, tokenizer, lengths and prefix alone:

    prepared-<fingerprint>/
        tokenizer/                          as the run uses it
        train.arrow  validation.arrow ...   id, document, summary, source_ids, target_ids
        dropped.jsonl                       the rows that were left out, each with its reason
        meta.json                           fingerprint, content hashes, audit; written last

Training reads it memory-mapped through `TokenizedSplit`, without `datasets`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5_fsdp.data.tokenized import TokenizedSplit
from t5_fsdp.errors import UserError

PREPARED_FORMAT = 3  # raise when the same inputs would give other files
DROPPED = "dropped.jsonl"


@dataclass(frozen=True)
class PreparedPart:
    """The rows of one source of a mixture in the training split.

    Attributes:
        name: of the source.
        start, stop: its rows.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder; see the module.

    Attributes:
        directory: the folder.
        tokenizer_directory: its tokenizer, for `load_tokenizer`.
        fingerprint: of everything the folder was made from.
        source_fingerprint: of the rows alone, see `fingerprint.source_fingerprint`.
        content_hash: per split, of the token ids in order: equal means equal training data.
        parts: the sources of the training split, in order.
        audit: what `load_splits` tells; per split also source_tokens and target_tokens ({mean,
            median, p90, max} before truncation, prefix and end mark included), the shares
            source_truncated and target_truncated of the examples, unknown_tokens, the share of
            the tokens kept, unknown_characters ({character: times}) and duplicates (documents
            that stood before, case and white space aside); duplicates_across ({"test in train":
            n}) and warnings.
        reused: it was there already.
    """

    directory: Path
    tokenizer_directory: Path
    fingerprint: str
    source_fingerprint: str
    content_hash: dict[str, str]
    parts: list[PreparedPart]
    audit: dict[str, Any]
    reused: bool

    def split(self, name: str) -> TokenizedSplit | None:
        """train, validation or test; None where the data has no such split."""
        if name not in self.content_hash:
            return None
        return TokenizedSplit.from_arrow(self.directory / f"{name}.arrow")


def open_prepared(directory: Path) -> PreparedData:
    """The prepared data in a folder that `preparation.prepare` made.

    Raises:
        UserError: the folder is not complete.
    """
    prepared = find_prepared(directory)
    if prepared is None:
        raise UserError(
            f"{directory} is not a complete folder of prepared data; "
            "make it with scripts/prepare_data.py"
        )
    return prepared


def find_prepared(directory: Path) -> PreparedData | None:
    """As `open_prepared`; None where the folder is missing, not complete or damaged."""
    import pyarrow as pa

    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in meta["file_bytes"]}
        if meta["format"] != PREPARED_FORMAT or sizes != meta["file_bytes"]:
            return None
        prepared = PreparedData(
            directory=directory,
            tokenizer_directory=directory / "tokenizer",
            fingerprint=meta["fingerprint"],
            source_fingerprint=meta["source_fingerprint"],
            content_hash=dict(meta["content_hash"]),
            parts=[PreparedPart(**part) for part in meta["parts"]],
            audit=meta["audit"],
            reused=True,
        )
        for name in prepared.content_hash:
            split = prepared.split(name)
            if split is None or len(split) != meta["audit"]["splits"][name]["kept"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return None
    return prepared
