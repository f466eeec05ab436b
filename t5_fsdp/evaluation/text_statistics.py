"""What a summary is like beside its ROUGE: length, novelty, copying, repetition, cut ends.

Words are those of `unicode_words`, not stemmed, whatever ROUGE's own settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from t5_fsdp.evaluation.rouge_tokenizers import unicode_words

Value: TypeAlias = float | int | bool | None

STATISTICS = (
    "document_words", "summary_words", "reference_words", "compression",
    "novel_1grams", "novel_2grams", "novel_3grams", "novel_4grams",
    "repetition", "coverage", "density", "cut", "sentinels", "empty",
)  # fmt: skip
_REPEATED_NGRAM = 3
_SENTINEL = re.compile(r"<extra_id_\d+>")


def text_statistics(
    prediction: str,
    references: Sequence[str],
    document: str | None = None,
    cut: bool | None = None,
    sentinels: int | None = None,
) -> dict[str, Value]:
    """The columns `STATISTICS` of one example, in that order; None where one is not known.

    - document_words, summary_words, reference_words (mean of several references): numbers of words.
    - compression: document_words / summary_words; None for a summary without words.
    - novel_1grams to novel_4grams: share of the summary's different n-grams that are not in the
      document; None where the summary has fewer words.
    - repetition: share of the summary's 3-grams that stood in it before (1 - different / all).
    - coverage, density: share of the summary's words that are in a span copied from the document,
      and mean length of the span that a word is in (Grusky, Naaman and Artzi 2018, Newsroom).
    - cut: generation ended at the length limit, before the end mark.
    - sentinels: tokens <extra_id_N> that were generated; in a text from elsewhere: found in it.
    - empty: nothing but white space.

    Args:
        document: what was summarized, None if not at hand.
        cut, sentinels: what generation knows, None for a text from elsewhere.
    """
    summary = unicode_words(prediction)
    counts = [len(unicode_words(text)) for text in references]
    found: dict[str, Value] = dict.fromkeys(STATISTICS)
    found["summary_words"] = len(summary)
    found["reference_words"] = sum(counts) / len(counts) if len(counts) > 1 else counts[0]
    found["repetition"] = _repetition(summary)
    found["cut"] = cut
    found["sentinels"] = len(_SENTINEL.findall(prediction)) if sentinels is None else sentinels
    found["empty"] = not prediction.strip()
    if document is not None:
        words = unicode_words(document)
        found["document_words"] = len(words)
        found["compression"] = len(words) / len(summary) if summary else None
        for size in range(1, 5):
            found[f"novel_{size}grams"] = _novelty(summary, words, size)
        lengths = copied_spans(summary, words)
        num_words = max(1, len(summary))
        found["coverage"] = sum(lengths) / num_words
        found["density"] = sum(length**2 for length in lengths) / num_words
    return found


def mean_statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each column over the examples where it is known; without those that never are."""
    means = {}
    for name in STATISTICS:
        known = [row[name] for row in rows if row.get(name) is not None]
        if known:
            means[name] = sum(known) / len(known)
    return means


def copied_spans(summary: Sequence[str], document: Sequence[str]) -> list[int]:
    """Lengths of the spans of the summary that stand in the document, the longest ones first taken.

    F(A, S) of Grusky et al. 2018, figure 3, with its greedy choice at each word of the summary and
    its jump behind each match in the document.
    """
    places: dict[str, list[int]] = {}
    for index, word in enumerate(document):
        places.setdefault(word, []).append(index)
    lengths = []
    start = 0
    while start < len(summary):
        longest = behind = 0
        for place in places.get(summary[start], ()):
            if place < behind:
                continue
            length = _common_length(summary, start, document, place)
            longest, behind = max(longest, length), place + length
        if longest:
            lengths.append(longest)
        start += max(1, longest)
    return lengths


def _common_length(first: Sequence[str], start: int, second: Sequence[str], place: int) -> int:
    length = 0
    limit = min(len(first) - start, len(second) - place)
    while length < limit and first[start + length] == second[place + length]:
        length += 1
    return length


def _ngrams(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[first:] for first in range(size)), strict=False))


def _novelty(summary: Sequence[str], document: Sequence[str], size: int) -> float | None:
    grams = set(_ngrams(summary, size))
    return len(grams.difference(_ngrams(document, size))) / len(grams) if grams else None


def _repetition(summary: Sequence[str]) -> float:
    grams = _ngrams(summary, _REPEATED_NGRAM)
    return (len(grams) - len(set(grams))) / len(grams) if grams else 0.0
