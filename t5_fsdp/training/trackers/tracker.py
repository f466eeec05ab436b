"""What a tracker is told, and what it has to do."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from t5_fsdp.files import write_json

DEFAULT_PROJECT = "t5-fsdp"
Ending = Literal["finished", "preempted", "failed"]


@dataclass
class TrackedRun:
    """A run as trackers see it.

    Attributes:
        name: how it is listed.
        project: of its like (W&B and trackio: project, MLflow: experiment); None: as the tracker's
            own environment variable says, else `DEFAULT_PROJECT`.
        config: the resolved configuration, as nested dicts.
        first_step: the first that this launch logs; 1 is that of a new run.
    """

    run_dir: Path
    name: str
    project: str | None
    config: dict[str, Any]
    first_step: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_resumed(self) -> bool:
        return self.first_step > 1

    def known_id(self, tracker: str) -> str | None:
        """Under which an earlier launch of this run is known to a tracker; None for a new run."""
        return self._ids().get(tracker) if self.is_resumed else None

    def remember_id(self, tracker: str, run_id: str) -> None:
        """Keep it in the run folder for the launches to come."""
        with self._lock:
            write_json(self._file, self._ids() | {tracker: run_id})

    @property
    def _file(self) -> Path:
        return self.run_dir / "trackers.json"

    def _ids(self) -> dict[str, str]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        known = found.items() if isinstance(found, dict) else ()
        return {name: run_id for name, run_id in known if isinstance(run_id, str)}


class Tracker(Protocol):
    """One place for figures; its methods are called in turn, in a thread of its own.

    Whatever they raise ends this tracker, never the run. Attributes:
        name: for messages.
    """

    name: str

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or go on with it; where it can be looked at, in words, or nothing."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Scalars of a step by their names, e.g. train/loss."""

    def log_text(self, step: int, name: str, markdown: str) -> None:
        """A text of a step."""

    def finish(self, ending: Ending) -> None:
        """Hand over what is still kept back."""
