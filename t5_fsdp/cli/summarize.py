"""`summarize`: a line, or an object of JSON Lines, for each text."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5_fsdp.cli.loading import LoadedModel, find_model, load_model
from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.cli.texts import Text, check_files, find_files, read_texts
from t5_fsdp.config import Config
from t5_fsdp.console import is_terminal
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from t5_fsdp.console import Progress
    from t5_fsdp.distributed import World
    from t5_fsdp.evaluation.generation import GenerationSettings

_EXTRA = [
    Extra("checkpoint", "Checkpoint, run folder (its best), Hugging Face folder or Hub id.",
          required=True, metavar="DIR"),
    Extra("lines", "Take each line of the input as a text of its own.", type=bool, default=False),
    Extra("long", "Of texts longer than data.max_source_tokens: truncate: what is beyond it is not "
          "read; chunk: parts that fit, of whole sentences, are summarized and their summaries "
          "joined.", type=Literal["truncate", "chunk"], default="truncate"),
    Extra("output", "Write one JSON object a line, with id and summary, to this file instead of "
          "lines of text to standard output. Until all are there it is called FILE.jsonl.part.",
          type=str | None, metavar="FILE.jsonl"),
    Extra("documents", "With --output, write each text beside its summary as well.",
          type=bool, default=False),
]  # fmt: skip
# Texts are decoded in windows, so that the first summaries are written before the last are made:
# so many batches of the longest texts.
_BATCHES_A_WINDOW = 64

Writer = Callable[[Text, str], None]


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code. Summaries alone go to standard output."""
    return run(functools.partial(_summarize, argv), results_on_stdout=True)


def _summarize(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="summarize",
        description="Write a summary for each text, in order; also under torchrun.",
        extra=_EXTRA,
        positionals_help="Text files, one text each; folders, for the .txt files below them; "
        ".jsonl files, a text a line in data.document_column; none: standard input is one text.",
    )
    own = layers.own
    if own["documents"] and own["output"] is None:
        raise UserError("--documents is only with --output FILE.jsonl; leave it out")
    if session.launch.world_size == 1:  # of several, only rank 0 may see the files
        check_files(layers.positionals)
    found = find_model(layers, "checkpoint", own["checkpoint"])
    config = resolve(layers, found.base)
    with contextlib.ExitStack() as stack:
        texts: list[Text] = []
        writers: list[Writer] = []

        def open_files() -> None:
            column = config.data.document_column
            texts.extend(read_texts(layers.positionals, lines=own["lines"], column=column))
            writer: Writer = _print_summary
            if own["output"] is not None:
                path = Path(own["output"])
                _check_output(path, layers.positionals)
                writer = stack.enter_context(_json_lines(path, own["documents"]))
            writers.append(writer)

        # Slow to import; what is wrong with the command line is said before. Several ranks share
        # one standard input, and a problem is for one of them to tell.
        alone = session.launch.world_size == 1
        if alone:
            open_files()
        world = session.enter_world()
        if not alone:
            world.on_rank_zero(open_files)
        found.choose(config.evaluation.best_metric, session)
        session.connect(config.train.collective_timeout_seconds)
        loaded = load_model(found, config, world, session.console)
        write_summaries(texts, loaded, config, own["long"] == "chunk", writers, session)


def write_summaries(
    texts: Sequence[Text],
    loaded: LoadedModel,
    config: Config,
    split: bool,
    writers: Sequence[Writer],
    session: Session,
) -> None:
    """Decode on all ranks, write on rank 0, which alone needs texts and a writer; a collective.

    Args:
        texts: in the order in which their summaries are written.
        loaded, config: the model and how it generates.
        split: read long texts in parts; else they are cut.
        writers: one, which gets each text with its summary.
        session: of this rank.
    """
    from t5_fsdp.evaluation.generation import GenerationSettings

    world = session.world
    assert world is not None
    settings = GenerationSettings.of(config.evaluation, config.seed)
    made: list[list[list[np.ndarray]]] = []
    world.on_rank_zero(lambda: made.append(_make_sources(texts, loaded, config, split, session)))
    parts = world.broadcast_object(made[0] if made else None)
    window_size = _window_size(settings, config.data.max_source_tokens)
    with (
        session.console.progress(sum(map(len, parts)), "summaries") as progress,
        loaded.generator.open() as model,
    ):
        for window in plan_windows([len(sources) for sources in parts], window_size):
            sources = [source for index in window for source in parts[index]]
            summaries = _decode(sources, model, loaded, config, settings, world, progress)

            def write(window: range = window, summaries: Any = summaries) -> bool:
                rest = iter(summaries)
                try:
                    for index in window:
                        writers[0](texts[index], _join([next(rest) for _ in parts[index]]))
                except BrokenPipeError:  # `| head` has seen enough
                    return True
                return False

            nobody_reads = world.try_on_rank_zero(write)
            if world.sum([float(bool(nobody_reads))])[0]:
                break


def _decode(
    sources: Sequence[np.ndarray],
    model: PreTrainedModel,
    loaded: LoadedModel,
    config: Config,
    settings: GenerationSettings,
    world: World,
    progress: Progress,
) -> list[str] | None:
    """Summaries of `sources`, dealt over ranks, on rank 0; a collective."""
    from t5_fsdp.data.tokenization import newline_id
    from t5_fsdp.evaluation.generation import generate

    mine = generate(
        model,
        loaded.tokenizer,
        sources,
        settings,
        rank=world.rank,
        world_size=world.world_size,
        newline=newline_id(loaded.tokenizer, config.data.keep_newlines),
        on_batch=progress.advance,
        is_sharded=loaded.generator.is_sharded,
    )
    gathered = world.gather_objects(mine)
    progress.advance(len(sources) - len(mine))  # the other ranks'
    if gathered is None:
        return None
    merged = {position: made.text for share in gathered for position, made in share.items()}
    return [merged[position] for position in range(len(sources))]


def _make_sources(
    texts: Sequence[Text], loaded: LoadedModel, config: Config, split: bool, session: Session
) -> list[list[np.ndarray]]:
    from t5_fsdp.evaluation.long_documents import make_sources

    data = config.data
    documents = [text.text for text in texts]
    made = make_sources(loaded.tokenizer, documents, data.prefix, data.max_source_tokens, split)
    if made.num_long:
        what = (
            f"longer than data.max_source_tokens ({data.max_source_tokens}): {made.num_long:,} of "
            f"{counted(len(texts), 'text')}"
        )
        if split:
            num_parts = sum(len(sources) for sources in made.parts if len(sources) > 1)
            session.console.say(f"{what}, read in {counted(num_parts, 'part')}")
        else:
            session.console.warn(f"{what}; what is beyond it is not read; --long chunk reads all")
    return made.parts


def _window_size(settings: GenerationSettings, max_source_tokens: int) -> int:
    rows = settings.batch_tokens // (settings.num_beams * max_source_tokens)
    return _BATCHES_A_WINDOW * max(1, rows)


def plan_windows(num_parts: Sequence[int], size: int) -> list[range]:
    """Which texts are decoded together: in order, and as many as have `size` parts or just more.

    It depends on no number of ranks, and neither do the batches inside a window.
    """
    windows: list[range] = []
    start = held = 0
    for index, count in enumerate(num_parts):
        held += count
        if held >= size or index == len(num_parts) - 1:
            windows.append(range(start, index + 1))
            start, held = index + 1, 0
    return windows


def _join(summaries: Sequence[str]) -> str:
    """One summary of those of the parts; those of several lines stay lines."""
    joint = "\n" if any("\n" in summary for summary in summaries) else " "
    return joint.join(filter(None, summaries))


def _print_summary(text: Text, summary: str) -> None:
    # One line a text, whatever the summary's own lines.
    line = " ".join(summary.split())
    try:
        _print_line(line)
    except UnicodeEncodeError as error:
        raise UserError(
            f"standard output can't write {line[error.start]!r} (its encoding is "
            f"{error.encoding}); set PYTHONIOENCODING=utf-8, or give --output FILE.jsonl"
        ) from None


def _print_line(line: str) -> None:
    if is_terminal(sys.stdout):
        # Moves a progress bar out of the way of the line.
        from tqdm import tqdm

        tqdm.write(line, file=sys.stdout)
        return
    print(line, flush=True)


def _check_output(path: Path, inputs: Sequence[str]) -> None:
    """Raises UserError when the output would be no new file, or lie over an input."""
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file in it, e.g. summaries.jsonl")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"--output {path} is there and can't be written; give another file")
    if path.exists() and any(path.samefile(name) for name in find_files(inputs)):
        raise UserError(f"--output {path} is one of the inputs; give another file")


@contextlib.contextmanager
def _json_lines(path: Path, documents: bool) -> Iterator[Writer]:
    """A file of whole lines at any moment, which gets its name when nothing went wrong.

    Where a link leads is written, and into a pipe or device directly: neither is replaced.

    Raises:
        UserError: it can't be written.
    """
    path = Path(os.path.realpath(path))
    is_file = path.is_file() or not path.exists()
    partial = path.with_name(f"{path.name}.part") if is_file else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _output_error(path, error) from None

    def write(text: Text, summary: str) -> None:
        row: dict[str, Any] = {"id": text.id}
        if documents:
            row["document"] = text.text
        row["summary"] = summary
        try:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
        except OSError as error:
            raise _output_error(path, error) from None

    try:
        with file:
            yield write
            if is_file:
                os.fsync(file.fileno())
        if is_file:
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            if is_file and partial.stat().st_size == 0:  # it failed before there was a summary
                partial.unlink()


def _output_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"--output {path} can't be written ({error.strerror}); make room, or give another file"
    )
