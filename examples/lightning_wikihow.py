"""Fine-tune under Lightning's Trainer.

    export PYTHONPATH=.  # or: pip install .
    python examples/lightning_wikihow.py --config configs/wikihow_t5_base.yaml --strategy fsdp
    python examples/lightning_wikihow.py --config configs/demo.yaml --steps 20      # on a CPU

It writes into <run_dir of the configuration>-lightning, or --output: Lightning's logs and best
checkpoint, and `weights`, for the commands of t5_fsdp. Lightning starts the other processes itself:
one a GPU. docs/lightning.md says what works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp import UserError, load_config
from t5_fsdp.errors import EXIT_USER_ERROR
from t5_fsdp.files import check_new
from t5_fsdp.integrations.lightning import SummarizationData, SummarizationModule


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Fine-tune a T5 under Lightning's Trainer.")
    parser.add_argument("--config", default="configs/wikihow_t5_base.yaml")
    parser.add_argument("--output", type=Path, default=None, help="default: <run_dir>-lightning")
    strategies = ("auto", "ddp", "fsdp", "fsdp2")
    parser.add_argument("--strategy", default="auto", choices=strategies)
    parser.add_argument("--devices", type=int, default=None, help="default: all GPUs, or one CPU")
    precisions = ("32-true", "bf16-mixed")
    parser.add_argument("--precision", default="32-true", choices=precisions)
    parser.add_argument("--steps", type=int, default=None, help="fewer than the configuration's")
    options = parser.parse_args(argv)
    try:
        fit(options)
    except UserError as error:
        if rank_zero_only.rank == 0:  # the others have met the same
            print(error.render(), file=sys.stderr)
        return EXIT_USER_ERROR
    except MisconfigurationException as error:  # of Lightning's, e.g. fsdp without a GPU
        print(UserError(str(error)).render(), file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def fit(options: argparse.Namespace) -> None:
    """Train, then write the last weights.

    Raises:
        UserError: an option is wrong, or the weights of an earlier run are there.
    """
    config = load_config(
        options.config, train={} if options.steps is None else {"max_steps": options.steps}
    )
    output = options.output or Path(f"{config.run_dir}-lightning")
    weights = output / "weights"
    check_new(weights, "--output: its folder")  # before training, not after it
    pl.seed_everything(config.seed)
    data = SummarizationData(config)
    strategy = options.strategy
    if strategy == "fsdp" and not torch.cuda.is_available():
        raise UserError("--strategy fsdp is for GPUs only; use fsdp2 or ddp")
    if strategy == "fsdp2":
        ranks = options.devices or max(1, torch.cuda.device_count())
        strategy = ModelParallelStrategy(ranks, tensor_parallel_size=1)
    best = ModelCheckpoint(output, monitor="validation_rougeLsum", mode="max")
    trainer = pl.Trainer(
        max_steps=data.num_steps(),
        strategy=strategy,
        devices="auto" if options.devices is None else options.devices,
        precision=options.precision,
        logger=CSVLogger(output, name="lightning"),
        log_every_n_steps=config.logging.every_steps,
        callbacks=[best],
    )
    trainer.fit(SummarizationModule(config), datamodule=data)
    trainer.lightning_module.write_checkpoint(weights)


if __name__ == "__main__":
    sys.exit(main())
