"""trackio: a run in run_dir/trackio, or where TRACKIO_DIR or TRACKIO_SPACE_ID says."""

from __future__ import annotations

import os
from typing import Any

from t5_fsdp.training.trackers.tracker import DEFAULT_PROJECT, Ending, TrackedRun


class TrackioRuns:
    """Logs to a trackio run."""

    name = "trackio"

    def start(self, run: TrackedRun) -> str:
        # trackio takes its folder from there alone, when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str((run.run_dir / "trackio").resolve()))
        import trackio
        from trackio.utils import TRACKIO_DIR

        project = run.project or DEFAULT_PROJECT
        known = run.known_id("trackio")
        self._run: Any = trackio.init(
            project=project,
            name=known or run.name,
            config=run.config,
            resume="never" if known is None else "allow",
            embed=False,
        )
        run.remember_id("trackio", self._run.name)
        return f"`TRACKIO_DIR={TRACKIO_DIR} trackio show --project {project}` shows it"

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(markdown)}, step=step)

    def finish(self, ending: Ending) -> None:
        self._run.finish()
