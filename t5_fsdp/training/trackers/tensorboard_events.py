"""TensorBoard: event files in run_dir/tensorboard."""

from __future__ import annotations

from typing import Any

from t5_fsdp.training.trackers.tracker import Ending, TrackedRun


class TensorBoardEvents:
    """Writes event files."""

    name = "TensorBoard"

    def start(self, run: TrackedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run does steps again: what an earlier launch has written of them is not shown.
        self._writer: Any = SummaryWriter(
            str(run.run_dir / "tensorboard"), purge_step=run.first_step
        )
        return ""

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        self._writer.add_text(name, markdown, step)

    def finish(self, ending: Ending) -> None:
        self._writer.close()
