"""Prepared data: texts to token ids once, on disk, found again by what they were made from.

`prepare` leaves a folder that depends on nothing but content (data, tokenizer, lengths, prefix):

    prepared-<fingerprint>/
        tokenizer/                          as the run uses it
        train.arrow  validation.arrow ...   id, document, summary, source_ids, target_ids
        dropped.jsonl                       the rows that were left out, each with its reason
        meta.json                           fingerprint, content hashes, audit; written last

Training reads it memory-mapped through `TokenizedSplit`, without `datasets`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.data.audit import SplitAudit, duplicates_across, warnings_of
from t5_fsdp.data.fingerprint import source_fingerprint
from t5_fsdp.data.parts import SPLITS, parts_of
from t5_fsdp.data.sources import load_splits
from t5_fsdp.data.split_writer import LoadedSplits
from t5_fsdp.data.tokenization import (
    TRAIN_TOKENIZER,
    Encoder,
    load_tokenizer,
    local_folder,
    newline_id,
    serialized,
    tokenizer_files,
    tokenizer_name,
    tokenizer_option,
    tokenizer_revision,
    train_tokenizer,
    with_prefix,
)
from t5_fsdp.data.tokenized import TokenizedSplit, flatten, rows_of
from t5_fsdp.errors import UserError
from t5_fsdp.files import FILE_ERRORS
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

PREPARED_FORMAT = 3  # raise when the same inputs would give other files
DROPPED = "dropped.jsonl"

_ROWS_A_BATCH = 1000
_SECONDS_BETWEEN_LINES = 10.0  # of progress, where the output is no terminal
# A tokenizer in plain Python (ByT5) gets several processes from here on; the others have threads.
_ROWS_FOR_PROCESSES = 20_000


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
    """The prepared data in a folder that `prepare` made.

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
        with _locked(directory.with_suffix(".lock"), report):
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


class _locked:
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
            tokenizer = _tokenizer_for(loaded, data, model, partial, report)
        tokenizer.save_pretrained(partial / "tokenizer")
        meta = _tokenize(loaded, tokenizer, data, partial, report)
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


# ---------------------------------------------------------------- tokenizing


def _tokenizer_for(
    loaded: LoadedSplits,
    data: DataConfig,
    model: ModelConfig,
    work_dir: Path,
    report: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    name = tokenizer_name(model)
    if name != TRAIN_TOKENIZER:
        return load_tokenizer(name, tokenizer_revision(model), option=tokenizer_option(model))
    wanted, train = model.tokenizer_vocab_size, loaded.splits["train"]
    report(f"tokenizer: learning {wanted:,} pieces from {counted(len(train), 'example')}")
    folder = work_dir / "tokenizer"
    texts = _TrainingTexts(train, [part.data.prefix for part in parts_of(data)])
    train_tokenizer(texts, wanted, folder)
    tokenizer = load_tokenizer(str(folder))
    if len(tokenizer) < wanted:
        report(
            f"tokenizer: the texts support {len(tokenizer):,} pieces; "
            f"model.tokenizer_vocab_size is {wanted:,}"
        )
    return tokenizer


@dataclass(frozen=True)
class _TrainingTexts:
    """Documents with their prefix, and summaries; can be iterated again."""

    rows: datasets.Dataset
    prefixes: Sequence[str]

    def __iter__(self) -> Iterator[str]:
        for row in self.rows:
            yield with_prefix(row["document"], self.prefixes[row["part"]])
            yield row["summary"]


@dataclass(frozen=True)
class _BatchEncoder:
    """Rows to ids in full length; goes to other processes by pickle."""

    encoder: Encoder
    prefixes: Sequence[str]

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        documents = [
            with_prefix(document, self.prefixes[part])
            for document, part in zip(batch["document"], batch["part"], strict=True)
        ]
        return {
            "source_ids": self.encoder.encode(documents),
            "target_ids": self.encoder.encode_lines(batch["summary"]),
        }


def _tokenize(
    loaded: LoadedSplits,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    folder: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Write every split; content hashes, parts and audit for meta.json."""
    encoder = Encoder(tokenizer, newline_id(tokenizer, data.keep_newlines))
    parts = parts_of(data)
    _check_prefixes(encoder, [part.data.prefix for part in parts], data.max_source_tokens)
    batch_encoder = _BatchEncoder(encoder, [part.data.prefix for part in parts])
    audit, hashes, documents = loaded.audit, {}, {}
    for split, rows in loaded.splits.items():
        split_audit = SplitAudit(encoder, data.max_source_tokens, data.max_target_tokens)
        _write_split(rows, batch_encoder, split_audit, data, folder, split, report)
        audit["splits"][split] |= split_audit.figures()
        hashes[split] = split_audit.content_hash
        documents[split] = split_audit.document_hashes
    audit["duplicates_across"] = duplicates_across(documents)
    audit["warnings"] = warnings_of(audit, data.max_source_tokens, data.max_target_tokens)
    names = [part.name for part in parts]
    return {"content_hash": hashes, "parts": _part_rows(loaded, names), "audit": audit}


def _check_prefixes(encoder: Encoder, prefixes: list[str], max_source_tokens: int) -> None:
    for prefix in prefixes:
        length = len(encoder.encode([prefix])[0]) if prefix else 1
        if length >= max_source_tokens:
            raise UserError(
                f"data.prefix {prefix!r} takes {length - 1} of data.max_source_tokens "
                f"({max_source_tokens}) and leaves no room for the document; raise it"
            )


def _part_rows(loaded: LoadedSplits, names: list[str]) -> list[dict[str, Any]]:
    rows = loaded.splits.get("train")
    if rows is None:
        return []
    counts = [0] * len(names)
    for batch in rows.select_columns(["part"]).iter(100 * _ROWS_A_BATCH):
        for part in set(batch["part"]):
            counts[part] += batch["part"].count(part)
    result, start = [], 0
    for name, count in zip(names, counts, strict=True):
        result.append({"name": name, "start": start, "stop": start + count})
        start += count
    return result


def _write_split(
    rows: datasets.Dataset,
    encode: _BatchEncoder,
    audit: SplitAudit,
    data: DataConfig,
    folder: Path,
    split: str,
    report: Callable[[str], None],
) -> None:
    """Write `<split>.arrow` and fill the audit."""
    import pyarrow as pa
    from tqdm import tqdm

    started = time.monotonic()
    texts = [pa.field(name, pa.string()) for name in ("id", "document", "summary")]
    ids = [pa.field(name, pa.list_(pa.int32())) for name in ("source_ids", "target_ids")]
    schema = pa.schema(texts + ids)
    limits = (data.max_source_tokens, data.max_target_tokens)
    done, told = 0, started
    bar = tqdm(total=len(rows), desc=f"tokenizing {split}", disable=not sys.stderr.isatty())
    with bar, pa.ipc.new_file(str(folder / f"{split}.arrow"), schema) as writer:
        for batch in _encoded_batches(rows, encode, folder / "texts" / f"{split}-ids.arrow"):
            audit.add_texts(batch["document"])
            audit.add_lengths(batch["source_ids"], batch["target_ids"])
            columns = [pa.array(batch[name], pa.string()) for name in schema.names[:3]]
            flat = [
                flatten([encode.encoder.cut(row, limit) for row in batch[name]])
                for name, limit in zip(schema.names[3:], limits, strict=True)
            ]
            kept = [list(rows_of(*column)) for column in flat]
            pairs = zip(*kept, batch["document"], batch["summary"], strict=True)
            for source, target, document, summary in pairs:
                audit.add_ids(source, target, (document, summary))
            columns += [
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
                for values, offsets in flat
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            done += len(batch["id"])
            bar.update(len(batch["id"]))
            if bar.disable and time.monotonic() - told > _SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                report(f"tokenizing {split} {done:,}/{len(rows):,}")
    seconds = time.monotonic() - started
    examples = counted(len(rows), "example")
    report(f"tokenized {split}: {examples}, {len(rows) / seconds:,.0f} a second")


def _encoded_batches(
    rows: datasets.Dataset, encode: _BatchEncoder, scratch: Path
) -> Iterator[dict[str, list]]:
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if encode.encoder.has_threads or len(rows) <= _ROWS_FOR_PROCESSES or num_processes == 1:
        for batch in rows.iter(_ROWS_A_BATCH):
            yield batch | encode(batch)
        return
    encoded = rows.map(
        encode,
        batched=True,
        num_proc=num_processes,
        cache_file_name=str(scratch),
        new_fingerprint="encoded",  # the file is used once: nothing to look up by a hash
    )
    yield from encoded.iter(_ROWS_A_BATCH)
