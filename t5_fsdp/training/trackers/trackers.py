"""The trackers of a run, each in a thread of its own: none of them can stop or slow down training.

A server that does not answer would otherwise hold up rank 0 for minutes, and with it, in their
collectives, all the others.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from t5_fsdp.config import LoggingConfig
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.packages import is_installed
from t5_fsdp.training.trackers.mlflow_runs import MlflowRuns
from t5_fsdp.training.trackers.tensorboard_events import TensorBoardEvents
from t5_fsdp.training.trackers.tracker import Ending, TrackedRun, Tracker
from t5_fsdp.training.trackers.trackio_runs import TrackioRuns
from t5_fsdp.training.trackers.weights_and_biases import WeightsAndBiases

# By their options in the logging section, which are the names of their packages too.
_TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardEvents,
    "wandb": WeightsAndBiases,
    "mlflow": MlflowRuns,
    "trackio": TrackioRuns,
}
_MOST_WAITING = 10_000  # rows and texts for a tracker that is behind; more are dropped
_SECONDS_AT_THE_END = 60.0
# torchrun kills what has not ended 30 s after its signal.
_SECONDS_WHEN_STOPPED = 8.0


def chosen_trackers(options: LoggingConfig) -> list[str]:
    """Names of the options that are true, which are those of the packages too."""
    return [name for name in _TRACKERS if getattr(options, name)]


def check_trackers(options: LoggingConfig) -> None:
    """Raises UserError, with a line each, for trackers whose packages are not installed."""
    absent = [
        f"logging.{name} is true, but the package {name} is not installed here; "
        f"`pip install {name}`, or set logging.{name}: false"
        for name in chosen_trackers(options)
        if not is_installed(name)
    ]
    if absent:
        raise UserError(*absent)


def open_trackers(options: LoggingConfig, run: TrackedRun, console: Console) -> Trackers:
    """Start those that the options name."""
    return Trackers([_TRACKERS[name]() for name in chosen_trackers(options)], run, console)


class Trackers:
    """Any number of trackers as one.

    Args:
        console: told where they can be looked at, and once of each that has failed.
    """

    def __init__(
        self, trackers: Sequence[Tracker], run: TrackedRun | None, console: Console
    ) -> None:
        self._console = console
        self._senders = [_Sender(tracker, run, console) for tracker in trackers if run]

    @classmethod
    def none(cls, console: Console) -> Trackers:
        """For ranks that log nothing."""
        return cls([], None, console)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """The numbers among `figures`, by their names."""
        numbers = {
            name: value
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for sender in self._senders:
            sender.put("log", step, numbers)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        """A text, for those that show texts."""
        for sender in self._senders:
            sender.put("log_text", step, name, markdown)

    def finish(self, ending: Ending) -> None:
        """Wait, for a while, until they have everything; further calls do nothing."""
        limit = _SECONDS_AT_THE_END if ending == "finished" else _SECONDS_WHEN_STOPPED
        senders, self._senders = self._senders, []
        deadline = time.monotonic() + limit
        for sender in senders:
            sender.end(ending)
        for sender in senders:
            sender.join(max(0.0, deadline - time.monotonic()))
            if sender.is_alive():
                self._console.warn(
                    f"{sender.tracker.name} has not taken all within {limit:.0f} s; what it lacks "
                    "is in metrics.jsonl"
                )


class _Sender(threading.Thread):
    """Hands things over to one tracker, until it fails or finishes."""

    def __init__(self, tracker: Tracker, run: TrackedRun, console: Console) -> None:
        super().__init__(name=f"tracker-{tracker.name}", daemon=True)
        self.tracker = tracker
        self._run, self._console = run, console
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(_MOST_WAITING)
        self._has_failed = False
        self._num_dropped = 0
        self.start()

    def put(self, method: str, *args: Any) -> None:
        if self._has_failed:
            return
        try:
            self._waiting.put_nowait((method, args))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self._console.warn(
                    f"{self.tracker.name} is {_MOST_WAITING:,} rows behind and gets no more until "
                    "it has caught up; metrics.jsonl has them"
                )

    def end(self, ending: Ending) -> None:
        if self._has_failed:
            return
        while True:
            try:
                return self._waiting.put_nowait(("finish", (ending,)))
            except queue.Full:  # it is behind anyway: the ending is worth more than the oldest row
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()

    def run(self) -> None:
        try:
            where = self.tracker.start(self._run)
            if where:
                self._console.say(f"{self.tracker.name}: {where}")
            method = ""
            while method != "finish":
                method, args = self._waiting.get()
                getattr(self.tracker, method)(*args)
        except BaseException as error:  # packages call sys.exit as well
            self._has_failed = True
            kind = type(error).__name__
            lines = str(error).strip().splitlines() or [kind]
            why = lines[0] if isinstance(error, Exception) else f"{kind}: {lines[0]}"
            self._console.warn(
                f"{self.tracker.name} has failed ({why[:300]}) and gets no more of this "
                "launch; training goes on, and metrics.jsonl has it all"
            )
