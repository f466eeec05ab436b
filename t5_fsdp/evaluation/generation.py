"""Summaries by beam search, dealt over ranks so that their number never changes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from t5_fsdp.config import EvaluationConfig
from t5_fsdp.data.batching import SpecialIds, collate
from t5_fsdp.data.tokenization import decode_summary, sentinel_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GeneratedSummary:
    """A summary, and what its text alone does not tell.

    Attributes:
        cut: it reached the length limit before the end mark.
        sentinels: generated tokens <extra_id_N>, which decoding leaves out of the text.
    """

    text: str
    cut: bool
    sentinels: int


@dataclass(frozen=True)
class GenerationSettings:
    """How a summary is decoded; the same for validation and final evaluation."""

    num_beams: int
    max_new_tokens: int
    length_penalty: float
    batch_tokens: int

    @classmethod
    def of(cls, options: EvaluationConfig) -> GenerationSettings:
        """The part of the evaluation options that decoding reads."""
        return cls(
            num_beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            length_penalty=options.length_penalty,
            batch_tokens=options.batch_tokens,
        )

    def to_json(self) -> dict[str, float | int]:
        return dict(vars(self))


def plan_generation(lengths: Sequence[int], settings: GenerationSettings) -> list[list[int]]:
    """Batches of positions, longest sources first: a function of lengths and settings alone.

    rows x beams x longest source stays within `batch_tokens`; one example may exceed it alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        rows = len(batches[-1]) + 1 if batches else 0
        if batches and rows * settings.num_beams * longest <= settings.batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def deal_batches(num_batches: int, rank: int, world_size: int) -> list[int]:
    """Which batches a rank decodes: dealt in turn, since they come sorted by cost."""
    return list(range(rank, num_batches, world_size))


@torch.inference_mode()
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
) -> dict[int, GeneratedSummary]:
    """Decode this rank's share of `sources`.

    Args:
        model: a whole model on this rank's device, in the dtype to compute in.
        sources: token ids with prefix and end mark, [examples] of [source].
        newline: the token that stands for a newline, see `tokenization.newline_id`.
        on_batch: called after each batch with its number of rows.
        should_stop: asked before each batch; then the rest is left out.

    Returns:
        position in `sources` -> summary.
    """
    special = SpecialIds(tokenizer.pad_token_id, model.config.decoder_start_token_id)
    batches = plan_generation([len(source) for source in sources], settings)
    was_training = model.training
    model.eval()
    summaries: dict[int, GeneratedSummary] = {}
    sentinels = sentinel_ids(tokenizer) - {newline}
    for number in deal_batches(len(batches), rank, world_size):
        if should_stop():
            break
        batch = batches[number]
        # Only the sources count; collate wants targets too.
        rows = collate([sources[i] for i in batch], [sources[i][:1] for i in batch], special)
        rows = rows.to(model.device)
        output = model.generate(  # type: ignore[operator]
            input_ids=rows.input_ids,
            attention_mask=rows.attention_mask,
            num_beams=settings.num_beams,
            max_new_tokens=settings.max_new_tokens,
            length_penalty=settings.length_penalty,
            do_sample=False,
        )
        # The first id is the decoder's start.
        made = [_summary_of(ids[1:], tokenizer, newline, sentinels) for ids in output.tolist()]
        summaries.update(zip(batch, made, strict=True))
        on_batch(len(batch))
    model.train(was_training)
    return summaries


def _summary_of(
    ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    newline: int | None,
    sentinels: Set[int],
) -> GeneratedSummary:
    """Of generated ids without the decoder's start; behind the end mark there may be padding."""
    return GeneratedSummary(
        text=decode_summary(tokenizer, ids, newline),
        cut=tokenizer.eos_token_id not in ids,
        sentinels=sum(token_id in sentinels for token_id in ids),
    )
