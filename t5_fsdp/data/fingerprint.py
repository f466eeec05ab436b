"""A digest of all that decides which rows a source gives, for prepared data to be found again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from t5_fsdp.config import DataConfig
from t5_fsdp.data import hub
from t5_fsdp.data.parts import SPLITS, parts_of, row_limit
from t5_fsdp.data.readers import format_of
from t5_fsdp.data.source_files import files_by_split
from t5_fsdp.errors import UserError

READING_VERSION = 2  # raise when the same files would give other rows
_BLOCK_BYTES = 1 << 20


def source_fingerprint(data: DataConfig, splits: tuple[str, ...] = SPLITS) -> str:
    """Hex digest of all that decides which rows `load_splits` gives.

    That is the content of the files (neither path nor time) and the options that matter.

    Args:
        data: the source.
        splits: only these count.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    for part in parts_of(data):
        _add_part(digest, part.data, splits)
    return digest.hexdigest()


def _add_part(digest: Any, data: DataConfig, splits: tuple[str, ...]) -> None:
    options: dict[str, Any] = {
        "version": READING_VERSION,
        "source": data.source,
        "limits": [row_limit(data, split) for split in SPLITS],
        "on_bad_row": data.on_bad_row,
    }
    if data.source in ("files", "hub", "saved"):
        options["columns"] = [data.document_column, data.summary_column]
    if data.source == "wikihow":
        options["wikihow"] = [data.wikihow_version, data.wikihow_rules]
    digest.update(json.dumps(options, sort_keys=True).encode())
    if data.source in ("hub", "saved"):
        digest.update(hub.content_digest(data, splits).encode())
        return
    files = files_by_split(data)
    for split, paths in files.items():
        for path in paths if split in (*splits, "all") else []:
            # A WikiHow list counts by its role; elsewhere only the format of a name matters.
            role = path.name if data.source == "wikihow" else format_of(path)
            digest.update(f"\n{split} {role} ".encode())
            digest.update(_content_digest(path))


def _content_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check the file and data.source"
        ) from None
    return digest.digest()
