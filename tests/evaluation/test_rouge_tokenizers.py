"""Words of any script; on English text those of rouge-score."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5_fsdp.evaluation.rouge_tokenizers import WordTokenizer, has_word, unicode_words
from tests.odd_texts import odd_text


@pytest.mark.parametrize("stemmer", [True, False])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.one_of(
        st.text(string.printable),
        st.lists(st.sampled_from(["Running", "cats_and", "it's", "3.50", "generously"])).map(
            " ".join
        ),
    )
)
def test_ascii_text_has_the_same_words_in_both(stemmer: bool, text: str):
    default, unicode = (WordTokenizer(name, stemmer) for name in ("default", "unicode"))
    assert unicode.tokenize(text) == default.tokenize(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Le café, naïve!", ["le", "café", "naïve"]),
        ("cafe\u0301", ["café"]),  # composed
        ("完全相同。", ["完", "全", "相", "同"]),
        ("東京タワーは333m", ["東", "京", "タ", "ワ", "ー", "は", "333m"]),
        ("हिन्दी में", ["हिन्दी", "में"]),  # vowel signs stay in their word
        ("ที่นี่", ["ที่", "นี่"]),  # and with their letter
        ("한국어 문장", ["한국어", "문장"]),
        ("Привет, мир", ["привет", "мир"]),
        ("\uff21\uff22 ﬁn", ["ab", "fin"]),  # compatibility forms
        ("🍎 _ … \ud800", []),
    ],
)
def test_words_of_other_scripts(text: str, words: list[str]):
    assert unicode_words(text) == words


def test_stems_are_cut_off_english_words_alone():
    assert WordTokenizer("unicode", True).tokenize("running cafés") == ["run", "cafés"]
    assert WordTokenizer("unicode", False).tokenize("running cafés") == ["running", "cafés"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(odd_text, st.sampled_from(["default", "unicode"]))
def test_a_text_has_a_word_if_the_tokenizer_finds_one(text: str, name: str):
    assert has_word(text, name) == bool(WordTokenizer(name, False).tokenize(text))
