"""Batches as transformers' own collator makes them, counted."""

from __future__ import annotations

from typing import Any

from t5_fsdp.benchmark.clock import StepTokens
from t5_fsdp.benchmark.workload import END, PAD


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


class CountingCollator:
    """transformers' DataCollatorForSeq2Seq, which notes what is in each batch.

    Attributes:
        counts: of the batches so far, in the order in which they were made.
    """

    def __init__(self) -> None:
        from transformers import DataCollatorForSeq2Seq

        self._collate = DataCollatorForSeq2Seq(padding_tokenizer())
        self.counts: list[StepTokens] = []

    def __call__(self, rows: list[dict[str, list[int]]]) -> Any:
        # It pads the rows it is given in place.
        batch = self._collate([dict(row) for row in rows])
        source, target = (sum(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
        width = batch["input_ids"].shape[1] + batch["labels"].shape[1]
        self.counts.append(StepTokens(len(rows), source, target, len(rows) * width))
        return batch
