"""Checkpoints of Lightning's: what a module is made from, and which run may go on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from t5_fsdp.errors import UserError
from tests.integrations.test_lightning import fit
from tests.test_api import tiny_config

pl = pytest.importorskip("lightning.pytorch")


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A trainer that has done 3 steps, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = fit(tiny_config(corpus, folder / "run"), "auto", {}, max_steps=3, limit_val_batches=0)
    trainer.save_checkpoint(folder / "three.ckpt")
    return trainer, folder / "three.ckpt"


def validate(module: Any, config: Any, **options: Any) -> dict[str, float]:
    """What a validation of a new Trainer logs."""
    from t5_fsdp.integrations.lightning import SummarizationData

    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, **options)  # fmt: skip
    [figures] = trainer.validate(module, datamodule=SummarizationData(config), verbose=False)
    return figures


def test_a_module_is_made_from_a_checkpoint_alone(
    corpus: Path, tmp_path: Path, trained: tuple[Any, Path]
) -> None:
    from t5_fsdp import evaluate
    from t5_fsdp.integrations.lightning import SummarizationModule

    trainer, checkpoint = trained
    module = SummarizationModule.load_from_checkpoint(checkpoint)
    assert module.config == trainer.lightning_module.config
    expected = trainer.lightning_module.full_weights()
    weights = module.full_weights()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
    with pytest.raises(UserError, match="no Trainer, and so no data"):
        module.write_checkpoint(tmp_path / "early")
    figures = validate(module, module.config)
    module.write_checkpoint(tmp_path / "weights")
    scores = evaluate(tmp_path / "weights", split="validation", quiet=True).scores
    assert figures["validation_rouge1"] == pytest.approx(scores["rouge1"], rel=1e-4)
    assert '"step": 3' in (tmp_path / "weights/state.json").read_text()
    with pytest.raises(UserError, match=f"folder {tmp_path}/weights exists"):
        module.write_checkpoint(tmp_path / "weights")


def test_a_limited_validation_counts_the_tokens_it_saw(
    corpus: Path, tmp_path: Path, trained: tuple[Any, Path]
) -> None:
    from t5_fsdp.integrations.lightning import SummarizationModule

    trainer, checkpoint = trained
    batch, *others = trainer.datamodule.val_dataloader()
    assert others
    inputs = {name: value for name, value in batch.items() if name != "rows"}
    with torch.no_grad():
        total = float(trainer.lightning_module.model.eval()(**inputs)[1])
    expected = total / len(batch["target_ids"])
    module = SummarizationModule.load_from_checkpoint(checkpoint)
    figures = validate(module, module.config, limit_val_batches=1)
    assert figures["validation_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seed": 2}, "of another run than this one.*\n.*seed is 1 there and 2 now"),
        ({"train.global_batch_size": 8}, "train.global_batch_size is 16 there and 8 now"),
        ({"data.max_source_tokens": 32}, "the training data is [0-9a-f]{12} there"),
        ({"model.config": {"d_model": 16, "num_layers": 1, "num_heads": 2}},
         "another model or tokenizer.*\n.*d_model is 32 there and 16 now"),
    ],
)  # fmt: skip
def test_another_run_does_not_go_on_from_it(
    corpus: Path, tmp_path: Path, trained: tuple[Any, Path], options: Any, problem: str
) -> None:
    config = tiny_config(corpus, tmp_path / "run", **options)
    with pytest.raises(UserError) as raised:
        fit(config, "auto", {}, ckpt_path=trained[1], limit_val_batches=0)
    assert raised.match(problem)


def test_checkpoints_of_other_modules_are_refused(
    corpus: Path, tmp_path: Path, trained: tuple[Any, Path]
) -> None:
    from t5_fsdp.integrations.lightning import SummarizationModule

    stored = torch.load(trained[1])  # weights only: it holds plain values
    del stored["t5_fsdp"]
    torch.save(stored, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="does not say what it was trained on"):
        SummarizationModule.load_from_checkpoint(tmp_path / "other.ckpt")
    config = tiny_config(corpus, tmp_path / "run")
    with pytest.raises(UserError, match=r"other\.ckpt does not say what it was trained on"):
        fit(config, "auto", {}, ckpt_path=tmp_path / "other.ckpt")
    stored["hyper_parameters"]["config"]["train"]["epoch_count"] = 3
    torch.save(stored, tmp_path / "newer.ckpt")
    with pytest.raises(UserError, match=r"configuration is of another version.*epoch_count"):
        SummarizationModule.load_from_checkpoint(tmp_path / "newer.ckpt")
    with pytest.raises(UserError, match="is a folder of shards"):
        SummarizationModule.load_from_checkpoint(tmp_path)


def test_a_clip_value_of_0_clips_nothing(corpus: Path, tmp_path: Path) -> None:
    def losses(**options: Any) -> list[float]:
        log: dict[str, Any] = {}
        clip = {"optimizer.grad_clip_norm": options.pop("norm", 0.01)}
        fit(tiny_config(corpus, tmp_path / "run", **clip), "auto", log, max_steps=3,
            limit_val_batches=0, **options)  # fmt: skip
        return [row["loss"] for row in log["rows"]]

    free = losses(norm=None)
    assert losses(gradient_clip_val=0) == losses(gradient_clip_val=-1.0) == free
    assert losses() != free


def test_a_step_that_is_not_finite_ends_the_run_with_its_weights(
    corpus: Path, tmp_path: Path
) -> None:
    class Break(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.global_step == 2:
                self.before = module.full_weights()
                self.before = {name: weight.clone() for name, weight in self.before.items()}
                self.module = module
                next(iter(module.parameters())).grad.fill_(float("nan"))

    callback = Break()
    with pytest.raises(UserError, match="step 3: the gradient norm nan is not finite"):
        fit(tiny_config(corpus, tmp_path / "run"), "auto", {}, callbacks=[callback])
    for name, weight in callback.module.full_weights().items():
        assert torch.equal(weight, callback.before[name])
