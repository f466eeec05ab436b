"""Whether the disk holds what a run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli.export_hf import check_export_at_end
from t5_fsdp.config import Config

if TYPE_CHECKING:
    from t5_fsdp.checkpoint.retention import Retention
    from t5_fsdp.cli.starting_point import StartingPoint


def retention_of(config: Config) -> Retention:
    """Which checkpoints the options keep."""
    from t5_fsdp.checkpoint.retention import Retention

    return Retention(
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        best_metric=config.evaluation.best_metric,
        keep_every=config.checkpoint.keep_every,
    )


def check_disk(model: Any, start: StartingPoint, config: Config) -> None:
    """Refuse a run before it starts that would fill its disk.

    Args:
        model: on the meta device.

    Raises:
        UserError: the disk can't hold what is to be kept, or a folder is in the way of the export.
    """
    from t5_fsdp.checkpoint.retention import check_room
    from t5_fsdp.model.build import num_parameters
    from t5_fsdp.training.optimizer import state_bytes

    check_export_at_end(config)
    every, validated = config.checkpoint.every_steps, config.evaluation.every_steps
    best_at_others = (
        start.has_validation
        and config.checkpoint.keep_best > 0
        and validated is not None
        and (every is None or validated % every != 0)
    )
    at_others = best_at_others or config.checkpoint.every_minutes is not None
    trained = num_parameters(model, trained=True)
    size = 4 * num_parameters(model) + state_bytes(config.optimizer) * trained
    check_room(
        Path(config.run_dir),
        retention_of(config).most_at_once(start.last_step, every, at_others),
        size,
        4 * num_parameters(model) if config.checkpoint.export_at_end else 0,
    )
