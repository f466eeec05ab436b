"""From texts to token ids, once: the tokenizer, the prepared data on disk, and reading it back.

`prepare` leaves a folder that depends on nothing but content (data, tokenizer, lengths, prefix):

    prepared-<fingerprint>/
        tokenizer/                          as the run uses it
        train.arrow  validation.arrow ...   id, document, summary, source_ids, target_ids
        meta.json                           fingerprint, content hashes, audit; written last

Training reads it memory-mapped through `TokenizedSplit`, without `datasets`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import shutil
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.data.sources import load_splits, source_fingerprint
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow
    from transformers import PreTrainedTokenizerBase

PREPARED_FORMAT = 2  # raise when the same inputs would give other files
TRAIN_TOKENIZER = "train"
NUM_SENTINELS = 100  # T5's <extra_id_0> ... <extra_id_99>, the last ids in reverse

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
# SentencePiece's 0.9995 makes the rarer capitals of a small corpus unknown, and what is unknown
# is missing from every prediction.
_CHARACTER_COVERAGE = 0.99999
_ORDINARY_TEXT = "the quick brown fox"
_MAX_TRAINING_SENTENCES = 1_000_000
_MAX_SENTENCE_BYTES = 1 << 16  # SentencePiece skips longer lines without a word
_ROWS_A_BATCH = 1000
_USER_CAN_MEND = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EACCES", "EROFS", "EPERM", "EEXIST", "ENOTDIR")
}
# A tokenizer in plain Python (ByT5) gets several processes from here on; the others have threads.
_ROWS_FOR_PROCESSES = 20_000


# ---- tokenizers


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder (also a checkpoint of ours, in its `tokenizer/`) or Hub id.

    It has no length limit of its own: always pass one.

    Raises:
        UserError: there is no such folder or Hub id, the files are damaged, or the tokenizer
            cannot serve a T5 (no pad or end mark, or an emptied vocabulary).
    """
    from transformers import AutoTokenizer

    folder = _local_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name if folder is None else str(folder), revision=revision
        )
    except Exception as error:  # tokenizers raises bare Exceptions for damaged files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if folder is not None:
            raise UserError(
                f"tokenizer in {folder} cannot be loaded ({reason}); replace its files"
            ) from error
        at = f" at revision {revision!r}" if revision else ""
        raise UserError(
            f"tokenizer {name!r}{at} is neither a folder here nor to be had from the Hub "
            f"({reason}); give a folder, or check the name and the network"
        ) from error
    _check_usable(tokenizer, name)
    return tokenizer


def _local_folder(name: str) -> Path | None:
    """Where the tokenizer files of `name` lie, or None if it can only be a Hub id."""
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists():
            raise UserError(f"tokenizer {name!r} is a file; give the folder that holds it")
        if name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith("/"):
            raise UserError(
                f"tokenizer folder {name!r} does not exist; "
                "check the path or give a Hub id (owner/name)"
            )
        return None
    for folder in (path, path / "tokenizer"):
        if _files_of(folder):
            return folder
    raise UserError(
        f"folder {name!r} has no tokenizer files (e.g. tokenizer.json); "
        "set model.tokenizer to a folder that has, or to a Hub id"
    )


def _files_of(folder: Path) -> list[Path]:
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _check_usable(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    for role, token_id in (("pad", tokenizer.pad_token_id), ("end", tokenizer.eos_token_id)):
        if token_id is None:
            raise UserError(
                f"tokenizer {name!r} has no {role} token, which a T5 needs; give a T5's tokenizer"
            )
    if not _reads_text(tokenizer):
        raise UserError(
            f"tokenizer {name!r} knows no piece of {_ORDINARY_TEXT!r}: its files are incomplete; "
            "give a folder with a complete tokenizer.json, or a Hub id"
        )


def _reads_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it can tell ordinary text, or rightly cannot since it is for another script."""
    ids = tokenizer(_ORDINARY_TEXT, add_special_tokens=False)["input_ids"]
    known = [token_id for token_id in ids if token_id != tokenizer.unk_token_id]
    # A mark for spaces alone is no text: an emptied vocabulary still has that one.
    if any(character.isalnum() for character in tokenizer.decode(known)):
        return True
    pieces = {piece.strip("\u2581") for piece in tokenizer.get_vocab()}
    pieces -= set(tokenizer.all_special_tokens)
    letters = {piece for piece in pieces if any(map(str.isalpha, piece))}
    return bool(letters) and not any(piece in _ORDINARY_TEXT for piece in letters)


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
    """Learn a SentencePiece unigram vocabulary and write it as a T5 tokenizer folder.

    The same texts give the same tokenizer. Ids are T5's: 0 padding, 1 end mark, 2 unknown, then
    pieces, then the 100 sentinels in reverse. A small corpus may support fewer pieces than asked
    for. spiece.model, for SentencePiece itself, has no sentinels.

    Args:
        texts: the corpus, iterated twice; of more than a million lines the pieces are learned
            from a million, evenly spread.
        vocab_size: pieces, special tokens and sentinels together.
        directory: made if needed.

    Raises:
        UserError: no text, or a vocab_size below the number of characters that it needs.
    """
    import sentencepiece

    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(texts),
            model_writer=buffer,
            model_type="unigram",
            vocab_size=vocab_size - NUM_SENTINELS,
            hard_vocab_limit=False,
            character_coverage=_CHARACTER_COVERAGE,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            # SentencePiece's own sampling and shuffling have a random seed that can't be set.
            input_sentence_size=0,
            shuffle_input_sentence=False,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=1,  # the sums of several threads depend on their order
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1].rsplit("] ", 1)[-1]
        raise UserError(
            f"model.tokenizer_vocab_size {vocab_size} ({NUM_SENTINELS} of it for sentinels) does "
            f"not fit the training texts ({reason or 'no text to learn from'}); change "
            "model.tokenizer_vocab_size or check the data"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spiece.model").write_bytes(buffer.getvalue())
    _to_transformers(buffer.getvalue()).save_pretrained(directory)


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    """At most `_MAX_TRAINING_SENTENCES` of the lines, evenly spread."""
    total = sum(1 for _ in _all_lines(texts))
    wanted = min(total, _MAX_TRAINING_SENTENCES)
    for number, line in enumerate(_all_lines(texts)):
        if (number + 1) * wanted // total > number * wanted // total:
            yield line


def _all_lines(texts: Iterable[str]) -> Iterator[str]:
    characters = _MAX_SENTENCE_BYTES // 4  # UTF-8 takes at most four bytes for one
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), characters):
                yield line[start : start + characters]


def _to_transformers(model_bytes: bytes) -> PreTrainedTokenizerBase:
    # Pieces, scores and normalization are handed over one by one: T5Tokenizer(vocab_file=...)
    # builds a tokenizer to which everything is unknown, without an error.
    from sentencepiece import sentencepiece_model_pb2 as protobuf
    from transformers import T5Tokenizer

    model = protobuf.ModelProto.FromString(model_bytes)  # type: ignore[attr-defined]
    vocab = [(piece.piece, piece.score) for piece in model.pieces]
    vocab += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(NUM_SENTINELS))]
    return T5Tokenizer(
        vocab=vocab,
        _spm_precompiled_charsmap=model.normalizer_spec.precompiled_charsmap,
        extra_ids=NUM_SENTINELS,
    )


# ---- reading prepared data


class TokenizedSplit:
    """The examples of one split as token ids, with their texts at hand.

    Made by `PreparedData.split` (memory-mapped) or `from_ids` (in memory).

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
        return cls(_Ragged([_flatten(sources)]), _Ragged([_flatten(targets)]), in_memory)

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


def _flatten(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    parts = [np.asarray(row, np.int32) for row in rows]
    return np.concatenate([np.empty(0, np.int32), *parts]), offsets


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


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder; see the module.

    Attributes:
        directory: the folder.
        tokenizer_directory: its tokenizer, for `load_tokenizer`.
        fingerprint: of everything the folder was made from.
        source_fingerprint: of the rows alone, see `source_fingerprint`.
        content_hash: per split, of the token ids in order: equal means equal training data.
        audit: what `load_splits` tells; per split also source_tokens and target_tokens ({mean,
            median, p90, max} before truncation, prefix and end mark included), the shares
            source_truncated and target_truncated of the examples, and unknown_tokens, the share
            of the tokens kept.
        reused: it was there already.
    """

    directory: Path
    tokenizer_directory: Path
    fingerprint: str
    source_fingerprint: str
    content_hash: dict[str, str]
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
    """As `open_prepared`; None where the folder is missing or not complete."""
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in meta["file_bytes"]}
    except (OSError, ValueError, KeyError):
        return None
    if meta.get("format") != PREPARED_FORMAT or sizes != meta["file_bytes"]:
        return None
    return PreparedData(
        directory=directory,
        tokenizer_directory=directory / "tokenizer",
        fingerprint=meta["fingerprint"],
        source_fingerprint=meta["source_fingerprint"],
        content_hash=meta["content_hash"],
        audit=meta["audit"],
        reused=True,
    )


# ---- preparing


def prepare(
    data: DataConfig,
    model: ModelConfig,
    cache_dir: Path,
    report: Callable[[str], None] = print,
) -> PreparedData:
    """Read, clean, split and tokenize, once: the same content and options reuse the same folder.

    Any number of processes may call it at the same time: one works, the others wait for it. A
    process that dies leaves nothing that a later call could take for complete.

    Each source is `data.prefix` (unless the document begins with it already) and the document,
    cut to max_source_tokens; each target the summary, cut to max_target_tokens; both always keep
    their end mark.

    Args:
        data: source, prefix and lengths.
        model: which tokenizer (name, revision, tokenizer, tokenizer_vocab_size).
        cache_dir: holds the prepared folders; made if needed.
        report: gets a line for each stage.

    Raises:
        UserError: as `load_splits`, `load_tokenizer` and `train_tokenizer`, or when cache_dir
            cannot be written or is full.
    """
    key = _key(data, model)
    directory = cache_dir / f"prepared-{key.fingerprint[:16]}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_suffix(".lock"), report):
            prepared = find_prepared(directory)
            if prepared is not None and prepared.fingerprint == key.fingerprint:
                report(f"prepared data: reusing {directory}")
                return prepared
            return _make(data, model, key, directory, report)
    except OSError as error:
        if error.errno not in _USER_CAN_MEND:
            raise
        raise UserError(
            f"data.cache_dir {cache_dir} cannot be written ({error.strerror}); make room there or "
            "set data.cache_dir"
        ) from error


@dataclass(frozen=True)
class _Key:
    """What a prepared folder is found again by.

    Attributes:
        fingerprint: of everything it is made from.
        source: of the rows alone, see `source_fingerprint`.
        tokenizer: where it had to be loaded for that.
    """

    fingerprint: str
    source: str
    tokenizer: PreTrainedTokenizerBase | None


def _key(data: DataConfig, model: ModelConfig) -> _Key:
    source, tokenizer = source_fingerprint(data), None
    name = _tokenizer_name(model)
    if name == TRAIN_TOKENIZER:
        content = f"train {model.tokenizer_vocab_size}"
    elif (folder := _local_folder(name)) is not None:
        digest = hashlib.blake2b(digest_size=32)
        for path in _files_of(folder):
            file_bytes = path.read_bytes()
            digest.update(f"{path.name} {len(file_bytes)} ".encode())
            digest.update(file_bytes)
        content = digest.hexdigest()
    else:
        tokenizer = load_tokenizer(name, _revision(model))
        content = _serialized(tokenizer)
    parts = {
        "format": PREPARED_FORMAT,
        "data": source,
        "tokenizer": content,
        "max_source_tokens": data.max_source_tokens,
        "max_target_tokens": data.max_target_tokens,
        "prefix": data.prefix,
    }
    text = json.dumps(parts, sort_keys=True)
    return _Key(hashlib.blake2b(text.encode(), digest_size=32).hexdigest(), source, tokenizer)


def _tokenizer_name(model: ModelConfig) -> str:
    name = model.tokenizer or model.name
    if not name:
        raise UserError(
            "model.tokenizer and model.name are both null; give model.tokenizer: a folder, a Hub "
            "id, or train"
        )
    return name


def _revision(model: ModelConfig) -> str | None:
    """model.revision belongs to model.name; another tokenizer's Hub id has its own history."""
    return model.revision if model.tokenizer in (None, model.name) else None


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex digest of the vocabulary and the special tokens: what gives ids their meaning.

    Not of its files: they also hold how it was loaded, and by which release.
    """
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    text = json.dumps([vocab, special])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _serialized(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return json.dumps([type(tokenizer).__name__, vocab])


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
        report(f"prepared data: reading (data.source: {data.source})")
        loaded = load_splits(data, partial / "texts")
        tokenizer = key.tokenizer
        if tokenizer is None:
            tokenizer = _tokenizer_for(loaded.splits["train"], data, model, partial, report)
        tokenizer.save_pretrained(partial / "tokenizer")
        encoder = _Encoder(tokenizer, data)
        audit, hashes = loaded.audit, {}
        for split, rows in loaded.splits.items():
            encoded = _encode_split(rows, encoder, partial, split, report)
            audit["splits"][split] |= encoded.statistics(encoder)
            hashes[split] = encoded.digest.hexdigest()
        shutil.rmtree(partial / "texts")
        meta = {
            "format": PREPARED_FORMAT,
            "fingerprint": key.fingerprint,
            "source_fingerprint": key.source,
            "content_hash": hashes,
            "audit": audit,
        }
        _write_meta(partial, meta)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(f"prepared data: {directory}")
    made = open_prepared(directory)
    return dataclasses.replace(made, reused=False)


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    meta["file_bytes"] = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    # On disk before the rename, or a power cut could leave a complete name over empty files.
    for path in (*files, folder / "meta.json"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _tokenizer_for(
    train: datasets.Dataset,
    data: DataConfig,
    model: ModelConfig,
    work_dir: Path,
    report: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    name = _tokenizer_name(model)
    if name != TRAIN_TOKENIZER:
        return load_tokenizer(name, _revision(model))
    wanted = model.tokenizer_vocab_size
    report(f"tokenizer: learning {wanted} pieces from {len(train)} examples")
    texts = _TrainingTexts(train, data.prefix)
    folder = work_dir / "tokenizer"
    train_tokenizer(texts, wanted, folder)
    tokenizer = load_tokenizer(str(folder))
    if len(tokenizer) < wanted:
        report(
            f"tokenizer: the training texts support {len(tokenizer)} pieces, not the "
            f"{wanted} of model.tokenizer_vocab_size"
        )
    return tokenizer


@dataclass(frozen=True)
class _TrainingTexts:
    """Documents with their prefix, and summaries; can be iterated again."""

    rows: datasets.Dataset
    prefix: str

    def __iter__(self) -> Iterator[str]:
        for row in self.rows:
            yield with_prefix(row["document"], self.prefix)
            yield row["summary"]


def with_prefix(document: str, prefix: str) -> str:
    """The document with the prefix before it, once."""
    return document if document.startswith(prefix) else prefix + document


def encode_sources(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prefix: str, max_source_tokens: int
) -> list[np.ndarray]:
    """Token ids of documents outside any split, exactly as `prepare` makes them; int32 [source]."""
    encoder = _Encoder(tokenizer, DataConfig(prefix=prefix, max_source_tokens=max_source_tokens))
    ids = encoder({"document": list(texts), "summary": []})["source_ids"]
    return [np.array(encoder.cut(row, max_source_tokens), dtype=np.int32) for row in ids]


class _Encoder:
    """Texts to token ids in full length; truncation comes after, so that it can be counted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._prefix = data.prefix
        self.end_id = tokenizer.eos_token_id
        self.unknown_id = tokenizer.unk_token_id
        self.max_source, self.max_target = data.max_source_tokens, data.max_target_tokens
        self.has_threads = tokenizer.is_fast

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = [with_prefix(document, self._prefix) for document in batch["document"]]
        return {
            "source_ids": self._encode(documents),
            "target_ids": self._encode(batch["summary"]) if batch["summary"] else [],
        }

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(
            texts,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]

    def cut(self, ids: list[int], limit: int) -> list[int]:
        """At most `limit` ids of which the last is the end mark, whatever the tokenizer adds."""
        if ids and ids[-1] == self.end_id and len(ids) <= limit:
            return ids
        return [*ids[: limit - 1], self.end_id]


@dataclass
class _EncodedSplit:
    """What is gathered while a split is written."""

    source_lengths: list[int] = field(default_factory=list)  # before truncation
    target_lengths: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_unknown: int = 0
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=32))

    def add(self, source: np.ndarray, target: np.ndarray, unknown_id: int | None) -> None:
        self.digest.update(np.array([len(source), len(target)], "<i4").tobytes())
        for ids in (source, target):
            self.digest.update(ids.astype("<i4", copy=False).tobytes())
            self.num_tokens += len(ids)
            if unknown_id is not None:
                self.num_unknown += int(np.count_nonzero(ids == unknown_id))

    def statistics(self, encoder: _Encoder) -> dict[str, Any]:
        sources, targets = np.array(self.source_lengths), np.array(self.target_lengths)
        return {
            "source_tokens": _summary(sources),
            "target_tokens": _summary(targets),
            "source_truncated": float(np.mean(sources > encoder.max_source)),
            "target_truncated": float(np.mean(targets > encoder.max_target)),
            "unknown_tokens": self.num_unknown / self.num_tokens,
        }


def _summary(lengths: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(np.mean(lengths)),
        "median": float(np.median(lengths)),
        "p90": float(np.percentile(lengths, 90)),
        "max": int(np.max(lengths)),
    }


def _encode_split(
    rows: datasets.Dataset,
    encoder: _Encoder,
    folder: Path,
    split: str,
    report: Callable[[str], None],
) -> _EncodedSplit:
    """Write `<split>.arrow` and gather its statistics and content hash."""
    import pyarrow as pa
    from tqdm import tqdm

    started = time.monotonic()
    encoded = _EncodedSplit()
    texts = [pa.field(name, pa.string()) for name in ("id", "document", "summary")]
    ids = [pa.field(name, pa.list_(pa.int32())) for name in ("source_ids", "target_ids")]
    schema = pa.schema(texts + ids)
    bar = tqdm(total=len(rows), desc=f"tokenizing {split}", disable=not sys.stderr.isatty())
    with bar, pa.ipc.new_file(str(folder / f"{split}.arrow"), schema) as writer:
        for batch in _encoded_batches(rows, encoder, folder / "texts" / f"{split}-ids.arrow"):
            encoded.source_lengths += map(len, batch["source_ids"])
            encoded.target_lengths += map(len, batch["target_ids"])
            sources = _flatten(
                [encoder.cut(ids, encoder.max_source) for ids in batch["source_ids"]]
            )
            targets = _flatten(
                [encoder.cut(ids, encoder.max_target) for ids in batch["target_ids"]]
            )
            source_rows, target_rows = _Ragged([sources]), _Ragged([targets])
            for index in range(len(batch["id"])):
                encoded.add(source_rows.row(index), target_rows.row(index), encoder.unknown_id)
            columns = [pa.array(batch[name], pa.string()) for name in schema.names[:3]]
            columns += [
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
                for values, offsets in (sources, targets)
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            bar.update(len(batch["id"]))
    seconds = time.monotonic() - started
    report(f"tokenized {split}: {len(rows)} examples, {len(rows) / seconds:.0f} a second")
    return encoded


def _encoded_batches(
    rows: datasets.Dataset, encoder: _Encoder, scratch: Path
) -> Iterator[dict[str, list]]:
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if encoder.has_threads or len(rows) <= _ROWS_FOR_PROCESSES or num_processes == 1:
        for batch in rows.iter(_ROWS_A_BATCH):
            yield batch | encoder(batch)
        return
    encoded = rows.map(
        encoder,
        batched=True,
        num_proc=num_processes,
        cache_file_name=str(scratch),
        new_fingerprint="encoded",  # the file is used once: nothing to look up by a hash
    )
    yield from encoded.iter(_ROWS_A_BATCH)
