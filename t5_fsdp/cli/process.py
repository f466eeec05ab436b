"""What is round the work of every command, and of the library: signals, failures, the end.

`run` is for a program of its own: exit codes, and one error line in all. `call` is for somebody
else's program: the result is returned, errors are raised.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from t5_fsdp.cli.caller_state import caller_state_kept
from t5_fsdp.console import Console, occupy_closed_streams
from t5_fsdp.distributed import (
    Launch,
    World,
    end_with_launcher,
    enter_world,
    read_launch,
    wants_colours,
)
from t5_fsdp.errors import (
    EXIT_DEFECT,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    PeerFailed,
    Preempted,
    UserError,
    is_out_of_memory,
    tried_to_allocate,
)
from t5_fsdp.files import as_user_error
from t5_fsdp.interruption import Interruption
from t5_fsdp.small_command import print_error

T = TypeVar("T")

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
        is_resumable: the same command goes on where a signal has stopped it.
        held: what is let go of at the very end, however that comes.
    """

    def __init__(self, launch: Launch, interruption: Interruption, console: Console) -> None:
        self.launch = launch
        self.interruption = interruption
        self.console = console
        self.world: World | None = None
        self.on_early_end: Callable[[str, str], None] = lambda state, message: None
        self.last_checkpoint: Callable[[], Path | None] = lambda: None
        self.is_resumable = True
        self.held = contextlib.ExitStack()

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

    def speaks(self, exit_code: int, error: BaseException) -> bool:
        """Whether this rank is the one to tell the user about a failure."""
        if self.world is not None:
            problems = error.problems if isinstance(error, UserError) else ()
            return self.world.claim_failure(exit_code, problems)
        # Before the ranks have met all of a node fail alike: one of each node speaks.
        return self.launch.local_rank == 0


def run(command: Callable[[Session], None], *, results_on_stdout: bool = False) -> int:
    """Run a command; its exit code. Errors are printed once, by one rank.

    Args:
        command: the work; it raises UserError, Preempted or anything else.
        results_on_stdout: keep the console's lines off standard output.
    """
    occupy_closed_streams()
    with Interruption() as interruption:
        try:
            launch = read_launch()
        except UserError as error:
            print_error(error.render())
            return EXIT_USER_ERROR
        end_with_launcher(launch)
        stream = sys.stderr if results_on_stdout else None
        # Without a standard error its lines would be taken for results.
        quiet = results_on_stdout and stream is None
        console = Console(launch.rank == 0, stream, quiet, wants_colours())
        session = Session(launch, interruption, console)
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
                _, code = _fail(session, error, print_error)
                if session.world is not None:
                    session.world.say_goodbye(_SECONDS_FOR_THE_LAST)
            return code
        finally:
            session.held.close()
            session.console.close()


def call(command: Callable[[Session], T], *, quiet: bool = False, makes_group: bool = True) -> T:
    """Do a command's work inside somebody's program; its result.

    The work finds torch as it is in a program of its own, and the caller gets back what was there:
    signal handlers, warnings, random numbers and what else `caller_state` names.

    Args:
        command: the work.
        quiet: the console's lines go to a run's log.txt alone.
        makes_group: it sets up a process group, so the caller must have none.

    Raises:
        UserError: what the user can mend; on every rank. Also while another call is at work.
        PeerFailed: another rank failed otherwise, and raises the reason.
        Preempted: a signal asked to stop.
        KeyboardInterrupt: a second Ctrl-C; what was trained since the last checkpoint is lost.
    """
    with (
        _alone(),
        Interruption(is_guest=True) as interruption,
        caller_state_kept(),
        _libraries_as_before(),
    ):
        launch = read_launch()
        if makes_group:
            _refuse_a_second_group()
        end_with_launcher(launch)
        console = Console(launch.rank == 0, quiet=quiet, colours=wants_colours())
        session = Session(launch, interruption, console)
        try:
            result = command(session)
            _disconnect(session)
            return result
        except BaseException as error:
            with interruption.deferred():
                cause, _ = _fail(session, error, lambda text: None)
                cause = _as_one(session, error, cause)
                _leave_world(session)
            if cause is error:
                raise
            raise cause from error
        finally:
            session.held.close()
            session.console.close()


# Signal handlers, the process group and torch's settings belong to the whole process.
_call_at_work = threading.Lock()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    if not _call_at_work.acquire(blocking=False):
        raise UserError(
            "another call of t5_fsdp is at work in this process; wait for its end, or make this "
            "one in a process of its own"
        )
    try:
        yield
    finally:
        _call_at_work.release()


def _as_one(session: Session, error: BaseException, cause: BaseException) -> BaseException:
    """What is raised: on every rank a UserError where one of them met it, so that all can go on."""
    if isinstance(error, UserError):
        return error
    if isinstance(cause, PeerFailed) and cause.exit_code == EXIT_USER_ERROR:
        told = _failed_peer(session) or cause  # a collective's tells no problems
        return UserError(*(told.problems or ["another rank failed, and says why"]))
    return cause


def _refuse_a_second_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        raise UserError(
            "this program has a torch.distributed process group already, and a run makes its own; "
            "call torch.distributed.destroy_process_group() before"
        )


def _leave_world(session: Session) -> None:
    """After a failure: let the others go, and leave no process group behind."""
    import torch.distributed as dist

    if session.world is None:
        return
    session.world.say_goodbye(_SECONDS_FOR_THE_LAST)
    # NCCL's might wait for a rank that is gone; that process has to end.
    if session.world.is_connected and session.world.device.type == "cpu":
        dist.destroy_process_group()


def _disconnect(session: Session) -> None:
    if session.world is not None:
        gc.collect()
        session.world.disconnect()


def _fail(
    session: Session, error: BaseException, tell: Callable[[str], None]
) -> tuple[BaseException, int]:
    """Agree with the other ranks about a failure and record it; what it comes to, and its code.

    Args:
        tell: gets the text for the user, on one rank.
    """
    # An error after a peer's is its consequence, or the same one over again; so is the SIGTERM
    # with which torchrun then ends the ranks that are left.
    peer = error if isinstance(error, PeerFailed) else _failed_peer(session)
    if peer is not None and peer.exit_code == EXIT_PREEMPTED:
        error = Preempted("stopped by a signal to another rank; give the same command again")
        return error, _preempted(session, str(error))
    if peer is not None:
        time.sleep(_SECONDS_BEHIND_THE_SPEAKER)
        return peer, peer.exit_code
    if isinstance(error, Preempted):
        return error, _preempted(session, str(error))
    if is_out_of_memory(error):
        error = _memory_advice(error, session.launch.rank)
    error = as_user_error(error)
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_DEFECT
    absent = _absent_ranks(session, error)
    if not session.speaks(code, error):
        time.sleep(_SECONDS_BEHIND_THE_SPEAKER)
        return error, code
    if isinstance(error, UserError):
        text = error.render()
    else:
        text = "".join(traceback.format_exception(error))
        text += f"last good checkpoint: {session.last_checkpoint() or 'none'}"
        if absent:
            text += f"\nno answer from rank {', '.join(map(str, absent))}: it hangs, or is gone"
    tell(text)
    _record_end(session, "failed", str(error).split("\n")[0] or type(error).__name__)
    session.console.record(text)
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        session.console.record("".join(traceback.format_exception(error.__cause__)))
    return error, code


def _absent_ranks(session: Session, error: BaseException) -> list[int]:
    """Where a collective failed: the ranks that don't say so as well."""
    if session.world is None or not isinstance(error, RuntimeError):
        return []
    return session.world.absent_ranks(_SECONDS_FOR_THE_OTHERS)


def _memory_advice(error: BaseException, rank: int) -> UserError:
    """Of memory that ran out where nothing told more of it."""
    told = UserError(
        f"out of memory on rank {rank}, outside of training steps{tried_to_allocate(error)}; if it "
        "was computing a validation or summaries, lower train.micro_batch_tokens, "
        "evaluation.batch_tokens or evaluation.num_beams; if it was loading, gathering or saving "
        "weights, shard them (parallel.engine: fsdp2) over more devices, or take a smaller model; "
        "and end what else takes memory there"
    )
    told.__cause__ = error
    return told


def _preempted(session: Session, message: str) -> int:
    number = session.interruption.requested
    if number is not None and not session.is_resumable:
        session.console.say(f"stopped by {number.name}")
        return 128 + number
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


@contextlib.contextmanager
def _libraries_as_before() -> Iterator[None]:
    """What `_quiet_libraries` silences may speak again afterwards."""
    import transformers
    from huggingface_hub.utils import logging as hub_logging

    loud = transformers.logging.get_verbosity(), hub_logging.get_verbosity()
    has_bars = transformers.utils.logging.is_progress_bar_enabled()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        transformers.logging.set_verbosity(loud[0])
        hub_logging.set_verbosity(loud[1])
        if has_bars:
            transformers.utils.logging.enable_progress_bar()


def _quiet_libraries() -> None:
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
