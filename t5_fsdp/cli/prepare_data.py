"""`prepare_data`: read, clean, split and tokenize once, and say what was found."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.paths import check_paths
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, cache_dir
from t5_fsdp.console import Console
from t5_fsdp.data.parts import SPLITS, prepared_splits
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.files import write_json
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.distributed import World

_EXTRA = [
    Extra("list_dropped", "Write every row that was left out, with its file, number and reason, to "
          "<run_dir>/dropped_rows.jsonl.", type=bool, default=False),
]  # fmt: skip

# The lead baseline is scored on at most so many examples of a split.
_LEAD_EXAMPLES = 500


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    return run(functools.partial(_prepare, argv))


def _prepare(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="prepare_data",
        description="Read, clean, split and tokenize the data once; train does it by itself too.",
        extra=_EXTRA,
        config_required=True,
    )
    config = resolve(layers, check_data=source_problems)
    check_paths(config)
    world = session.enter_world()
    prepared = prepare_on_all_ranks(config, world, session.console, warn=False)
    world.on_rank_zero(lambda: _tell(config, prepared, layers.own["list_dropped"], session.console))


def _tell(config: Config, prepared: PreparedData, list_dropped: bool, console: Console) -> None:
    from t5_fsdp.data.prepared import DROPPED

    run_dir = Path(config.run_dir)
    audit = prepared.audit | {"lead_baseline": _lead_baseline(prepared, config)}
    write_json(run_dir / "data_audit.json", audit)
    say_audit(audit, console)
    if list_dropped:
        target = run_dir / "dropped_rows.jsonl"
        shutil.copyfile(prepared.directory / DROPPED, target)
        console.say(f"rows that were left out: {target}")
    console.say(f"audit: {run_dir / 'data_audit.json'}; prepared data: {prepared.directory}")


def prepare_on_all_ranks(
    config: Config, world: World, console: Console, warn: bool = True
) -> PreparedData:
    """Prepare on rank 0, and on each node that does not see its cache; then open it everywhere.

    Everybody waits without timeout. When streaming, the training split is left out.

    Args:
        config: data, model (for the tokenizer) and where the cache is.
        world, console: who prepares and who tells.
        warn: say the audit's warnings.

    Raises:
        UserError: as `prepare`.
    """
    from t5_fsdp.data.preparation import prepare
    from t5_fsdp.data.prepared import open_prepared

    probe = cache_dir(config) / world.on_rank_zero(lambda: _make_probe(cache_dir(config)))

    def work() -> str | None:
        if not world.is_main and probe.exists():
            return None  # it sees rank 0's folder
        made = prepare(
            config.data,
            config.model,
            cache_dir(config),
            console.say,
            prepared_splits(config.data),
        )
        return str(made.directory)

    own = world.on_each_node(work)
    main = world.on_rank_zero(lambda: own)
    world.on_rank_zero(lambda: probe.unlink(missing_ok=True))
    prepared = open_prepared(Path(own or main or ""))
    for text in prepared.audit["warnings"] if warn else []:
        console.warn(text)
    return prepared


def _make_probe(folder: Path) -> str:
    """The name of a file by which the other nodes see whether they share the folder."""
    name = f".probe-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):  # a cache that can't be written may still be complete
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return name


def _lead_baseline(prepared: PreparedData, config: Config) -> dict[str, Any]:
    """ROUGE of the first words of the documents, on (a part of) the held-out splits."""
    from t5_fsdp.evaluation.baselines import lead_baseline
    from t5_fsdp.evaluation.evaluate import choose_examples
    from t5_fsdp.evaluation.rouge import RougeSettings, score_pairs
    from t5_fsdp.evaluation.workers import num_cores

    figures = {}
    for name in SPLITS[1:]:
        split = prepared.split(name)
        if split is None:
            continue
        chosen = choose_examples(len(split), _LEAD_EXAMPLES, config.seed)
        texts = [split.text(int(index)) for index in chosen]
        references = [text["summary"] for text in texts]
        lead = lead_baseline([text["document"] for text in texts], references)
        settings = RougeSettings.of(config.evaluation)
        scores = score_pairs(lead, references, settings, num_cores()).summary()["scores"]
        figures[name] = {"examples": len(texts)} | {
            metric: values["fmeasure"] for metric, values in scores.items()
        }
    return figures


def say_audit(audit: dict[str, Any], console: Console) -> None:
    """The audit as tables, then what was dropped, notes and warnings."""
    console.say(_rows_table(audit["splits"]))
    console.say(_tokens_table(audit["splits"]))
    for reason, count in audit["dropped"].items():
        console.say(f"left out: {counted(count, 'row')}, {reason}")
    for pair, count in audit["duplicates_across"].items():
        console.say(f"documents of {pair}: {count:,}")
    for name, split in audit["splits"].items():
        if split["unknown_characters"]:
            characters = json.dumps(split["unknown_characters"], ensure_ascii=False)
            console.say(f"{name}, characters unknown to the tokenizer: {characters}")
    for name, lead in audit.get("lead_baseline", {}).items():
        points = " / ".join(f"{100 * lead[m]:.1f}" for m in lead if m != "examples")
        console.say(
            f"{name}, lead baseline ROUGE-1/2/L/Lsum: {points} on "
            f"{counted(lead['examples'], 'example')}"
        )
    for note in audit["notes"]:
        console.say(note)
    for warning in audit["warnings"]:
        console.warn(warning)


def _rows_table(splits: dict[str, Any]) -> str:
    lines = [f"{'split':<12}{'read':>10}{'kept':>10}{'left out':>10}{'duplicates':>12}"]
    for name, split in splits.items():
        dropped = sum(split["dropped"].values())
        lines.append(
            f"{name:<12}{split['read']:>10,}{split['kept']:>10,}{dropped:>10,}"
            f"{split['duplicates']:>12,}"
        )
    return "\n".join(lines)


def _tokens_table(splits: dict[str, Any]) -> str:
    lines = [f"{'tokens':<20}{'mean':>8}{'median':>8}{'p90':>8}{'max':>10}{'cut':>8}{'unknown':>9}"]
    for name, split in splits.items():
        for side in ("source", "target"):
            tokens = split[f"{side}_tokens"]
            unknown = f"{100 * split['unknown_tokens']:.2f}%" if side == "source" else ""
            line = (
                f"{name + ', ' + side:<20}{tokens['mean']:>8.1f}{tokens['median']:>8.0f}"
                f"{tokens['p90']:>8.0f}{tokens['max']:>10,}"
                f"{100 * split[side + '_truncated']:>7.1f}%{unknown:>9}"
            )
            lines.append(line.rstrip())
    return "\n".join(lines)
