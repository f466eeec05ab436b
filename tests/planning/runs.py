"""Planned runs for tests."""

from __future__ import annotations

from typing import Any

import torch

from t5_fsdp.cli.plan import plan_run
from t5_fsdp.config import Config
from t5_fsdp.distributed import Launch, World
from t5_fsdp.planning.fit import with_options
from t5_fsdp.planning.run import PlannedRun


def planned(
    name: str | None = "google-t5/t5-3b",
    *,
    world_size: int = 8,
    devices_per_node: int = 8,
    device: str = "cuda",
    **options: Any,
) -> PlannedRun:
    """A run with default options but for `options`, whose names have __ for their dots."""
    config = Config()
    config.model.name = name
    for option, value in options.items():
        section, _, field = option.partition("__")
        setattr(getattr(config, section), field, value)
    launch = Launch(world_size=world_size, local_world_size=min(world_size, devices_per_node))
    return plan_run(config, World(launch, torch.distributed.HashStore(), torch.device(device)))


def changed(run: PlannedRun, **options: Any) -> PlannedRun:
    """The run with other options, named likewise."""
    return with_options(run, {name.replace("__", "."): value for name, value in options.items()})
