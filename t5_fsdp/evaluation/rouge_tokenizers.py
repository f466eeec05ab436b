"""What ROUGE counts as a word: rouge-score's own definition, or words of any script."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby

# Scripts without spaces between words: a character is the smallest unit that means something.
_UNSPACED = (
    ("\u0e01", "\u0eff"),  # Thai, Lao
    ("\u1000", "\u109f"),  # Burmese
    ("\u1780", "\u17ff"),  # Khmer
    ("\u3005", "\u3007"),  # marks of repetition, zero
    ("\u3041", "\u312f"),  # Japanese syllables, Bopomofo
    ("\u31f0", "\u31ff"),
    ("\u3400", "\u9fff"),  # Chinese characters
    ("\uf900", "\ufaff"),
    ("\U00020000", "\U000323af"),
)
_ASCII_WORD = re.compile("[a-z0-9]")
_STEMS_REMEMBERED = 2**16
_TEXTS_REMEMBERED = 2  # several metrics in a row ask for the words of a pair


class WordTokenizer:
    """A tokenizer for `RougeScorer`, which remembers stems: that saves a third of the time.

    Args:
        name: "default" (rouge-score's own words) or "unicode" (`unicode_words`).
        stemmer: cut the ends of English words longer than three letters (Porter), as rouge-score
            does.
    """

    def __init__(self, name: str, stemmer: bool) -> None:
        from nltk.stem.porter import PorterStemmer
        from rouge_score.tokenize import tokenize

        self.stem = lru_cache(maxsize=_STEMS_REMEMBERED)(PorterStemmer().stem)
        self._stemmer = self if stemmer else None
        self._split = tokenize
        words = self._default_words if name == "default" else self._unicode_words
        self.tokenize: Callable[[str], list[str]] = lru_cache(maxsize=_TEXTS_REMEMBERED)(words)

    def _default_words(self, text: str) -> list[str]:
        return self._split(text, self._stemmer)

    def _unicode_words(self, text: str) -> list[str]:
        words = unicode_words(text)
        if self._stemmer is None:
            return words
        return [self.stem(word) if len(word) > 3 and word.isascii() else word for word in words]


def unicode_words(text: str) -> list[str]:
    """The words of a text in any script, in lower case and in compatibility form (NFKC).

    Letters and digits with their marks make words; where a script puts no spaces between words
    (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each character is one. On ASCII text these are
    rouge-score's words.
    """
    return _unicode_pattern().findall(unicodedata.normalize("NFKC", text).lower())


def has_word(text: str, name: str) -> bool:
    """Whether the tokenizer of that name finds any word in a text."""
    if name == "default":
        return _ASCII_WORD.search(text.lower()) is not None
    return bool(unicode_words(text))


@lru_cache(maxsize=1)
def _unicode_pattern() -> re.Pattern[str]:
    unspaced = "".join(f"{first}-{last}" for first, last in _UNSPACED)
    # Python counts no combining mark as part of a word, so it would cut Hindi at each vowel.
    letter = rf"[^\W_][{_marks()}]*"
    return re.compile(rf"(?=[{unspaced}]){letter}|(?:(?![{unspaced}]){letter})+")


def _marks() -> str:
    """All combining marks, as the inside of a character class."""
    marks = (c for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith("M"))
    ranges = []
    for _, run in groupby(enumerate(marks), key=lambda item: item[1] - item[0]):
        codes = [code for _, code in run]
        ranges.append(f"{re.escape(chr(codes[0]))}-{re.escape(chr(codes[-1]))}")
    return "".join(ranges)
