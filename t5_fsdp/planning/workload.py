"""How long a run's examples are and how many there are: from prepared data, options or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from t5_fsdp.config import DataConfig, ModelConfig, TrainConfig
from t5_fsdp.data.parts import prepared_splits
from t5_fsdp.data.preparation import find_prepared_for
from t5_fsdp.data.prepared import PreparedData
from t5_fsdp.data.sample import SPLIT_SIZES
from t5_fsdp.planning.step_time import Lengths
from t5_fsdp.training.trainer import total_steps

# Training examples of WikiHow under the official rules and lists, by data.wikihow_version.
_WIKIHOW_EXAMPLES = {"all": 157_252, "sep": 1_060_732}
# Of the training splits of Hub datasets, as their papers and cards give them.
_HUB_EXAMPLES = {
    "abisee/cnn_dailymail": 287_113,
    "EdinburghNLP/xsum": 204_045,
    "knkarthick/samsum": 14_732,
}


@dataclass(frozen=True)
class Workload:
    """What a run has to go through.

    Attributes:
        lengths: of the mean example.
        longest: of any source and target, where that is known; else what the options allow.
        num_examples: of the training split, or None where nothing tells.
        num_examples_origin: what told it.
    """

    lengths: Lengths
    longest: tuple[int, int]
    num_examples: int | None
    num_examples_origin: str

    def steps(self, train: TrainConfig) -> int | None:
        """Optimizer steps of the whole run."""
        if self.num_examples is None:
            return train.max_steps
        return total_steps(math.ceil(self.num_examples / train.global_batch_size), train)


def find_workload(
    data: DataConfig,
    model: ModelConfig,
    cache_dir: Path,
    *,
    source_tokens: float | None = None,
    target_tokens: float | None = None,
    num_examples: int | None = None,
) -> Workload:
    """What is given counts first, then prepared data; else every example is as long as allowed.

    Args:
        cache_dir: where prepared data is kept.
        source_tokens, target_tokens, num_examples: as given by the user; of the examples
            data.max_train_examples may leave fewer.
    """
    prepared = find_prepared_for(data, model, cache_dir, prepared_splits(data))
    workload = _of_prepared(prepared, data) if prepared is not None else None
    if workload is None:
        workload = _assumed(data)
    lengths = workload.lengths
    if source_tokens is not None or target_tokens is not None:
        lengths = Lengths(
            lengths.source if source_tokens is None else source_tokens,
            lengths.target if target_tokens is None else target_tokens,
            "as given" if None not in (source_tokens, target_tokens) else
            f"as given, the other {lengths.origin}",
        )  # fmt: skip
    if num_examples is None:
        return replace(workload, lengths=lengths)
    used, origin = _limited(num_examples, "as given", data)
    return Workload(lengths, workload.longest, used, origin)


def _limited(num_examples: int, origin: str, data: DataConfig) -> tuple[int, str]:
    """Of so many training examples those that a run uses, and what tells their number."""
    limit = data.max_train_examples
    if limit is None or limit >= num_examples:
        return num_examples, origin
    return limit, "data.max_train_examples"


def _of_prepared(prepared: PreparedData, data: DataConfig) -> Workload | None:
    split = prepared.split("train")
    if split is None or not len(split):
        return None
    source, target = split.source_lengths, split.target_lengths
    return Workload(
        Lengths(float(source.mean()), float(target.mean()), "mean of the prepared data"),
        (int(source.max()), int(target.max())),
        len(split),
        "of the prepared data",
    )


def _assumed(data: DataConfig) -> Workload:
    longest = (data.max_source_tokens, data.max_target_tokens)
    source, target = map(float, longest)
    lengths = Lengths(source, target, "assumed: every example as long as the options allow")
    known, origin = _known_examples(data)
    if known is None:
        return Workload(lengths, longest, None, "")
    return Workload(lengths, longest, *_limited(known, origin, data))


def _known_examples(data: DataConfig) -> tuple[int | None, str]:
    if data.mixture:
        return None, ""
    if data.source == "wikihow":
        return _WIKIHOW_EXAMPLES[data.wikihow_version], "WikiHow's official training split"
    if data.source == "sample":
        return SPLIT_SIZES["train"], "the bundled sample"
    if data.source == "hub" and data.train_split == "train":
        return _HUB_EXAMPLES.get(data.dataset or ""), f"as published of {data.dataset}"
    return None, ""
