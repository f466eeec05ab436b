"""Processes that are started without running the program's script again.

multiprocessing's "spawn" imports the main module anew in each child, for what may be unpickled from
there. A script without `if __name__ == "__main__"` would do all its work over again in each of
them, a training included, and one that is read from standard input can't be imported at all.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def without_main(travels: Any) -> Iterator[None]:
    """Processes that this one spawns meanwhile leave the main module alone, if they can.

    Args:
        travels: what they will unpickle; if it is defined in the main module, they import that.
    """
    if b"__main__" in bytes(ForkingPickler.dumps(travels)):
        yield
        return
    # multiprocessing.spawn.get_preparation_data tells the child what these two say; there is no
    # option for it.
    main = vars(sys.modules["__main__"])
    with _one_at_a_time:
        hidden: dict[str, Any] = {
            name: main.pop(name) for name in ("__file__", "__spec__") if name in main
        }
        main["__spec__"] = None
        try:
            yield
        finally:
            main.pop("__spec__", None)
            main.update(hidden)
