"""Rows to token ids: the tokenizer, the arrow file of each split, and what the audit says of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.console import is_terminal
from t5_fsdp.data.audit import SplitAudit, duplicates_across, warnings_of
from t5_fsdp.data.parts import parts_of
from t5_fsdp.data.split_writer import LoadedSplits
from t5_fsdp.data.tokenization import (
    TRAIN_TOKENIZER,
    Encoder,
    load_tokenizer,
    newline_id,
    tokenizer_name,
    tokenizer_option,
    tokenizer_revision,
    train_tokenizer,
    with_prefix,
)
from t5_fsdp.data.tokenized import flatten, rows_of
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_ROWS_A_BATCH = 1000
_SECONDS_BETWEEN_LINES = 10.0  # of progress, where the output is no terminal
# A tokenizer in plain Python (ByT5) gets several processes from here on; the others have threads.
_ROWS_FOR_PROCESSES = 20_000


def tokenizer_for(
    loaded: LoadedSplits,
    data: DataConfig,
    model: ModelConfig,
    work_dir: Path,
    report: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """The tokenizer that the options name, or one learned from the training split.

    Args:
        loaded: has the training split, where a tokenizer is learned.
        work_dir: a new tokenizer is written into its folder `tokenizer`.
        report: gets a line for each stage.

    Raises:
        UserError: as `load_tokenizer` and `train_tokenizer`.
    """
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


def tokenize_splits(
    loaded: LoadedSplits,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    folder: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Write `<split>.arrow` of every split into a folder.

    Args:
        folder: may hold scratch files in `texts`.
        report: gets a line for each split.

    Returns:
        content_hash, parts and audit as `PreparedData` has them.

    Raises:
        UserError: a prefix fills max_source_tokens.
    """
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
    bar = tqdm(total=len(rows), desc=f"tokenizing {split}", disable=not is_terminal(sys.stderr))
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
