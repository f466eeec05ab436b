"""`export_hf`: a sharded checkpoint as a Hugging Face folder, or its adapter as a PEFT folder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.errors import UserError

_EXTRA = [
    Extra("checkpoint", "Checkpoint or run folder (its best).", required=True, metavar="DIR"),
    Extra("output", "New folder to write.", required=True, metavar="DIR"),
    Extra("adapter_only", "Write a PEFT folder with the adapter instead of a whole model with the "
          "adapter merged into it.", type=bool, default=False),
]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    return run(functools.partial(_export, argv))


def _export(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="export_hf",
        description="Write a checkpoint as a folder that transformers loads; one process, no GPU.",
        extra=_EXTRA,
    )
    if session.launch.world_size > 1:
        raise UserError("export_hf runs as one process; start it without torchrun")
    folder = Path(layers.own["checkpoint"])
    newest = run_folder.find_checkpoint(folder, "--checkpoint")
    config = resolve(layers, run_folder.read_config_dict(newest))
    session.enter_world()
    from t5_fsdp.checkpoint.export import export_adapter, export_to_hf

    chosen = run_folder.find_checkpoint(folder, "--checkpoint", config.evaluation.best_metric)
    output = Path(layers.own["output"])
    if layers.own["adapter_only"] and config.model.name is None:
        session.console.warn(
            "the adapter's base has random weights of this run and no name: the exported adapter "
            "fits no model elsewhere; export without --adapter_only"
        )
    if layers.own["adapter_only"]:
        export_adapter(chosen, output, config.model)
    else:
        export_to_hf(chosen, output, config.evaluation, config.data)
    session.console.say(f"exported {chosen} to {output}")
