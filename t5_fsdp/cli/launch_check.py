"""What `make train` asks before it starts torchrun: are the data and a GPU there?

torchrun prints its own block over every failing rank; what can be said before it is said here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.paths import check_paths
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.distributed import leave
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import run_small


def main(argv: Sequence[str]) -> int:
    """Check a configuration, its data and the machine; returns the exit code."""

    def check() -> list[str]:
        check_launch(argv)
        return []

    return run_small(check)


def check_launch(argv: Sequence[str]) -> None:
    """Refuse what a training run on this machine's GPUs would fail over.

    Raises:
        UserError: lists what is wrong with the options, or what is missing of data and GPU.
    """
    layers = parse_layers(
        argv,
        command="launch_check",
        description="Check that the data and a GPU are there before training starts.",
        # Options of the train command may stand in ARGS; they change nothing here.
        extra=[
            Extra("check", "As for train; ignored.", type=bool, default=False),
            Extra("check_memory", "As for train; ignored.", type=bool, default=True),
        ],
        config_required=True,
    )
    layers.print_config = False
    problems: list[str] = []
    try:
        check_paths(resolve(layers, check_data=source_problems))
    except UserError as error:
        problems += error.problems

    import torch

    if not torch.cuda.is_available():
        problems.append(
            "PyTorch sees no GPU on this machine; `make demo` runs on the CPU, and so does "
            "`torchrun --standalone --nproc_per_node 2 scripts/train.py --config FILE.yaml`"
        )
    if problems:
        raise UserError(*problems)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
