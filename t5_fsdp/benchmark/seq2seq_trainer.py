"""transformers' Seq2SeqTrainer, as its users set it up: random batches, or grouped by length."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from t5_fsdp.benchmark.clock import Clock
from t5_fsdp.benchmark.ranks import launch_variables
from t5_fsdp.benchmark.stock_batches import CountingCollator
from t5_fsdp.benchmark.workload import Workload
from t5_fsdp.benchmark.world import chosen_device, quiet, reset_memory
from t5_fsdp.model.flops import T5Shape


def train(workload: Workload, clock_options: dict[str, int], sampling: str) -> dict[str, Any]:
    """On a rank: `sampling` is random or group_by_length.

    One batch of the global batch's share a device, no accumulation, its own optimizer settings
    but for the learning rate.
    """
    import os

    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    quiet()
    reset_memory(workload.device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = chosen_device(workload.device, rank)
    if world_size == 1:
        # As `python script.py` without a launcher; with these it would wrap the model in DDP.
        for name in launch_variables(0, 1, 0):
            os.environ.pop(name, None)
    clock = Clock(T5Shape.of(workload.spec().config), device, **clock_options)
    collator = CountingCollator()

    class Ticking(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick(collator.counts[state.global_step])

    with tempfile.TemporaryDirectory() as scratch:
        arguments = Seq2SeqTrainingArguments(
            scratch,
            per_device_train_batch_size=max(1, workload.global_batch_size // world_size),
            max_steps=clock.total_steps,
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
            data_collator=collator,
            callbacks=[Ticking()],
        )
        trainer.train()
        losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    return {"losses": losses}
