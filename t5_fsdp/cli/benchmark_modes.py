"""What `benchmark` measures beside training: generation, data, checkpoints, start-up, one GPU."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.console import Console
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    from t5_fsdp.benchmark.gpu_suite import Measured
    from t5_fsdp.benchmark.rounds import Figures
    from t5_fsdp.benchmark.tables import Result
    from t5_fsdp.benchmark.workload import Workload

_TURN_SECONDS = 3600.0
# Of eight minutes: what hangs at the end takes some seconds more.
GPU_SUITE_SECONDS = 440.0


def generate(options: Any, console: Console) -> None:
    """Summaries and their ROUGE, by this program's evaluation and by Seq2SeqTrainer.predict."""
    from t5_fsdp.benchmark.generation import (
        GenerationWork,
        ours,
        seq2seq_trainer,
        write_random_model,
    )
    from t5_fsdp.benchmark.workload import read_pairs

    rows = read_pairs(options.texts, "--texts", options.examples)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = scratch
            write_random_model(Path(scratch), options.model, options.tokenizer, options.seed)
        work = GenerationWork(
            checkpoint=str(checkpoint),
            rows=rows,
            num_beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            max_source_tokens=options.max_source_tokens,
            max_target_tokens=options.max_target_tokens,
            device=options.device,
            param_dtype=options.param_dtype,
            seed=options.seed,
        )
        functions: dict[str, Callable[[], None]] = {
            "this program": functools.partial(ours, work, options.rounds),
            "Seq2SeqTrainer.predict": functools.partial(seq2seq_trainer, work, options.rounds),
        }
        _compare(functions, options, "summaries_per_second", console)


def checkpoint(options: Any, workload: Workload, console: Console) -> None:
    """Blocked and total seconds of a checkpoint, beside training and waiting for the files."""
    from t5_fsdp.benchmark.saving import save

    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        functions: dict[str, Callable[[], None]] = {
            f"async_save: {str(background).lower()}": functools.partial(
                save, workload, options.rounds, background, scratch
            )
            for background in (True, False)
        }
        _compare(functions, options, "blocked_seconds", console)


def _compare(
    functions: Mapping[str, Callable[[], None]], options: Any, reference: str, console: Console
) -> None:
    """Each on ranks of its own gets its turn in every round; what rank 0 says counts."""
    from t5_fsdp.benchmark.comparison import start_ranks
    from t5_fsdp.benchmark.ranks import Turns

    with contextlib.ExitStack() as stack:

        def begin(function: Callable[[], None]) -> Callable[[], Figures]:
            ranks = start_ranks(options.device, options.world_size, options.threads)
            stack.callback(ranks.close, force=True)
            turns = Turns(ranks, _TURN_SECONDS, function)
            return lambda: turns.take()[0]

        begun = {title: begin(function) for title, function in functions.items()}
        _measure(begun, options, reference, console)


def start_up(options: Any, console: Console) -> None:
    """From the command to the first step, beside an empty script; and `--help`."""
    from t5_fsdp.benchmark.start_up import StartUp

    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        made = StartUp(Path(scratch), options.world_size)
        _measure(
            {
                "to the first optimizer step": made.first_step,
                "empty script, torch and T5 imported": made.empty_script,
                "train.py --help": made.help,
            },
            options,
            "seconds",
            console,
            base=1,
        )


def data(options: Any, console: Console) -> None:
    """Rows a second of a made-up WikiHow, and padding of the batches made of it."""
    from t5_fsdp.benchmark.data_preparation import (
        map_by_datasets,
        padding_of_prepared,
        prepare,
        write_csv,
    )

    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        write_csv(folder / "wikihowAll.csv", options.examples)
        arguments = folder, options.tokenizer, options.examples
        padding: dict[str, float] = {}

        def ours() -> Figures:
            figures = prepare(*arguments)
            padding.update(padding or padding_of_prepared(folder))
            return figures

        contestants: dict[str, Callable[[], Figures]] = {
            "this program: prepare_data": ours,
            "datasets: csv and map": lambda: map_by_datasets(*arguments),
        }
        _measure(contestants, options, "rows_per_second", console, extra={"padding": padding})
        for title, share in padding.items():
            console.say(f"padding, {title}: {share:.1%}")


def _measure(
    contestants: Mapping[str, Callable[[], Figures]],
    options: Any,
    reference: str,
    console: Console,
    *,
    base: int = 0,
    extra: dict[str, Any] | None = None,
) -> None:
    """Measure in turn, print a table and write the files.

    Args:
        reference: the figure of which ratios are taken.
        base: the contestant that they are taken to.
    """
    from t5_fsdp.benchmark.rounds import measure_in_turn, medians, ratio
    from t5_fsdp.benchmark.tables import Result, text_table, write_result

    def result(found: Mapping[str, list[Figures]]) -> Result:
        other = found[list(found)[base]]
        names = list(other[0])
        rows, results = [], {}
        for title, rounds in found.items():
            middle, times = medians(rounds), ratio(rounds, other, reference)
            rows.append([title, *(_cell(n, middle[n]) for n in names), f"{times:.2f}"])
            results[title] = {"medians": middle, f"ratio_of_{reference}": times, "rounds": rounds}
        return Result(
            {"mode": options.mode, "contestants": results, **(extra or {})},
            f"benchmark --mode {options.mode}, medians of {len(other)}; ratio of "
            f"{reference.replace('_', ' ')} to {list(found)[base]}",
            ["", *(_short(name) for name in names), "ratio"],
            rows,
        )

    def after_round(number: int, found: Mapping[str, list[Figures]]) -> None:
        keep(result(found), options, number, options.rounds, "rounds")

    final = result(measure_in_turn(contestants, options.rounds, console, after_round))
    console.say(f"\n{final.title}\n\n" + text_table(final.header, final.rows))
    write_result(final, options.json, options.markdown)


def keep(result: Result, options: Any, done: int, total: int, unit: str) -> None:
    """Write what there is so far, so that a benchmark that is stopped was not for nothing."""
    from t5_fsdp.benchmark.tables import write_result

    if done < total:
        write_result(result, options.json, options.markdown, f"{done} of {total} {unit}")


_SHORT = {
    "summaries_per_second": "per s",
    "generating_seconds": "of it gen.",
    "rouge1": "R-1",
    "rouge2": "R-2",
    "rougeL": "R-L",
    "rougeLsum": "R-Ls",
    "rows_per_second": "rows/s",
    "peak_memory_bytes": "memory",
    "blocked_seconds": "blocked",
    "total_seconds": "total",
}


def _short(name: str) -> str:
    return _SHORT.get(name, name)


def _cell(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name.startswith("rouge"):
        return f"{100 * value:.2f}"
    return f"{value:,.2f}" + (" s" if name.endswith("seconds") else "")


def gpu_suite(options: Any, console: Console, began: float) -> None:
    """One table about one GPU.

    Args:
        began: when the command did, by `time.monotonic()`.
    """
    from t5_fsdp.benchmark import gpu_suite as suite
    from t5_fsdp.benchmark.tables import text_table, write_result
    from t5_fsdp.benchmark.world import device_name
    from t5_fsdp.model.devices import peak_flops

    name = device_name(options.device)
    peak = peak_flops(name, "bf16")
    num_rows = len(suite.chosen_rows(options.only))
    console.say(
        f"{name}; every row trains for some steps on random weights and token ids; peak and "
        "planned memory in GiB"
    )
    measured = suite.measure(
        options.device,
        tiny=options.tiny,
        only=options.only,
        deadline=began + (options.limit_seconds or GPU_SUITE_SECONDS),
        console=console,
        after_row=lambda done: keep(
            _suite_result(done, name, peak), options, len(done), num_rows, "rows"
        ),
    )
    final = _suite_result(measured, name, peak)
    notes = [f"{item.row.title}: {item.note}" for item in measured if item.note]
    console.say("\n" + "\n".join([text_table(final.header, final.rows), *notes]))
    write_result(final, options.json, options.markdown)
    if all(item.segment is None for item in measured):
        text = f"no row could be measured: {measured[0].note}"
        if any(item.short_note == "failed" for item in measured):
            raise RuntimeError(text)
        raise UserError(f"{text}; raise --limit_seconds, or choose smaller rows by --only")


def _suite_result(measured: Sequence[Measured], device: str, peak: float | None) -> Result:
    """The table about it.

    Args:
        device: its name.
        peak: its FLOPs a second in bf16, where they are known.
    """
    from t5_fsdp.benchmark.tables import Result, number

    rows: list[Sequence[str]] = []
    for item in measured:
        segment = item.segment
        planned = number(None if item.planned_bytes is None else item.planned_bytes / 2**30, ".1f")
        if segment is None:
            rows.append([item.row.title, "", item.short_note, "", "", planned, ""])
            continue
        rows.append(
            [
                item.row.title,
                f"{1000 * segment.seconds / segment.steps:,.0f}",
                f"{segment.tokens_per_second:,.0f}",
                number(item.mfu(peak), ".1%"),
                f"{segment.peak_memory_bytes / 2**30:.1f}",
                planned,
                str(item.compiled_graphs) if item.row.compiled else "",
            ]
        )
    return Result(
        {"suite": "gpu", "device": device, "rows": [item.to_json(peak) for item in measured]},
        f"benchmark --suite gpu on {device}",
        ["", "ms/step", "tokens/s", "MFU", "peak", "planned", "graphs"],
        rows,
    )
