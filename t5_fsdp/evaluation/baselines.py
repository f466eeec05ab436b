"""Summaries that need no model: what a trained one has to beat, and what selection could reach.

How long they are is measured on the references of the *other* examples of the same split: the
median, over them, of sentences or of words. So no baseline but `oracle` (and the `lead_baseline`
of the tables, which takes the reference's length alone) looks at the reference it is scored with.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from t5_fsdp.evaluation.rouge_tokenizers import WordTokenizer
from t5_fsdp.evaluation.sentences import list_sentences
from t5_fsdp.seeding import numpy_generator

BASELINES = {
    "lead": "the first sentences, as many as other references have",
    "lead-N": "the first N sentences, e.g. lead-3",
    "lead_words": "the first words, as many as other references have",
    "random": "as many random sentences as other references have, in the document's order",
    "oracle": "the sentences with the best ROUGE, chosen with the reference at hand: an upper "
    "bound for copying sentences",
}
_FIXED_LEAD = re.compile(r"lead-([1-9]\d{0,3})")
# Of a single example nothing is known about other references.
_LONE_SENTENCES, _LONE_WORDS = 3, 60


def is_baseline(name: str) -> bool:
    """Whether `name` is that of a built-in baseline."""
    return name in BASELINES.keys() - {"lead-N"} or _FIXED_LEAD.fullmatch(name) is not None


def baseline_summaries(
    name: str, documents: Sequence[str], references: Sequence[Sequence[str]], seed: int = 1
) -> list[str]:
    """The summaries of a built-in baseline, [examples]; sentences one a line.

    Args:
        name: one for which `is_baseline` holds.
        documents: [examples].
        references: of each example one or several.
        seed: of `random`.
    """
    if name == "lead_words":
        counts = [max(len(text.split()) for text in several) for several in references]
        lengths = medians_of_others(counts, _LONE_WORDS)
        return [
            " ".join(document.split()[:length])
            for document, length in zip(documents, lengths, strict=True)
        ]
    sentences = [list_sentences(document) for document in documents]
    if name == "oracle":
        chosen = _oracle(sentences, references)
    elif fixed := _FIXED_LEAD.fullmatch(name):
        chosen = [found[: int(fixed[1])] for found in sentences]
    else:
        counts = [max(len(list_sentences(text)) for text in several) for several in references]
        lengths = medians_of_others(counts, _LONE_SENTENCES)
        if name == "lead":
            chosen = [found[:length] for found, length in zip(sentences, lengths, strict=True)]
        else:
            chosen = _random(sentences, lengths, seed)
    return ["\n".join(found) for found in chosen]


def medians_of_others(lengths: Sequence[int], alone: int) -> list[int]:
    """For each example the median of the other examples' lengths, rounded down, at least 1.

    Args:
        alone: the answer where there is no other example.
    """
    if len(lengths) == 1:
        return [alone]
    values = np.array(lengths)
    places = {length: place for place, length in enumerate(lengths)}
    medians = {
        length: max(1, int(np.median(np.delete(values, place)))) for length, place in places.items()
    }
    return [medians[length] for length in lengths]


def _random(sentences: list[list[str]], lengths: list[int], seed: int) -> list[list[str]]:
    chosen = []
    for index, (found, length) in enumerate(zip(sentences, lengths, strict=True)):
        order = numpy_generator(seed, "random baseline", index).permutation(len(found))
        chosen.append([found[place] for place in sorted(order[:length])])
    return chosen


def _oracle(sentences: list[list[str]], references: Sequence[Sequence[str]]) -> list[list[str]]:
    tokenizer = WordTokenizer("unicode", stemmer=True)
    chosen = []
    for found, several in zip(sentences, references, strict=True):
        words = [tokenizer.tokenize(sentence) for sentence in found]
        targets = [tokenizer.tokenize(text) for text in several]
        chosen.append([found[place] for place in greedy_choice(words, targets)])
    return chosen


def greedy_choice(sentences: Sequence[list[str]], references: Sequence[list[str]]) -> list[int]:
    """Places of the sentences that make the best summary, found one after the other.

    Each time the one is added that raises ROUGE-1 + ROUGE-2 (F, of the best reference) most, until
    none does (Nallapati et al. 2017; Liu and Lapata 2019).

    Args:
        sentences: words of each.
        references: words of each.
    """
    targets = [(_counts(words, 1), _counts(words, 2)) for words in references]
    chosen: list[int] = []
    best = 0.0
    while True:
        gains = [
            (_ngram_score(sentences, sorted([*chosen, place]), targets), -place)
            for place in range(len(sentences))
            if place not in chosen
        ]
        score, place = max(gains, default=(0.0, 0))
        if score <= best:
            return sorted(chosen)
        best = score
        chosen.append(-place)


def _ngram_score(
    sentences: Sequence[list[str]],
    chosen: Sequence[int],
    targets: Sequence[tuple[Counter, Counter]],
) -> float:
    words = [word for place in chosen for word in sentences[place]]
    summary = (_counts(words, 1), _counts(words, 2))
    return max(sum(map(_f_measure, summary, target)) for target in targets)


def _counts(words: list[str], size: int) -> Counter:
    return Counter(words if size == 1 else pairwise(words))


def _f_measure(summary: Counter, reference: Counter) -> float:
    total = summary.total() + reference.total()
    return 2 * (summary & reference).total() / total if total else 0.0


def lead_baseline(documents: Sequence[str], references: Sequence[str]) -> list[str]:
    """The first words of each document, as many as its reference has, joined by blanks.

    Words are what whitespace separates. What a model has to beat: it costs nothing.

    Raises:
        ValueError: the lengths differ.
    """
    if len(documents) != len(references):
        raise ValueError(
            f"{len(documents)} documents but {len(references)} references; "
            "give one reference for each document"
        )
    return [
        " ".join(document.split()[: len(reference.split())])
        for document, reference in zip(documents, references, strict=True)
    ]
