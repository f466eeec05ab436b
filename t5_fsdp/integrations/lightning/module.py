"""The training itself: Lightning's hooks round the model, loss, optimizer and schedule."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from t5_fsdp.checkpoint.format import RunState
from t5_fsdp.checkpoint.weights_only import write_weights
from t5_fsdp.config import Config, to_dict
from t5_fsdp.data.tokenization import load_tokenizer, tokenizer_digest
from t5_fsdp.errors import UserError
from t5_fsdp.integrations.lightning import sharded_model
from t5_fsdp.integrations.lightning.checkpoint import (
    ORIGIN,
    Origin,
    config_from,
    origin_in,
    spec_from,
)
from t5_fsdp.integrations.lightning.checks import (
    ACCUMULATE,
    STEP,
    config_differences,
    config_problems,
    fit_problems,
    trainer_problems,
)
from t5_fsdp.integrations.lightning.data import (
    Batch,
    Place,
    SummarizationData,
    inputs_of,
    place_of,
    rows_of,
)
from t5_fsdp.integrations.lightning.scoring import gather, rouge
from t5_fsdp.model.build import ModelSpec, StateDict, build_with_weights
from t5_fsdp.model.configuration import check_model, resolve_spec
from t5_fsdp.model.pretrained import initial_weights
from t5_fsdp.parallel.common import DTYPES
from t5_fsdp.seeding import seed_torch
from t5_fsdp.training.adamw import LowPrecisionMomentsAdamW
from t5_fsdp.training.optimizer import learning_rate, make_optimizer


class SummarizationModule(LightningModule):
    """The model with its loss, optimizer, schedule and ROUGE.

    Logs, at each optimizer step, `loss` (nats a real target token of the global batch),
    `learning_rate` (the one used), `grad_norm` (before clipping) and `epoch_done` (fractional); at
    each validation `validation_loss` and, as `validation_rouge1` and so on, ROUGE from 0 to 1; for
    `trainer.test` likewise. Where limit_val_batches leaves examples out, all these are of the
    others.

    Clipping is by `optimizer.grad_clip_norm`, or by the Trainer's gradient_clip_val where given.

    Args:
        config: from `load_config`; the same as the data's. Also its plain values, which a
            checkpoint of Lightning's holds.
        rouge: generate and score summaries at validations; else only the loss is computed.
        spec: what the model is built from, likewise; None: as the options and the tokenizer say.

    Raises:
        UserError: an option is wrong.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        *,
        rouge: bool = True,
        spec: ModelSpec | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        config = config_from(config)
        if problems := config_problems(config):
            raise UserError(*problems)
        self.config, self.rouge = config, rouge
        self.model: Any = None
        self._spec = spec_from(spec)
        self._tokenizer: Any = None
        self._is_sharded = False
        self._origin: Origin | None = None  # of weights that came from a checkpoint
        self._loaded_step = 0
        # Sums over the micro-batches of a step, and over the batches of a validation.
        self._step_loss: list[torch.Tensor] = []
        self._split_loss: list[torch.Tensor] = []
        self._rows: list[int] = []  # of the split, that a validation has seen
        self._place: Place | None = None
        self._grad_norm = math.nan

    def setup(self, stage: str) -> None:
        """Compare Trainer, data and module.

        Raises:
            UserError: they don't go together, with everything that has to be changed.
        """
        problems = trainer_problems(self.trainer)
        problems += config_differences(self.config, self.data.config)
        if stage == "fit":
            steps = self.data.num_steps(), self.data.steps_per_epoch
            problems += fit_problems(self.trainer, self.config, *steps)
        if problems:
            raise UserError(*problems)
        if self._origin is not None:
            self._compare(self._origin, "the checkpoint that the module was loaded from")

    # ------------------------------------------------------------ the model

    @property
    def data(self) -> SummarizationData:
        """The trainer's data module.

        Raises:
            UserError: there is none.
        """
        if not self._is_attached:
            raise UserError(
                "SummarizationModule has no Trainer, and so no data and tokenizer; give it to one "
                "first: trainer.fit(module, datamodule=data), or trainer.validate with ckpt_path=; "
                "weights without data come from load_from_checkpoint, or model.name: FOLDER of a "
                "write_checkpoint"
            )
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SummarizationData):
            raise UserError("SummarizationModule needs datamodule=SummarizationData(config)")
        return data

    @property
    def _is_attached(self) -> bool:
        try:
            return self.trainer is not None
        except RuntimeError:  # so Lightning says it
            return False

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
        if self.model is None:
            self.model = sharded_model.build(self.spec, self._first_weights(), self.config)
        if self._is_attached and not self._is_sharded:
            self.model = sharded_model.shard(self.model, self.config.parallel, self.device_mesh)
            self._is_sharded = True

    def _first_weights(self) -> StateDict:
        if not self._is_attached:  # load_from_checkpoint fills them
            return sharded_model.empty_weights(self.spec)
        opened = initial_weights(self.config.model, self.spec, self.config.seed)
        self.spec.own_head = opened.own_head
        return {name: tensor.float() for name, tensor in opened.tensors.items()}

    def configure_optimizers(self) -> Any:
        """This program's optimizer, and its schedule step by step."""
        options, schedule = self.config.optimizer, self.config.schedule
        shard = sharded_model.shard_index(self.model, self.device_mesh)
        optimizer = make_optimizer(self.model, options, seed=self.config.seed, shard=shard)
        last = self.data.num_steps()
        factors = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: learning_rate(done + 1, last, 1.0, schedule)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": factors, "interval": "step", "name": "learning_rate"},
        }

    # ------------------------------------------------------------ training

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Say whether a step ends with this micro-batch, and seed its dropout."""
        self._place = place = place_of(batch)
        self.trainer.accumulate_grad_batches = STEP if place.is_last else ACCUMULATE
        if place.is_first:
            self._step_loss.clear()
            [optimizer] = self.trainer.optimizers
            optimizer.zero_grad()  # of a step that an earlier fit has not ended
            if isinstance(optimizer, LowPrecisionMomentsAdamW):
                optimizer.number = place.step
            seed_torch(self.config.seed, "dropout", place.step, self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """This micro-batch's share of the step's loss."""
        objective, cross_entropy = self.model(**inputs_of(batch))
        self._step_loss.append(cross_entropy.detach())
        # Strategies take the mean of the gradients over ranks, and Lightning divides by the second
        # factor.
        factor = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return objective * factor / place_of(batch).target_tokens

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
        """Clip the global norm; as Lightning has it, by no value of 0 or less.

        Raises:
            UserError: the norm is not finite; the weights are left as they were.
        """
        limit = self.config.optimizer.grad_clip_norm
        limit = limit if gradient_clip_val is None else gradient_clip_val
        if limit is None or limit <= 0:
            limit = math.inf
        self._grad_norm = sharded_model.clip_grad_norm(self.model, limit)
        if not math.isfinite(self._grad_norm):  # the same on every rank
            assert self._place is not None
            raise UserError(
                f"step {self._place.step}: the gradient norm {self._grad_norm} is not finite; the "
                "weights were left as they were. Lower optimizer.lr, or use the command train, "
                "which names the examples and has train.skip_nonfinite_steps"
            )

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the step, if one has ended."""
        place = place_of(batch)
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

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Sum the loss."""
        self._split_loss.append(self.model(**inputs_of(batch))[1])
        self._rows += rows_of(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Sum the loss."""
        self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log loss and ROUGE of the validation examples."""
        self._evaluate("validation")

    def on_test_epoch_end(self) -> None:
        """Log loss and ROUGE of the test split."""
        self._evaluate("test")

    def _evaluate(self, name: str) -> None:
        """Of the examples that were seen: limit_val_batches may have left some out."""
        losses, self._split_loss = self._split_loss, []
        mine, self._rows = self._rows, []
        examples = self.data.examples(name)
        if examples is None or self.trainer.sanity_checking:
            return
        split, trainer = examples[0], self.trainer
        rows = np.array(sorted(itertools.chain(*gather(mine, trainer))))
        figures = {"loss": self._sum(losses) / int(split.target_lengths[rows].sum())}
        if self.rouge:
            model = self.whole_model()
            figures |= rouge(model, self.tokenizer, split, rows, self.config, trainer)
        self.log_dict({f"{name}_{key}": value for key, value in figures.items()}, batch_size=1)

    # ------------------------------------------------------------ weights

    def whole_model(self) -> Any:
        """A model with all weights on this rank, to generate with; a collective."""
        dtype = DTYPES[self.config.parallel.param_dtype]
        weights = {
            name: tensor.to(self.device, dtype) for name, tensor in self.full_weights().items()
        }
        return build_with_weights(self.spec, weights, self.config.model.attention)

    def full_weights(self) -> StateDict:
        """All weights by their names in the model, on every rank; a collective.

        Raises:
            UserError: there is no model yet.
        """
        if self.model is None:
            raise UserError(
                "SummarizationModule has no weights yet; give it to trainer.fit or "
                "trainer.validate first, or make it by load_from_checkpoint"
            )
        return sharded_model.full_weights(self.model, self.spec)

    def write_checkpoint(self, folder: str | Path) -> None:
        """Write the weights as a checkpoint of this program, without optimizer state; a collective.

        `t5-fsdp evaluate`, `summarize` and `export` take it, and so does model.name.

        Args:
            folder: a new one.

        Raises:
            UserError: it can't be written, or is not new; there is no Trainer or no model yet.
        """
        prepared = self.data.prepared
        weights = self.full_weights()
        with contextlib.ExitStack() as stack:
            stack.callback(self.trainer.strategy.barrier)
            if not self.trainer.is_global_zero:
                return
            state = RunState(
                step=self.trainer.global_step or self._loaded_step,
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
            tokenizer = prepared.tokenizer_directory
            write_weights(Path(folder), on_cpu, state, config, tokenizer, option="folder")

    # ------------------------------------------------------------ checkpoints of Lightning's

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's: the module with its weights, without Trainer and data.

        Raises:
            UserError: the checkpoint is a folder of shards, or of no module like this one.
        """
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            raise UserError(
                f"{checkpoint_path} is a folder of shards; make one file of it (python -m "
                "lightning.pytorch.utilities.consolidate_checkpoint FOLDER), or go on from it by "
                "trainer.fit(..., ckpt_path=FOLDER)"
            )
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a module can be made from, and what a run that goes on must have the same."""
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = {
            "config": to_dict(self.config),
            "rouge": self.rouge,
            "spec": self.spec.to_json(),
        }
        checkpoint[ORIGIN] = vars(self._origin_now())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the checkpoint's run with this one.

        Raises:
            UserError: its weights are for another model or tokenizer; to go on with training, also
                when its data, their order or its optimizer are others.
        """
        self._loaded_step = checkpoint["global_step"]
        if not self._is_attached:
            self._origin = origin_in(checkpoint, "the checkpoint")
            return
        name = self.trainer.ckpt_path
        self._compare(origin_in(checkpoint, name), name, goes_on=self.trainer.state.fn == "fit")

    def _compare(self, origin: Origin, name: object, *, goes_on: bool = False) -> None:
        now = self._origin_now()
        if differences := origin.model_differences(now):
            raise UserError(
                f"{name} holds the weights of another model or tokenizer than the options ask for; "
                "give its options, or start anew",
                *differences,
            )
        if goes_on and (differences := origin.run_differences(now)):
            raise UserError(
                f"{name} is of another run than this one; give its data and options, or start a "
                "new run from its weights (SummarizationModule.load_from_checkpoint(FILE, "
                "config=config))",
                *differences,
            )

    def _origin_now(self) -> Origin:
        digest = tokenizer_digest(self.tokenizer)
        return Origin.of(self.config, self.spec, self.data.prepared, digest)
