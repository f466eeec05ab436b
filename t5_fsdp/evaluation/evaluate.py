"""Loss and ROUGE of (a part of) a split: one code for validation in training and eval_rouge."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from t5_fsdp.console import Console
from t5_fsdp.data.batching import evaluation_batches
from t5_fsdp.data.collation import SpecialIds
from t5_fsdp.data.tokenization import Encoder
from t5_fsdp.distributed import World
from t5_fsdp.evaluation.generation import GeneratedSummary, GenerationSettings, generate
from t5_fsdp.evaluation.own_metric import Metric
from t5_fsdp.evaluation.rouge import METRICS, RougeSettings
from t5_fsdp.evaluation.scoring import Evaluation, evaluate_rows
from t5_fsdp.evaluation.shown_summaries import spread
from t5_fsdp.evaluation.unfinished import Unfinished
from t5_fsdp.evaluation.workers import num_cores
from t5_fsdp.quantities import counted
from t5_fsdp.seeding import numpy_generator

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5_fsdp.data.tokenized import TokenizedSplit


class EvaluationStopped(Exception):
    """A rank was asked to stop before all summaries were there; raised on all of them."""


class ScoringFailed(Exception):
    """Rank 0 could not score the summaries; raised on all ranks, which may save their work first.

    Attributes:
        error: why, on rank 0.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__("the summaries could not be scored")
        self.error = error

    def tell(self) -> NoReturn:
        """Raises why; on rank 0."""
        assert self.error is not None
        raise self.error


def _stop_together(world: World, should_stop: Callable[[], bool]) -> None:
    if world.sum([float(should_stop())])[0]:
        raise EvaluationStopped


def choose_examples(size: int, limit: int | None, seed: int) -> np.ndarray:
    """A fixed random choice of at most `limit` rows of a split, in the split's order."""
    if limit is None or limit >= size:
        return np.arange(size)
    return np.sort(numpy_generator(seed, "validation subset").permutation(size)[:limit])


def validation_loss(
    model: nn.Module,
    split: TokenizedSplit,
    indices: np.ndarray,
    special: SpecialIds,
    world: World,
    micro_batch_tokens: int,
    width_multiple: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> float:
    """Mean nats a real target token over `indices`, dropout off; a collective.

    Every rank does the same number of forwards, as sharded models need.

    Args:
        model: one that `model.forward.attach_loss` has given the loss.
        should_stop: asked before each batch, on each rank.

    Raises:
        EvaluationStopped: one of the ranks was told to stop.
    """
    batches = evaluation_batches(
        split,
        indices,
        special,
        rank=world.rank,
        world_size=world.world_size,
        micro_batch_tokens=micro_batch_tokens,
        width_multiple=width_multiple,
    )
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            _stop_together(world, should_stop)
            batch = batch.to(world.device)
            _, cross_entropy = model(**batch.loss_inputs())
            total += float(cross_entropy)
    model.train(was_training)
    return world.sum([total])[0] / int(split.target_lengths[indices].sum())


@dataclass(frozen=True)
class Generator:
    """A model to generate with.

    Attributes:
        open: makes it ready, and lets go of it; a collective.
        is_sharded: all ranks generate together, see `generation.generate`.
    """

    open: Callable[[], AbstractContextManager[PreTrainedModel]]
    is_sharded: bool = False

    @classmethod
    def whole(cls, model: PreTrainedModel) -> Generator:
        """A model that this rank has for itself."""
        return cls(lambda: contextlib.nullcontext(model))


def summarize(
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[np.ndarray],
    settings: GenerationSettings,
    world: World,
    console: Console,
    newline: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    unfinished: Unfinished | None = None,
) -> list[GeneratedSummary] | None:
    """Summaries of `sources` in their order, on rank 0 (None elsewhere); a collective.

    Args:
        sources: token ids with prefix and end mark, the same on every rank.
        newline: the token that stands for a newline, see `tokenization.newline_id`.
        should_stop: asked before each batch, on each rank.
        unfinished: keeps finished batches, and has those of an interrupted run.

    Raises:
        EvaluationStopped: one of the ranks was told to stop.
    """
    merged, done = _finished(unfinished, world, len(sources), console)

    def keep(batch: int, made: dict[int, GeneratedSummary]) -> None:
        if unfinished is not None:
            unfinished.add(world.rank, batch, made)

    def stop() -> bool:
        if generator.is_sharded:  # nobody may leave the others alone
            return world.sum([float(should_stop())])[0] > 0
        return should_stop()

    with (
        console.progress(len(sources), "summaries", len(merged)) as progress,
        generator.open() as model,
    ):
        # The bar counts rank 0's rows for all: ranks are dealt equal work.
        mine = generate(
            model,
            tokenizer,
            sources,
            settings,
            rank=world.rank,
            world_size=world.world_size,
            newline=newline,
            on_batch=lambda rows: progress.advance(min(rows * world.world_size, len(sources))),
            should_stop=stop,
            is_sharded=generator.is_sharded,
            done=done,
            keep=keep,
        )
    _stop_together(world, should_stop)
    gathered = world.gather_objects(mine)
    if gathered is None:
        return None
    for share in gathered:
        assert not merged.keys() & share.keys(), "an example was decoded twice"
        merged.update(share)
    assert len(merged) == len(sources), "an example was not decoded"
    return [merged[position] for position in range(len(sources))]


def _finished(
    unfinished: Unfinished | None, world: World, num_sources: int, console: Console
) -> tuple[dict[int, GeneratedSummary], set[int]]:
    """Summaries of an interrupted run, on rank 0, and the numbers of their batches."""
    merged: dict[int, GeneratedSummary] = {}
    if unfinished is None:
        return merged, set()

    def read() -> list[int]:
        batches = unfinished.read()
        for made in batches.values():
            merged.update(made)
        return list(batches)

    done = set(world.on_rank_zero(read))
    if merged:
        of = counted(num_sources, "summary")
        console.say(f"going on: {len(merged):,} of {of} are there already")
    return merged, done


def examples_of(split: TokenizedSplit, indices: np.ndarray) -> list[dict[str, str]]:
    """The texts of a split as predictions.jsonl names them: id, document, reference."""
    texts = (split.text(int(index)) for index in indices)
    return [
        {"id": text["id"], "document": text["document"], "reference": text["summary"]}
        for text in texts
    ]


def score_summaries(
    examples: Sequence[Mapping[str, Any]],
    summaries: Sequence[GeneratedSummary],
    tokenizer: PreTrainedTokenizerBase,
    settings: RougeSettings,
    console: Console | None = None,
    metric: Metric | None = None,
) -> Evaluation:
    """All figures of generated summaries, on all cores: the other ranks wait meanwhile.

    Args:
        examples: of `examples_of`.
        summaries: one for each.
        tokenizer: the model's.
        metric: one of the caller's own.
    """
    rows = [
        {**example, "prediction": made.text, "cut": made.cut, "sentinels": made.sentinels}
        for example, made in zip(examples, summaries, strict=True)
    ]
    return evaluate_rows(
        rows,
        settings,
        processes=num_cores(),
        encoder=Encoder(tokenizer),
        console=console,
        metric=metric,
    )


@dataclass(frozen=True)
class Validation:
    """What a validation in training gives.

    Attributes:
        figures: loss, ROUGE, own metrics, examples, seconds; the same on every rank, but for the
            seconds.
        shown: rows of predictions.jsonl to show, on rank 0.
    """

    figures: dict[str, float]
    shown: list[dict[str, Any]]


def validate(
    model: nn.Module,
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    special: SpecialIds,
    split: TokenizedSplit,
    indices: np.ndarray,
    settings: GenerationSettings,
    rouge: RougeSettings,
    world: World,
    console: Console,
    *,
    newline: int | None,
    micro_batch_tokens: int,
    width_multiple: int,
    output_dir: Path,
    stored_settings: Mapping[str, Any],
    num_shown: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    metric: Metric | None = None,
) -> Validation:
    """Loss, then ROUGE, of a running training; a collective.

    Args:
        model: the sharded model, for the loss.
        generator: of the same weights.
        stored_settings: of `generation.decoding_settings`, for rouge.json.
        num_shown: rows to show, always those of the same examples.
        should_stop: whether this rank was asked to stop.
        metric: one of the caller's own; called on rank 0.

    Raises:
        EvaluationStopped: one of them was.
        ScoringFailed: something failed on rank 0 when the summaries were there, e.g. the metric.
    """
    began = time.perf_counter()
    loss = validation_loss(
        model, split, indices, special, world, micro_batch_tokens, width_multiple, should_stop
    )
    sources = [split.source(int(index)) for index in indices]
    summaries = summarize(
        generator, tokenizer, sources, settings, world, console, newline, should_stop
    )

    shown: list[dict[str, Any]] = []
    errors: list[Exception] = []

    def score() -> dict[str, float]:
        assert summaries is not None
        examples = examples_of(split, indices)
        evaluation = score_summaries(examples, summaries, tokenizer, rouge, metric=metric)
        evaluation.write(output_dir, stored_settings)
        shown.extend(spread(evaluation.rows, num_shown))
        means = {name: evaluation.summary["scores"][name]["fmeasure"] for name in METRICS}
        return means | evaluation.metrics

    def try_to_score() -> dict[str, float] | None:
        try:
            return score()
        except Exception as error:
            errors.append(error)
            return None

    figures = world.on_rank_zero(try_to_score)
    if figures is None:
        raise ScoringFailed(errors[0] if errors else None)
    seconds = time.perf_counter() - began
    return Validation(
        {"loss": loss, **figures, "examples": len(indices), "seconds": seconds}, shown
    )
