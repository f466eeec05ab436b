"""ROUGE of predictions against references, as rouge-score computes it pair by pair.

What is added: rougeLsum's sentences (rouge-score wants one a line and does not say when it gets
none), the settings of published work, several references, several processes.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from t5_fsdp.config import EvaluationConfig
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.bootstrap import CONFIDENCE, RESAMPLES, bootstrap_percentiles
from t5_fsdp.evaluation.rouge_tokenizers import WordTokenizer
from t5_fsdp.evaluation.sentences import SENTENCE_LANGUAGE, cut_sentences, split_sentences
from t5_fsdp.evaluation.workers import map_in_workers

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
References: TypeAlias = str | Sequence[str]
_Triple: TypeAlias = tuple[float, float, float]  # precision, recall, fmeasure

_SENTENCEX = f"sentencex ({SENTENCE_LANGUAGE})"
_TOKENIZERS = {
    "default": "rouge-score default: lower case, a-z and 0-9 only",
    "unicode": "words of any script, NFKC, lower case; single characters where it has no spaces",
}
_SPLITTERS = {
    "default": f"newlines where the text has lines, else {_SENTENCEX}",
    "t5": 'newlines, also behind " . "',
    "hf": f"newlines, also where {_SENTENCEX} ends a sentence, in place of nltk's punkt",
    "pegasus": "newlines",
}


@dataclass(frozen=True)
class RougeSettings:
    """What decides about the numbers; see the options of the same names and docs/evaluation.md.

    Attributes:
        preset: of METRICS' text: stemmer, and where rougeLsum's sentences end.
        tokenizer: what a word is.
        references: what becomes of several ones.
    """

    preset: str = "default"
    tokenizer: str = "default"
    references: str = "best"

    @classmethod
    def of(cls, options: EvaluationConfig) -> RougeSettings:
        """The part of the evaluation options that scoring reads."""
        return cls(options.rouge_preset, options.rouge_tokenizer, options.references)

    @property
    def stemmer(self) -> bool:
        return self.preset != "t5"

    def prepare(self, text: str) -> str:
        """The text as rougeLsum gets it, a sentence a line."""
        if self.preset == "t5":  # t5/evaluation/metrics.py, rouge()
            return text.replace(" . ", " .\n")
        if self.preset == "hf":  # examples/pytorch/summarization/run_summarization.py
            return cut_sentences(text.strip())
        if self.preset == "pegasus":  # pegasus/eval/text_eval.py
            return text
        return split_sentences(text)

    def to_json(self) -> dict[str, Any]:
        """What another program needs to get the same numbers."""
        return {
            "preset": self.preset,
            "stemmer": self.stemmer,
            "tokenizer": _TOKENIZERS[self.tokenizer],
            "sentence_splitter": _SPLITTERS[self.preset],
            "references": self.references,
            "rouge_score_version": importlib.metadata.version("rouge-score"),
            "sentencex_version": importlib.metadata.version("sentencex"),
        }


@dataclass(frozen=True, eq=False)
class Scores:
    """ROUGE of every example: float64 arrays [examples, 4], 0 to 1, columns as in `METRICS`."""

    precision: np.ndarray
    recall: np.ndarray
    fmeasure: np.ndarray
    settings: RougeSettings = RougeSettings()

    def __len__(self) -> int:
        return len(self.fmeasure)

    def summary(self, bootstrap_seed: int = 1) -> dict[str, Any]:
        """Of rouge.json: "examples", "scores" by metric (0 to 1) and "settings".

        precision, recall and fmeasure are means over the examples; fmeasure_low and fmeasure_high
        bound the 95 % percentile bootstrap interval of the mean fmeasure (Efron 1979; ROUGE-1.5.5
        reports the same), from 1,000 resamples of the examples. fmeasure_mid is the median of the
        resamples, which T5, evaluate and PEGASUS report in place of the mean. The same seed gives
        the same ones.
        """
        low, middle, high = bootstrap_percentiles(self.fmeasure, bootstrap_seed)
        columns = {
            "precision": self.precision.mean(axis=0),
            "recall": self.recall.mean(axis=0),
            "fmeasure": self.fmeasure.mean(axis=0),
            "fmeasure_low": low,
            "fmeasure_high": high,
            "fmeasure_mid": middle,
        }
        scores = {
            metric: {name: float(values[index]) for name, values in columns.items()}
            for index, metric in enumerate(METRICS)
        }
        settings = {
            **self.settings.to_json(),
            "confidence": CONFIDENCE,
            "bootstrap_resamples": RESAMPLES,
            "bootstrap_seed": bootstrap_seed,
        }
        return {"examples": len(self), "scores": scores, "settings": settings}

    def rows(self) -> list[dict[str, float]]:
        """The F-measure of each metric, 0 to 1, for each example in order."""
        return [dict(zip(METRICS, values, strict=True)) for values in self.fmeasure.tolist()]


def score_pairs(
    predictions: Sequence[str],
    references: Sequence[References],
    settings: RougeSettings = RougeSettings(),
    processes: int = 1,
    console: Console | None = None,
) -> Scores:
    """ROUGE-1, -2, -L and -Lsum of each prediction, as rouge-score gives them.

    A prediction or reference without a word scores 0.

    Args:
        predictions: [examples].
        references: [examples], one text or several for each prediction.
        settings: stemmer, words, sentences.
        processes: how many score at the same time, see `workers.map_in_workers`; the numbers don't
            depend on it.
        console: tells how far it is.

    Raises:
        ValueError: the lengths differ, processes is below 1, or an example has no reference.
        TypeError: a prediction or reference is not a string.
        UserError: there is nothing to score.
    """
    listed = _listed(predictions, references)
    items = [(*pair, settings) for pair in zip(predictions, listed, strict=True)]
    values = map_in_workers(_score_example, items, processes, console, "ROUGE")
    precision, recall, fmeasure = np.moveaxis(np.array(values, dtype=np.float64), 2, 0)
    return Scores(precision, recall, fmeasure, settings)


def _listed(predictions: Sequence[str], references: Sequence[References]) -> list[tuple[str, ...]]:
    """The references of each example, after a check of all."""
    for name, texts in (("predictions", predictions), ("references", references)):
        if isinstance(texts, str):
            raise TypeError(f"{name} is one string; give a list of strings")
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions but {len(references)} references; "
            "give one reference for each prediction"
        )
    if not len(predictions):
        raise UserError("no prediction to score: the split or file has no example; give at least 1")
    listed = [(item,) if isinstance(item, str) else item for item in references]
    for index, (prediction, texts) in enumerate(zip(predictions, listed, strict=True)):
        _check_text(prediction, f"predictions[{index}]")
        if not isinstance(texts, list | tuple):
            raise TypeError(
                f"references[{index}] is a {type(texts).__name__}; give a string, or a list of them"
            )
        if not texts:
            raise ValueError(f"references[{index}] is empty; give at least one text")
        for text in texts:
            _check_text(text, f"references[{index}]")
    return [tuple(texts) for texts in listed]


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is a {type(text).__name__}; give a string")


def _score_example(item: tuple[str, tuple[str, ...], RougeSettings]) -> np.ndarray:
    """[4 metrics, 3] with precision, recall and fmeasure last."""
    prediction, references, settings = item
    scorer = _pair_scorer(settings)
    values = np.array([scorer.score(prediction, text) for text in references], dtype=np.float64)
    if settings.references == "average":
        return values.mean(axis=0)
    # As rouge-score's score_multi: the first of the best, metric by metric.
    return values[values[:, :, 2].argmax(axis=0), np.arange(len(METRICS))]


class _PairScorer:
    """Scores one pair. Only rougeLsum sees the split text: newlines don't matter to the others."""

    def __init__(self, settings: RougeSettings) -> None:
        from rouge_score.rouge_scorer import RougeScorer

        self._prepare = settings.prepare
        self._tokenizer = WordTokenizer(settings.tokenizer, settings.stemmer)
        self._by_ngrams = RougeScorer(list(METRICS[:2]), tokenizer=self._tokenizer)
        self._by_sentence = RougeScorer(list(METRICS[3:]), tokenizer=self._tokenizer)

    def score(self, prediction: str, reference: str) -> list[_Triple]:
        """(precision, recall, fmeasure) of each metric."""
        scores = self._by_ngrams.score(reference, prediction)
        words = self._tokenizer.tokenize(prediction), self._tokenizer.tokenize(reference)
        scores["rougeL"] = _rouge_l(*words)
        scores |= self._by_sentence.score(self._prepare(reference), self._prepare(prediction))
        return [tuple(scores[metric]) for metric in METRICS]


@lru_cache(maxsize=2)
def _pair_scorer(settings: RougeSettings) -> _PairScorer:
    return _PairScorer(settings)


def _rouge_l(prediction: list[str], reference: list[str]) -> _Triple:
    """As rouge-score's rougeL, which fills a table in Python and takes half of all the time."""
    from rouge_score.scoring import fmeasure

    if not prediction or not reference:
        return 0.0, 0.0, 0.0
    length = lcs_length(prediction, reference)
    precision, recall = length / len(prediction), length / len(reference)
    return precision, recall, fmeasure(precision, recall)


def lcs_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, a row of the table at a time.

    The bits of an integer say where in a row the length stays the same (Hyyro 2004, Bit-parallel
    LCS-length computation revisited).
    """
    places: dict[str, int] = {}
    for index, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << index
    everywhere = (1 << len(first)) - 1
    row = everywhere
    for word in second:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & everywhere
    return len(first) - row.bit_count()
