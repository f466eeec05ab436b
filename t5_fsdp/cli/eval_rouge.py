"""`eval_rouge`: summaries of a whole split by a checkpoint, and their ROUGE."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5_fsdp.cli.loading import LoadedModel, find_model, load_model
from t5_fsdp.cli.options import Extra, Layers, parse_layers, resolve
from t5_fsdp.cli.prepare_data import prepare_on_all_ranks
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, to_dict
from t5_fsdp.data.sources import source_problems
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    from t5_fsdp.data.prepared import PreparedData

_EXTRA = [
    Extra("checkpoint", "Checkpoint, run folder (its best), Hugging Face folder or Hub id.",
          type=str | None, metavar="DIR"),
    Extra("split", "Which split to summarize and score.",
          type=Literal["train", "validation", "test"], default="test"),
    Extra("predictions", "Only score this file: reference and prediction a line.",
          type=str | None, metavar="FILE.jsonl"),
    Extra("output_dir", "Where rouge.json and predictions.jsonl go; null: "
          "<run_dir>/evaluation/step-N/<split>.", type=str | None, metavar="DIR"),
]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    return run(functools.partial(_evaluate, argv))


def _evaluate(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="eval_rouge",
        description="Summarize a split with a checkpoint and score it, or score predictions.",
        extra=_EXTRA,
    )
    own = layers.own
    if own["checkpoint"] is None and own["predictions"] is None:
        raise UserError("eval_rouge needs --checkpoint DIR, or --predictions FILE.jsonl")
    if own["checkpoint"] is not None and own["predictions"] is not None:
        raise UserError("--checkpoint and --predictions exclude each other; give one of them")
    if own["predictions"] is not None:
        resolve(layers)  # nothing of it is used, but a misspelt option is still said
        _score_file(Path(own["predictions"]), own["output_dir"], session)
    else:
        _evaluate_checkpoint(layers, session)


def _score_file(path: Path, output_dir: str | None, session: Session) -> None:
    from t5_fsdp.evaluation.baselines import lead_baseline
    from t5_fsdp.evaluation.predictions import read_predictions, write_rouge
    from t5_fsdp.evaluation.rouge import score_pairs
    from t5_fsdp.evaluation.tables import format_table
    from t5_fsdp.evaluation.workers import num_cores

    if session.launch.rank != 0:
        return
    rows = read_predictions(path)
    references = [row["reference"] for row in rows]
    predictions = [row["prediction"] for row in rows]
    summary = score_pairs(predictions, references, num_cores(), session.console).summary()
    systems = {"predictions": summary}
    if all(isinstance(row.get("document"), str) for row in rows):
        lead = lead_baseline([row["document"] for row in rows], references)
        systems["lead baseline"] = score_pairs(lead, references, num_cores()).summary()
    session.console.say(f"{len(rows)} examples of {path}")
    session.console.say(format_table(systems))
    if output_dir is not None:
        write_rouge(Path(output_dir) / "rouge.json", summary)
        session.console.say(f"written: {Path(output_dir) / 'rouge.json'}")


def _evaluate_checkpoint(layers: Layers, session: Session) -> None:
    from t5_fsdp.data.tokenization import newline_id
    from t5_fsdp.evaluation.baselines import lead_baseline
    from t5_fsdp.evaluation.evaluate import score_split, summarize_split, write_evaluation
    from t5_fsdp.evaluation.generation import GenerationSettings
    from t5_fsdp.evaluation.rouge import score_pairs
    from t5_fsdp.evaluation.tables import format_table
    from t5_fsdp.evaluation.workers import num_cores

    found = find_model(layers, "--checkpoint", layers.own["checkpoint"])
    config = resolve(layers, found.base)
    world = session.enter_world()
    found.choose(config.evaluation.best_metric)
    loaded = load_model(found, config, world.device)
    prepared = _prepared(config, found.stored_data, loaded, session)
    name = layers.own["split"]
    split = prepared.split(name)
    if split is None:
        raise UserError(f"the data has no {name} split; give --split or data.{name}_files")
    folder = Path(layers.own["output_dir"] or loaded.run_dir(config) / "evaluation" / loaded.label
                  / name)  # fmt: skip
    console = session.console
    console.say(f"evaluating {loaded.source} on {len(split):,} {name} examples")
    if (folder / "rouge.json").exists():
        console.say(f"{folder} holds an earlier evaluation; it will be replaced")
    world.connect(config.train.collective_timeout_seconds)
    indices = _all_of(split)
    settings = GenerationSettings.of(config.evaluation)
    predictions = summarize_split(
        loaded.model,
        loaded.tokenizer,
        split,
        indices,
        settings,
        world,
        console,
        newline_id(loaded.tokenizer, config.data.keep_newlines),
    )

    def score() -> None:
        assert predictions is not None
        scores, rows = score_split(split, indices, predictions)
        summary = write_evaluation(folder, scores, rows, settings.to_json())
        references = [row["reference"] for row in rows]
        lead = lead_baseline([row["document"] for row in rows], references)
        systems = {
            "model": summary,
            "lead baseline": score_pairs(lead, references, num_cores()).summary(),
        }
        console.say(format_table(systems))
        console.say(f"written: {folder}")

    world.on_rank_zero(score)


def _all_of(split: Any) -> Any:
    import numpy as np

    return np.arange(len(split))


def _prepared(
    config: Config, stored: dict[str, Any] | None, loaded: LoadedModel, session: Session
) -> PreparedData:
    """The run's own prepared data where its options and files are the same, else new.

    Raises:
        UserError: neither the prepared data nor the files it came from are there.
    """
    assert session.world is not None
    own = None
    if loaded.prepared is not None and stored == to_dict(config.data):
        own = _run_data(config, loaded.prepared, session)
    if own is not None:
        return own
    if problems := source_problems(config.data):
        raise UserError(*problems)
    config.model.tokenizer = str(loaded.tokenizer_source)
    return prepare_on_all_ranks(config, session.world, session.console)


def _run_data(config: Config, folder: Path, session: Session) -> PreparedData | None:
    """The data as the run prepared it, or None where it is gone or its files have changed."""
    from t5_fsdp.data.prepared import find_prepared
    from t5_fsdp.data.sources import prepared_splits, source_fingerprint

    assert session.world is not None

    def decide() -> bool:
        prepared = find_prepared(folder)
        if prepared is None:
            return False
        if source_problems(config.data):
            session.console.warn(f"the data files are gone; using {folder}, made from them")
            return True
        now = source_fingerprint(config.data, prepared_splits(config.data))
        return now == prepared.source_fingerprint

    # Hashing large files is work for one rank.
    return find_prepared(folder) if session.world.on_rank_zero(decide) else None
