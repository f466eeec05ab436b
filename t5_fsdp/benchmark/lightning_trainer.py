"""Lightning, where it is installed: its Trainer round transformers' model, random batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from t5_fsdp.benchmark.stock_batches import StockBatches
from t5_fsdp.benchmark.workload import Workload


def train(workload: Workload, clock_options: dict[str, int]) -> dict[str, Any]:
    """On a rank: alone, under DDP on the CPU, or sharded by FSDP on GPUs."""
    import lightning

    batches = StockBatches(workload, clock_options)
    world_size = batches.world_size
    losses: list[torch.Tensor] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.plain_model(torch.device("cpu"))

        def training_step(self, batch: Any, number_in_epoch: int) -> torch.Tensor:
            batches.tick()
            loss = self.model(**batch).loss
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=workload.learning_rate)

    trainer = lightning.Trainer(
        accelerator="gpu" if workload.device == "cuda" else "cpu",
        devices=world_size,
        strategy=_strategy(workload, world_size),
        precision="bf16-mixed" if workload.param_dtype == "bf16" else "32-true",
        max_steps=batches.clock.total_steps,
        max_epochs=-1,
        gradient_clip_val=None if workload.device == "cuda" and world_size > 1 else 1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(
        workload.examples.rows(),  # type: ignore[arg-type]
        batch_size=max(1, workload.global_batch_size // world_size),
        shuffle=True,
        collate_fn=batches,
    )
    trainer.fit(Module(), loader)
    return {"losses": {n + 1: float(loss) for n, loss in enumerate(losses)}}


def _strategy(workload: Workload, world_size: int) -> Any:
    if world_size == 1:
        return "auto"
    if workload.device == "cpu":
        return "ddp"
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.t5.modeling_t5 import T5Block

    return FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({T5Block}))
