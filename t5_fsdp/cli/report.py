"""`report`: one HTML page about a run, or about several beside each other."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.files import write_atomically
from t5_fsdp.report.html import GENERATOR, render
from t5_fsdp.report.runs import is_run, read_runs
from t5_fsdp.small_command import OneLineParser, run_small

REPORT = "report.html"
COMPARISON = "comparison.html"
_HEAD_BYTES = 1000  # of a page, in which its generator stands


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code (0 done, 2 user error)."""
    return run_small(functools.partial(_report, argv))


def _report(argv: Sequence[str]) -> str:
    options = _parser().parse_args(argv)
    if "" in options.run:
        raise UserError("--run is empty; give the folder of a run (its run_dir)")
    folders = [Path(folder) for folder in options.run]
    written = write_report(folders, None if options.output is None else Path(options.output))
    return f"report: {written}"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="report",
        description="Write one HTML page about a run (figures, curves, configuration, data, "
        "checkpoints, summaries), or about several runs beside each other. It loads nothing from "
        "anywhere. docs/report.md says how to read it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run", metavar="DIR", nargs="+", action="extend", required=True,
        help="folders of runs (their run_dir)",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE",
        help=f"the page; an older report there is replaced, another file is not. By default "
        f"{REPORT} in the run's folder, of several runs {COMPARISON} in the first one's",
    )  # fmt: skip
    return parser


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page about the runs in these folders; where it is.

    Args:
        output: None: report.html in the run's folder, of several comparison.html in the first's.

    Raises:
        UserError: a folder holds no run, a file in it can't be read, or the page can't be written.
    """
    runs = read_runs(folders)
    if output is None:
        output = runs[0].folder / (REPORT if len(runs) == 1 else COMPARISON)
    _check_output(output)
    page = render(runs)
    try:
        # A link is written through, as by a shell.
        write_atomically(Path(os.path.realpath(output)), [page])
    except OSError as error:
        raise UserError(
            f"{output} can't be written ({error.strerror or error}); give another --output"
        ) from error
    return output


def _check_output(path: Path) -> None:
    """Refuse to replace what is no report."""
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file, e.g. {path / REPORT}")
    if os.path.islink(os.path.realpath(path)):
        raise UserError(f"--output {path} is a link that leads to itself; give another one")
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"--output {path} is no regular file; give another one")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); give another --output") from None
    if f'content="{GENERATOR}"'.encode() not in head:
        raise UserError(f"{path} exists and is no report; move it away, or give another --output")


def refresh_report(run_dir: Path, console: Console) -> None:
    """Write report.html of a run that has ended or was evaluated, whatever state it is in.

    A page that can't be written is only warned of: the run has done its work. Where there is no
    run, nothing is written.
    """
    try:
        if is_run(run_dir):
            console.say(f"report: {write_report([run_dir])}")
    except UserError as error:
        console.warn(f"no {REPORT} is written: {error.problems[0]}")
    except Exception as error:  # a run must not fail by it, whatever it is
        console.warn(f"no {REPORT} is written ({type(error).__name__}: {error})")
