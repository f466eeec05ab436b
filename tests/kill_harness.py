"""Kills runs with signal 9 at random moments, starts them again, and checks what they make of it.

    python -m tests.kill_harness [--kills 50] [--seed 1] [--folder /tmp/kills]

Two ranks under torchrun train a tiny T5 with dropout. One rank, both, or the launcher are killed,
half of the times while a checkpoint is being written (its folder is there, COMPLETE is not), else
in the start-up or somewhere in training. Each next launch has to go on from the newest complete
checkpoint, at most one interval before the newest that was begun. When a run reaches its end its
losses and weights are compared with those of an unbroken run, bit for bit, and another one begins.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from t5_fsdp.checkpoint.format import COMPLETE, complete_checkpoints, step_of
from t5_fsdp.checkpoint.stored_weights import read_weights
from tests.conftest import DROPOUT_MODEL, build_corpus, read_metrics, tiny_options
from tests.launch import Launched, launched, run, torchrun

INTERVAL, LAST_STEP = 5, 60
VICTIMS = ("one rank", "all ranks", "launcher")
OPTIONS = {
    "model.config": DROPOUT_MODEL,
    "parallel.param_dtype": "bf16",
    "schedule.name": "linear",
    "train.max_steps": LAST_STEP,
    "train.epochs": 1000,
    "checkpoint.every_steps": INTERVAL,
    "evaluation.max_examples": 2,
}
# Workers look every second whether their launcher is there; those that have lost another worker may
# wait for it until torchrun kills them, 30 s after its signal.
SECONDS_TO_END = {"launcher": 5.0, "one rank": 60.0, "all ranks": 10.0}
START_UP_SECONDS = 6.0
TRAINING_SECONDS = 0.6


@dataclass(frozen=True)
class Kill:
    """One kill and what was lost by it.

    Attributes:
        moment: "start-up", "training" or "saving".
        saving: the step whose checkpoint was being written, or None.
        trained: the last step that was logged.
        newest: the step of the newest complete checkpoint, 0 for none.
        begun: the newest step whose checkpoint was at least begun.
    """

    victim: str
    moment: str
    saving: int | None
    trained: int
    newest: int
    begun: int

    def __str__(self) -> str:
        during = "" if self.saving is None else f" the checkpoint of step {self.saving}"
        return (
            f"{self.victim} in {self.moment}{during}: step {self.trained} was logged, "
            f"goes on from step {self.newest}"
        )


class Campaign:
    """Runs of one configuration that are killed again and again.

    Args:
        corpus: as the fixture of this name makes it.
        folder: for the runs and their logs.
    """

    def __init__(self, corpus: Path, folder: Path, seed: int) -> None:
        self._corpus, self._folder = corpus, folder
        self._random = random.Random(seed)
        self._num_launches = self._num_runs = 0
        self._save_seconds = [0.2]
        self.kills: list[Kill] = []
        self.num_finished = 0

    def options(self, name: str) -> list[str]:
        """The command line of one of the runs."""
        return tiny_options(self._corpus, self._folder / name, **OPTIONS)

    def run(self, num_kills: int, reference: Path, say: Callable[[str], None]) -> None:
        """Kill until there are that many, half of them in a save; every run goes to its end.

        Args:
            reference: the folder of an unbroken run of the same options.

        Raises:
            AssertionError: a launch did not go on where it should, or a run ended otherwise.
        """
        while len(self.kills) < num_kills:
            self._num_runs += 1
            run_dir = self._folder / f"run-{self._num_runs}"
            while self._launch(run_dir, len(self.kills) < num_kills):
                say(f"{len(self.kills)}: {self.kills[-1]}")
            compare(run_dir, reference)
            self.num_finished += 1
            say(f"{run_dir.name} equals the unbroken run")

    def _launch(self, run_dir: Path, to_kill: bool) -> bool:
        """Start a run or go on with it; whether it was killed, else it has reached its end."""
        self._num_launches += 1
        log = self._folder / f"launch-{self._num_launches}.log"
        traces = Traces(run_dir)
        with launched(torchrun("train", self.options(run_dir.name)), log) as process:
            killed = to_kill and self._kill(process, traces)
            code = process.wait(SECONDS_TO_END[self._victim] if killed else 120)
            start = stated_start(process.output)
            assert killed or (start is not None and code == 0), process.output
            assert start in (None, traces.start), process.output
        if killed:
            self._note(traces)
        return killed

    def _kill(self, process: Launched, traces: Traces) -> bool:
        """Wait for a random moment and kill; False where the run was over before."""
        in_saves = sum(kill.moment == "saving" for kill in self.kills)
        if 2 * in_saves <= len(self.kills):
            self._moment = "saving"
        else:
            self._moment = self._random.choices(["training", "start-up"], [3, 1])[0]
        self._victim = VICTIMS[len(self.kills) % len(VICTIMS)]
        if not process.wait_until(lambda: len(process.workers()) == 2):
            return False
        if not self._wait(process, traces):
            return False
        workers = process.workers()
        if len(workers) < 2:  # it is about to end
            return False
        pids = {
            "one rank": [self._random.choice(workers)],
            "all ranks": workers,
            "launcher": [process.launcher.pid],
        }[self._victim]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return True

    def _wait(self, process: Launched, traces: Traces) -> bool:
        if self._moment == "start-up":
            time.sleep(self._random.uniform(0, START_UP_SECONDS))
            return not process.has_ended
        if self._moment == "training":
            good = process.wait_until(lambda: traces.last_step > traces.start)
            time.sleep(self._random.uniform(0, TRAINING_SECONDS))
            return good and not process.has_ended
        after = traces.start + INTERVAL * self._random.randint(0, 1)
        good = process.wait_until(lambda: (traces.saving or 0) > after)
        time.sleep(self._random.uniform(0, statistics.median(self._save_seconds)))
        return good and not process.has_ended

    def _note(self, traces: Traces) -> None:
        moment, saving, newest = self._moment, traces.saving, newest_step(traces.run_dir)
        if saving is not None:
            moment = "saving"
        elif moment == "saving":  # it was complete before
            moment = "training"
        begun = max(newest, saving or 0)
        kill = Kill(self._victim, moment, saving, traces.last_step, newest, begun)
        # What is lost is at most one interval, but for the save that a kill has hit: then the steps
        # that were made beside it are lost too.
        assert begun - newest <= INTERVAL, kill
        assert saving is not None or kill.trained - newest <= INTERVAL, kill
        self.kills.append(kill)
        if (traces.run_dir / "metrics.jsonl").exists():
            rows = read_metrics(traces.run_dir, "checkpoint")
            self._save_seconds += [row["total_seconds"] for row in rows[-2:]]


class Traces:
    """What one launch has left in the run's folder, apart from what was there before it.

    Attributes:
        start: the step that it has to go on from.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.start = newest_step(run_dir)
        self._metrics = run_dir / "metrics.jsonl"
        self._offset = self._metrics.stat().st_size if self._metrics.exists() else 0
        self._old = {folder.stat().st_ino for folder in self._folders()}

    def _folders(self) -> list[Path]:
        return list((self.run_dir / "checkpoints").glob("step-*"))

    @property
    def last_step(self) -> int:
        """The last one that it has logged."""
        if not self._metrics.exists():
            return self.start
        content = self._metrics.read_bytes()[self._offset :].decode()
        return max([self.start, *map(int, re.findall(r'"train", "step": (\d+)', content))])

    @property
    def saving(self) -> int | None:
        """The step of the checkpoint that it is writing, or was when it was killed."""
        for folder in self._folders():
            with contextlib.suppress(OSError):
                is_new = folder.stat().st_ino not in self._old
                if is_new and step_of(folder) and not (folder / COMPLETE).exists():
                    return step_of(folder)
        return None


def stated_start(output: str) -> int | None:
    """The step from which a launch says that it goes on; a kill may come after all was done."""
    patterns = (r"resuming from .*\(step (\d+)\)", r"is already trained to step (\d+)")
    said = next((match for p in patterns if (match := re.search(p, output))), None)
    if said is None:
        return 0 if "starting at step 1" in output else None
    return int(said[1])


def newest_step(run_dir: Path) -> int:
    """Of the newest complete checkpoint, 0 for none."""
    return max([step_of(folder) or 0 for folder in complete_checkpoints(run_dir)], default=0)


def compare(run_dir: Path, reference: Path) -> None:
    """Raises AssertionError where losses or final weights differ in a bit."""
    losses = [
        [(row["step"], row["loss"]) for row in read_metrics(folder, "train")]
        for folder in (run_dir, reference)
    ]
    assert [step for step, _ in losses[0]] == list(range(1, LAST_STEP + 1))
    assert losses[0] == losses[1]
    found, expected = (
        read_weights(folder / f"checkpoints/step-{LAST_STEP:08d}")
        for folder in (run_dir, reference)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def main(argv: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="Keep the runs and their logs here.")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(build_corpus(folder), folder, options.seed)
        done = run(torchrun("train", campaign.options("unbroken")))
        if done.returncode != 0:
            sys.exit(done.stderr)
        campaign.run(options.kills, folder / "unbroken", lambda text: print(text, flush=True))
        kills = campaign.kills
        moments = Counter(kill.moment for kill in kills)
        victims = Counter(kill.victim for kill in kills)
        print(
            f"{len(kills)} kills {dict(moments)} {dict(victims)}; {campaign.num_finished} runs "
            f"equal the unbroken one; steps lost at most {max(k.trained - k.newest for k in kills)}"
            f", from the newest checkpoint that was begun at most "
            f"{max(k.begun - k.newest for k in kills)} (the interval is {INTERVAL})"
        )


if __name__ == "__main__":
    main()
