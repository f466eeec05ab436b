"""From the command to the first optimizer step, beside a script that does nothing but import."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from t5_fsdp.benchmark.commands import failure, run_command, started
from t5_fsdp.benchmark.rounds import Figures

ROOT = Path(__file__).parents[2]
_CONFIG = ROOT / "configs/demo.yaml"
_POLL_SECONDS = 0.01
_MOST_SECONDS = 300.0
_SECONDS_TO_STOP = 60.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# What no training with torch and transformers can do without.
_EMPTY_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from transformers import T5ForConditionalGeneration
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").close()
dist.barrier()
dist.destroy_process_group()
"""


class StartUp:
    """Commands of a demo run with prepared data in `folder`.

    Args:
        folder: gets data and runs.
        world_size: processes of torchrun.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world_size = folder, world_size
        self._runs = 0
        self._empty = folder / "empty.py"
        self._empty.write_text(_EMPTY_SCRIPT, encoding="utf-8")
        self._run("prepare_data", *self._options("prepared"))

    def _options(self, name: str) -> list[str]:
        return [
            "--config", str(_CONFIG), "--run_dir", str(self._folder / name),
            "--data.cache_dir", str(self._folder / "cache"),
        ]  # fmt: skip

    @staticmethod
    def _run(script: str, *options: str) -> float:
        """Seconds that one of the scripts takes."""
        return run_command([str(ROOT / f"scripts/{script}.py"), *options], _ENVIRONMENT).seconds

    def first_step(self) -> Figures:
        """Seconds until the first row of metrics.jsonl, which follows the first step."""
        self._runs += 1
        name = f"run-{self._runs}"
        metrics = self._folder / name / "metrics.jsonl"

        def has_row() -> bool:
            return metrics.exists() and '"train"' in metrics.read_text(encoding="utf-8")

        return self._until(
            [str(ROOT / "scripts/train.py"), *self._options(name), "--logging.every_steps", "1"],
            has_row,
        )

    def empty_script(self) -> Figures:
        """Seconds until both ranks of the script have met."""
        self._runs += 1
        done = self._folder / f"done-{self._runs}"
        return self._until([str(self._empty), str(done)], done.exists)

    def help(self) -> Figures:
        """Seconds of `train.py --help`."""
        return {"seconds": self._run("train", "--help")}

    def _until(self, script: list[str], is_there: Callable[[], bool]) -> Figures:
        """Seconds until `is_there`, after which the processes are stopped.

        Raises:
            UserError: they refused to start.
            RuntimeError: they ended before, or it took too long; with what they said.
        """
        launch = ["-m", "torch.distributed.run", "--standalone",
                  "--nproc_per_node", str(self._world_size)]  # fmt: skip
        with tempfile.TemporaryFile() as output:
            began = time.perf_counter()
            with started([*launch, *script], output, _ENVIRONMENT) as process:
                try:
                    while not is_there():
                        seconds = time.perf_counter() - began
                        if process.poll() is not None or seconds > _MOST_SECONDS:
                            output.seek(0)
                            said = output.read().decode("utf-8", "replace")
                            raise failure(os.path.basename(script[0]), process.returncode, said)
                        time.sleep(_POLL_SECONDS)
                    return {"seconds": time.perf_counter() - began}
                finally:
                    _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """torchrun passes SIGTERM on to its workers and waits for them."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_STOP)
