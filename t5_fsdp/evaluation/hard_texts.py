"""Texts that ROUGE or the vocabulary cannot deal with, counted, and what to tell about them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from t5_fsdp.data.tokenization import Encoder
from t5_fsdp.evaluation.rouge_tokenizers import has_word

# Above these shares, or beyond these means, a hint is given.
_MOSTLY = 0.5
_HIGH_CUT = 0.05
_HIGH_REPETITION = 0.1
_HIGH_COPYING = 0.95  # of word pairs
_ODD_LENGTH = 2.0

_SHOWN_CHARACTERS = 10
_NO_LETTER = re.compile(r"[\W_]+")


def count_hard_texts(
    predictions: Sequence[str], references: Sequence[Sequence[str]], tokenizer: str
) -> dict[str, Any]:
    """Of rouge.json's "counts": examples that can't score, and how much is beyond a-z and 0-9.

    Args:
        predictions: [examples].
        references: of each example one or several; it counts where none has a word.
        tokenizer: the name of ROUGE's, see `rouge_tokenizers`.
    """
    texts = [*predictions, *(text for several in references for text in several)]
    return {
        "predictions_without_words": sum(not has_word(text, tokenizer) for text in predictions),
        "references_without_words": sum(
            not any(has_word(text, tokenizer) for text in several) for several in references
        ),
        "non_ascii_share": _non_ascii_share(texts),
    }


def count_lost_characters(encoder: Encoder, references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Of rouge.json's "counts": references with characters that the vocabulary can't write."""
    characters: Counter[str] = Counter()
    num_references = 0
    for several in references:
        for text in several:
            lost = {c: n for c, n in Counter(text).items() if encoder.is_unknown(c)}
            characters.update(lost)
            num_references += bool(lost)
    return {
        "references_with_lost_characters": num_references,
        "lost_characters": dict(characters.most_common(_SHOWN_CHARACTERS)),
    }


def hints_of(
    counts: Mapping[str, Any], statistics: Mapping[str, float], num_examples: int, tokenizer: str
) -> list[str]:
    """In plain words what in an evaluation is unusual, each a line.

    Args:
        counts: of the functions here.
        statistics: of `text_statistics.mean_statistics`.
        num_examples: of the evaluation.
        tokenizer: the name of ROUGE's.
    """
    return [
        *_hints_on_scores(counts, num_examples, tokenizer),
        *_hints_on_generation(statistics),
        *_hints_on_style(statistics),
    ]


def _hints_on_scores(counts: Mapping[str, Any], num_examples: int, tokenizer: str) -> list[str]:
    hints = []
    for name in ("predictions", "references"):
        if count := counts[f"{name}_without_words"]:
            hints.append(f"{count:,} of {num_examples:,} {name} have no word and score 0")
    share = counts["non_ascii_share"]
    if tokenizer == "default" and share > _MOSTLY:
        hints.append(
            f"{100 * share:.0f} % of the letters and digits are none of a-z and 0-9, which is all "
            "that ROUGE reads with evaluation.rouge_tokenizer: default; use unicode"
        )
    if count := counts.get("references_with_lost_characters"):
        characters = " ".join(counts["lost_characters"])
        hints.append(
            f"{count:,} references hold characters that the vocabulary can't write, so no summary "
            f"can (commonest: {characters})"
        )
    return hints


def _hints_on_generation(statistics: Mapping[str, float]) -> list[str]:
    hints = []
    if (cut := statistics.get("cut", 0.0)) > _HIGH_CUT:
        hints.append(f"{100 * cut:.0f} % of summaries were cut at evaluation.max_new_tokens")
    if (empty := statistics["empty"]) > 0:
        hints.append(f"{_percent(empty)} of summaries are empty")
    if (sentinels := statistics["sentinels"]) > 0:
        hints.append(
            f"summaries hold {sentinels:.2g} sentinel tokens (<extra_id_N>) on average: the model "
            "still fills gaps, as in pretraining; train it longer"
        )
    return hints


def _hints_on_style(statistics: Mapping[str, float]) -> list[str]:
    hints = []
    if (repetition := statistics["repetition"]) > _HIGH_REPETITION:
        hints.append(
            f"{100 * repetition:.0f} % of the three-word sequences stood in their summary before: "
            "summaries repeat themselves"
        )
    ours, theirs = statistics["summary_words"], statistics["reference_words"]
    if max(ours, theirs) > _ODD_LENGTH * min(ours, theirs):
        hints.append(f"summaries have {ours:.1f} words on average, references {theirs:.1f}")
    if (copied := 1 - statistics.get("novel_2grams", 1.0)) > _HIGH_COPYING:
        hints.append(
            f"{100 * copied:.0f} % of the summaries' word pairs stand in their documents: "
            "summaries are mostly copied"
        )
    return hints


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _non_ascii_share(texts: Sequence[str]) -> float:
    """Of all letters and digits the share that is no ASCII, 0 where there is none."""
    total = beyond = 0
    for text in texts:
        letters = _NO_LETTER.sub("", text)
        total += len(letters)
        beyond += len(letters) - len(letters.encode("ascii", "ignore"))
    return beyond / total if total else 0.0
