"""`eval_rouge`: summaries of a whole split by a checkpoint, their ROUGE, and a comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5_fsdp.cli.baseline import (
    Baseline,
    add_predictions,
    compare_with,
    find_baseline,
    generation_settings,
    prediction_settings,
    summarize_by_model,
)
from t5_fsdp.cli.loading import FoundModel, LoadedModel, find_model, load_model
from t5_fsdp.cli.options import Extra, Layers, parse_layers, resolve
from t5_fsdp.cli.prepare_data import prepare_on_all_ranks
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, DataConfig, to_dict
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import numpy as np

    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.evaluation.own_metric import Metric
    from t5_fsdp.evaluation.scoring import Evaluation

_EXTRA = [
    Extra("checkpoint", "Checkpoint, run folder (its best), Hugging Face folder or Hub id.",
          type=str | None, metavar="DIR"),
    Extra("split", "Which split to summarize and score.",
          type=Literal["train", "validation", "test"], default="test"),
    Extra("predictions", "Only score this file: reference and prediction a line.",
          type=str | None, metavar="FILE.jsonl"),
    Extra("baseline", "Compare with it on the same examples: a predictions file, a checkpoint or "
          "what else --checkpoint takes, lead, lead-N, lead_words, random or oracle "
          "(docs/evaluation.md).", type=str | None, metavar="NAME"),
    Extra("output_dir", "Where rouge.json, predictions.jsonl and comparison.json go; null: "
          "<run_dir>/evaluation/step-N/<split>, with --predictions nowhere.",
          type=str | None, metavar="DIR"),
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
        _score_file(layers, session)
    else:
        evaluate_checkpoint(layers, session)


def _score_file(layers: Layers, session: Session) -> None:
    from t5_fsdp.evaluation.predictions import read_predictions
    from t5_fsdp.evaluation.rouge import RougeSettings
    from t5_fsdp.evaluation.scoring import evaluate_rows
    from t5_fsdp.evaluation.workers import num_cores

    path, output_dir = layers.own["predictions"], layers.own["output_dir"]
    folder = None if output_dir is None else Path(output_dir)
    config = resolve(layers)
    rouge = RougeSettings.of(config.evaluation)
    baseline = find_baseline(layers, config)
    needs_world = baseline is not None and baseline.found is not None
    if session.launch.rank != 0 and not needs_world:
        return
    rows = read_predictions(path)
    if baseline is not None:
        add_predictions(baseline, rows, path)
    if baseline is not None and needs_world:
        session.enter_world()
        session.connect(config.train.collective_timeout_seconds)
        summarize_by_model(baseline, rows, rouge, layers.own["split"], folder, session)

    def score() -> None:
        evaluation = evaluate_rows(rows, rouge, processes=num_cores(), console=session.console)
        session.console.say(f"{counted(len(rows), 'example')} of {path}")
        if folder is not None:
            evaluation.write(folder, {})
        _tell(evaluation, "predictions", baseline, folder, session)

    if session.world is None:
        score()
    else:
        session.world.on_rank_zero(score)


@dataclass
class _Examples:
    """What is summarized and scored.

    Attributes:
        rows: id, document and reference of each.
        sources: token ids of each document, with prefix and end mark.
        what: one of them in words, e.g. "test example".
        dropped: rows that can't be evaluated, by reason.
    """

    rows: list[dict[str, Any]]
    sources: list[np.ndarray]
    what: str
    dropped: dict[str, int] = field(default_factory=dict)


def evaluate_checkpoint(
    layers: Layers,
    session: Session,
    given: Callable[[DataConfig], list[dict[str, Any]]] | None = None,
    metric: Metric | None = None,
) -> tuple[Path, str]:
    """Summarize and score; what the command and the library do. A collective.

    Args:
        layers: with the command's own options.
        session: of this rank.
        given: document and reference of each example, and maybe an id, instead of a split, by
            the names of their columns; only rank 0's count.
        metric: one of the caller's own; tried on a few references before summaries are made.

    Returns:
        the folder of rouge.json and predictions.jsonl, and what was evaluated.

    Raises:
        UserError: what the user can mend.
        Preempted: a signal asked to stop.
    """
    found = find_model(layers, "checkpoint", layers.own["checkpoint"])
    if given is None:
        _check_names_data(found, layers)
    config = resolve(layers, found.base)
    rows = None if given is None else given(config.data)
    baseline = find_baseline(layers, config)

    from t5_fsdp.cli.report import refresh_report
    from t5_fsdp.data.tokenization import newline_id
    from t5_fsdp.evaluation.evaluate import score_summaries, summarize
    from t5_fsdp.evaluation.own_metric import TRIED_EXAMPLES, try_metric
    from t5_fsdp.evaluation.rouge import RougeSettings
    from t5_fsdp.evaluation.unfinished import Unfinished

    world = session.enter_world()
    found.choose(config.evaluation.best_metric, session)
    session.connect(config.train.collective_timeout_seconds)
    loaded = load_model(found, config, world, session.console)
    tokenizer, source = loaded.tokenizer, loaded.source
    if rows is None:
        name = layers.own["split"]
        examples = _examples_of_split(name, config, found.stored_data, loaded, session)
    else:
        name = "given"
        examples = _examples_given(world.broadcast_object(rows), config, loaded)
    folder = Path(layers.own["output_dir"] or found.evaluation_folder(config, name))
    console = session.console
    console.say(f"evaluating {source} on {counted(len(examples.rows), examples.what)}")
    if examples.dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in examples.dropped.items())
        console.say(f"rows of the split that can't be evaluated and are left out: {reasons}")
    if baseline is not None:
        # Before the summaries, which may take hours: other examples are refused at once.
        waiting = baseline
        world.on_rank_zero(lambda: add_predictions(waiting, examples.rows, source))
    if metric is not None:
        references = [row["reference"] for row in examples.rows[:TRIED_EXAMPLES]]
        world.on_rank_zero(lambda: try_metric(metric, references))
    if (folder / "rouge.json").exists():
        console.say(f"{folder} holds an earlier evaluation; it will be replaced")
    rouge = RougeSettings.of(config.evaluation)
    settings = world.on_rank_zero(lambda: prediction_settings(found, config))
    unfinished = Unfinished(folder, settings, examples.sources)
    summaries = summarize(
        loaded.generator,
        tokenizer,
        examples.sources,
        generation_settings(config),
        world,
        console,
        newline_id(tokenizer, config.data.keep_newlines),
        unfinished=unfinished,
    )
    del loaded  # makes room for a baseline's model
    evaluations = []

    def score() -> None:
        assert summaries is not None
        evaluation = score_summaries(examples.rows, summaries, tokenizer, rouge, console, metric)
        evaluation.write(folder, settings)
        evaluations.append(evaluation)

    world.on_rank_zero(score)
    if baseline is not None and baseline.found is not None:
        summarize_by_model(baseline, examples.rows, rouge, name, folder, session)

    def finish() -> None:
        _tell(evaluations[0], "model", baseline, folder, session)
        # The baseline's model may have been killed: only now nothing is to be made again.
        unfinished.delete()
        if folder.parent.parent.name == "evaluation":  # of a run
            refresh_report(folder.parents[2], console)

    world.on_rank_zero(finish)
    return folder, source


# Options of the data section, one of which says where the examples are.
_PLACES = ("source", "path", "dataset", "mixture", "train_files", "validation_files", "test_files")


def _check_names_data(found: FoundModel, layers: Layers) -> None:
    """Raises UserError for a model that does not know its data where nobody says which to take.

    The default is WikiHow, and a word about its missing files would mislead.
    """
    sections = (values.get("data", {}) for values in (layers.files, layers.flags))
    given = {name for section in sections if isinstance(section, dict) for name in section}
    if found.checkpoint is None and not given & set(_PLACES):
        raise UserError(
            f"{found.option} {found.name} has no data options, as it is no checkpoint of a run; "
            f"give {layers.config_argument} with a data section, such as config.yaml of the run "
            "that it comes from"
        )


def _examples_of_split(
    name: str,
    config: Config,
    stored_data: dict[str, Any] | None,
    loaded: LoadedModel,
    session: Session,
) -> _Examples:
    import numpy as np

    from t5_fsdp.evaluation.evaluate import examples_of

    prepared = _prepared(config, stored_data, loaded, session)
    split = prepared.split(name)
    if split is None:
        raise UserError(f"the data has no {name} split; give another split, or data.{name}_files")
    return _Examples(
        rows=examples_of(split, np.arange(len(split))),
        sources=[split.source(index) for index in range(len(split))],
        what=f"{name} example",
        dropped=prepared.audit["splits"].get(name, {}).get("dropped", {}),
    )


def _examples_given(
    given: Sequence[Mapping[str, Any]], config: Config, loaded: LoadedModel
) -> _Examples:
    from t5_fsdp.evaluation.long_documents import make_sources

    data = config.data
    documents = [row["document"] for row in given]
    made = make_sources(loaded.tokenizer, documents, data.prefix, data.max_source_tokens, False)
    return _Examples(
        rows=[{"id": str(number), **row} for number, row in enumerate(given)],
        sources=[parts[0] for parts in made.parts],
        what="given example",
    )


def _tell(
    evaluation: Evaluation,
    name: str,
    baseline: Baseline | None,
    folder: Path | None,
    session: Session,
) -> None:
    """The table, what is unusual, and the comparison with a baseline, which is done with then."""
    from t5_fsdp.evaluation.baselines import is_baseline, lead_baseline
    from t5_fsdp.evaluation.predictions import references_of
    from t5_fsdp.evaluation.rouge import score_pairs
    from t5_fsdp.evaluation.scoring import add_lead_baseline
    from t5_fsdp.evaluation.tables import format_table
    from t5_fsdp.evaluation.workers import num_cores

    console, rows = session.console, evaluation.rows
    systems = [(name, evaluation.summary)]
    if all("document" in row for row in rows):
        references = [references_of(row) for row in rows]
        lead = lead_baseline([row["document"] for row in rows], [texts[0] for texts in references])
        scores = score_pairs(lead, references, evaluation.scores.settings, num_cores())
        chosen = "" if baseline is None else baseline.name
        # Beside one that was asked for it would be taken for that one.
        if not (is_baseline(chosen) and chosen.startswith("lead")):
            systems.append(("lead baseline", scores.summary()))
        if folder is not None:
            add_lead_baseline(folder, scores)
    differences = ""
    if baseline is not None:
        theirs, differences = compare_with(baseline, evaluation, name, folder, console)
        systems.append((baseline.name, theirs))
    console.say(format_table(systems))
    if differences:
        console.say(differences)
    for figure, value in evaluation.summary.get("metrics", {}).items():
        console.say(f"{figure} {'not finite' if value is None else f'{value:.4g}'}")
    for hint in evaluation.summary["hints"]:
        console.say(f"note: {hint}")
    if folder is not None:
        console.say(f"written: {folder}")
    else:
        console.say("nothing is written; --output_dir DIR writes rouge.json")
    if baseline is not None and baseline.unfinished is not None:
        baseline.unfinished.delete()


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
    from t5_fsdp.data.fingerprint import source_fingerprint
    from t5_fsdp.data.parts import prepared_splits
    from t5_fsdp.data.prepared import find_prepared

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
