"""Where the time of a step goes: marks on a timeline, the host's or a GPU's, and sums between them.

A host runs ahead of its GPU, so its own clock would tell how long it takes to ask for the work. An
event that is recorded between two pieces of work passes when the GPU comes there. The time between
two of them is one of the GPU's clock, and is read later, without keeping the GPU waiting.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

Mark = TypeVar("Mark")


class Timeline(Protocol[Mark]):
    """What marks are set on."""

    def mark(self) -> Mark:
        """A mark behind all the work that was asked for until now."""

    def is_past(self, mark: Mark) -> bool:
        """Whether that work is done; doesn't wait."""

    def wait(self, mark: Mark) -> None:
        """Until that work is done."""

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Between two marks that are past."""


class HostTimeline:
    """Of work that is done when its call returns.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def is_past(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class DeviceTimeline:
    """Of a GPU's current stream, by its events.

    Args:
        make_event: an event with timing that is not yet recorded.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        return mark.query()

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) / 1000.0  # it is in milliseconds


def timeline_of(device: torch.device) -> Timeline[Any]:
    """The one on which this device's work is measured."""
    return DeviceTimeline() if device.type == "cuda" else HostTimeline()


class Stopwatch(Generic[Mark]):
    """Sums of the time between marks, by name.

    What lies between two marks belongs to the name that is given at the second one, so that the
    sums of a step's names add up to the step.
    """

    def __init__(self, timeline: Timeline[Mark]) -> None:
        self._timeline = timeline
        self._open: deque[tuple[str, Mark, Mark]] = deque()
        self._sums: dict[str, float] = defaultdict(float)
        self._last: Mark | None = None

    def begin(self) -> None:
        """A mark that no name gets the time before."""
        self._settle()
        self._last = self._timeline.mark()

    def lap(self, name: str, *also: str) -> None:
        """Count the time since the last mark for `name`, and for other names as well."""
        assert self._last is not None
        began, self._last = self._last, self._timeline.mark()
        for each in (name, *also):
            self._open.append((each, began, self._last))

    @contextmanager
    def spans_of(self, modules: Sequence[nn.Module], name: str) -> Iterator[None]:
        """Meanwhile count, for `name`, the time that the modules' forward passes take."""
        begun: list[Mark] = []

        def before(*_: Any) -> None:
            begun.append(self._timeline.mark())

        def after(*_: Any) -> None:
            self._open.append((name, begun.pop(), self._timeline.mark()))

        handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> dict[str, float]:
        """The sums in seconds, which begin anew; waits for the last mark's work."""
        if self._open:
            self._timeline.wait(self._open[-1][2])
        self._settle()
        sums, self._sums = dict(self._sums), defaultdict(float)
        return sums

    def _settle(self) -> None:
        """Add up what is past, so that no more than a step's marks are kept."""
        while self._open and self._timeline.is_past(self._open[0][2]):
            name, began, ended = self._open.popleft()
            self._sums[name] += self._timeline.seconds(began, ended)
