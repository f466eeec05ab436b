"""`export_hf`: a sharded checkpoint as a Hugging Face or PEFT folder or one file, and back."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.loading import FoundModel, find_model, hub_options
from t5_fsdp.cli.options import Extra, dump_yaml, parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, to_dict
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError

_EXTRA = [
    Extra("checkpoint", "Checkpoint or run folder (its best); with format dcp also a Hugging Face "
          "folder or Hub id.", required=True, metavar="DIR"),
    Extra("output", "New folder to write; with format safetensors a file.", required=True,
          metavar="DIR"),
    Extra("format", "hf: a folder for transformers, an adapter merged into the weights; adapter: a "
          "PEFT folder with the adapter alone; safetensors: all weights in one file; dcp: a "
          "checkpoint with weights alone, for model.name.",
          type=Literal["hf", "adapter", "safetensors", "dcp"], default="hf"),
    Extra("dtype", "hf, safetensors: precision of the weights.",
          type=Literal["fp32", "bf16", "fp16"], default="fp32"),
    Extra("max_shard_size", "hf: largest file of weights, e.g. 500MB; more go into several files "
          "with an index.", default="5GB", metavar="SIZE"),
    Extra("verify", "hf: read the folder with transformers and compare its logits with the "
          "checkpoint's before it gets its name.", type=bool, default=False),
    Extra("push_to_hub", "hf, adapter: upload the folder to this repository of the Hugging Face "
          "Hub too.", type=str | None, metavar="REPO_ID"),
    Extra("private", "push_to_hub: make the repository, if it is new, a private one.", type=bool,
          default=False),
]  # fmt: skip
# Which formats read an option; at its default it changes nothing.
_READ_BY = {
    "dtype": ("hf", "safetensors"),
    "max_shard_size": ("hf",),
    "verify": ("hf",),
    "push_to_hub": ("hf", "adapter"),
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    return run(functools.partial(_export, argv))


def _export(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="export_hf",
        description="Write a checkpoint as a folder that transformers loads, or another format; "
        "one process, no GPU.",
        extra=_EXTRA,
    )
    own = layers.own
    if session.launch.world_size > 1:
        raise UserError("export_hf runs as one process; start it without torchrun")
    if problems := _problems(own):
        raise UserError(*problems)
    found = find_model(layers, "checkpoint", own["checkpoint"], needs_config=False)
    if found.checkpoint is None and own["format"] != "dcp":
        raise UserError(
            f"--checkpoint {found.name} is no checkpoint or run folder; --format {own['format']} "
            "writes what comes from one. A Hugging Face folder or Hub id takes --format dcp"
        )
    config = resolve(layers, found.base)
    session.enter_world()
    if own["push_to_hub"] is not None:
        from t5_fsdp.checkpoint.hub import check_push

        check_push(own["push_to_hub"])
    found.choose(config.evaluation.best_metric, session)
    _WRITERS[own["format"]](found, config, own, session.console)
    session.console.say(f"exported {found.checkpoint or found.name} to {own['output']}")
    if own["push_to_hub"] is not None:
        from t5_fsdp.checkpoint.hub import push

        address = push(Path(own["output"]), own["push_to_hub"], own["private"])
        session.console.say(f"pushed to {address}")


def _problems(own: dict[str, Any]) -> list[str]:
    """What can be said against the command's own options together."""
    problems = []
    defaults = {item.name: item.default for item in _EXTRA}
    for name, formats in _READ_BY.items():
        if own["format"] not in formats and own[name] != defaults[name]:
            problems.append(
                f"--{name} is for --format {' or '.join(formats)}, not {own['format']}; leave it "
                "out"
            )
    if own["private"] and own["push_to_hub"] is None:
        problems.append("--private is for --push_to_hub; leave it out")
    try:
        _parse_size(own["max_shard_size"])
    except UserError as error:
        problems += error.problems
    return problems


def _parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, in powers of ten as transformers and the Hub have it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise UserError(f"--max_shard_size is {text!r}; give a size such as 5GB or 500MB")
    return size


def _write_hf(found: FoundModel, config: Config, own: dict[str, Any], console: Console) -> None:
    from t5_fsdp.checkpoint.export import ExportOptions, export_to_hf

    assert found.checkpoint is not None
    if own["dtype"] == "fp16" and config.model.init == "pretrained":
        console.warn("activations of pretrained T5s overflow fp16; --dtype bf16 has the range")
    verified = export_to_hf(
        found.checkpoint,
        Path(own["output"]),
        found.base,
        config.evaluation,
        config.data,
        ExportOptions(
            name=_name(own),
            dtype=own["dtype"],
            max_shard_bytes=_parse_size(own["max_shard_size"]),
            verify=own["verify"],
        ),
    )
    if verified is not None:
        console.say(
            f"verified: logits differ by {verified.difference:.3g} at most (largest "
            f"{verified.largest:.3g}; allowed for {own['dtype']}: {verified.tolerance:.3g})"
        )


def _write_adapter(
    found: FoundModel, config: Config, own: dict[str, Any], console: Console
) -> None:
    from t5_fsdp.checkpoint.export import export_adapter

    assert found.checkpoint is not None
    if config.model.name is None:
        console.warn(
            "the adapter's base has random weights of this run and no name: the exported adapter "
            "fits no model elsewhere; export the whole model with --format hf"
        )
    export_adapter(
        found.checkpoint,
        Path(own["output"]),
        found.base,
        config.evaluation,
        config.data,
        _name(own),
    )


def _write_file(found: FoundModel, config: Config, own: dict[str, Any], console: Console) -> None:
    from t5_fsdp.checkpoint.export import export_to_file

    assert found.checkpoint is not None
    export_to_file(found.checkpoint, Path(own["output"]), own["dtype"])


def _write_dcp(found: FoundModel, config: Config, own: dict[str, Any], console: Console) -> None:
    """A checkpoint with weights alone: of a Hugging Face model, or of one of ours."""
    from t5_fsdp.checkpoint.format import CONFIG, TOKENIZER, read_state
    from t5_fsdp.checkpoint.stored_weights import StoredWeights
    from t5_fsdp.checkpoint.weights_only import write_weights

    output = Path(own["output"])
    if output.absolute().parent.name == "checkpoints":
        raise UserError(
            f"--output {output} lies among the checkpoints of a run, which can't go on from it; "
            "give a folder elsewhere"
        )
    if found.checkpoint is None:
        _convert(found.name, config, output, console)
        return
    write_weights(
        output,
        StoredWeights(found.checkpoint),
        read_state(found.checkpoint),
        (found.checkpoint / CONFIG).read_text(encoding="utf-8"),
        found.checkpoint / TOKENIZER,
    )


def _convert(name: str, config: Config, output: Path, console: Console) -> None:
    """A Hugging Face folder or Hub id as a checkpoint with weights alone, of step 0."""
    from t5_fsdp.checkpoint.format import RunState
    from t5_fsdp.checkpoint.weights_only import write_weights
    from t5_fsdp.data.tokenization import load_tokenizer, tokenizer_digest
    from t5_fsdp.model.configuration import resolve_spec
    from t5_fsdp.model.pretrained import open_pretrained

    options = hub_options(name, config)
    tokenizer = load_tokenizer(name, options.revision, option="--checkpoint")
    spec = resolve_spec(options, tokenizer)
    opened = open_pretrained(options, spec)
    if opened.note:
        console.warn(opened.note)
    spec.own_head = opened.own_head
    config.model = options
    state = RunState(
        step=0,
        model=spec.to_json(),
        data_hash="",
        tokenizer_hash=tokenizer_digest(tokenizer),
        plan={},
        window={},
        scores={},
        versions=run_folder.library_versions(),
        prepared="",
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        write_weights(output, opened.tensors, state, dump_yaml(config), Path(folder))


_AT_END = "hf"  # in the run's folder
_WRITERS = {"hf": _write_hf, "adapter": _write_adapter, "safetensors": _write_file,
            "dcp": _write_dcp}  # fmt: skip


def _name(own: dict[str, Any]) -> str:
    """Of the exported model, for its card."""
    return own["push_to_hub"] or Path(own["output"]).absolute().name


def check_export_at_end(config: Config) -> None:
    """Raises UserError when `<run_dir>/hf`, which is to be written, holds something else."""
    from t5_fsdp.checkpoint.export import check_replaceable

    if config.checkpoint.export_at_end:
        check_replaceable(Path(config.run_dir) / _AT_END, "checkpoint.export_at_end:")


def export_at_end(config: Config, console: Console, anew: bool) -> None:
    """Write the run's best checkpoint, else its newest, to `<run_dir>/hf`; by one process.

    Args:
        anew: also when that checkpoint was exported there before.

    Raises:
        UserError: there is none that is sound, or the folder can't be written.
    """
    from t5_fsdp.checkpoint.export import ExportOptions, export_to_hf, is_export_of

    run_dir = Path(config.run_dir)
    output = run_dir / _AT_END
    best = config.evaluation.best_metric
    chosen = run_folder.find_checkpoint(run_dir, "run_dir", best, console.warn)
    if not anew and is_export_of(output, chosen):
        return
    export_to_hf(
        chosen,
        output,
        to_dict(config),
        config.evaluation,
        config.data,
        ExportOptions(name=run_dir.absolute().name),
        option="checkpoint.export_at_end:",
        replace=True,
    )
    console.say(f"exported {chosen} to {output}")
