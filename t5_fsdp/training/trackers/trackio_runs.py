"""trackio: a run in run_dir/trackio, or where TRACKIO_DIR or TRACKIO_SPACE_ID says."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from t5_fsdp.training.trackers.tracker import DEFAULT_PROJECT, Ending, TrackedRun


class TrackioRuns:
    """Logs to a trackio run."""

    name = "trackio"

    def start(self, run: TrackedRun) -> str:
        own_folder = (run.run_dir / "trackio").resolve()
        trackio, folder = _import_trackio(own_folder)
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
        show = f"trackio show --project {shlex.quote(project)}"
        where = f"`TRACKIO_DIR={shlex.quote(str(folder))} {show}` shows it"
        is_first = folder == own_folder or "TRACKIO_DIR" in os.environ
        return where if is_first else f"{where}; trackio has one folder a process, its first run's"

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(markdown)}, step=step)

    def finish(self, ending: Ending) -> None:
        self._run.finish()


def _import_trackio(folder: Path) -> tuple[Any, Path]:
    """The package, and its folder, which it takes from the environment when it is first imported.

    Args:
        folder: where the environment says nothing; nor does it afterwards, for other processes.
    """
    is_given = "TRACKIO_DIR" in os.environ
    os.environ.setdefault("TRACKIO_DIR", str(folder))
    try:
        import trackio
        from trackio.utils import TRACKIO_DIR
    finally:
        if not is_given:
            del os.environ["TRACKIO_DIR"]
    return trackio, Path(TRACKIO_DIR)
