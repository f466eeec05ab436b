"""What `eval_rouge --baseline` names, its summaries of the same documents, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli.loading import FoundModel, LoadedModel, find_model, load_model
from t5_fsdp.cli.options import Layers, resolve
from t5_fsdp.cli.process import Session
from t5_fsdp.config import Config
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.files import write_json
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.evaluation.generation import GeneratedSummary, GenerationSettings
    from t5_fsdp.evaluation.rouge import RougeSettings
    from t5_fsdp.evaluation.scoring import Evaluation
    from t5_fsdp.evaluation.unfinished import Unfinished


@dataclass
class Baseline:
    """A system to compare with: a built-in one, a predictions file or a model.

    Attributes:
        rows: of a predictions file.
        found, config: of a model, before its weights are read, and the options for it.
        predictions: once they are there, on rank 0.
        unfinished: keeps a model's, until nothing is to be made again.
    """

    name: str
    config: Config
    rows: list[dict[str, Any]] | None = None
    found: FoundModel | None = None
    predictions: list[str] = field(default_factory=list)
    unfinished: Unfinished | None = None


def find_baseline(layers: Layers, config: Config) -> Baseline | None:
    """What `--baseline` names, or None without it.

    Raises:
        UserError: it names nothing that is there, or a predictions file that can't be read.
    """
    from t5_fsdp.evaluation.baselines import BASELINES, is_baseline
    from t5_fsdp.evaluation.predictions import read_predictions

    name = layers.own["baseline"]
    if name is None or is_baseline(name):
        return None if name is None else Baseline(name, config)
    if Path(name).is_file() or name.endswith(".jsonl"):
        return Baseline(name, config, rows=read_predictions(name))
    if not layers.files and "/" not in name and not Path(name).exists():
        raise UserError(
            f"--baseline {name} is no file or folder here and none of {', '.join(BASELINES)}; "
            "check the spelling (a Hub id needs --config FILE.yaml too)"
        )
    found = find_model(layers, "baseline", name)
    return Baseline(name, resolve(layers, found.base), found=found)


def add_predictions(baseline: Baseline, examples: Sequence[Mapping[str, Any]], system: str) -> None:
    """Of a predictions file or a built-in baseline, which need no model; call it on rank 0.

    Raises:
        UserError: the examples are other ones than the file's, or have no documents.
    """
    from t5_fsdp.evaluation.baselines import baseline_summaries
    from t5_fsdp.evaluation.comparison import align
    from t5_fsdp.evaluation.predictions import references_of

    if baseline.rows is not None:
        baseline.predictions = align(examples, baseline.rows, system, baseline.name)
        return
    documents = documents_of(examples, baseline, system)
    if baseline.found is None:
        references = [references_of(example) for example in examples]
        seed = baseline.config.seed
        baseline.predictions = baseline_summaries(baseline.name, documents, references, seed)


def documents_of(
    examples: Sequence[Mapping[str, Any]], baseline: Baseline, system: str
) -> list[str]:
    """The documents of the examples.

    Raises:
        UserError: one has none.
    """
    for number, example in enumerate(examples, start=1):
        if "document" not in example:
            raise UserError(
                f"--baseline {baseline.name} needs the documents, and example {number} of {system} "
                "has no 'document'; add them, or give a predictions file as baseline"
            )
    return [example["document"] for example in examples]


def summarize_by_model(
    baseline: Baseline,
    examples: Sequence[Mapping[str, Any]],
    rouge: RougeSettings,
    split: str,
    folder: Path | None,
    session: Session,
) -> None:
    """Predictions of a baseline that is a model, generated or from an earlier evaluation.

    A collective. An earlier one is taken where it lies in the model's own evaluation folder or
    below `folder` and was made by the same weights and settings from the same documents.

    Args:
        examples: with documents, the same on every rank.
        folder: where a new one is written, below it in `baseline`; None: nowhere.
    """
    from t5_fsdp.evaluation.evaluate import score_summaries
    from t5_fsdp.evaluation.predictions import stored_rows

    assert baseline.found is not None and session.world is not None
    found, config, world = baseline.found, baseline.config, session.world
    found.choose(config.evaluation.best_metric, session)
    own = None if folder is None else folder / "baseline"

    def read_earlier() -> bool:
        if found.checkpoint is None:  # a Hub id may have moved on
            return False
        settings = prediction_settings(found, config)
        for place in filter(None, (found.evaluation_folder(config, split), own)):
            rows = stored_rows(place, settings, examples)
            if rows is not None:
                session.console.say(f"predictions of {baseline.name}: {place}")
                baseline.predictions = [row["prediction"] for row in rows]
                return True
        return False

    if world.on_rank_zero(read_earlier):
        return
    loaded = load_model(found, config, world, session.console)
    settings = world.on_rank_zero(lambda: prediction_settings(found, config))
    summaries = _summarize(loaded, baseline, examples, settings, own, session)

    def keep() -> None:
        assert summaries is not None
        evaluation = score_summaries(examples, summaries, loaded.tokenizer, rouge)
        baseline.predictions = [row["prediction"] for row in evaluation.rows]
        if own is not None:
            evaluation.write(own, settings)
            if found.checkpoint is not None:  # the next time they are taken from there
                assert baseline.unfinished is not None
                baseline.unfinished.delete()

    world.on_rank_zero(keep)


def _summarize(
    loaded: LoadedModel,
    baseline: Baseline,
    examples: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    folder: Path | None,
    session: Session,
) -> list[GeneratedSummary] | None:
    """Summaries of the examples on rank 0; finished batches are kept in `folder`."""
    from t5_fsdp.data.tokenization import encode_sources, newline_id
    from t5_fsdp.evaluation.evaluate import summarize
    from t5_fsdp.evaluation.unfinished import Unfinished

    assert session.world is not None
    config = baseline.config
    documents = counted(len(examples), "document")
    session.console.say(f"summarizing {documents} with {loaded.source}")
    sources = encode_sources(
        loaded.tokenizer,
        [example["document"] for example in examples],
        config.data.prefix,
        config.data.max_source_tokens,
    )
    if folder is not None:
        baseline.unfinished = Unfinished(folder, settings, sources)
    return summarize(
        loaded.generator,
        loaded.tokenizer,
        sources,
        generation_settings(config),
        session.world,
        session.console,
        newline_id(loaded.tokenizer, config.data.keep_newlines),
        unfinished=baseline.unfinished,
    )


def generation_settings(config: Config) -> GenerationSettings:
    """How summaries are decoded."""
    from t5_fsdp.evaluation.generation import GenerationSettings

    return GenerationSettings.of(config.evaluation, config.seed)


def prediction_settings(found: FoundModel, config: Config) -> dict[str, Any]:
    """All that decides about a model's predictions, for rouge.json's "settings"; on one rank."""
    from t5_fsdp.evaluation.generation import decoding_settings

    return {**decoding_settings(config), "model_digest": found.digest(config)}


def compare_with(
    baseline: Baseline, evaluation: Evaluation, name: str, folder: Path | None, console: Console
) -> tuple[dict[str, Any], str]:
    """Score the baseline and write comparison.json; the baseline's `Scores.summary`, and a text.

    Args:
        baseline: with its predictions.
        evaluation: of the system.
        name: the system's.
        folder: where comparison.json goes; None: nowhere.
        console: tells how far it is.
    """
    from t5_fsdp.evaluation.comparison import compare, largest_changes, settings_of_comparison
    from t5_fsdp.evaluation.predictions import references_of
    from t5_fsdp.evaluation.rouge import score_pairs
    from t5_fsdp.evaluation.tables import format_changes, format_comparison
    from t5_fsdp.evaluation.workers import num_cores

    references = [references_of(row) for row in evaluation.rows]
    scores = score_pairs(
        baseline.predictions, references, evaluation.scores.settings, num_cores(), console
    )
    metrics = compare(evaluation.scores, scores)
    changes = largest_changes(evaluation.rows, baseline.predictions, evaluation.scores, scores)
    text = f"{format_comparison(metrics, baseline.name)}\n{format_changes(changes, baseline.name)}"
    if folder is not None:
        values = {
            "system": name,
            "baseline": baseline.name,
            "examples": len(scores),
            "metrics": metrics,
            "largest_changes": changes,
            "settings": {**scores.settings.to_json(), **settings_of_comparison()},
        }
        write_json(folder / "comparison.json", values)
    return scores.summary(), text
