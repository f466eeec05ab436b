"""`torchrun` as `make demo` and `make train` start it: what our processes say stands last.

    python -m t5_fsdp.cli.launcher --standalone --nproc_per_node 2 scripts/train.py --config C

torchrun ends with a block or a traceback of its own, whatever its processes have said and done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from t5_fsdp.errors import EXIT_DEFECT, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR

_TOLD_BY_US = (EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_DEFECT)


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        the exit code of the process that failed first; 1 where a process was killed, with
        torchrun's words about it; 128 and the number of the signal that stopped the run.
    """
    try:
        torchrun(list(argv))
    except SignalException as stopped:  # the processes have saved, and said so
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        if failure.exitcode in _TOLD_BY_US:
            return failure.exitcode
        print(failed, file=sys.stderr)
        return EXIT_DEFECT
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
