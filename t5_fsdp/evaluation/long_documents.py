"""Documents that are longer than a model reads at a time: cut there, or split into parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from t5_fsdp.data.tokenization import Encoder, with_prefix
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.sentences import list_sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Counter = Callable[[Sequence[str]], list[int]]  # tokens of each text
_Piece = tuple[str, str]  # what stands between it and the piece before, and its text

# A part must hold any single character, and should hold a sentence.
MIN_ROOM = 16


@dataclass(frozen=True)
class Sources:
    """What is given to the model for some documents.

    Attributes:
        parts: token ids with prefix and end mark, [documents] of [parts] of int32 [source]; no
            part for a blank document, more than one only where one was split.
        num_long: documents that were longer than one source.
    """

    parts: list[list[np.ndarray]]
    num_long: int


def make_sources(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    prefix: str,
    max_source_tokens: int,
    split: bool,
) -> Sources:
    """Encode documents as training does.

    Args:
        split: split what is longer than `max_source_tokens`; else it is cut there.

    Raises:
        UserError: to split, with no room beside the prefix.
    """
    encoder = Encoder(tokenizer)
    written = [index for index, text in enumerate(documents) if text.strip()]
    encoded = encoder.encode([with_prefix(documents[index], prefix) for index in written])
    # White space between two sentences may take a token of its own.
    room = max_source_tokens - len(encoder.encode([prefix])[0]) - 1
    if split and room < MIN_ROOM:
        raise UserError(
            f"--long chunk: data.max_source_tokens {max_source_tokens} leaves {room} tokens beside "
            f"the prefix; give at least {max_source_tokens - room + MIN_ROOM}"
        )

    def count(texts: Sequence[str]) -> list[int]:
        return [len(row) - 1 for row in encoder.encode(texts)]

    parts: list[list[np.ndarray]] = [[] for _ in documents]
    num_long = 0
    for index, row in zip(written, encoded, strict=True):
        rows = [row]
        if len(row) > max_source_tokens:
            num_long += 1
            if split:
                texts = split_document(documents[index], room, count)
                rows = encoder.encode([with_prefix(text, prefix) for text in texts])
        parts[index] = [
            np.array(encoder.cut(ids, max_source_tokens), dtype=np.int32) for ids in rows
        ]
    return Sources(parts, num_long)


def split_document(document: str, room: int, count: Counter) -> list[str]:
    """Parts of a document in its order, each at most `room` tokens, of about the same length.

    A part ends where a sentence or line ends; a sentence that is longer by itself is split between
    words, and a word that is, between characters. Nothing but white space is lost.

    Args:
        room: at least `MIN_ROOM`.
        count: the tokens of each of some texts; of texts joined by blanks there are at most as many
            as of all together, and one for each blank.
    """
    pieces = _pieces([(" ", sentence) for sentence in list_sentences(document)], room, count)
    if not pieces:
        return []
    lengths = [length + 1 for length in count([text for _, text in pieces])]
    num_parts = len(_fill(lengths, room))
    # The smallest room that takes no more parts leaves no scrap as the last one.
    low, high = math.ceil(sum(lengths) / num_parts), room
    while low < high:
        middle = (low + high) // 2
        if len(_fill(lengths, middle)) > num_parts:
            low = middle + 1
        else:
            high = middle
    ends = list(accumulate(_fill(lengths, high)))
    starts = [0, *ends[:-1]]
    return [
        "".join(joint + text for joint, text in pieces[start:end]).strip()
        for start, end in zip(starts, ends, strict=True)
    ]


def _fill(lengths: Sequence[int], room: int) -> list[int]:
    """How many pieces each part takes when each takes what it can; one at least."""
    sizes: list[int] = []
    left = -1
    for length in lengths:
        if length <= left:
            sizes[-1] += 1
        else:
            sizes.append(1)
            left = room
        left -= length
    return sizes


def _pieces(pieces: Sequence[_Piece], room: int, count: Counter) -> list[_Piece]:
    """Those that fit as they are, the others in words, or in halves of a word, that do."""
    fitting: list[_Piece] = []
    lengths = count([text for _, text in pieces])
    for (joint, text), length in zip(pieces, lengths, strict=True):
        if length < room or len(text) == 1:
            fitting.append((joint, text))
            continue
        smaller = [(" ", word) for word in text.split()]
        if len(smaller) == 1:
            middle = len(text) // 2
            smaller = [(joint, text[:middle]), ("", text[middle:])]
        fitting += _pieces(smaller, room, count)
    return fitting
