"""ROUGE of the examples that a validation has seen, each rank generating its share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from t5_fsdp.config import Config
from t5_fsdp.data.tokenization import newline_id
from t5_fsdp.data.tokenized import TokenizedSplit
from t5_fsdp.evaluation.evaluate import examples_of, score_summaries
from t5_fsdp.evaluation.generation import GenerationSettings, generate
from t5_fsdp.evaluation.rouge import METRICS, RougeSettings


def gather(value: Any, trainer: Trainer) -> list[Any]:
    """All ranks' values, on every rank; a collective."""
    if trainer.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def rouge(
    model: Any,
    tokenizer: Any,
    split: TokenizedSplit,
    rows: np.ndarray,
    config: Config,
    trainer: Trainer,
) -> dict[str, float]:
    """Mean F-measures; a collective.

    Args:
        model: a whole one on this rank's device.
        rows: of the split, the same on every rank.
    """
    mine = generate(
        model,
        tokenizer,
        [split.source(int(row)) for row in rows],
        GenerationSettings.of(config.evaluation, config.seed),
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        newline=newline_id(tokenizer, config.data.keep_newlines),
    )
    shares = gather(mine, trainer)
    figures = None
    if trainer.is_global_zero:
        made = {place: summary for share in shares for place, summary in share.items()}
        summaries = [made[place] for place in range(len(rows))]
        settings = RougeSettings.of(config.evaluation)
        scored = score_summaries(examples_of(split, rows), summaries, tokenizer, settings)
        figures = {name: scored.summary["scores"][name]["fmeasure"] for name in METRICS}
    strategy: Any = trainer.strategy
    return strategy.broadcast(figures)
