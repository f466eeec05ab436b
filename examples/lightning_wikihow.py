"""Fine-tune under Lightning's Trainer: `python examples/lightning_wikihow.py --config FILE`.

    python examples/lightning_wikihow.py --config configs/wikihow_t5_base.yaml --strategy fsdp
    python examples/lightning_wikihow.py --config configs/demo.yaml --steps 20      # on a CPU

Lightning starts the other processes itself: one a GPU. docs/lightning.md says what works.
"""

import argparse

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from t5_fsdp import load_config
from t5_fsdp.integrations.lightning import SummarizationData, SummarizationModule


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a T5 under Lightning's Trainer.")
    parser.add_argument("--config", default="configs/wikihow_t5_base.yaml")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, fsdp or fsdp2")
    parser.add_argument("--devices", type=int, default=None, help="default: all GPUs, or one CPU")
    parser.add_argument("--precision", default="32-true", help="bf16-mixed on GPUs")
    parser.add_argument("--steps", type=int, default=None, help="fewer than the configuration's")
    options = parser.parse_args()

    config = load_config(
        options.config, train={"max_steps": options.steps} if options.steps else {}
    )
    pl.seed_everything(config.seed)
    data = SummarizationData(config)
    strategy = options.strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(options.devices, tensor_parallel_size=1)
    best = ModelCheckpoint(config.run_dir, monitor="validation_rougeLsum", mode="max")
    trainer = pl.Trainer(
        max_steps=data.num_steps(),
        strategy=strategy,
        devices=options.devices or "auto",
        precision=options.precision,
        logger=CSVLogger(config.run_dir, name="lightning"),
        log_every_n_steps=config.logging.every_steps,
        callbacks=[best],
    )
    trainer.fit(SummarizationModule(config), datamodule=data)
    trainer.lightning_module.write_checkpoint(f"{config.run_dir}/weights")


if __name__ == "__main__":
    main()
