"""ROUGE of predictions against references, with intervals, a baseline and the files they go to.

The numbers are rouge-score's own, pair by pair. What is added: rougeLsum's sentences (rouge-score
wants one a line and does not say when it gets none), several processes, bootstrap intervals.
rouge-score reads a-z and 0-9 only: texts in other scripts score 0 and accents split words.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.files import write_atomically, write_json
from t5_fsdp.seeding import numpy_generator

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
BOOTSTRAP_RESAMPLES = 1000
CONFIDENCE = 0.95

# A worker needs about half a second to start; below this many pairs one process is done earlier.
MIN_PAIRS_FOR_WORKERS = 300
MAX_CHUNK_PAIRS = 256
# One block of resampling counts takes at most this much: 64 resamples of 40,000 examples.
BOOTSTRAP_BLOCK_BYTES = 20 * 2**20

SENTENCE_LANGUAGE = "en"
LONE_SURROGATES = re.compile("[\ud800-\udfff]")
PREDICTION_FIELDS = ("reference", "prediction")
PREDICTION_FORMAT = (
    "each line must be one JSON object with the strings 'reference' and 'prediction', in UTF-8"
)


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
        "bootstrap_resamples": BOOTSTRAP_RESAMPLES,
        "bootstrap_seed": bootstrap_seed,
    }


def bootstrap_interval(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end, [columns] each, of the 95 % percentile bootstrap interval of column means.

    Args:
        values: [examples, columns], at least one example. Rows are drawn whole, with replacement.
        seed: of the 1,000 resamples.
    """
    num_examples = len(values)
    generator = numpy_generator(seed, "rouge bootstrap")
    block = max(1, BOOTSTRAP_BLOCK_BYTES // (8 * num_examples))
    means = []
    for start in range(0, BOOTSTRAP_RESAMPLES, block):
        counts = np.empty((min(block, BOOTSTRAP_RESAMPLES - start), num_examples))
        for row in counts:
            drawn = generator.integers(num_examples, size=num_examples)
            row[:] = np.bincount(drawn, minlength=num_examples)
        means.append(counts @ values / num_examples)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    # Rounding must not put the mean of equal scores outside of their interval.
    mean = values.mean(axis=0)
    return np.minimum(low, mean), np.maximum(high, mean)


def split_sentences(text: str) -> str:
    """The text with one sentence a line, as rougeLsum needs it.

    A text with several lines that are not blank is left as it is: its lines count as sentences.
    Any other is cut by sentencex, offline.
    """
    from sentencex import segment

    if sum(1 for line in text.split("\n") if line.strip()) > 1:
        return text
    # JSON can carry lone surrogates, which sentencex cannot encode; ROUGE ignores both characters.
    return "\n".join(segment(SENTENCE_LANGUAGE, LONE_SURROGATES.sub("\ufffd", text)))


class _StemmingTokenizer:
    """rouge-score's own tokenizer and stemmer; remembering stems saves a third of the time."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer
        from rouge_score.tokenize import tokenize

        self.stem = lru_cache(maxsize=2**16)(PorterStemmer().stem)
        self._tokenize = tokenize

    def tokenize(self, text: str) -> list[str]:
        return self._tokenize(text, self)


class _PairScorer:
    """Scores one pair. Only rougeLsum sees the split text: the others get it as it came."""

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer

        tokenizer = _StemmingTokenizer()
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


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def score_pairs(
    predictions: Sequence[str],
    references: Sequence[str],
    processes: int = 1,
    progress: bool = False,
) -> Scores:
    """ROUGE-1, -2, -L and -Lsum of each prediction, with stemmer, as rouge-score gives them.

    An empty prediction or reference scores 0.

    Args:
        predictions: [examples].
        references: [examples], one for each prediction.
        processes: how many score at the same time; the numbers don't depend on it. Few pairs are
            scored in this process anyway. More than one needs the usual `if __name__ ==
            "__main__":` guard in the calling program.
        progress: tell on standard error how far it is.

    Raises:
        ValueError: the lengths differ, or processes is below 1.
        TypeError: a prediction or reference is not a string.
        UserError: there is nothing to score.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; give 1 or more")
    _check_texts(predictions, references)
    pairs = list(zip(predictions, references, strict=True))
    size = min(MAX_CHUNK_PAIRS, math.ceil(len(pairs) / (8 * processes)))
    chunks = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    values = []
    with Console(enabled=progress, stream=sys.stderr).progress(len(pairs), "ROUGE") as bar:
        for chunk_values in _score_chunks(chunks, len(pairs), processes):
            values.append(chunk_values)
            bar.advance(len(chunk_values))
    return Scores(*np.moveaxis(np.concatenate(values), 2, 0))


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


def _score_chunks(
    chunks: list[list[tuple[str, str]]], num_pairs: int, processes: int
) -> Iterator[np.ndarray]:
    """Values [chunk, 4, 3] of each chunk, in order."""
    # Daemonic processes may not have children.
    daemonic = multiprocessing.current_process().daemon
    if processes == 1 or daemonic or num_pairs < MIN_PAIRS_FOR_WORKERS:
        yield from map(_score_chunk, chunks)
        return
    num_done = 0
    # The caller has CUDA, gloo or NCCL threads alive, which a fork would copy half-way.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(
            min(processes, len(chunks)), mp_context=context, initializer=_start_worker
        ) as pool:
            for values in pool.map(_score_chunk, chunks):
                num_done += 1
                yield values
    except BrokenProcessPool as error:
        # Predictions may have cost hours of generation: losing a helper must not lose them.
        warnings.warn(f"scoring goes on in one process: {error}", RuntimeWarning, stacklevel=2)
        yield from map(_score_chunk, chunks[num_done:])


def _score_chunk(pairs: list[tuple[str, str]]) -> np.ndarray:
    """[chunk, 4 metrics, 3] with precision, recall and fmeasure last."""
    scorer = _pair_scorer()
    return np.array([scorer.score(*pair) for pair in pairs], dtype=np.float64)


def _start_worker() -> None:
    # Ctrl-C reaches the whole terminal group; the caller alone answers it and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    """A pool's worker outlives a killed caller for ever, and holds its output pipes open."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)


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


def read_predictions(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a predictions.jsonl, with all their fields; blank lines are skipped.

    Each has at least the strings "reference" and "prediction". NaN and infinities, which Python
    writes though JSON has none, are read as null.

    Raises:
        UserError: the file cannot be read or has no prediction, or a line is not UTF-8, not a JSON
            object or lacks one of the two strings; names file and line.
    """
    try:
        with open(path, "rb") as file:
            rows = list(_read_rows(file, path))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot read predictions from {path}: {reason}; give a readable JSON Lines file"
        ) from error
    if not rows:
        raise UserError(f"{path} has no predictions; {PREDICTION_FORMAT}")
    return rows


def _read_rows(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield _parse_row(line, f"{path}, line {number}")


def _parse_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 (byte {error.start + 1}); save the file as UTF-8 text"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}); {PREDICTION_FORMAT}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is a JSON {type(row).__name__}; {PREDICTION_FORMAT}")
    for field in PREDICTION_FIELDS:
        if field not in row:
            found = ", ".join(list(row)[:10]) or "none"
            raise UserError(f"{place} has no '{field}' (its fields: {found}); {PREDICTION_FORMAT}")
        if not isinstance(row[field], str):
            kind = "null" if row[field] is None else type(row[field]).__name__
            raise UserError(f"{place}: '{field}' is {kind}, not a string; {PREDICTION_FORMAT}")
    return row


def write_predictions(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, UTF-8; the file appears whole or not at all.

    Raises:
        ValueError: a value is NaN or infinite, which JSON cannot hold.
        OSError: the file cannot be written.
    """
    write_atomically(
        Path(path), (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    )


def write_rouge(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write a `Scores.summary` as rouge.json; the file appears whole or not at all.

    Raises:
        ValueError: a value is NaN or infinite, which JSON cannot hold.
        OSError: the file cannot be written.
    """
    write_json(Path(path), summary)


def format_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """An aligned plain-text table: a line a system, its mean F-measures in points (0 to 100).

    Args:
        rows: `Scores.summary` by the name of the system, e.g. "model" and "lead baseline".
    """
    width = max((len(name) for name in rows), default=0)
    lines = ["  ".join([" " * width, *TITLES.values()])]
    for name, summary in rows.items():
        cells = [
            f"{100 * summary['scores'][metric]['fmeasure']:.1f}".rjust(len(title))
            for metric, title in TITLES.items()
        ]
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)
