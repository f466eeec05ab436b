"""`python -m t5_fsdp.checkpoint DIR`: the checkpoints of a run's folder, as a table."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from t5_fsdp.checkpoint.listing import Listed, Listing, format_size, list_checkpoints
from t5_fsdp.distributed import leave
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import OneLineParser, run_small

_HEADER = ("step", "age", "size", "status", "loss", "rougeLsum", "")


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code (0 done, 2 user error)."""
    return run_small(functools.partial(_list, argv))


def _list(argv: Sequence[str]) -> str:
    options = _parser().parse_args(argv)
    try:
        listing = list_checkpoints(Path(options.folder), options.verify)
    except OSError as error:
        what = error.filename or options.folder
        raise UserError(f"{what} can't be read ({error.strerror})") from error
    return json.dumps(listing.to_json(), indent=1) if options.json else _table(listing)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m t5_fsdp.checkpoint",
        description="List the checkpoints of a run: step, age, size, whether each is whole, "
        "validation scores, the best, and the one that checkpoint.resume: auto goes on from.",
    )
    parser.add_argument("folder", metavar="DIR", help="a run's folder, or one checkpoint")
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare its checksum, not only "
        "its size",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _table(listing: Listing) -> str:
    rows = [_HEADER, *(_row(listed) for listed in listing.checkpoints)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(
            # Words to the left, numbers to the right.
            cell.ljust(width) if name in ("status", "") else cell.rjust(width)
            for name, cell, width in zip(_HEADER, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    total = sum(listed.num_bytes for listed in listing.checkpoints)
    checked = "checksums" if listing.verified else "sizes; --verify reads the checksums"
    lines.append(f"{format_size(total)} in all; checked by {checked}")
    if any(listed.is_best for listed in listing.checkpoints):
        lines.append(f"best: by {listing.best_metric}")
    if any(listed.is_next for listed in listing.checkpoints):
        lines.append("next: checkpoint.resume: auto goes on from it")
    lines += [listed.problem for listed in listing.checkpoints if listed.problem]
    return "\n".join(lines)


def _row(listed: Listed) -> tuple[str, ...]:
    loss, rouge = listed.scores.get("loss"), listed.scores.get("rougeLsum")
    marks = [name for name, holds in (("best", listed.is_best), ("next", listed.is_next)) if holds]
    return (
        "" if listed.step is None else str(listed.step),
        _age(listed.age_seconds),
        format_size(listed.num_bytes),
        listed.status,
        "" if loss is None else f"{loss:.3f}",
        "" if rouge is None else f"{100 * rouge:.1f}",
        ", ".join(marks),
    )


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
