"""Signals that ask a run to stop: SIGTERM and SIGINT (torchrun passes them on) and SIGUSR1.

Before training nothing is lost by stopping at once, so the first signal raises `Preempted`. Inside
`deferred()` it only sets a flag, which the training loop reads between steps and all ranks agree
on. A second signal ends the process at once; a second Ctrl-C in somebody else's program, a notebook
for one, is Python's KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from t5_fsdp.errors import Preempted

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class Interruption:
    """The state of being asked to stop; use as a context manager round a whole command.

    Args:
        is_guest: this is somebody else's program, which goes on after a second Ctrl-C.
    """

    def __init__(self, *, is_guest: bool = False) -> None:
        self.requested: signal.Signals | None = None
        self._is_guest = is_guest
        self._deferred = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        # Python delivers signals to the main thread only; elsewhere (a library user's thread)
        # the handlers stay whoever's they are.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None: a handler in C, as of faulthandler.register, which could not be put back.
                if signal.getsignal(number) is not None:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While this lasts a signal only sets `requested`."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if self._is_guest and number == signal.SIGINT:
                raise KeyboardInterrupt
            os._exit(128 + number)
        self.requested = signal.Signals(number)
        if not self._deferred:
            raise Preempted(f"stopped by {self.requested.name}; give the same command again")
