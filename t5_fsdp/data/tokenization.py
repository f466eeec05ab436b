"""Tokenizers: loading them, learning one, and turning texts into token ids and back."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from t5_fsdp.config import ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.files import looks_like_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN_TOKENIZER = "train"
NUM_SENTINELS = 100  # T5's <extra_id_0> ... <extra_id_99>, the last ids in reverse
# Span corruption numbers its sentinels upwards: the last one is the least used in pretraining.
NEWLINE_TOKEN = "<extra_id_99>"

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
# Half a character, which JSON's escapes can write and UTF-8 can't.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ORDINARY_TEXT = "the quick brown fox"
_MAX_TRAINING_SENTENCES = 1_000_000
_MAX_SENTENCE_BYTES = 1 << 16  # SentencePiece skips longer lines without a word


def load_tokenizer(
    name: str,
    revision: str | None = None,
    local_files_only: bool = False,
    option: str = "tokenizer",
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder (also a checkpoint of ours, in its `tokenizer/`) or Hub id.

    It has no length limit of its own: always pass one.

    Args:
        name, revision: which one.
        local_files_only: take a Hub id from the cache, without asking the network.
        option: how the user gave it, for messages.

    Raises:
        UserError: there is no such folder or Hub id, the files are damaged, or the tokenizer
            cannot serve a T5 (no pad or end mark, or an emptied vocabulary).
    """
    from transformers import AutoTokenizer

    folder = local_folder(name, option)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name if folder is None else str(folder),
            revision=revision,
            local_files_only=local_files_only,
        )
    except Exception as error:  # tokenizers raises bare Exceptions for damaged files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if folder is not None:
            raise UserError(
                f"{option}: the tokenizer in {folder} cannot be loaded ({reason}); "
                "replace its files"
            ) from error
        at = f" at revision {revision!r}" if revision else ""
        raise UserError(
            f"{option}: the tokenizer of {name}{at} is neither in a folder here nor to be had from "
            f"the Hugging Face Hub ({reason}); check the name and the network, or give a folder "
            "with it"
        ) from error
    _check_usable(tokenizer, f"{option}: the tokenizer of {name}")
    return tokenizer


def local_folder(name: str, option: str = "tokenizer") -> Path | None:
    """Where the tokenizer files of `name` lie, or None if it can only be a Hub id.

    Args:
        option: how the user gave it, for messages.

    Raises:
        UserError: it is a path with no tokenizer there.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{option}: {name} is a file; give the folder that holds it")
        if looks_like_path(name):
            raise UserError(
                f"{option}: {name} does not exist; check the path, or give a Hub id (owner/name)"
            )
        return None
    for folder in (path, path / "tokenizer"):
        if tokenizer_files(folder):
            return folder
    raise UserError(
        f"{option}: the folder {name} has no tokenizer files (e.g. tokenizer.json); "
        "set model.tokenizer to a folder that has, or to a Hub id"
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that make a tokenizer."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _check_usable(tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    for role, token_id in (("pad", tokenizer.pad_token_id), ("end", tokenizer.eos_token_id)):
        if token_id is None:
            raise UserError(f"{what} has no {role} token, which a T5 needs; give a T5's")
    if not _reads_text(tokenizer):
        raise UserError(
            f"{what} knows no piece of {_ORDINARY_TEXT!r}: its files are incomplete; "
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


def tokenizer_name(model: ModelConfig) -> str:
    """The tokenizer to use: model.tokenizer, else that of model.name.

    Raises:
        UserError: both are null.
    """
    name = model.tokenizer or model.name
    if not name:
        raise UserError(
            "model.tokenizer and model.name are both null; give model.tokenizer: a folder, a Hub "
            "id, or train"
        )
    return name


def tokenizer_option(model: ModelConfig) -> str:
    """The option that says which tokenizer is used."""
    return "model.tokenizer" if model.tokenizer else "model.name"


def tokenizer_revision(model: ModelConfig) -> str | None:
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


def serialized(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides how it encodes, as text."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return json.dumps([type(tokenizer).__name__, vocab])


# ---------------------------------------------------------------- texts to ids and back


def with_prefix(document: str, prefix: str) -> str:
    """The document with the prefix before it, once; white space before it does not count."""
    stripped = document.lstrip()
    return stripped if prefix and stripped.startswith(prefix) else prefix + document


def newline_id(tokenizer: PreTrainedTokenizerBase, keep_newlines: bool) -> int | None:
    """The token that stands for a newline in targets, or None where none is needed or wanted.

    Raises:
        UserError: newlines are to be kept, the vocabulary has none, and no sentinel either.
    """
    if not keep_newlines or _writes_newlines(tokenizer):
        return None
    token_id = tokenizer.get_vocab().get(NEWLINE_TOKEN)
    if token_id is None:
        raise UserError(
            f"data.keep_newlines needs the token {NEWLINE_TOKEN}, which this tokenizer has not; "
            "use a T5's tokenizer, or set it to false"
        )
    return token_id


def _writes_newlines(tokenizer: PreTrainedTokenizerBase) -> bool:
    # ByT5's bytes and some newer vocabularies have a newline of their own.
    ids = tokenizer("a\nb", add_special_tokens=False)["input_ids"]
    return "\n" in tokenizer.decode(ids)


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of <extra_id_0>, <extra_id_1> ..., the marks of gaps in T5's pretraining.

    In mT5's vocabulary they are ordinary pieces with a mark for a blank before them.
    """
    return {
        token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token.lstrip("\u2581").startswith("<extra_id_")
    }


def encode_sources(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prefix: str, max_source_tokens: int
) -> list[np.ndarray]:
    """Token ids of documents outside any split, exactly as `prepare` makes them; int32 [source]."""
    encoder = Encoder(tokenizer)
    documents = [with_prefix(text, prefix) for text in texts]
    return [
        np.array(encoder.cut(row, max_source_tokens), dtype=np.int32)
        for row in encoder.encode(documents)
    ]


def decode_summary(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], newline: int | None
) -> str:
    """The text of generated ids, special tokens left out.

    Args:
        tokenizer: the model's.
        ids: of one summary; what stands behind the end mark is left out.
        newline: from `newline_id`; its ids become newlines.
    """
    ids = list(ids)
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    lines: list[list[int]] = [[]]
    for token_id in ids:
        if newline is not None and token_id == newline:
            lines.append([])
        else:
            lines[-1].append(token_id)
    texts = tokenizer.batch_decode(lines, skip_special_tokens=True)
    return "\n".join(text.strip() for text in texts).strip()


class Encoder:
    """Texts to token ids in full length; truncation comes after, so that it can be counted.

    Args:
        tokenizer: its end mark ends every text.
        newline: from `newline_id`; stands between the lines of `encode_lines`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, newline: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._newline = newline
        self.end_id = tokenizer.eos_token_id
        self.unknown_id = tokenizer.unk_token_id
        self.has_threads = tokenizer.is_fast
        specials = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, filter(None, specials))) or r"(?!)")
        self._unknown: dict[str, bool] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text with end mark; newlines become what the vocabulary has for them."""
        return self._encode([self._plain(text) for text in texts], True)

    def encode_lines(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, with the newline token between the lines of a text where there is one."""
        if self._newline is None:
            return self.encode(texts)
        lines = [self._plain(text).strip().split("\n") for text in texts]
        encoded = iter(self._encode([line for text in lines for line in text], False))
        rows = []
        for text in lines:
            row: list[int] = []
            for number in range(len(text)):
                row += [self._newline] if number else []
                row += next(encoded)
            rows.append([*row, self.end_id])
        return rows

    def _plain(self, text: str) -> str:
        text = _LONE_SURROGATE.sub("\ufffd", text)
        # A text that quotes "</s>" must not end there: a blank inside makes it ordinary pieces.
        return self._specials.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
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

    def is_unknown(self, character: str) -> bool:
        """Whether the vocabulary cannot write a character."""
        if character not in self._unknown:
            if _LONE_SURROGATE.match(character):
                return True
            ids = self._encode([character], False)[0]
            self._unknown[character] = self.unknown_id is not None and self.unknown_id in ids
        return self._unknown[character]
