"""`benchmark`: this program and its peers side by side on the same work.

Its options are few and its own, so it reads them with argparse: it has to run where jsonargparse
is not installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli import benchmark_checks, benchmark_modes
from t5_fsdp.cli.process import Session, run
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import OneLineParser

if TYPE_CHECKING:
    from t5_fsdp.benchmark.comparison import Outcome
    from t5_fsdp.benchmark.workload import Examples, Workload

MODES = ("train", "generate", "data", "checkpoint", "startup")
# Of the comparison in docs/performance.md.
_MODEL = {
    "vocab_size": 32128,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 4,
    "num_heads": 4,
}
_RANDOM_EXAMPLES = 8192


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code (0 done, 2 user error, 1 defect)."""
    return run(functools.partial(_benchmark, argv))


def _benchmark(argv: Sequence[str], session: Session) -> None:
    began = time.monotonic()
    session.is_resumable = False
    options = _parser().parse_args(list(argv))
    benchmark_checks.settle(options, _MODEL)
    console = session.console
    if options.suite == "gpu":
        benchmark_modes.gpu_suite(options, console, began)
    elif options.mode == "train":
        _train(options, console)
    elif options.mode == "generate":
        benchmark_modes.generate(options, console)
    elif options.mode == "checkpoint":
        benchmark_modes.checkpoint(options, _workload(options), console)
    elif options.mode == "startup":
        benchmark_modes.start_up(options, console)
    else:
        benchmark_modes.data(options, console)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="benchmark",
        description="Measure this program and its peers on the same work, in turn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mode", choices=MODES, help="What is measured; without it: train.")
    add("--suite", choices=("gpu",), help="gpu: one table about one GPU, instead of a mode.")
    add("--tiny", action="store_true", help="--suite gpu: the same on a model for any CPU.")
    add("--only", metavar="REGEX", help="--suite gpu: rows with a title like this.")
    add("--limit_seconds", type=float, metavar="S",
        help="--suite gpu: how long it may take; what is not done by then is left out; without "
        f"it: {benchmark_modes.GPU_SUITE_SECONDS:.0f}.")  # fmt: skip
    add("--world_size", type=int, metavar="N",
        help="Processes of each contestant; without it: one a GPU, or two on a CPU.")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="Where they compute.")
    add("--contestants", default="all", metavar="A,B",
        help="train: which ones, of fsdp2, ddp, bare, seq2seq, seq2seq_grouped, lightning, "
        "tutorial; all: those whose packages are installed.")  # fmt: skip
    add("--reference", metavar="A",
        help="train: what the ratios are to; without it: "
        f"{benchmark_checks.REFERENCE}, or the first.")  # fmt: skip
    add("--texts", type=Path, metavar="FILE",
        help="jsonl with document and summary; without it: random token ids.")  # fmt: skip
    add("--tokenizer", metavar="DIR", help="For texts: a tokenizer's folder or Hub id.")
    add("--checkpoint", type=Path, metavar="DIR",
        help="generate: Hugging Face folder; without it: random weights.")  # fmt: skip
    add("--examples", type=int, metavar="N",
        help="generate, data: how many; without it: "
        f"{' and '.join(f'{n:,}' for n in benchmark_checks.EXAMPLES.values())}.")  # fmt: skip
    add("--num_beams", type=int, default=4, metavar="N", help="generate: of beam search.")
    add("--max_new_tokens", type=int, default=32, metavar="N", help="generate: longest summary.")
    add("--folder", type=Path, metavar="DIR",
        help="checkpoint, data, startup: where files are written, and deleted again.")  # fmt: skip
    add("--model_config", default="{}", metavar="JSON",
        help=f"T5 configuration values that differ from {json.dumps(_MODEL)}.")  # fmt: skip
    add("--global_batch_size", type=int, default=32, metavar="N",
        help="Examples in an optimizer step, over all ranks.")  # fmt: skip
    add("--micro_batch_tokens", type=int, default=16384, metavar="N",
        help="Most padded tokens on a device at a time, of this program and the bare loop.",
        )  # fmt: skip
    add("--max_source_tokens", type=int, default=512, metavar="N", help="Longest source.")
    add("--max_target_tokens", type=int, default=150, metavar="N", help="Longest target.")
    add("--source_tokens", type=int, default=400, metavar="N", help="Random ids: mean length.")
    add("--target_tokens", type=int, default=80, metavar="N", help="Random ids: mean length.")
    add("--param_dtype", choices=("bf16", "fp32"), default="bf16", help="Of the computation.")
    add("--activation_checkpointing", choices=("none", "full"), default="none",
        help="Recompute blocks in the backward pass.")  # fmt: skip
    add("--rounds", type=int, default=5, metavar="N", help="Turns of each contestant.")
    add("--steps", type=int, default=10, metavar="N", help="Steps that are timed in a turn.")
    add("--warmup_steps", type=int, default=3, metavar="N", help="Steps before the first turn.")
    add("--threads", type=int, metavar="N",
        help="Threads of a rank on a CPU; without it: the cores divided by the ranks.")  # fmt: skip
    add("--keep_alive", choices=("auto", "true", "false"), default="auto",
        help="Hold all contestants in memory at once; false: each starts anew in every round; "
        "auto: true on a CPU.")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="Of weights, random ids and order.")
    add("--json", type=Path, metavar="FILE", help="Write all figures.")
    add("--markdown", type=Path, metavar="FILE", help="Write the table.")
    return parser


def _train(options: Any, console: Console) -> None:
    from t5_fsdp.benchmark.comparison import OUT_OF_MEMORY, Schedule, compare
    from t5_fsdp.benchmark.tables import Result, text_table, write_result

    names = options.contestants
    workload = _workload(options)
    workload.check_micro_batch()
    keep_alive = (
        options.device == "cpu" if options.keep_alive == "auto" else options.keep_alive == "true"
    )
    title, peak = _describe(options, workload), _peak_flops(options)
    console.say(title)

    def result(outcomes: dict[str, Outcome]) -> Result:
        figures = {name: _figures(name, outcomes, options.reference, peak) for name in names}
        work = _describe_json(options, workload)
        return Result(
            {"mode": "train", "work": work, "contestants": figures},
            title,
            ["", "tokens/s", f"x {options.reference}", "MFU", "padding", "peak memory"],
            [_row(name, outcomes, options.reference, peak) for name in names],
        )

    def keep(number: int, outcomes: dict[str, Outcome]) -> None:
        benchmark_modes.keep(result(outcomes), options, number, options.rounds, "rounds")

    outcomes = compare(
        workload,
        options.world_size,
        names,
        Schedule(options.rounds, options.steps, options.warmup_steps, keep_alive=keep_alive),
        console,
        threads=options.threads,
        after_round=keep,
    )
    final = result(outcomes)
    console.say("\n" + text_table(final.header, final.rows))
    write_result(final, options.json, options.markdown)
    failures = {outcome.failure for outcome in outcomes.values()}
    if failures == {OUT_OF_MEMORY}:
        raise UserError(
            "no contestant fits into memory; lower --global_batch_size and --micro_batch_tokens, "
            "or give a smaller --model_config"
        )
    if None not in failures:
        raise RuntimeError("every contestant failed")


def _workload(options: Any) -> Workload:
    from t5_fsdp.benchmark.workload import Workload

    return Workload(
        model=options.model,
        examples=_examples(options, options.model["vocab_size"]),
        global_batch_size=options.global_batch_size,
        micro_batch_tokens=options.micro_batch_tokens,
        max_source_tokens=options.max_source_tokens,
        max_target_tokens=options.max_target_tokens,
        param_dtype=options.param_dtype,
        activation_checkpointing=options.activation_checkpointing,
        device=options.device,
        seed=options.seed,
    )


def _examples(options: Any, vocab: int) -> Examples:
    from t5_fsdp.benchmark.workload import random_examples, read_examples

    lengths = {name: getattr(options, name) for name in ("max_source_tokens", "max_target_tokens")}
    if options.texts is not None:
        return read_examples(options.texts, options.tokenizer, vocab, **lengths)
    return random_examples(
        max(_RANDOM_EXAMPLES, options.global_batch_size),
        vocab,
        source_tokens=options.source_tokens,
        target_tokens=options.target_tokens,
        seed=options.seed,
        **lengths,
    )


def _describe(options: Any, workload: Workload) -> str:
    """The work in words."""
    from t5_fsdp.benchmark.workload import mean_lengths

    texts = "random token ids" if options.texts is None else options.texts.name
    source, target = mean_lengths(workload.examples)
    model = workload.model
    layers = model["num_layers"], model.get("num_decoder_layers", model["num_layers"])
    return (
        f"{layers[0]} + {layers[1]} layers, d_model {model['d_model']}, {workload.param_dtype}, "
        f"{options.world_size} x {workload.device}; {len(workload.examples):,} examples of "
        f"{texts}, "
        f"{source:.0f} source and {target:.0f} target tokens each, {workload.global_batch_size} in "
        "a step"
    )


def _describe_json(options: Any, workload: Workload) -> dict[str, Any]:
    import torch
    import transformers

    from t5_fsdp.benchmark.world import device_name

    return {
        "model": workload.model,
        "texts": None if options.texts is None else str(options.texts),
        "examples": len(workload.examples),
        "world_size": options.world_size,
        "device": device_name(options.device),
        "threads": options.threads,
        "cores": os.cpu_count(),
        "global_batch_size": workload.global_batch_size,
        "micro_batch_tokens": workload.micro_batch_tokens,
        "param_dtype": workload.param_dtype,
        "activation_checkpointing": workload.activation_checkpointing,
        "rounds": options.rounds,
        "steps": options.steps,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _peak_flops(options: Any) -> float | None:
    from t5_fsdp.benchmark.world import device_name
    from t5_fsdp.model.devices import peak_flops

    peak = peak_flops(device_name(options.device), options.param_dtype)
    return None if peak is None else peak * options.world_size


def _figures(
    name: str, outcomes: dict[str, Outcome], reference: str, peak: float | None
) -> dict[str, Any]:
    outcome = outcomes[name]
    figures = outcome.to_json()
    if outcome.segments:
        figures |= {
            "tokens_per_second": outcome.tokens_per_second,
            f"ratio_to_{reference}": outcome.ratio_to(outcomes[reference]),
            "mfu": outcome.mfu(peak),
            "padding_share": outcome.padding_share(),
            "peak_memory_bytes": max(part.peak_memory_bytes for part in outcome.segments),
        }
    return figures


def _row(name: str, outcomes: dict[str, Outcome], reference: str, peak: float | None) -> list[str]:
    from t5_fsdp.benchmark.comparison import CONTESTANTS
    from t5_fsdp.benchmark.tables import number

    title, figures = CONTESTANTS[name].title, _figures(name, outcomes, reference, peak)
    if not outcomes[name].segments:
        return [title, "failed", "", "", "", ""]
    return [
        title,
        number(figures["tokens_per_second"]),
        number(figures[f"ratio_to_{reference}"], ".2f"),
        number(figures["mfu"], ".1%"),
        number(figures["padding_share"], ".1%"),
        number(figures["peak_memory_bytes"] / 2**30, ".2f", " GiB"),
    ]
