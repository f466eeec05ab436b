"""Long documents: every word in one part, no part too long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.long_documents import MIN_ROOM, make_sources, split_document
from t5_fsdp.evaluation.sentences import list_sentences
from tests.conftest import make_pairs
from tests.odd_texts import odd_text

PREFIX = "summarize: "


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def squeezed(text: str) -> str:
    return "".join(text.split())


def sentences(lengths: Sequence[int]) -> str:
    return " ".join(" ".join(["Word", *["word"] * (length - 1)]) + "." for length in lengths)


def test_parts_end_with_sentences_and_are_of_like_length() -> None:
    document = sentences([10] * 9)
    # A sentence counts 11, so five fit; 5 and 4, not 5, 4 and no scrap of one.
    parts = split_document(document, 60, count_words)
    assert count_words(parts) == [50, 40]
    assert " ".join(parts) == document
    assert count_words(split_document(sentences([10] * 11), 60, count_words)) == [40, 40, 30]
    by_lines = split_document("\n\n".join(["word " * 9 + "word"] * 9), 60, count_words)
    assert count_words(by_lines) == [50, 40]


def test_a_sentence_that_is_too_long_is_split_between_words() -> None:
    document = sentences([5, 100, 5])
    parts = split_document(document, 30, count_words)
    assert max(count_words(parts)) <= 30 and " ".join(parts) == document


@given(st.lists(odd_text, max_size=8).map("\n".join), st.integers(MIN_ROOM, 40))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_of_odd_texts(text: str, room: int) -> None:
    def count(texts: Sequence[str]) -> list[int]:
        return [len(text.encode("utf-8", "replace")) for text in texts]

    parts = split_document(text, room, count)
    expected = "".join(map(squeezed, list_sentences(text)))
    assert squeezed("".join(parts)) == expected
    assert all(length <= room for length in count(parts))


@pytest.fixture(scope="module", params=["sentencepiece", "bytes"])
def tokenizer(request: Any, corpus: Path) -> Any:
    from transformers import AutoTokenizer, ByT5Tokenizer

    if request.param == "bytes":
        return ByT5Tokenizer()
    return AutoTokenizer.from_pretrained(corpus / "tokenizer")


def test_each_part_is_what_the_model_reads_of_it(tokenizer: Any) -> None:
    documents = [
        " ".join(pair["document"] for pair in make_pairs(30, 3)),
        "",
        "rinse rice.",
        "水" * 300,
        "a" * 300,
        PREFIX + " ".join(["rinse blue rice."] * 60),
    ]
    made = make_sources(tokenizer, documents, PREFIX, 64, split=True)
    # The small vocabulary makes one unknown token of all the water.
    assert made.num_long == (3 if tokenizer.unk_token_id in made.parts[3][0] else 4)
    assert len(made.parts[1]) == 0 and len(made.parts[2]) == 1
    for document, sources in zip(documents, made.parts, strict=True):
        assert all(len(source) <= 64 for source in sources)
        texts = [tokenizer.decode(source, skip_special_tokens=True) for source in sources]
        assert all(text.startswith(PREFIX) for text in texts)
        if "水" not in document:
            read = squeezed("".join(text.removeprefix(PREFIX) for text in texts))
            assert read == squeezed(document.removeprefix(PREFIX))


def test_a_word_that_is_too_long_is_split_and_gets_no_blanks() -> None:
    def count(texts: Sequence[str]) -> list[int]:
        return [text.count("水") for text in texts]

    # Its second half takes few tokens, so it shares a part with the last piece of the first.
    word = "水" * 40 + "x" * 60 + "水" * 5 + "x" * 15
    parts = split_document(f"{word} rice", 30, count)
    assert len(parts) == 3 and max(count(parts)) <= 30
    assert "".join(parts) == f"{word} rice"


def test_truncated_is_what_training_reads(tokenizer: Any) -> None:
    documents = [" ".join(pair["document"] for pair in make_pairs(30, 3)), "rinse rice."]
    made = make_sources(tokenizer, documents, PREFIX, 64, split=False)
    assert made.num_long == 1 and [len(sources) for sources in made.parts] == [1, 1]
    whole = tokenizer(PREFIX + documents[0])["input_ids"]
    expected = [*whole[:63], tokenizer.eos_token_id]
    assert np.array_equal(made.parts[0][0], expected)


def test_no_room_beside_the_prefix_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"--long chunk: .* give at least"):
        make_sources(tokenizer, ["rinse " * 90], PREFIX, 12, split=True)
