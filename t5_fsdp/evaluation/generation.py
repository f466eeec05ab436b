"""Summaries, dealt over ranks so that their number never changes one.

Batches are a function of the examples and settings. Each rank decodes whole batches, with a model
of its own, or, where the weights stay sharded, in step with the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5_fsdp.config import Config, EvaluationConfig
from t5_fsdp.data.collation import SpecialIds, collate
from t5_fsdp.data.tokenization import decode_summary, sentinel_ids
from t5_fsdp.errors import UserError
from t5_fsdp.model.cross_attention_cache import source_inputs
from t5_fsdp.quantities import counted
from t5_fsdp.seeding import seed_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GeneratedSummary:
    """A summary, and what its text alone does not tell.

    Attributes:
        cut: it reached the length limit before the end mark.
        sentinels: generated tokens <extra_id_N>, which are left out of the text.
    """

    text: str
    cut: bool
    sentinels: int


@dataclass(frozen=True)
class GenerationSettings:
    """How a summary is decoded; the same for validation and final evaluation.

    Attributes:
        seed: of sampling; null without it.
    """

    num_beams: int
    max_new_tokens: int
    length_penalty: float
    batch_tokens: int
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0
    batch_examples: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    @classmethod
    def of(cls, options: EvaluationConfig, seed: int) -> GenerationSettings:
        """The part of the evaluation options that decoding reads.

        Args:
            seed: the run's.
        """
        names = [name for name in inspect.signature(cls).parameters if name != "seed"]
        values = {name: getattr(options, name) for name in names}
        return cls(**values, seed=seed if options.do_sample else None)

    def to_json(self) -> dict[str, float | int | None]:
        return dict(vars(self))

    def arguments(self) -> dict[str, Any]:
        """What transformers' `generate` is called with."""
        names = ["num_beams", "max_new_tokens", "min_new_tokens", "length_penalty"]
        names += ["no_repeat_ngram_size", "do_sample"]
        names += ["temperature", "top_k", "top_p"] if self.do_sample else []
        return {name: getattr(self, name) for name in names}


def decoding_settings(config: Config) -> dict[str, Any]:
    """All that decides about predictions beside the model itself, for rouge.json's "settings"."""
    return {
        **GenerationSettings.of(config.evaluation, config.seed).to_json(),
        "prefix": config.data.prefix,
        "max_source_tokens": config.data.max_source_tokens,
        "keep_newlines": config.data.keep_newlines,
        "param_dtype": config.parallel.param_dtype,
    }


def plan_generation(lengths: Sequence[int], settings: GenerationSettings) -> list[list[int]]:
    """Batches of positions, longest sources first: a function of lengths and settings alone.

    rows x beams x longest source stays within `batch_tokens`; one example may exceed it alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    most = settings.batch_examples or len(lengths)
    batches: list[list[int]] = []
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        rows = len(batches[-1]) + 1 if batches else 0
        fits = rows <= most and rows * settings.num_beams * longest <= settings.batch_tokens
        if batches and fits:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def deal_batches(
    num_batches: int, rank: int, world_size: int, done: Collection[int] = ()
) -> list[int]:
    """Which batches a rank decodes: dealt in turn, since they come sorted by cost.

    Args:
        done: batches that nobody has to decode any more.
    """
    left = [number for number in range(num_batches) if number not in done]
    return left[rank::world_size]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[np.ndarray],
    settings: GenerationSettings,
    *,
    rank: int = 0,
    world_size: int = 1,
    newline: int | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
    should_stop: Callable[[], bool] = lambda: False,
    is_sharded: bool = False,
    done: Collection[int] = (),
    keep: Callable[[int, dict[int, GeneratedSummary]], None] = lambda number, made: None,
) -> dict[int, GeneratedSummary]:
    """Decode this rank's share of `sources`.

    Args:
        model: a whole model on this rank's device, in the dtype to compute in; or one of
            `Engine.sharded_generation`.
        sources: token ids with prefix and end mark, [examples] of [source].
        newline: the token that stands for a newline, see `tokenization.newline_id`.
        on_batch: called after each batch with its number of rows.
        should_stop: asked before each batch; then the rest is left out. With `is_sharded` all ranks
            have to hear the same.
        is_sharded: all ranks call the model together: each of them as often as any other.
        done: numbers of batches (of `plan_generation`) to leave out, the same on every rank.
        keep: called after each batch with its number and summaries.

    Returns:
        position in `sources` -> summary.

    Raises:
        UserError: a single example does not fit into the GPU's memory.
    """
    batches = plan_generation([len(source) for source in sources], settings)
    decoder = _Decoder(model, tokenizer, settings, newline, is_sharded)
    was_training = model.training
    model.eval()
    summaries: dict[int, GeneratedSummary] = {}
    mine: list[int | None] = list(deal_batches(len(batches), rank, world_size, done))
    if is_sharded:
        # Whoever has a batch less decodes one again, since the others' calls need it.
        most = len(deal_batches(len(batches), 0, world_size, done))
        mine += [None] * (most - len(mine))
    for number in mine:
        if should_stop():
            break
        batch = batches[-1 if number is None else number]
        made = decoder.decode([sources[i] for i in batch], number or 0)
        if number is None:
            continue
        named = dict(zip(batch, made, strict=True))
        summaries.update(named)
        keep(number, named)
        on_batch(len(batch))
    model.train(was_training)
    return summaries


class _Decoder:
    """Decodes batches with one model and its settings."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings,
        newline: int | None,
        is_sharded: bool,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._settings, self._newline, self._is_sharded = settings, newline, is_sharded
        self._special = SpecialIds(tokenizer.pad_token_id, model.config.decoder_start_token_id)
        self._sentinels = sentinel_ids(tokenizer) - {newline}
        self._arguments = settings.arguments()
        if is_sharded:
            self._arguments["synced_gpus"] = True  # all go on until the last one has ended

    def decode(self, sources: Sequence[np.ndarray], number: int) -> list[GeneratedSummary]:
        """Summaries of one batch.

        Args:
            number: of the batch; sampling is seeded by it.
        """
        if not self._settings.do_sample:
            return self._decode_or_halve(sources, number)
        device = self._model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return self._decode_or_halve(sources, number)

    def _decode_or_halve(
        self, sources: Sequence[np.ndarray], number: int, first: int = 0
    ) -> list[GeneratedSummary]:
        """Summaries of one batch, or of a part of it that starts at `first`."""
        if self._settings.do_sample:
            assert self._settings.seed is not None
            # Each attempt anew: what a failed one has drawn depends on where memory ran out.
            seed_torch(self._settings.seed, "sampling", number, first)
        try:
            return self._decode(sources)
        except torch.OutOfMemoryError as error:
            # Sharded, the other ranks are in the middle of the same batch.
            if len(sources) == 1 or self._is_sharded:
                raise UserError(
                    f"decoding {counted(len(sources), 'example')} does not fit into this GPU's "
                    f"memory ({str(error)[:100]}); lower evaluation.batch_tokens, "
                    "batch_examples or num_beams"
                ) from None
        # Behind the except block, which holds on to the tensors of the failed attempt.
        torch.cuda.empty_cache()
        half = len(sources) // 2
        return [
            *self._decode_or_halve(sources[:half], number, first),
            *self._decode_or_halve(sources[half:], number, first + half),
        ]

    def _decode(self, sources: Sequence[np.ndarray]) -> list[GeneratedSummary]:
        # Only the sources count; collate wants targets too.
        rows = collate(sources, [source[:1] for source in sources], self._special)
        rows = rows.to(self._model.device)
        inputs: dict[str, Any] = {
            "input_ids": rows.input_ids,
            "attention_mask": rows.attention_mask,
        }
        # FSDP1 gathers into tensors that have to outlive inference mode.
        with torch.no_grad() if self._is_sharded else torch.inference_mode():
            if not self._is_sharded and self._settings.num_beams > 1:
                inputs = source_inputs(self._model, **inputs)
            output = self._model.generate(**inputs, **self._arguments)  # type: ignore[operator]
        # The first id is the decoder's start.
        return [
            _summary_of(ids[1:], self._tokenizer, self._newline, self._sentinels)
            for ids in output.tolist()
        ]


def _summary_of(
    ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    newline: int | None,
    sentinels: Set[int],
) -> GeneratedSummary:
    """Of generated ids without the decoder's start; behind the end mark there may be padding."""
    return GeneratedSummary(
        # mT5's sentinels are no special tokens, which decoding leaves out by itself.
        text=decode_summary(tokenizer, [i for i in ids if i not in sentinels], newline),
        cut=tokenizer.eos_token_id not in ids,
        sentinels=sum(token_id in sentinels for token_id in ids),
    )
