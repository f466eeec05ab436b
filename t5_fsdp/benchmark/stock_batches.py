"""Batches as transformers' own collator makes them, counted and timed."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from t5_fsdp.benchmark.clock import Clock, StepTokens
from t5_fsdp.benchmark.workload import END, PAD, Workload
from t5_fsdp.benchmark.world import chosen_device, quiet, reset_memory
from t5_fsdp.model.flops import T5Shape


def padding_tokenizer() -> Any:
    """A tokenizer that can do nothing but pad, which is all that a collator asks of it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "</s>": END, "<unk>": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


class StockBatches:
    """On a rank: transformers' DataCollatorForSeq2Seq, and a clock that knows what it has made.

    For trainers that fetch their batches and set up their process group themselves. Use as their
    collator, and call `tick` at the start of each of their steps.

    Attributes:
        world_size: ranks.
        clock: its steps are the batches in the order in which they are made, through all epochs.
    """

    def __init__(self, workload: Workload, clock_options: dict[str, int]) -> None:
        from transformers import DataCollatorForSeq2Seq

        quiet()
        reset_memory(workload.device)
        self.world_size = int(os.environ["WORLD_SIZE"])
        device = chosen_device(workload.device, int(os.environ["RANK"]))
        self.clock = Clock(T5Shape.of(workload.spec().config), device, **clock_options)
        self._collate = DataCollatorForSeq2Seq(padding_tokenizer())
        # Trainers fetch a batch ahead.
        self._waiting: deque[StepTokens] = deque()

    def __call__(self, rows: list[dict[str, list[int]]]) -> Any:
        # It pads the rows it is given in place.
        batch = self._collate([dict(row) for row in rows])
        source, target = (sum(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
        width = batch["input_ids"].shape[1] + batch["labels"].shape[1]
        self._waiting.append(StepTokens(len(rows), source, target, len(rows) * width))
        return batch

    def tick(self) -> None:
        """At the start of a step: it computes the next batch."""
        self.clock.tick(self._waiting.popleft())
