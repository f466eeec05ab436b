"""What every command does round its work: signals, exit codes, one error line in all."""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from t5_fsdp.console import Console
from t5_fsdp.distributed import Launch, World, end_with_launcher, enter_world, read_launch
from t5_fsdp.errors import (
    EXIT_DEFECT,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    PeerFailed,
    Preempted,
    UserError,
)
from t5_fsdp.files import FILE_ERRORS
from t5_fsdp.interruption import Interruption

# torchrun ends all ranks when the first one fails; a rank with nothing to say leaves later than
# the one that is printing why.
_SECONDS_BEHIND_THE_SPEAKER = 2.0
_SECONDS_FOR_THE_LAST = 10.0
# Collectives of different ranks time out one after the other.
_SECONDS_FOR_THE_OTHERS = 5.0


class Session:
    """One command on one rank, from its start to its exit code.

    Attributes:
        console: rank 0's lines.
        on_early_end: called on one rank with "failed" or "preempted" and a message, when the
            command ends before its work is done, e.g. to write status.json.
        last_checkpoint: what to go back to after a defect.
    """

    def __init__(self, launch: Launch, interruption: Interruption, console: Console) -> None:
        self.launch = launch
        self.interruption = interruption
        self.console = console
        self.world: World | None = None
        self.on_early_end: Callable[[str, str], None] = lambda state, message: None
        self.last_checkpoint: Callable[[], Path | None] = lambda: None

    def enter_world(self) -> World:
        """Import torch, find the other ranks. Only from here on a failure can be agreed on."""
        self.world = enter_world(self.launch)
        _quiet_libraries()
        return self.world

    def connect(self, timeout_seconds: float) -> None:
        """Set up the process group of the world.

        Raises:
            Preempted: a rank was asked to stop before all had come.
        """
        assert self.world is not None
        interruption = self.interruption
        with interruption.deferred():
            stops = self.world.meet(lambda: interruption.requested is not None)
            if not stops:
                self.world.connect(timeout_seconds)
        if stops or interruption.requested is not None:
            raise Preempted("stopped by a signal; give the same command again")

    def speaks(self, exit_code: int) -> bool:
        """Whether this rank is the one to tell the user about a failure."""
        if self.world is not None:
            return self.world.claim_failure(exit_code)
        # Before the ranks have met all of a node fail alike: one of each node speaks.
        return self.launch.local_rank == 0


def run(command: Callable[[Session], None], *, results_on_stdout: bool = False) -> int:
    """Run a command; its exit code. Errors are printed once, by one rank.

    Args:
        command: the work; it raises UserError, Preempted or anything else.
        results_on_stdout: keep the console's lines off standard output.
    """
    with Interruption() as interruption:
        try:
            launch = read_launch()
        except UserError as error:
            print(error.render(), file=sys.stderr, flush=True)
            return EXIT_USER_ERROR
        end_with_launcher(launch)
        stream = sys.stderr if results_on_stdout else None
        session = Session(launch, interruption, Console(launch.rank == 0, stream))
        try:
            command(session)
            _disconnect(session)
            return EXIT_DONE
        except SystemExit:  # --help and --print_config
            raise
        except BrokenPipeError:  # `| head` has seen enough
            return EXIT_DONE
        except BaseException as error:
            # torchrun sends SIGTERM to the ranks that are left when the first one ends.
            with interruption.deferred():
                code = _fail(session, error)
                if session.world is not None:
                    session.world.say_goodbye(_SECONDS_FOR_THE_LAST)
            return code
        finally:
            session.console.close()


def _disconnect(session: Session) -> None:
    if session.world is not None:
        gc.collect()
        session.world.disconnect()


def _fail(session: Session, error: BaseException) -> int:
    # An error after a peer's is its consequence, or the same one over again; so is the SIGTERM
    # with which torchrun then ends the ranks that are left.
    peer = error if isinstance(error, PeerFailed) else _failed_peer(session)
    if peer is not None and peer.exit_code == EXIT_PREEMPTED:
        return _preempted(
            session, "stopped by a signal to another rank; give the same command again"
        )
    if peer is not None:
        time.sleep(_SECONDS_BEHIND_THE_SPEAKER)
        return peer.exit_code
    if isinstance(error, Preempted):
        return _preempted(session, str(error))
    error = _as_user_error(error)
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_DEFECT
    absent = _absent_ranks(session, error)
    if not session.speaks(code):
        time.sleep(_SECONDS_BEHIND_THE_SPEAKER)
        return code
    if isinstance(error, UserError):
        text = error.render()
    else:
        text = "".join(traceback.format_exception(error))
        text += f"last good checkpoint: {session.last_checkpoint() or 'none'}"
        if absent:
            text += f"\nno answer from rank {', '.join(map(str, absent))}: it hangs, or is gone"
    print(text, file=sys.stderr, flush=True)
    _record_end(session, "failed", str(error).split("\n")[0])
    session.console.record(text)
    return code


def _absent_ranks(session: Session, error: BaseException) -> list[int]:
    """Where a collective failed: the ranks that don't say so as well."""
    if session.world is None or not isinstance(error, RuntimeError):
        return []
    return session.world.absent_ranks(_SECONDS_FOR_THE_OTHERS)


def _as_user_error(error: BaseException) -> BaseException:
    if isinstance(error, shutil.Error):  # of copying a folder: a list of (from, to, why)
        return UserError(f"a folder can't be copied ({str(error)[:300]}); make room for it")
    if not isinstance(error, OSError) or error.errno not in FILE_ERRORS | {errno.EMFILE}:
        return error
    what = error.filename or "a file"
    name = str(what) if len(str(what)) <= 200 else f"{str(what)[:200]}..."
    return UserError(
        f"{name} can't be read or written ({error.strerror}); make room, change what is in the "
        "way, or give another path"
    )


def _preempted(session: Session, message: str) -> int:
    if session.world is not None:
        # The signal may have come to this rank alone, and the others wait for it.
        session.world.claim_failure(EXIT_PREEMPTED)
    session.console.say(message)
    if session.launch.rank == 0:
        _record_end(session, "preempted", message)
    return EXIT_PREEMPTED


def _record_end(session: Session, state: str, message: str) -> None:
    # The disk may be what failed; the user has been told by now.
    with contextlib.suppress(OSError):
        session.on_early_end(state, message)


def _failed_peer(session: Session) -> PeerFailed | None:
    if session.world is None:
        return None
    try:
        session.world.raise_if_peer_failed()
    except PeerFailed as peer:
        return peer
    except Exception:  # the store is gone with its host
        return None
    return None


def _quiet_libraries() -> None:
    import warnings

    import transformers
    from huggingface_hub.utils import logging as hub_logging

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    # Reading a checkpoint in one process is what evaluation and export are meant to do.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
    # Of FSDP1 on one rank or unsharded, which is what was asked for; DDP's new name for an option
    # does not exist in the oldest torch that is supported.
    for message in (
        "FSDP is switching to use `NO_SHARD`",
        "When using ``NO_SHARD`` for ``ShardingStrategy``",
        ".*broadcast_buffers",
    ):
        warnings.filterwarnings("ignore", message=message)
    # T5Block returns a view; nobody writes into it, and the gradients are checked by a test.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
