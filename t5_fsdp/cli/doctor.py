"""`doctor`: is this machine fit for a run, and what is to be mended first?"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from t5_fsdp.cli.machine_checks.finding import Finding, ok, problem
from t5_fsdp.cli.options import Extra, Layers, parse_layers, resolve
from t5_fsdp.config import Config
from t5_fsdp.errors import EXIT_DONE, EXIT_USER_ERROR, UserError

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
    try:
        layers = parse_layers(
            argv,
            command="doctor",
            description="Check whether this machine is fit for training, and say what to mend; "
            "with --config also what that configuration needs.",
            extra=_EXTRA,
        )
        num_problems = 0
        for finding in examine(layers):
            print(as_text(finding), flush=True)
            num_problems += finding.state == "problem"
        if num_problems:
            number = "1 problem" if num_problems == 1 else f"{num_problems} problems"
            raise UserError(f"{number} to mend before a run, named above with what to do")
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_USER_ERROR
    print("nothing stands in the way of a run")
    return EXIT_DONE


def examine(layers: Layers) -> Iterator[Finding]:
    """All findings, as they are made."""
    from t5_fsdp.cli.machine_checks import software

    yield software.check_python()
    packages = software.check_packages()
    yield from packages
    if any(finding.state == "problem" for finding in packages):
        return  # what follows needs them

    from t5_fsdp.cli.machine_checks import gpus, limits, network, storage

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
    yield from storage.check_run_dir(Path(config.run_dir))
    yield network.check_hub(config)
    yield from network.check_adapters(adapters)
    if layers.own["peers"]:
        yield network.check_peers(num_gpus)


def _read_config(layers: Layers) -> tuple[Config, list[Finding]]:
    """The configuration as given, else the defaults; what is wrong with it and its data."""
    from t5_fsdp.data.sources import source_problems

    has_config = bool(layers.files)
    layers.print_config = False
    try:
        config = resolve(layers, check_data=source_problems if has_config else None)
        findings = [ok("configuration", "sound, and its data files are there")] * has_config
    except UserError as error:
        has_config = False
        config, findings = Config(), [problem("configuration", text) for text in error.problems]
        run_dir = layers.flags.get("run_dir", layers.files.get("run_dir"))
        if isinstance(run_dir, str) and run_dir:
            config.run_dir = run_dir
    if not has_config:
        config.model.name = None  # that of the defaults is nobody's
    return config, findings


_SUBJECT_WIDTH = 15


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
