"""The library: what the commands do, as functions of a program; see docs/library.md.

    from t5_fsdp import load_config, train

    config = load_config("configs/demo.yaml", run_dir="runs/mine", train={"epochs": 1})
    result = train(config, data={"train": pairs, "validation": others})

Each function works in one process and under torchrun, where every rank calls it with the same
arguments. It runs to its end before it returns, and may be called again. Errors are raised as
exceptions and nothing ends the process; signal handlers are restored.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli.options import Layers, check_own, layers_of_program, resolve
from t5_fsdp.config import Config, DataConfig, cache_dir
from t5_fsdp.data.given import Examples, GivenData, by_split, given_rows, show, write_given
from t5_fsdp.data.parts import SPLITS
from t5_fsdp.data.rows import columns_of
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    from t5_fsdp.cli.process import Session
    from t5_fsdp.distributed import World
    from t5_fsdp.evaluation.own_metric import Metric

_PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class TrainResult:
    """What a training has left behind.

    Attributes:
        run_dir: with everything that the run wrote.
        step: the last finished one.
        checkpoint: the best that is kept, by evaluation.best_metric; else the newest.
        scores: of the validation at that checkpoint's step: loss in nats a token, ROUGE from 0 to
            1, own metrics; {} without one.
        message: how it ended, in words.
    """

    run_dir: Path
    step: int
    checkpoint: Path
    scores: dict[str, float]
    message: str


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of a model's summaries.

    Attributes:
        source: checkpoint, folder or Hub id that was evaluated.
        folder: with rouge.json and predictions.jsonl.
        scores: mean F-measure of each ROUGE, 0 to 1, and the figures of an own metric.
        summary: all of rouge.json: precision, recall, bootstrap intervals, statistics, settings.
    """

    source: str
    folder: Path
    scores: dict[str, float]
    summary: dict[str, Any]

    def predictions(self) -> list[dict[str, Any]]:
        """The rows of predictions.jsonl: document, reference, prediction and scores of each."""
        from t5_fsdp.evaluation.predictions import read_predictions

        return read_predictions(self.folder / "predictions.jsonl")


def load_config(path: _PathLike | Sequence[_PathLike] | None = None, **options: Any) -> Config:
    """The configuration of a run: defaults, then YAML files, then `options`; checked.

    Args:
        path: a YAML file, several of which the later ones win, or None.
        options: `run_dir`, `seed`, and of each section a mapping of those options that differ,
            e.g. `train={"epochs": 1}`; or by dotted names, `**{"train.epochs": 1}`.

    Raises:
        UserError: lists every unknown option, wrong type and impossible value. Whether data and
            model are there is for `train` to say.
    """
    if isinstance(path, Mapping):
        raise UserError("path is a mapping; give options by name: load_config(**options)")
    paths = path if isinstance(path, list | tuple) else [] if path is None else [path]
    layers = layers_of_program(options, [_path("path", item) for item in paths])
    # Of an own metric only `train` knows the names.
    return resolve(layers, own_metrics=None)


def train(
    config: Config,
    *,
    data: GivenData | None = None,
    metric: Metric | None = None,
    check_memory: bool = True,
    quiet: bool = False,
) -> TrainResult:
    """Fine-tune a model, or go on with the run in `config.run_dir`: what the command `train` does.

    Args:
        config: from `load_config`, or a `Config` of one's own, which is checked as well. It is not
            changed.
        data: examples instead of the source in `config.data`: those of the training split, or a
            mapping with "train", "validation" and "test". A split is a list, or anything else that
            can be iterated over or has __len__ and __getitem__, of pairs (document, summary) or of
            mappings with `config.data.document_column` and `summary_column`, and maybe an "id".
            They are written as JSON Lines into the cache folder and then treated as files are.
        metric: called at each validation, on rank 0, as `metric(predictions, references)` with as
            many texts in both; a mapping from names to numbers, higher is better. They stand beside
            ROUGE in metrics.jsonl and rouge.json, and `config.evaluation.best_metric` may name one.
            It is tried on a few references before training, or before summaries are made.
        check_memory: refuse what is estimated to exceed the memory of its GPU, or on a CPU of the
            host, clearly.
        quiet: print nothing; the run's log.txt has all.

    Returns:
        the same on every rank.

    Raises:
        UserError: what the user can mend: an option, the data, the model, memory or disk; on
            every rank.
        PeerFailed: another rank failed otherwise, and raised why.
        Preempted: SIGTERM, SIGINT or SIGUSR1 asked to stop; the run is saved, and the same call
            goes on with it. A BaseException, as KeyboardInterrupt is.
    """
    from t5_fsdp.cli.process import call
    from t5_fsdp.cli.train import train_model

    _check_metric_type(metric)
    given = None if data is None else by_split(data)
    config = _check(config, given, metric)

    def work(session: Session) -> TrainResult:
        world = session.enter_world()
        if given is not None:
            _write(given, config, world)
            if problems := source_problems(config.data):
                raise UserError(*problems)
        train_model(config, session, world, metric, check_memory)
        return world.on_rank_zero(lambda: _outcome(config))

    return call(work, quiet=quiet)


def evaluate(
    checkpoint: _PathLike,
    *,
    split: str = "test",
    data: Examples | None = None,
    config: Config | None = None,
    metric: Metric | None = None,
    output_dir: _PathLike | None = None,
    quiet: bool = False,
    **options: Any,
) -> EvaluationResult:
    """Summarize a whole split, or examples of one's own, and score: what `eval_rouge` does.

    Args:
        checkpoint: a checkpoint, a run folder (its best), a Hugging Face folder or a Hub id.
        split: of the checkpoint's data: "train", "validation" or "test".
        data: examples instead, as a split of `train`'s.
        config: data and generation settings for a Hugging Face folder or Hub id; a checkpoint has
            its own.
        metric: as of `train`.
        output_dir: where rouge.json and predictions.jsonl go; None: <run_dir>/evaluation/step-N/
            <split>, for examples of one's own .../given.
        quiet: print nothing.
        options: what differs from the checkpoint's configuration, as of `load_config`, e.g.
            `evaluation={"num_beams": 1}`.

    Returns:
        the same on every rank.

    Raises:
        UserError, PeerFailed, Preempted: as `train`.
    """
    from t5_fsdp.cli.eval_rouge import evaluate_checkpoint
    from t5_fsdp.cli.process import call

    if split not in SPLITS:
        raise UserError(f"split is {split!r}; give train, validation or test")
    _check_metric_type(metric)
    layers = _layers_of_model(config, options)
    layers.own = {
        "checkpoint": _path("checkpoint", checkpoint),
        "split": split,
        "baseline": None,
        "output_dir": None if output_dir is None else _path("output_dir", output_dir),
    }

    def work(session: Session) -> EvaluationResult:
        given = None if data is None else functools.partial(_rows_to_score, data)
        folder, source = evaluate_checkpoint(layers, session, given, metric)
        assert session.world is not None
        summary = session.world.on_rank_zero(lambda: _read_summary(folder))
        scores = {name: values["fmeasure"] for name, values in summary["scores"].items()}
        where = str(Path(source).absolute()) if Path(source).exists() else source
        return EvaluationResult(
            where, folder.absolute(), scores | summary.get("metrics", {}), summary
        )

    return call(work, quiet=quiet)


def summarize(
    texts: Iterable[str],
    checkpoint: _PathLike,
    *,
    chunk: bool = False,
    config: Config | None = None,
    quiet: bool = True,
    **options: Any,
) -> list[str]:
    """A summary of each text, in order: what the command `summarize` does.

    The model is loaded anew at each call: give many texts at once.

    Args:
        texts: to summarize; a blank one has an empty summary.
        checkpoint: as of `evaluate`.
        chunk: of texts longer than data.max_source_tokens: summarize parts that fit and join their
            summaries, instead of cutting.
        config: as of `evaluate`.
        quiet: print nothing.
        options: as of `evaluate`.

    Returns:
        the same on every rank.

    Raises:
        UserError, PeerFailed, Preempted: as `train`.
    """
    from t5_fsdp.cli.loading import find_model, load_model
    from t5_fsdp.cli.process import call
    from t5_fsdp.cli.summarize import write_summaries
    from t5_fsdp.cli.texts import Text

    layers, name = _layers_of_model(config, options), _path("checkpoint", checkpoint)
    listed = [Text(number, text) for number, text in enumerate(_checked_texts(texts))]

    def work(session: Session) -> list[str]:
        found = find_model(layers, "checkpoint", name)
        settings = resolve(layers, found.base)
        world = session.enter_world()
        found.choose(settings.evaluation.best_metric, session)
        session.connect(settings.train.collective_timeout_seconds)
        loaded = load_model(found, settings, world, session.console)
        made: list[str] = []
        write = [lambda text, summary: made.append(summary)]
        write_summaries(listed, loaded, settings, chunk, write, session)
        return world.broadcast_object(made)

    return call(work, quiet=quiet)


def plan(
    config: Config,
    *,
    world_size: int = 8,
    devices_per_node: int = 8,
    device: str = "a100-40",
    device_memory_gib: float | None = None,
    source_tokens: float | None = None,
    target_tokens: float | None = None,
    num_examples: int | None = None,
    price_per_hour: float | None = None,
    simulate: bool = False,
    sweep: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Memory and time of a training run without running it: what the command `plan` does.

    Args:
        config: of the run; its data need not be there.
        world_size: devices, one process each.
        devices_per_node: of one machine.
        device: a100-40, a100-80, h100, h200, l4, a10g, v100-16, v100-32, t4 or cpu.
        device_memory_gib: of one device; None: as of `device`.
        source_tokens, target_tokens: mean tokens, for the time; None: of the prepared data, else
            the most that the configuration allows.
        num_examples: for training; None: of the prepared data.
        price_per_hour: dollars for a node.
        simulate: run a rank's step on tensors without memory as well: seconds to minutes.
        sweep: go through settings: what fits, fastest first.
        quiet: print nothing.

    Returns:
        the numbers that `t5-fsdp plan --json` writes (docs/planning.md).

    Raises:
        UserError: what the user can mend.
    """
    from t5_fsdp.cli.plan import OWN_OPTIONS, make_plan
    from t5_fsdp.cli.process import call

    given = {
        "world_size": world_size,
        "devices_per_node": devices_per_node,
        "device": device,
        "device_memory_gib": device_memory_gib,
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "num_examples": num_examples,
        "price_per_hour": price_per_hour,
        "simulate": simulate,
        "sweep": sweep,
    }
    own = check_own(OWN_OPTIONS, given)
    checked = resolve(_layers_of(config), own_metrics=None)
    return call(lambda session: make_plan(checked, own, session), quiet=quiet, makes_group=False)


def _check(config: Config, given: Mapping[str, Examples] | None, metric: Metric | None) -> Config:
    """A copy whose every value is checked, as far as that goes before the examples are written.

    Raises:
        UserError: lists what is wrong.
    """
    layers = _layers_of(config)
    if given is not None:
        layers.flags["data"] = _as_files(dict.fromkeys(given, "given"))
    return resolve(
        layers,
        check_data=None if given is not None else source_problems,
        own_metrics=() if metric is None else None,
    )


def _as_files(paths: Mapping[str, str]) -> dict[str, Any]:
    """Options of the data section that have the files of each split read."""
    files = {f"{split}_files": [paths[split]] if split in paths else [] for split in SPLITS}
    return {"source": "files", "dataset": None, "subset": None, "mixture": [], **files}


def _write(given: Mapping[str, Examples], config: Config, world: World) -> None:
    """Have each node write the examples, and `config` read them."""
    columns = columns_of(config.data)
    # The checkpoints name the files, and are read from other working directories as well.
    folder = (cache_dir(config) / "given").absolute()
    paths = world.on_each_node(lambda: write_given(given, folder, columns))
    config.data = dataclasses.replace(config.data, **_as_files(paths))


def _path(argument: str, value: Any) -> str:
    """Raises UserError for what is none."""
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str):
        return text
    raise UserError(f"{argument} is {show(value)}; give a path")


def _check_metric_type(metric: Any) -> None:
    if metric is not None and not callable(metric):
        raise UserError(
            f"metric is {show(metric)}; give a function of (predictions, references), two lists of "
            "texts, that returns a mapping of names to numbers"
        )


def _outcome(config: Config) -> TrainResult:
    import json

    from t5_fsdp.checkpoint.format import complete_checkpoints, read_state, step_of
    from t5_fsdp.checkpoint.retention import best_steps

    run_dir = Path(config.run_dir).absolute()
    folders = complete_checkpoints(run_dir)
    scores = read_state(folders[-1]).scores
    ranked = best_steps(scores, config.evaluation.best_metric, folders)
    chosen = next((path for path in folders if step_of(path) in ranked[:1]), folders[-1])
    status = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    return TrainResult(
        run_dir=run_dir,
        step=status["step"],
        checkpoint=chosen,
        scores=scores.get(str(step_of(chosen)), {}),
        message=status["message"],
    )


def _layers_of(config: Any, options: Mapping[str, Any] | None = None) -> Layers:
    """Raises UserError for what is no configuration."""
    if not isinstance(config, Config):
        raise UserError(f"config is {show(config)}; give what load_config returns")
    return layers_of_program(options or {}, config=config)


def _layers_of_model(config: Config | None, options: Mapping[str, Any]) -> Layers:
    return layers_of_program(options) if config is None else _layers_of(config, options)


def _rows_to_score(data: Examples, options: DataConfig) -> list[dict[str, Any]]:
    """document and reference of each example.

    Raises:
        UserError: one lacks either, or there is none.
    """
    columns = options.document_column, options.summary_column
    rows = []
    for number, row in enumerate(given_rows(data, "given", columns)):
        texts = [row.get(column) for column in columns]
        for column, text in zip(columns, texts, strict=True):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"data, example {number}: its {column} is {text!r}; give a text")
        rows.append({"document": texts[0], "reference": texts[1]})
    return rows


def _read_summary(folder: Path) -> dict[str, Any]:
    import json

    return json.loads((folder / "rouge.json").read_text(encoding="utf-8"))


def _checked_texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise UserError("texts is one string; give a list of them")
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping):
        raise UserError(f"texts is {show(texts)}; give a list of strings")
    listed = list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise UserError(f"text {number} is {show(text)}; give a string")
    return listed
