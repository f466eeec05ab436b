"""Lightning's Trainer against the command `train`: the same steps, on one rank and on two."""

from __future__ import annotations

import contextlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.errors import UserError
from tests.conftest import ROOT, read_metrics
from tests.launch import cpu_environment
from tests.test_api import tiny_config

pytest.importorskip("lightning")

FEW = {"data.max_validation_examples": 6}


def cpu_strategy(name: str) -> Any:
    """A strategy for two ranks; Lightning's FSDP wants GPUs, which its numbers do not need."""
    import torch
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import enable_wrap

    class CPUFSDPStrategy(FSDPStrategy):
        @contextlib.contextmanager
        def model_sharded_context(self) -> Iterator[None]:
            device = torch.device("cpu")  # Lightning gives an index of a GPU
            with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=device, **self.kwargs):
                yield

    if name == "fsdp":
        return CPUFSDPStrategy()
    if name == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return name


def fit(config: Any, strategy: str, log: dict[str, Any], **options: Any) -> Any:
    """Train, and put what was logged into `log`; the trainer."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from t5_fsdp.integrations.lightning import SummarizationData, SummarizationModule

    class Recorder(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            log.setdefault("micro_batches", []).append(trainer.global_step)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            log["validation"] = {name: float(value)
                                 for name, value in trainer.callback_metrics.items()}  # fmt: skip

    class Logger(pl.loggers.logger.DummyLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "loss" in metrics:
                log.setdefault("rows", []).append({**metrics, "step": step})

    resume, callbacks = options.pop("ckpt_path", None), options.pop("callbacks", [])
    plugins = [TorchElasticEnvironment()] if strategy != "auto" else []
    data = SummarizationData(config)
    options = {"max_steps": data.num_steps(), "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if plugins else 1,
        strategy=cpu_strategy(strategy),
        plugins=plugins,
        logger=Logger(),
        log_every_n_steps=1,
        callbacks=[Recorder(), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(SummarizationModule(config), datamodule=data, ckpt_path=resume)
    return trainer


def compare(log: dict[str, Any], run_dir: Path, rel: float = 1e-5) -> None:
    rows, expected = log["rows"], read_metrics(run_dir, "train")
    assert [row["step"] + 1 for row in rows] == [row["step"] for row in expected]
    for name, ours in (("loss", "loss"), ("grad_norm", "grad_norm"),
                       ("learning_rate", "learning_rate"), ("epoch_done", "epoch")):  # fmt: skip
        assert [row[name] for row in rows] == pytest.approx(
            [row[ours] for row in expected], rel=rel
        )
    validation = read_metrics(run_dir, "validation")[-1]
    for name in ("loss", "rouge1", "rougeLsum"):
        assert log["validation"][f"validation_{name}"] == pytest.approx(validation[name], rel=1e-4)


def train_by_command(corpus: Path, run_dir: Path, **options: Any) -> None:
    from t5_fsdp import train

    train(tiny_config(corpus, run_dir, **FEW, **options), quiet=True)


SCHEDULE = {"schedule.name": "linear", "schedule.warmup_steps": 3, "optimizer.grad_clip_norm": 0.5}


def test_one_rank_trains_as_the_command_does(corpus: Path, tmp_path: Path) -> None:
    from t5_fsdp import evaluate

    train_by_command(corpus, tmp_path / "ours", **SCHEDULE)
    log: dict[str, Any] = {}
    trainer = fit(tiny_config(corpus, tmp_path / "theirs", **FEW, **SCHEDULE), "auto", log)
    compare(log, tmp_path / "ours")
    assert trainer.global_step == 10
    # Some steps have several micro-batches: the counter stands still within them.
    assert len(log["micro_batches"]) > 10 and log["micro_batches"][-1] == 10
    folder = tmp_path / "theirs/weights"
    trainer.lightning_module.write_checkpoint(folder)
    ours = evaluate(tmp_path / "ours", split="validation", quiet=True)
    theirs = evaluate(folder, split="validation", quiet=True)
    assert theirs.source == str(folder)
    assert theirs.scores == pytest.approx(ours.scores, rel=1e-4)


def test_a_lightning_checkpoint_goes_on_in_the_middle_of_an_epoch(
    corpus: Path, tmp_path: Path
) -> None:
    dropout = json.loads('{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}')
    config = tiny_config(corpus, tmp_path / "run", **FEW, **{"model.config": dropout})
    whole: dict[str, Any] = {}
    fit(config, "auto", whole, limit_val_batches=0)
    parts: dict[str, Any] = {}
    trainer = fit(config, "auto", parts, max_steps=6, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    fit(config, "auto", parts, ckpt_path=tmp_path / "six.ckpt", limit_val_batches=0)
    assert [row["step"] for row in parts["rows"]] == list(range(10))
    for name in ("loss", "learning_rate", "grad_norm"):
        expected = [row[name] for row in whole["rows"]]
        assert [row[name] for row in parts["rows"]] == pytest.approx(expected, rel=1e-6)


def fit_on_ranks(corpus: Path, run_dir: Path, strategy: str, options: Any) -> Any:
    """On a rank of a pool."""
    log: dict[str, Any] = {}
    trainer = fit(tiny_config(corpus, run_dir, **FEW, **options), strategy, log)
    trainer.lightning_module.write_checkpoint(run_dir / "weights")
    return log


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", *(pytest.param(n, marks=pytest.mark.long) for n in ("ddp", "model_parallel"))],
)
def test_two_ranks_train_as_the_command_does(
    pools: Any, corpus: Path, tmp_path: Path, strategy: str
) -> None:
    import torch

    from t5_fsdp.checkpoint.stored_weights import read_weights

    options = {**SCHEDULE, "parallel.activation_checkpointing": "full"}
    train_by_command(corpus, tmp_path / "ours", **options)
    logs = pools(2).run(fit_on_ranks, corpus, tmp_path / "theirs", strategy, options)
    for log in logs:
        compare(log, tmp_path / "ours")
    ours = read_weights(tmp_path / "ours/checkpoints/step-00000010")
    theirs = read_weights(tmp_path / "theirs/weights")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=1e-4)


def test_without_lightning_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "t5_fsdp.integrations.lightning", raising=False)
    with pytest.raises(UserError, match="pip install lightning"):
        import t5_fsdp.integrations.lightning  # noqa: F401


def test_the_example_refuses_the_folder_of_an_earlier_run(tmp_path: Path, capsys: Any) -> None:
    example = runpy.run_path(str(ROOT / "examples/lightning_wikihow.py"))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/COMPLETE").touch()
    argv = ["--config", str(ROOT / "configs/demo.yaml"), "--output", str(tmp_path)]
    assert example["main"](argv) == 2
    said = capsys.readouterr().err
    assert (
        said == f"error: --output: its folder {tmp_path}/weights exists and is not empty; "
        "give a new one\n"
    )


@pytest.mark.long
def test_the_example_starts_its_own_processes(tmp_path: Path) -> None:
    from t5_fsdp import load_config, summarize
    from t5_fsdp.cli.options import dump_yaml

    config = load_config(
        ROOT / "configs/demo.yaml",
        run_dir=tmp_path / "run",
        data={"max_train_examples": 200, "max_validation_examples": 4},
    )
    (tmp_path / "tiny.yaml").write_text(dump_yaml(config))
    options = ["--config", tmp_path / "tiny.yaml", "--steps", 4, "--strategy", "ddp",
               "--devices", 2]  # fmt: skip
    program = [sys.executable, ROOT / "examples/lightning_wikihow.py", *options]
    environment = cpu_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(word) for word in program], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "`max_steps=4` reached" in done.stderr
    assert len(summarize(["Rinse the rice."], tmp_path / "run-lightning/weights")) == 1
