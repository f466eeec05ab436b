"""`summarize`: one line for each text."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from t5_fsdp.cli.loading import find_model, load_model
from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.errors import UserError

_EXTRA = [
    Extra("checkpoint", "Checkpoint, run folder (its best), Hugging Face folder or Hub id.",
          required=True, metavar="DIR"),
    Extra("lines", "Take each line of the input as a text of its own.", type=bool, default=False),
]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code. Summaries alone go to standard output."""
    return run(functools.partial(_summarize, argv), results_on_stdout=True)


def _summarize(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="summarize",
        description="Write one line of summary for each text, in order.",
        extra=_EXTRA,
        positionals_help="Text files, one text each; none: standard input is one text.",
    )
    if session.launch.world_size > 1:
        raise UserError("summarize runs as one process; start it without torchrun")
    found = find_model(layers, "--checkpoint", layers.own["checkpoint"])
    config = resolve(layers, found.base)
    texts = _read_texts(layers.positionals, layers.own["lines"])
    world = session.enter_world()
    found.choose(config.evaluation.best_metric)

    # Slow to import; what is wrong with the command line is said before.
    from t5_fsdp.data.tokenization import encode_sources, newline_id
    from t5_fsdp.evaluation.generation import GenerationSettings, generate

    loaded = load_model(found, config, world, session.console, may_shard=False)
    written = [number for number, text in enumerate(texts) if text.strip()]
    sources = encode_sources(
        loaded.tokenizer,
        [texts[number] for number in written],
        config.data.prefix,
        config.data.max_source_tokens,
    )
    cut = sum(len(source) >= config.data.max_source_tokens for source in sources)
    if cut:
        session.console.warn(
            f"{cut} of {len(texts)} texts reach data.max_source_tokens "
            f"({config.data.max_source_tokens}); what is beyond it was not read"
        )
    with loaded.generator.open() as model:
        summaries = generate(
            model,
            loaded.tokenizer,
            sources,
            GenerationSettings.of(config.evaluation, config.seed),
            newline=newline_id(loaded.tokenizer, config.data.keep_newlines),
        )
    lines = [""] * len(texts)  # a blank text has nothing to summarize
    for position, number in enumerate(written):
        # One line a text, whatever the summary's own lines.
        lines[number] = " ".join(summaries[position].text.split())
    for line in lines:
        print(line, flush=True)


def _read_texts(paths: Sequence[str], lines: bool) -> list[str]:
    if not paths and sys.stdin is None:
        raise UserError("standard input is closed; give text files")
    texts = [_read(path) for path in paths] if paths else [_decode(sys.stdin.buffer.read())]
    if lines:
        # Only at newlines: a text may hold other marks that Python counts as line ends.
        texts = [line for text in texts for line in text.removesuffix("\n").split("\n")]
    if not any(text.strip() for text in texts):
        raise UserError("the input is empty; give text files, or text on standard input")
    return texts


def _read(path: str) -> str:
    try:
        return _decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); check the path") from None


def _decode(content: bytes, path: str = "standard input") -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
        ) from None
