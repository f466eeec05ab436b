"""What does not go together with Lightning is refused, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from t5_fsdp.errors import UserError
from tests.integrations.test_lightning import fit
from tests.test_api import tiny_config

pl = pytest.importorskip("lightning.pytorch")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_steps": 11}, r"max_steps=11\) is more than the 10 steps"),
        ({"max_steps": -1, "max_epochs": 4}, r"max_epochs=4\) goes beyond the run's 10 steps"),
        ({"max_steps": -1, "max_epochs": -1}, r"max_epochs=-1\) goes beyond"),
        ({"max_steps": -1}, r"max_epochs=1000\) goes beyond"),
        ({"limit_train_batches": 3}, r"limit_train_batches=3\) counts micro-batches"),
        ({"limit_train_batches": 1}, r"limit_train_batches=1\) counts micro-batches"),
        ({"overfit_batches": 2}, r"overfit_batches=2\) counts micro-batches"),
        ({"fast_dev_run": True}, r"fast_dev_run=1\) counts micro-batches"),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\): a step is"),
        ({"precision": "bf16-true"}, r"precision='bf16-true'\): weights"),
        ({"gradient_clip_algorithm": "value"}, "gradients are clipped by their norm"),
    ],
)
def test_a_trainer_that_would_make_other_steps_is_refused(
    corpus: Path, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    config = tiny_config(corpus, tmp_path / "run")
    with pytest.raises(UserError, match=problem):
        fit(config, "auto", {}, **options)


def test_all_problems_of_a_trainer_are_named_at_once(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus, tmp_path / "run")
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(UserError) as raised:
        fit(config, "auto", {}, max_steps=99, precision="64-true", callbacks=[scheduler])
    lines = str(raised.value.render())
    for name in ("max_steps=99", "'64-true'", "GradientAccumulationScheduler"):
        assert name in lines


def test_strategies_that_do_without_these_hooks_are_refused() -> None:
    from t5_fsdp.integrations.lightning.checks import trainer_problems

    trainer = SimpleNamespace(accumulate_grad_batches=1, callbacks=[], precision="32-true")
    for name in ("DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAStrategy"):
        kind = getattr(pl.strategies, name)
        trainer.strategy = object.__new__(kind)  # what they need is not installed here
        [problem] = trainer_problems(trainer)
        assert problem.startswith(f"{name} is not for this module")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model.adapter": "lora"}, r"model\.adapter is not for Lightning"),
        ({"parallel.param_dtype": "fp16"}, "fp16 is not for Lightning"),
        ({"data.streaming": True}, r"data\.streaming is not for Lightning"),
        ({"train.skip_nonfinite_steps": 3}, r"train\.skip_nonfinite_steps is 3, but"),
    ],
)
def test_options_that_are_not_for_lightning_are_refused(
    corpus: Path, tmp_path: Path, options: Any, problem: str
) -> None:
    from t5_fsdp.integrations.lightning import SummarizationData, SummarizationModule

    config = tiny_config(corpus, tmp_path / "run", **options)
    for kind in (SummarizationData, SummarizationModule):
        with pytest.raises(UserError, match=problem):
            kind(config)


def test_module_and_data_are_of_one_configuration(corpus: Path, tmp_path: Path) -> None:
    from t5_fsdp.integrations.lightning import SummarizationData, SummarizationModule

    one = tiny_config(corpus, tmp_path / "one")
    two = tiny_config(corpus, tmp_path / "two", **{"seed": 7, "train.global_batch_size": 8})
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, max_steps=1,
                         enable_checkpointing=False)  # fmt: skip
    with pytest.raises(UserError) as raised:
        trainer.fit(SummarizationModule(one), datamodule=SummarizationData(two))
    lines = raised.value.render().splitlines()
    assert len(lines) == 2  # folders may differ
    assert "seed is 1 in the module's configuration and 7 in the data's" in lines[0]
    assert "train.global_batch_size is 16 in" in lines[1]


def test_each_is_nothing_without_the_other(corpus: Path, tmp_path: Path) -> None:
    from t5_fsdp.integrations.lightning import SummarizationData, SummarizationModule

    config = tiny_config(corpus, tmp_path / "run")
    with pytest.raises(UserError, match="no Trainer, and so no data"):
        SummarizationModule(config).write_checkpoint(tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    with pytest.raises(UserError, match="no batches before a Trainer has it"):
        SummarizationData(config).train_dataloader()
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, max_steps=1,
                         enable_checkpointing=False)  # fmt: skip
    with pytest.raises(UserError, match=r"needs datamodule=SummarizationData"):
        trainer.fit(SummarizationModule(config), train_dataloaders=[{}])
