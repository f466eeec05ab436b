"""`prepare_data`: read, clean, split and tokenize once, and say what was found."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli.options import parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config
from t5_fsdp.console import Console
from t5_fsdp.data.sources import source_problems
from t5_fsdp.files import write_json

if TYPE_CHECKING:
    from t5_fsdp.data.tokenization import PreparedData
    from t5_fsdp.distributed import World


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    return run(functools.partial(_prepare, argv))


def _prepare(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="prepare_data",
        description="Read, clean, split and tokenize the data once; train does it by itself too.",
        config_required=True,
    )
    config = resolve(layers, check_data=source_problems)
    world = session.enter_world()
    prepared = prepare_on_all_ranks(config, world, session.console)
    if world.is_main:
        path = Path(config.run_dir) / "data_audit.json"
        write_json(path, prepared.audit)
        say_audit(prepared.audit, session.console)
        session.console.say(f"audit: {path}; prepared data: {prepared.directory}")


def cache_dir(config: Config) -> Path:
    """Where prepared data is kept: data.cache_dir, or .cache beside run_dir."""
    if config.data.cache_dir:
        return Path(config.data.cache_dir)
    return Path(config.run_dir).parent / ".cache"


def prepare_on_all_ranks(config: Config, world: World, console: Console) -> PreparedData:
    """Prepare on rank 0 while the others wait without timeout, then open it everywhere.

    A node that does not see rank 0's cache prepares its own.
    """
    from t5_fsdp.data.tokenization import open_prepared, prepare

    def work() -> str:
        return str(prepare(config.data, config.model, cache_dir(config), console.say).directory)

    directory = Path(world.on_rank_zero(work))
    if directory.is_dir():
        return open_prepared(directory)
    return prepare(config.data, config.model, cache_dir(config), console.say)


def say_audit(audit: dict[str, Any], console: Console) -> None:
    """The audit as a small table."""
    console.say(f"{'split':<12}{'kept':>9}{'source tokens':>16}{'target tokens':>16}{'unknown':>9}")
    for name, split in audit["splits"].items():
        source, target = split.get("source_tokens", {}), split.get("target_tokens", {})
        unknown = 100 * split.get("unknown_tokens", 0.0)
        console.say(
            f"{name:<12}{split['kept']:>9,}{source.get('mean', 0):>16.1f}"
            f"{target.get('mean', 0):>16.1f}{unknown:>8.2f}%"
        )
    for reason, count in audit.get("dropped", {}).items():
        console.say(f"dropped {count:,} rows: {reason}")
    for note in audit.get("notes", ()):
        console.say(note)
