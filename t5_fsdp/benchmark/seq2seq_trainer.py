"""transformers' Seq2SeqTrainer, as its users set it up: random batches, or grouped by length."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from t5_fsdp.benchmark.ranks import launch_variables
from t5_fsdp.benchmark.stock_batches import StockBatches
from t5_fsdp.benchmark.workload import Workload


def train(workload: Workload, clock_options: dict[str, int], sampling: str) -> dict[str, Any]:
    """On a rank: `sampling` is random or group_by_length.

    One batch of the global batch's share a device, no accumulation, its own optimizer settings
    but for the learning rate.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    batches = StockBatches(workload, clock_options)
    world_size = batches.world_size
    if world_size == 1:
        # As `python script.py` without a launcher; with these it would wrap the model in DDP.
        for name in launch_variables(0, 1, 0):
            os.environ.pop(name, None)

    class Ticking(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            batches.tick()

    with tempfile.TemporaryDirectory() as scratch:
        arguments = Seq2SeqTrainingArguments(
            scratch,
            per_device_train_batch_size=max(1, workload.global_batch_size // world_size),
            max_steps=batches.clock.total_steps,
            learning_rate=workload.learning_rate,
            lr_scheduler_type="constant",
            bf16=workload.param_dtype == "bf16",
            use_cpu=workload.device == "cpu",
            gradient_checkpointing=workload.activation_checkpointing != "none",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            train_sampling_strategy=sampling,
            save_strategy="no",
            logging_steps=workload.log_every,
            report_to=[],
            disable_tqdm=True,
            seed=workload.seed,
        )
        trainer = Seq2SeqTrainer(
            workload.plain_model(torch.device("cpu")),
            arguments,
            train_dataset=workload.examples.rows(),  # type: ignore[arg-type]
            data_collator=batches,
            callbacks=[Ticking()],
        )
        trainer.train()
        losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    return {"losses": losses}
