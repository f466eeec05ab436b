"""ROUGE of predictions against references.

The numbers are rouge-score's own, pair by pair. What is added: rougeLsum's sentences (rouge-score
wants one a line and does not say when it gets none), several processes, bootstrap intervals.
rouge-score reads a-z and 0-9 only: texts in other scripts score 0 and accents split words.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.bootstrap import CONFIDENCE, RESAMPLES, bootstrap_interval
from t5_fsdp.evaluation.rouge_tokenizers import StemmingTokenizer
from t5_fsdp.evaluation.sentences import SENTENCE_LANGUAGE, split_sentences
from t5_fsdp.evaluation.workers import map_in_workers

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True, eq=False)
class Scores:
    """ROUGE of every example: float64 arrays [examples, 4], 0 to 1, columns as in `METRICS`."""

    precision: np.ndarray
    recall: np.ndarray
    fmeasure: np.ndarray

    def __len__(self) -> int:
        return len(self.fmeasure)

    def summary(self, bootstrap_seed: int = 1) -> dict[str, Any]:
        """What rouge.json holds: "examples", "scores" by metric (0 to 1) and "settings".

        precision, recall and fmeasure are means over the examples; fmeasure_low and fmeasure_high
        bound the 95 % percentile bootstrap interval of the mean fmeasure (Efron 1979; ROUGE-1.5.5
        reports the same), from 1,000 resamples of the examples. The same seed gives the same
        interval.
        """
        low, high = bootstrap_interval(self.fmeasure, bootstrap_seed)
        columns = {
            "precision": self.precision.mean(axis=0),
            "recall": self.recall.mean(axis=0),
            "fmeasure": self.fmeasure.mean(axis=0),
            "fmeasure_low": low,
            "fmeasure_high": high,
        }
        scores = {
            metric: {name: float(values[index]) for name, values in columns.items()}
            for index, metric in enumerate(METRICS)
        }
        return {"examples": len(self), "scores": scores, "settings": _settings(bootstrap_seed)}

    def rows(self) -> list[dict[str, float]]:
        """The F-measure of each metric, 0 to 1, for each example in order."""
        return [dict(zip(METRICS, values, strict=True)) for values in self.fmeasure.tolist()]


def _settings(bootstrap_seed: int) -> dict[str, Any]:
    """Everything that another program needs to get the same numbers."""
    sentencex_version = importlib.metadata.version("sentencex")
    return {
        "preset": "default",
        "stemmer": True,
        "tokenizer": "rouge-score default: lower case, a-z and 0-9 only",
        "sentence_splitter": (
            f"newlines where the text has lines, else sentencex {sentencex_version} "
            f"({SENTENCE_LANGUAGE})"
        ),
        "rouge_score_version": importlib.metadata.version("rouge-score"),
        "confidence": CONFIDENCE,
        "bootstrap_resamples": RESAMPLES,
        "bootstrap_seed": bootstrap_seed,
    }


class _PairScorer:
    """Scores one pair. Only rougeLsum sees the split text: the others get it as it came."""

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer

        tokenizer = StemmingTokenizer()
        self._whole = RougeScorer(list(METRICS[:3]), tokenizer=tokenizer)
        self._by_sentence = RougeScorer(list(METRICS[3:]), tokenizer=tokenizer)

    def score(self, prediction: str, reference: str) -> list[tuple[float, float, float]]:
        """(precision, recall, fmeasure) of each metric."""
        scores = self._whole.score(reference, prediction) | self._by_sentence.score(
            split_sentences(reference), split_sentences(prediction)
        )
        return [tuple(scores[metric]) for metric in METRICS]


@lru_cache(maxsize=1)
def _pair_scorer() -> _PairScorer:
    return _PairScorer()


def score_pairs(
    predictions: Sequence[str],
    references: Sequence[str],
    processes: int = 1,
    console: Console | None = None,
) -> Scores:
    """ROUGE-1, -2, -L and -Lsum of each prediction, with stemmer, as rouge-score gives them.

    An empty prediction or reference scores 0.

    Args:
        predictions: [examples].
        references: [examples], one for each prediction.
        processes: how many score at the same time, see `workers.map_in_workers`; the numbers don't
            depend on it.
        console: tells how far it is.

    Raises:
        ValueError: the lengths differ, or processes is below 1.
        TypeError: a prediction or reference is not a string.
        UserError: there is nothing to score.
    """
    _check_texts(predictions, references)
    pairs = list(zip(predictions, references, strict=True))
    values = map_in_workers(_score_pair, pairs, processes, console, "ROUGE")
    return Scores(*np.moveaxis(np.array(values, dtype=np.float64), 2, 0))


def _check_texts(predictions: Sequence[str], references: Sequence[str]) -> None:
    named = {"predictions": predictions, "references": references}
    for name, texts in named.items():
        if isinstance(texts, str):
            raise TypeError(f"{name} is one string; give a list of strings")
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions but {len(references)} references; "
            "give one reference for each prediction"
        )
    if not len(predictions):
        raise UserError("no prediction to score: the split or file has no example; give at least 1")
    for name, texts in named.items():
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"{name}[{index}] is a {type(text).__name__}; give a string")


def _score_pair(pair: tuple[str, str]) -> list[tuple[float, float, float]]:
    return _pair_scorer().score(*pair)
