"""The batches that the command `train` forms, in order, as Lightning takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer

from t5_fsdp.config import Config, cache_dir, width_multiple
from t5_fsdp.console import Console
from t5_fsdp.data.batching import StepBatch, StepBatches, check_longest, evaluation_shares
from t5_fsdp.data.collation import SpecialIds, collate_rows
from t5_fsdp.data.preparation import prepare
from t5_fsdp.data.prepared import PreparedData
from t5_fsdp.data.tokenized import TokenizedSplit
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.evaluate import choose_examples
from t5_fsdp.integrations.lightning.checks import config_problems
from t5_fsdp.training.trainer import total_steps

Batch = dict[str, Any]
_PLACE, _ROWS = "place", "rows"  # of a batch, beside what the model takes


@dataclass(frozen=True)
class Place:
    """Where a micro-batch stands; lightning's transfers leave it alone."""

    step: int
    is_first: bool
    is_last: bool
    target_tokens: int
    epoch: float


def place_of(batch: Batch) -> Place:
    """Of a training batch."""
    return Place(**batch[_PLACE])


def rows_of(batch: Batch) -> list[int]:
    """Of an evaluation batch: its examples' indices in the split."""
    return batch[_ROWS]


def inputs_of(batch: Batch) -> Batch:
    """What the model takes."""
    return {name: value for name, value in batch.items() if name not in (_PLACE, _ROWS)}


class SummarizationData(LightningDataModule):
    """Batches of the prepared data: the global batches that the command `train` forms, in order.

    Args:
        config: from `load_config`. Streaming and mixtures with weights are not for Lightning.

    Raises:
        UserError: an option is wrong.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        if problems := config_problems(config):
            raise UserError(*problems)
        self.config = config
        self._prepared: PreparedData | None = None

    @property
    def prepared(self) -> PreparedData:
        """The data, read and tokenized when first asked for; any number of processes may ask.

        Raises:
            UserError: as `data.prepared.prepare`.
        """
        if self._prepared is None:
            config = self.config
            say = Console(self.trainer is None or self.trainer.is_global_zero).say
            self._prepared = prepare(config.data, config.model, cache_dir(config), say)
        return self._prepared

    def prepare_data(self) -> None:
        """Once a node, before the others open it."""
        _ = self.prepared

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the training split."""
        examples = self.prepared.audit["splits"]["train"]["kept"]
        return math.ceil(examples / self.config.train.global_batch_size)

    def num_steps(self) -> int:
        """Optimizer steps of the run, by train.epochs and train.max_steps: for Trainer(max_steps).

        Raises:
            UserError: as `prepared`.
        """
        return total_steps(self.steps_per_epoch, self.config.train)

    def train_dataloader(self) -> TrainingBatches:
        """This rank's micro-batches."""
        return TrainingBatches(self)

    def val_dataloader(self) -> EvaluationBatches:
        """The fixed choice of validation examples, on this rank; none without such a split."""
        return self._evaluation_batches("validation")

    def test_dataloader(self) -> EvaluationBatches:
        """The whole test split, on this rank."""
        return self._evaluation_batches("test")

    def examples(self, split: str) -> tuple[TokenizedSplit, np.ndarray] | None:
        """The split, and the indices of its examples that are evaluated; None without it."""
        found = self.prepared.split(split)
        if found is None:
            return None
        limit = self.config.evaluation.max_examples if split == "validation" else None
        return found, choose_examples(len(found), limit, self.config.seed)

    def _evaluation_batches(self, name: str) -> EvaluationBatches:
        examples = self.examples(name)
        if examples is None:
            return EvaluationBatches([])
        split, indices = examples
        limit, multiple = self.config.train.micro_batch_tokens, width_multiple(self.config)
        check_longest(split, limit, multiple, name)
        shares = evaluation_shares(
            split,
            indices,
            world_size=self._trainer.world_size,
            micro_batch_tokens=limit,
            width_multiple=multiple,
        )
        special = self.special()
        return EvaluationBatches(
            [
                {
                    **collate_rows(split, rows, special, multiple).loss_inputs(),
                    _ROWS: rows.tolist(),
                }
                for rows in shares[self._trainer.global_rank]
            ]
        )

    def special(self) -> SpecialIds:
        """Ids for padding and for the decoder's start.

        Raises:
            UserError: the Trainer's module is none of ours.
        """
        module: Any = self._trainer.lightning_module
        if not hasattr(module, "spec") or not hasattr(module, "tokenizer"):
            raise UserError("SummarizationData needs a SummarizationModule to go with it")
        config = module.spec.config
        return SpecialIds(module.tokenizer.pad_token_id, config.decoder_start_token_id)

    def step_batches(self) -> StepBatches:
        """This rank's share of every step.

        Raises:
            UserError: an example exceeds train.micro_batch_tokens.
        """
        split, train = self.prepared.split("train"), self.config.train
        assert split is not None
        return StepBatches(
            split,
            self.special(),
            rank=self._trainer.global_rank,
            world_size=self._trainer.world_size,
            global_batch_size=train.global_batch_size,
            micro_batch_tokens=train.micro_batch_tokens,
            batching=train.batching,
            seed=self.config.seed,
            width_multiple=width_multiple(self.config),
        )

    @property
    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise UserError(
                "SummarizationData has no batches before a Trainer has it, which knows the ranks: "
                "trainer.fit(module, datamodule=data)"
            )
        return self.trainer

    def next_step(self) -> int:
        """The first step that the trainer has not done."""
        return self._trainer.global_step + 1


@dataclass(frozen=True)
class EvaluationBatches:
    """The batches of a split; a plain list would be several loaders to Lightning."""

    batches: list[Batch]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class TrainingBatches:
    """The micro-batches of an epoch, from the step behind the trainer's last one.

    They have no length: how many a step has depends on the number of ranks. Resuming in the middle
    of an epoch needs no state, since the order of the data is a function of the step.
    """

    def __init__(self, data: SummarizationData) -> None:
        self._data = data
        self._batches = data.step_batches()

    def __iter__(self) -> Iterator[Batch]:
        first = self._data.next_step()
        a_epoch = self._batches.steps_per_epoch
        end_of_epoch = math.ceil(first / a_epoch) * a_epoch
        last = min(end_of_epoch, self._data.num_steps())
        for step in self._batches.iterate(first, last):
            yield from _micro_batches(step)


def _micro_batches(step: StepBatch) -> Iterator[Batch]:
    count = len(step.micro_batches)
    for index, micro in enumerate(step.micro_batches):
        place = Place(step.step, index == 0, index == count - 1, step.target_tokens, step.epoch)
        yield {**micro.loss_inputs(), _PLACE: vars(place)}
