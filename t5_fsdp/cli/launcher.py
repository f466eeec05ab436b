"""`torchrun` as `make demo` and `make train` start it: what our processes say stands last.

    python -m t5_fsdp.cli.launcher --standalone --nproc_per_node 2 scripts/train.py --config C

torchrun ends with lines, a block or a traceback of its own, whatever its processes have said and
done.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from t5_fsdp.errors import EXIT_DEFECT, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR
from t5_fsdp.small_command import print_error

_TOLD_BY_US = (EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_DEFECT)


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        the exit code of the process that failed first; 1 where a process was killed, with
        torchrun's words about it; 128 and the number of the signal that stopped the run.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_adds_something)
    try:
        torchrun(list(argv))
    except SignalException as stopped:  # the processes have saved, and said so
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        if failure.exitcode in _TOLD_BY_US:
            return failure.exitcode
        print_error(str(failed))
        return EXIT_DEFECT
    return EXIT_DONE


_LOGGERS = ("torch.distributed.run", "torch.distributed.elastic.multiprocessing.api")


def _adds_something(record: logging.LogRecord) -> bool:
    """False for what torchrun says of its threads, and of an end that a process has explained.

    A torchrun that words them in another way is merely not silenced.
    """
    words = str(record.msg)
    if words.startswith("failed (exitcode"):
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not arguments or arguments[0] not in _TOLD_BY_US
    return "closing signal" not in words and "OMP_NUM_THREADS" not in words


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
