"""`doctor`: is this machine fit for a run, and what is to be mended first?"""

from __future__ import annotations

import functools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from t5_fsdp.cli.machine_checks.finding import Finding, note, ok, problem
from t5_fsdp.cli.options import Extra, Layers, look_over, parse_layers
from t5_fsdp.config import Config
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import run_small

_EXTRA = [
    Extra(
        "peers",
        "Start a process on each GPU (without GPUs two on the CPU) and time what they send to each "
        "other.",
        type=bool,
        default=True,
    )
]


def main(argv: Sequence[str]) -> int:
    """Run the checks; 0, or 2 when a problem was found."""
    return run_small(functools.partial(_doctor, argv))


def _doctor(argv: Sequence[str]) -> Iterator[str]:
    layers = parse_layers(
        argv,
        command="doctor",
        description="Check whether this machine is fit for training, and say what to mend; "
        "with --config also what that configuration needs.",
        extra=_EXTRA,
    )
    num_problems = 0
    for finding in examine(layers):
        yield as_text(finding)
        num_problems += finding.state == "problem"
    if num_problems:
        number = "1 problem" if num_problems == 1 else f"{num_problems} problems"
        raise UserError(f"{number} to mend before a run, named above with what to do")
    yield "nothing stands in the way of a run"


def examine(layers: Layers) -> Iterator[Finding]:
    """All findings, as they are made."""
    from t5_fsdp.cli.machine_checks import software

    yield software.check_python()
    packages = software.check_packages()
    yield from packages
    if any(finding.state == "problem" for finding in packages):
        return  # what follows needs them

    from t5_fsdp.cli.machine_checks import gpus, limits, network, run_state, storage

    config, findings = _read_config(layers)
    yield from findings
    facts = gpus.gather_gpu_facts()
    yield from gpus.judge_gpus(facts, config.parallel)
    num_gpus = len(facts.gpus)
    adapters = network.rdma_adapters()
    yield from software.check_compiler(config, on_gpu=num_gpus > 0)
    yield from software.check_trackers(config)
    yield limits.check_cores(max(1, num_gpus))
    yield limits.check_memory(max(1, num_gpus))
    yield limits.check_open_files()
    yield from limits.check_locked_memory(bool(adapters))
    yield storage.check_shared_memory(on_gpu=num_gpus > 0)
    place = storage.check_run_dir(Path(config.run_dir))
    yield from place
    if not any(finding.state == "problem" for finding in place):
        yield from run_state.check_going_on(Path(config.run_dir), config.checkpoint)
    yield network.check_hub(config)
    yield from network.check_adapters(adapters)
    if layers.own["peers"]:
        yield network.check_peers(num_gpus)


def _read_config(layers: Layers) -> tuple[Config, list[Finding]]:
    """The configuration as far as it can be read, and what is wrong with it and its data."""
    from t5_fsdp.data.source_checks import source_problems

    has_config = bool(layers.files)
    found = look_over(layers, check_data=source_problems if has_config else None)
    config = found.config
    findings = [problem("configuration", text) for text in found.problems]
    if found.in_doubt:
        findings.append(
            note(
                "configuration",
                f"what can't be read has its default in all that follows: {_few(found.in_doubt)}",
            )
        )
    if has_config and not findings:
        findings = [ok("configuration", "sound, and its data files are there")]
    is_given = has_config or "name" in layers.flags.get("model", {})
    if not is_given or "model.name" in found.in_doubt:
        config.model.name = None  # that of the defaults is nobody's
    if "run_dir" not in {**layers.files, **layers.flags}:
        config.run_dir = str(Path(config.run_dir).parent)  # likewise; runs lie in there
    return config, findings


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (" ..." if len(names) > _MOST_NAMES else "")


_SUBJECT_WIDTH = 15
_MOST_NAMES = 5  # of options, in a line


def as_text(finding: Finding) -> str:
    """A line, or several as wide as the terminal."""
    head = f"{finding.state:8} {finding.subject:{_SUBJECT_WIDTH}}"
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    return textwrap.fill(
        head + finding.text,
        width,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
