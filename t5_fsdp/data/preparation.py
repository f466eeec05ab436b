"""Preparing data: texts to token ids once, found again by what they were made from.

What `prepare` leaves on disk is described in `prepared`. It is made beside its final name under a
lock, and renamed at the end.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.data.fingerprint import source_fingerprint
from t5_fsdp.data.parts import SPLITS, parts_of
from t5_fsdp.data.prepared import (
    DROPPED,
    PREPARED_FORMAT,
    PreparedData,
    find_prepared,
    open_prepared,
)
from t5_fsdp.data.sources import load_splits
from t5_fsdp.data.split_tokenization import tokenize_splits, tokenizer_for
from t5_fsdp.data.tokenization import (
    TRAIN_TOKENIZER,
    load_tokenizer,
    local_folder,
    serialized,
    tokenizer_files,
    tokenizer_name,
    tokenizer_option,
    tokenizer_revision,
)
from t5_fsdp.errors import UserError
from t5_fsdp.files import FILE_ERRORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(
    data: DataConfig,
    model: ModelConfig,
    cache_dir: Path,
    report: Callable[[str], None] = print,
    splits: tuple[str, ...] = SPLITS,
) -> PreparedData:
    """Read, clean, split and tokenize, once: the same content and options reuse the same folder.

    Any number of processes may call it at the same time: one works, the others wait for it. A
    process that dies leaves nothing that a later call could take for complete.

    Each source is its prefix (unless the document begins with it already) and the document, cut to
    max_source_tokens; each target the summary, cut to max_target_tokens; both always keep their
    end mark.

    Args:
        data: source, prefix and lengths.
        model: which tokenizer (name, revision, tokenizer, tokenizer_vocab_size).
        cache_dir: holds the prepared folders; made if needed.
        report: gets a line for each stage.
        splits: only these.

    Raises:
        UserError: as `load_splits`, `load_tokenizer` and `train_tokenizer`, when the prefix fills
            max_source_tokens, or when cache_dir cannot be written or is full.
    """
    name = tokenizer_name(model)
    if name != TRAIN_TOKENIZER and local_folder(name, tokenizer_option(model)) is None:
        report(f"tokenizer: {name} from the Hugging Face Hub or its cache")
    key = _key(data, model, splits)
    directory = _directory(cache_dir, key)
    try:
        if prepared := _reusable(directory, key):  # also in a cache that can't be written
            report(f"prepared data: reusing {directory}")
            return prepared
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _Lock(directory.with_suffix(".lock"), report):
            if prepared := _reusable(directory, key):
                report(f"prepared data: reusing {directory}")
                return prepared
            return _make(data, model, key, directory, report)
    except OSError as error:
        elsewhere = error.filename and not str(error.filename).startswith(str(cache_dir))
        if error.errno not in FILE_ERRORS | {errno.ENOENT} or elsewhere:
            raise
        raise UserError(
            f"data.cache_dir {cache_dir} cannot be written ({error.strerror}); make room there or "
            "set data.cache_dir"
        ) from error


def find_prepared_for(
    data: DataConfig,
    model: ModelConfig,
    cache_dir: Path,
    splits: tuple[str, ...] = SPLITS,
) -> PreparedData | None:
    """What `prepare` would reuse, without making anything or asking the network; None if nothing.

    Nor is there anything for a dataset of the Hub, whose content only the Hub can tell.

    Args:
        data, model, cache_dir, splits: as of `prepare`.
    """
    if not cache_dir.is_dir() or any(part.data.source == "hub" for part in parts_of(data)):
        return None
    try:
        key = _key(data, model, splits, local_files_only=True)
    except (UserError, OSError):  # no data here, or no tokenizer
        return None
    return _reusable(_directory(cache_dir, key), key)


def _directory(cache_dir: Path, key: _Key) -> Path:
    return cache_dir / f"prepared-{key.fingerprint[:16]}"


def _reusable(directory: Path, key: _Key) -> PreparedData | None:
    prepared = find_prepared(directory)
    return prepared if prepared is not None and prepared.fingerprint == key.fingerprint else None


@dataclass(frozen=True)
class _Key:
    """What a prepared folder is found again by.

    Attributes:
        fingerprint: of everything it is made from.
        source: of the rows alone, see `source_fingerprint`.
        splits: that are made.
        tokenizer: where it had to be loaded for that.
    """

    fingerprint: str
    source: str
    splits: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None


def _key(
    data: DataConfig,
    model: ModelConfig,
    splits: tuple[str, ...],
    local_files_only: bool = False,
) -> _Key:
    source, tokenizer = source_fingerprint(data, splits), None
    name = tokenizer_name(model)
    if name == TRAIN_TOKENIZER:
        content = f"train {model.tokenizer_vocab_size}"
    elif (folder := local_folder(name, tokenizer_option(model))) is not None:
        digest = hashlib.blake2b(digest_size=32)
        for path in tokenizer_files(folder):
            file_bytes = path.read_bytes()
            digest.update(f"{path.name} {len(file_bytes)} ".encode())
            digest.update(file_bytes)
        content = digest.hexdigest()
    else:
        revision, option = tokenizer_revision(model), tokenizer_option(model)
        tokenizer = load_tokenizer(name, revision, local_files_only, option)
        content = serialized(tokenizer)
    made_from = {
        "format": PREPARED_FORMAT,
        "data": source,
        "tokenizer": content,
        "max_source_tokens": data.max_source_tokens,
        "max_target_tokens": data.max_target_tokens,
        "prefixes": [part.data.prefix for part in parts_of(data)],
        "keep_newlines": data.keep_newlines,
        "splits": splits,
    }
    text = json.dumps(made_from, sort_keys=True)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return _Key(fingerprint, source, splits, tokenizer)


class _Lock:
    """Holds the lock of a prepared folder; says once that it has to wait, however long."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        from filelock import FileLock

        self._lock, self._report = FileLock(str(path)), report

    def __enter__(self) -> None:
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._report("prepared data: another process is making the same; waiting for it")
            # Released by the operating system when that process ends, however it ends.
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _make(
    data: DataConfig,
    model: ModelConfig,
    key: _Key,
    directory: Path,
    report: Callable[[str], None],
) -> PreparedData:
    """Make the folder beside its final name and rename it at the end; the lock is held."""
    partial = directory.with_suffix(".partial")
    for leftover in (partial, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        report(f"prepared data: reading ({', '.join(part.name for part in parts_of(data))})")
        loaded = load_splits(data, partial / "texts", key.splits)
        tokenizer = key.tokenizer
        if tokenizer is None:
            tokenizer = tokenizer_for(loaded, data, model, partial, report)
        tokenizer.save_pretrained(partial / "tokenizer")
        meta = tokenize_splits(loaded, tokenizer, data, partial, report)
        shutil.move(loaded.dropped_file, partial / DROPPED)
        shutil.rmtree(partial / "texts")
        meta |= {
            "format": PREPARED_FORMAT,
            "fingerprint": key.fingerprint,
            "source_fingerprint": key.source,
        }
        _write_meta(partial, meta)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(f"prepared data: {directory}")
    return dataclasses.replace(open_prepared(directory), reused=False)


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    meta["file_bytes"] = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    # On disk before the rename, or a power cut could leave a complete name over empty files.
    for path in (*files, folder / "meta.json"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
