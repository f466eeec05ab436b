"""Errors and exit codes that a user meets."""

from __future__ import annotations

import errno
import re

EXIT_DONE = 0
EXIT_DEFECT = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75

# What torch's allocators, CUDA and cuBLAS say; torch.OutOfMemoryError is a RuntimeError.
_OUT_OF_MEMORY = (
    "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "bad_alloc"
)  # fmt: skip


class UserError(Exception):
    """Something the user can mend: a bad option, file, row or value.

    The message is one line that names the value, the limit and the remedy. Further problems of
    the same kind follow it, one a line. The commands print it as `error: ...` and end with
    `EXIT_USER_ERROR`, without a traceback.

    Args:
        problems: one or more one-line messages; the first leads.
    """

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise ValueError("a UserError needs at least one problem")
        self.problems = tuple(" ".join(str(problem).split()) for problem in problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple:
        return type(self), self.problems

    def render(self) -> str:
        """The text for stderr: `error:` line first, further problems indented below it."""
        return "\n  ".join((f"error: {self.problems[0]}", *self.problems[1:]))


class Preempted(BaseException):
    """The run was asked to stop and has saved what it could; see `EXIT_PREEMPTED`.

    Like KeyboardInterrupt no `Exception`: it comes out of a signal handler, in the middle of
    whatever library code runs, whose `except Exception` must not swallow it.
    """


class PeerFailed(Exception):
    """Another rank failed and reports it; this rank has nothing to add and must end quietly.

    Attributes:
        exit_code: of that rank.
        problems: of its UserError, if it was one.
    """

    def __init__(self, exit_code: int, problems: tuple[str, ...] = ()) -> None:
        super().__init__(f"another rank ended with code {exit_code}")
        self.exit_code, self.problems = exit_code, problems


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a GPU or of the host."""
    if isinstance(error, OSError):  # e.g. of a process that can't be started, or a mapped file
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def tried_to_allocate(error: BaseException) -> str:
    """The size that there was no memory for, as the words ", asking for SIZE"; "" if not told."""
    found = re.search(r"tried to allocate (\d[\d.]* \w+)", str(error), re.IGNORECASE)
    return f", asking for {found.group(1)}" if found else ""
