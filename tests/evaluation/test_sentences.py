"""Texts become one sentence a line, and nothing of them is lost."""

from __future__ import annotations

from hypothesis import given, settings

from t5_fsdp.evaluation.sentences import list_sentences, split_sentences
from tests.odd_texts import odd_text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(odd_text)
def test_splitting_only_adds_newlines(text: str):
    plain = text.replace("\ud800", "\ufffd").replace("\n", "")
    assert split_sentences(text).replace("\ud800", "\ufffd").replace("\n", "") == plain


def test_lines_are_sentences_and_other_texts_are_split():
    assert split_sentences("One. Two.\nThree.") == "One. Two.\nThree."
    one_line = [line.strip() for line in split_sentences("Dr. Smith came. He left.\n").split("\n")]
    assert [line for line in one_line if line] == ["Dr. Smith came.", "He left."]


def test_sentences_of_lines_are_listed_without_blank_ones():
    assert list_sentences(" One. Two\n\nThree is here. Four ") == [
        "One.",
        "Two",
        "Three is here.",
        "Four",
    ]
    assert list_sentences(" \n") == []
