"""What does not work together with Lightning, refused before anything is computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
)

from t5_fsdp.checkpoint.format import is_checkpoint
from t5_fsdp.config import Config, leaves, to_dict
from t5_fsdp.config_problems import value_problems

# Of `accumulate_grad_batches`: a step ends with this micro-batch, or does not. Lightning divides a
# loss by it, which a power of two undoes without rounding.
STEP, ACCUMULATE = 1, 2**31

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy)
# Classes derived from those that do without what they do here.
_NOT_THESE = (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy)
_Trainer = Any  # Lightning's; some of its attributes are made where no type checker sees them
# Options that module and data may differ in, since neither reads them, or only one does.
_FREE_OPTIONS = ("run_dir", "logging.", "checkpoint.", "data.cache_dir")


def config_problems(config: Config) -> list[str]:
    """Values that no run could use, or that are not for Lightning."""
    problems = value_problems(config)
    for name in ("streaming", "mixture"):
        if getattr(config.data, name):
            problems.append(f"data.{name} is not for Lightning; use the command train")
    if config.model.adapter is not None:
        problems.append("model.adapter is not for Lightning; use the command train")
    if config.model.name is not None and is_checkpoint(Path(config.model.name)):
        problems.append(
            f"model.name: {config.model.name} is a checkpoint of this program; export it, and give "
            "that folder"
        )
    if config.parallel.uses_fp16:
        problems.append("parallel.param_dtype: fp16 is not for Lightning; use bf16 or fp32")
    if config.train.skip_nonfinite_steps:
        problems.append(
            f"train.skip_nonfinite_steps is {config.train.skip_nonfinite_steps}, but under "
            "Lightning the first step that is not finite ends the run; set it to 0, or use the "
            "command train"
        )
    return problems


def config_differences(module: Config, data: Config) -> list[str]:
    """Options that the module's configuration and the data's have differently, one a line."""
    pairs = zip(leaves(to_dict(module)).items(), leaves(to_dict(data)).values(), strict=True)
    return [
        f"{name} is {there!r} in the module's configuration and {here!r} in the data's"
        for (name, there), here in pairs
        if there != here and not name.startswith(_FREE_OPTIONS)
    ]


def trainer_problems(trainer: _Trainer) -> list[str]:
    """How the Trainer computes, whatever it is asked to do; one a line."""
    problems = [*_strategy_problems(trainer.strategy), *_precision_problems(trainer)]
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    # The other value is left by a fit that ended within a step.
    if trainer.accumulate_grad_batches not in (STEP, ACCUMULATE):
        problems.append(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): a step is a "
            "global batch here, however many micro-batches it has; leave it out, and set "
            "train.global_batch_size"
        )
    if schedulers:
        problems.append(
            "GradientAccumulationScheduler would change how many micro-batches a step has, which "
            "follows from train.global_batch_size here; leave it out"
        )
    return problems


def fit_problems(
    trainer: _Trainer, config: Config, num_steps: int, steps_per_epoch: int
) -> list[str]:
    """What a Trainer is asked to fit that the run does not have; one a line.

    Args:
        trainer: with its strategy.
        config: of the run.
        num_steps: optimizer steps of the run, with which its data and schedule end.
        steps_per_epoch: of the training split.
    """
    problems = _limit_problems(trainer)
    if not trainer.fast_dev_run:  # which sets these as well
        problems += _length_problems(trainer, num_steps, steps_per_epoch)
    if trainer.gradient_clip_algorithm == "value":
        problems.append(
            "Trainer(gradient_clip_algorithm='value'): gradients are clipped by their norm here; "
            "leave it out"
        )
    return problems + _optimizer_problems(trainer.strategy, config)


def _optimizer_problems(strategy: Strategy, config: Config) -> list[str]:
    if config.optimizer.name != "adafactor" or not isinstance(strategy, FSDPStrategy):
        return []
    return [
        "optimizer.name: adafactor needs whole rows, and Trainer(strategy='fsdp') cuts matrices "
        "into flat pieces; use ModelParallelStrategy, or optimizer.name: adamw"
    ]


def _strategy_problems(strategy: Strategy) -> list[str]:
    if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, _NOT_THESE):
        return [
            f"{type(strategy).__name__} is not for this module; use Trainer(strategy='auto'), "
            "'ddp', 'fsdp' or ModelParallelStrategy"
        ]
    if isinstance(strategy, ModelParallelStrategy):
        mesh: Any = strategy.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            return [
                "ModelParallelStrategy would split layers; give it data_parallel_size=<all ranks> "
                "and tensor_parallel_size=1"
            ]
    return []


def _precision_problems(trainer: _Trainer) -> list[str]:
    precision = trainer.precision
    if isinstance(trainer.strategy, ModelParallelStrategy):
        if precision != "32-true":
            return [
                f"Trainer(precision={precision!r}) with ModelParallelStrategy: there "
                "parallel.param_dtype decides; use '32-true'"
            ]
    elif precision not in ("32-true", "bf16-mixed"):
        return [
            f"Trainer(precision={precision!r}): weights and moments are float32 here, without a "
            "loss scale; use '32-true' or 'bf16-mixed'"
        ]
    return []


def _limit_problems(trainer: _Trainer) -> list[str]:
    """Limits count micro-batches: a step that they cut would be made with a part of its batch."""
    if trainer.fast_dev_run:
        count = int(trainer.fast_dev_run)
        return [
            f"Trainer(fast_dev_run={count}) counts micro-batches, so it may end within a step; "
            f"give max_steps={count} and, for a short validation, evaluation.max_examples"
        ]
    if trainer.overfit_batches:
        return [
            f"Trainer(overfit_batches={trainer.overfit_batches}) counts micro-batches, so it may "
            "end within a step; set data.max_train_examples and train.epochs"
        ]
    limit = trainer.limit_train_batches  # a count where an int, else a share; 0 trains nothing
    if limit != 0 and (isinstance(limit, int) or limit < 1.0):
        return [
            f"Trainer(limit_train_batches={limit}) counts micro-batches, so "
            "an epoch may end within a step; set train.max_steps or data.max_train_examples"
        ]
    return []


def _length_problems(trainer: _Trainer, num_steps: int, steps_per_epoch: int) -> list[str]:
    """A Trainer would go through empty epochs, some of them for ever."""
    if trainer.max_steps > num_steps:
        return [
            f"Trainer(max_steps={trainer.max_steps}) is more than the {num_steps} steps of the "
            "run, with which its data and schedule end; give max_steps=data.num_steps(), or raise "
            "train.epochs or train.max_steps"
        ]
    epochs = math.ceil(num_steps / steps_per_epoch)
    asked = -1 if trainer.max_epochs is None else trainer.max_epochs
    if trainer.max_steps == -1 and not 0 <= asked <= epochs:
        return [
            f"Trainer(max_steps=-1, max_epochs={asked}) goes beyond the run's {num_steps} steps, "
            f"which are {epochs} epochs; give max_steps=data.num_steps(), or raise train.epochs or "
            "train.max_steps"
        ]
    return []
