"""The same training under Lightning's Trainer: model, loss, batches, schedule and ROUGE.

    data = SummarizationData(config)
    trainer = lightning.Trainer(max_steps=data.num_steps(), strategy="fsdp", ...)
    trainer.fit(SummarizationModule(config), datamodule=data)

What differs between Lightning's batches and this program's: here a step is one global batch, whose
micro-batches are as many as its lengths need, and its loss is the sum over them, and over ranks,
divided by the real target tokens of the whole. So a batch of Lightning's is one micro-batch, and
before each the module says, by `trainer.accumulate_grad_batches`, whether a step ends with it. With
that Lightning's own optimization does the rest: `global_step` counts optimizer steps, gradients are
reduced once a step, and strategies, precision, loggers, callbacks and checkpoints work as they do
with any module. See docs/lightning.md for what does not.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import wrap

from t5_fsdp.checkpoint.format import RunState, is_checkpoint
from t5_fsdp.checkpoint.weights_only import write_weights
from t5_fsdp.config import (
    Config,
    ParallelConfig,
    cache_dir,
    to_dict,
    value_problems,
    width_multiple,
)
from t5_fsdp.console import Console
from t5_fsdp.data.batching import (
    SpecialIds,
    StepBatch,
    StepBatches,
    check_longest,
    evaluation_batches,
)
from t5_fsdp.data.prepared import PreparedData, prepare
from t5_fsdp.data.tokenization import load_tokenizer, newline_id, tokenizer_digest
from t5_fsdp.data.tokenized import TokenizedSplit
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.evaluate import choose_examples, examples_of, score_summaries
from t5_fsdp.evaluation.generation import GenerationSettings, generate
from t5_fsdp.evaluation.rouge import METRICS, RougeSettings
from t5_fsdp.model.build import (
    ModelSpec,
    StateDict,
    build_on_meta,
    build_with_weights,
    check_model,
    resolve_spec,
    unique_state_dict,
)
from t5_fsdp.model.forward import attach_loss
from t5_fsdp.model.loss import LossOptions
from t5_fsdp.model.pretrained import initial_weights
from t5_fsdp.parallel import activation_checkpointing
from t5_fsdp.parallel.common import DTYPES
from t5_fsdp.parallel.wrapping import find_units
from t5_fsdp.seeding import seed_torch
from t5_fsdp.training.optimizer import learning_rate, make_optimizer
from t5_fsdp.training.trainer import total_steps

try:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
except ImportError:
    raise UserError(
        "t5_fsdp.integrations.lightning needs the package lightning; pip install lightning"
    ) from None

# Of `accumulate_grad_batches`: a step ends with this micro-batch, or does not. Lightning divides a
# loss by it, which a power of two undoes without rounding.
_STEP, _ACCUMULATE = 1, 2**31
_Batch = dict[str, Any]


@dataclass(frozen=True)
class _Place:
    """Where a micro-batch stands; lightning's transfers leave it alone."""

    step: int
    is_first: bool
    is_last: bool
    target_tokens: int
    epoch: float


class SummarizationData(LightningDataModule):
    """Batches of the prepared data: the global batches that the command `train` forms, in order.

    Args:
        config: from `load_config`. Streaming and mixtures with weights are not for Lightning.

    Raises:
        UserError: an option is wrong.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        problems = value_problems(config)
        if config.data.streaming or config.data.mixture:
            problems.append("data.streaming and data.mixture are not for Lightning; leave them out")
        if problems:
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

    def num_steps(self) -> int:
        """Optimizer steps of the run, by train.epochs and train.max_steps: for Trainer(max_steps).

        Raises:
            UserError: as `prepared`.
        """
        examples = self.prepared.audit["splits"]["train"]["kept"]
        return total_steps(math.ceil(examples / self.config.train.global_batch_size),
                           self.config.train)  # fmt: skip

    def train_dataloader(self) -> TrainingBatches:
        """This rank's micro-batches."""
        return TrainingBatches(self)

    def val_dataloader(self) -> EvaluationBatches:
        """The fixed choice of validation examples, on this rank; none without such a split."""
        return self._evaluation_batches("validation")

    def test_dataloader(self) -> EvaluationBatches:
        """The whole test split, on this rank."""
        return self._evaluation_batches("test")

    def examples(self, split: str) -> tuple[TokenizedSplit, Any] | None:
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
        batches = evaluation_batches(
            split,
            indices,
            self.special(),
            rank=self._trainer.global_rank,
            world_size=self._trainer.world_size,
            micro_batch_tokens=limit,
            width_multiple=multiple,
        )
        return EvaluationBatches([batch.loss_inputs() for batch in batches])

    def special(self) -> SpecialIds:
        """Ids for padding and for the decoder's start."""
        module = self._trainer.lightning_module
        assert isinstance(module, SummarizationModule)
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
        assert self.trainer is not None, "the data has to be given to a Trainer"
        return self.trainer

    def next_step(self) -> int:
        """The first step that the trainer has not done."""
        return self._trainer.global_step + 1


@dataclass(frozen=True)
class EvaluationBatches:
    """The batches of a split; a plain list would be several loaders to Lightning."""

    batches: list[_Batch]

    def __iter__(self) -> Iterator[_Batch]:
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

    def __iter__(self) -> Iterator[_Batch]:
        first = self._data.next_step()
        a_epoch = self._batches.steps_per_epoch
        end_of_epoch = math.ceil(first / a_epoch) * a_epoch
        last = min(end_of_epoch, self._data.num_steps())
        for step in self._batches.iterate(first, last):
            yield from _micro_batches(step)


def _micro_batches(step: StepBatch) -> Iterator[_Batch]:
    count = len(step.micro_batches)
    for index, micro in enumerate(step.micro_batches):
        place = _Place(step.step, index == 0, index == count - 1, step.target_tokens, step.epoch)
        yield {**micro.loss_inputs(), "place": vars(place)}


class SummarizationModule(LightningModule):
    """The model with its loss, optimizer, schedule and ROUGE.

    Logs, at each optimizer step, `loss` (nats a real target token of the global batch),
    `learning_rate` (the one used), `grad_norm` (before clipping) and `epoch_done` (fractional); at
    each validation `validation_loss` and, as `validation_rouge1` and so on, ROUGE from 0 to 1; for
    `trainer.test` likewise.

    Clipping is by `optimizer.grad_clip_norm`, or by the Trainer's gradient_clip_val where given.

    Args:
        config: from `load_config`; the same as the data's.
        rouge: generate and score summaries at validations; else only the loss is computed.

    Raises:
        UserError: an option is wrong.
    """

    def __init__(self, config: Config, *, rouge: bool = True) -> None:
        super().__init__()
        if problems := _problems(config):
            raise UserError(*problems)
        self.config, self.rouge = config, rouge
        self.model: Any = None
        self._spec: ModelSpec | None = None
        self._tokenizer: Any = None
        # Sums over the micro-batches of a step, and over the batches of a validation.
        self._step_loss: list[torch.Tensor] = []
        self._split_loss: list[torch.Tensor] = []
        self._grad_norm = math.nan

    # ------------------------------------------------------------ the model

    @property
    def data(self) -> SummarizationData:
        """The trainer's data module."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SummarizationData):
            raise UserError("SummarizationModule needs datamodule=SummarizationData(config)")
        return data

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(str(self.data.prepared.tokenizer_directory))
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """What the model is built from."""
        if self._spec is None:
            self._spec = resolve_spec(self.config.model, self.tokenizer)
            check_model(self._spec, self.config.model.attention)
        return self._spec

    def configure_model(self) -> None:
        """Build the model with its weights, and shard it where the strategy leaves that to us.

        Each rank holds all weights on the CPU for a moment.

        Raises:
            UserError: the model or its weights are not to be had.
        """
        if self.model is not None:
            return
        options, seed = self.config.model, self.config.seed
        opened = initial_weights(options, self.spec, seed)
        self.spec.own_head = opened.own_head
        weights = {name: tensor.float() for name, tensor in opened.tensors.items()}
        model = build_with_weights(self.spec, weights, options.attention)
        train, parallel = self.config.train, self.config.parallel
        attach_loss(model, LossOptions(train.label_smoothing, train.z_loss, train.loss_chunk_rows))
        activation_checkpointing.apply(model, parallel)
        if self.device_mesh is not None:  # of ModelParallelStrategy, which shards nothing itself
            _fully_shard(model, parallel, self.device_mesh)
            self.model = model
        else:
            self.model = _wrap_units(model, parallel)

    def configure_optimizers(self) -> Any:
        """This program's optimizer, and its schedule step by step."""
        options, schedule = self.config.optimizer, self.config.schedule
        optimizer = make_optimizer(
            self.model, options, seed=self.config.seed, shard=self.global_rank
        )
        last = self.data.num_steps()
        factors = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: learning_rate(done + 1, last, 1.0, schedule)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": factors, "interval": "step", "name": "learning_rate"},
        }

    # ------------------------------------------------------------ training

    def on_train_batch_start(self, batch: _Batch, batch_idx: int) -> None:
        """Say whether a step ends with this micro-batch, and seed its dropout."""
        place = _Place(**batch["place"])
        self.trainer.accumulate_grad_batches = _STEP if place.is_last else _ACCUMULATE
        if place.is_first:
            self._step_loss.clear()
            seed_torch(self.config.seed, "dropout", place.step, self.global_rank)

    def training_step(self, batch: _Batch, batch_idx: int) -> torch.Tensor:
        """This micro-batch's share of the step's loss."""
        place = _Place(**batch["place"])
        objective, cross_entropy = self.model(**_inputs(batch))
        self._step_loss.append(cross_entropy.detach())
        # Strategies take the mean of the gradients over ranks, and Lightning divides by the second
        # factor.
        factor = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return objective * factor / place.target_tokens

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Nothing: a step's first micro-batch is not where Lightning believes it to be."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """A step, behind which the gradients are none again."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm, in the way that the strategy's model needs."""
        if gradient_clip_algorithm not in (None, "norm"):
            raise UserError(f"gradient_clip_algorithm is {gradient_clip_algorithm}; only norm is")
        limit = self.config.optimizer.grad_clip_norm
        limit = limit if gradient_clip_val is None else gradient_clip_val
        limit = math.inf if limit is None else limit
        if isinstance(self.model, FullyShardedDataParallel):
            norm = self.model.clip_grad_norm_(limit)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def on_train_batch_end(self, outputs: Any, batch: _Batch, batch_idx: int) -> None:
        """Log the step, if one has ended."""
        place = _Place(**batch["place"])
        if not place.is_last:
            return
        loss = self._sum(self._step_loss) / place.target_tokens
        rate = learning_rate(
            place.step, self.data.num_steps(), self.config.optimizer.lr, self.config.schedule
        )
        self.log("loss", loss, prog_bar=True, batch_size=1)
        self.log_dict(
            {"learning_rate": rate, "grad_norm": self._grad_norm, "epoch_done": place.epoch},
            batch_size=1,
        )

    def _sum(self, losses: list[torch.Tensor]) -> float:
        """Over this rank's, and over ranks."""
        total = torch.stack([loss.double() for loss in losses]).sum()
        return float(self.trainer.strategy.reduce(total, reduce_op="sum"))

    # ------------------------------------------------------------ evaluation

    def validation_step(self, batch: _Batch, batch_idx: int) -> None:
        """Sum the loss."""
        self._split_loss.append(self.model(**_inputs(batch))[1])

    def test_step(self, batch: _Batch, batch_idx: int) -> None:
        """Sum the loss."""
        self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log loss and ROUGE of the validation examples."""
        self._evaluate("validation")

    def on_test_epoch_end(self) -> None:
        """Log loss and ROUGE of the test split."""
        self._evaluate("test")

    def _evaluate(self, name: str) -> None:
        losses, self._split_loss = self._split_loss, []
        examples = self.data.examples(name)
        if examples is None or self.trainer.sanity_checking:
            return
        split, indices = examples
        tokens = int(split.target_lengths[indices].sum())
        figures = {"loss": self._sum(losses) / tokens}
        if self.rouge:
            figures |= self._rouge(split, indices)
        self.log_dict({f"{name}_{key}": value for key, value in figures.items()}, batch_size=1)

    def _rouge(self, split: TokenizedSplit, indices: Any) -> dict[str, float]:
        """Mean F-measures; each rank generates its share. A collective."""
        sources = [split.source(int(index)) for index in indices]
        mine = generate(
            self.whole_model(),
            self.tokenizer,
            sources,
            GenerationSettings.of(self.config.evaluation, self.config.seed),
            rank=self.global_rank,
            world_size=self.trainer.world_size,
            newline=newline_id(self.tokenizer, self.config.data.keep_newlines),
        )
        made = {position: summary for share in self._gather(mine) for position, summary
                in share.items()}  # fmt: skip
        figures = None
        if self.trainer.is_global_zero:
            summaries = [made[position] for position in range(len(sources))]
            settings = RougeSettings.of(self.config.evaluation)
            scored = score_summaries(
                examples_of(split, indices), summaries, self.tokenizer, settings
            )
            figures = {name: scored.summary["scores"][name]["fmeasure"] for name in METRICS}
        strategy: Any = self.trainer.strategy
        return strategy.broadcast(figures)

    def _gather(self, value: Any) -> list[Any]:
        """All ranks' values, on every rank."""
        if self.trainer.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def whole_model(self) -> Any:
        """A model with all weights on this rank, to generate with; a collective."""
        dtype = DTYPES[self.config.parallel.param_dtype]
        weights = {
            name: tensor.to(self.device, dtype) for name, tensor in self.full_weights().items()
        }
        return build_with_weights(self.spec, weights, self.config.model.attention)

    def full_weights(self) -> StateDict:
        """All weights by their names in the model, on every rank; a collective."""
        options = StateDictOptions(full_state_dict=True)
        stored: Any = get_model_state_dict(self.model, options=options)
        return {name: stored[name] for name in unique_state_dict(build_on_meta(self.spec))}

    def write_checkpoint(self, folder: str | Path) -> None:
        """Write the weights as a checkpoint of this program, without optimizer state; a collective.

        `t5-fsdp evaluate`, `summarize` and `export` take it, and so does model.name.

        Args:
            folder: a new one.

        Raises:
            UserError: it can't be written, or is not new.
        """
        weights = self.full_weights()
        with contextlib.ExitStack() as stack:
            stack.callback(self.trainer.strategy.barrier)
            if not self.trainer.is_global_zero:
                return
            prepared = self.data.prepared
            state = RunState(
                step=self.trainer.global_step,
                model=self.spec.to_json(),
                data_hash=prepared.content_hash["train"],
                tokenizer_hash=tokenizer_digest(self.tokenizer),
                plan={},
                window={},
                scores={},
                versions={},
                prepared=str(prepared.directory),
            )
            on_cpu = {name: tensor.float().cpu() for name, tensor in weights.items()}
            # JSON is YAML.
            config = json.dumps(to_dict(self.config), indent=1)
            write_weights(Path(folder), on_cpu, state, config, prepared.tokenizer_directory)


def _wrap_units(model: Any, parallel: ParallelConfig) -> Any:
    """Shard by FSDP1 where the strategy is Lightning's: it has said how (`enable_wrap`).

    Elsewhere torch's `wrap` changes nothing.
    """
    for name, unit in reversed(find_units(model, parallel)):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, wrap(unit))
    return wrap(model)


def _fully_shard(model: Any, parallel: ParallelConfig, mesh: Any) -> None:
    """Shard by FSDP2, in the precision of the options.

    Raises:
        UserError: the strategy was told to split layers as well.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise UserError(
            "ModelParallelStrategy would split layers; give it data_parallel_size=<all ranks> and "
            "tensor_parallel_size=1"
        )
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[parallel.param_dtype], reduce_dtype=DTYPES[parallel.reduce_dtype]
    )
    for _, unit in reversed(find_units(model, parallel)):
        fully_shard(unit, mesh=mesh["data_parallel"], mp_policy=precision)
    fully_shard(model, mesh=mesh["data_parallel"], mp_policy=precision)


def _problems(config: Config) -> list[str]:
    problems = value_problems(config)
    if config.model.adapter is not None:
        problems.append("model.adapter is not for Lightning; use the command train")
    if config.model.name is not None and is_checkpoint(Path(config.model.name)):
        problems.append(
            f"model.name: {config.model.name} is a checkpoint of this program; export it, and give "
            "that folder"
        )
    if config.parallel.uses_fp16:
        problems.append("parallel.param_dtype: fp16 is not for Lightning; use bf16 or fp32")
    return problems


def _inputs(batch: _Batch) -> _Batch:
    return {name: value for name, value in batch.items() if name != "place"}
