"""Contestants that train on the same work in turn, A B C A B C, and what came of it."""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from t5_fsdp.benchmark.clock import Segment, joined
from t5_fsdp.benchmark.ranks import RankFailed, Ranks, Turns
from t5_fsdp.benchmark.workload import Workload
from t5_fsdp.console import Console
from t5_fsdp.distributed import CPU_KERNEL_CACHES
from t5_fsdp.files import json_number
from t5_fsdp.packages import is_installed

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Contestant:
    """Something that trains.

    Attributes:
        title: for tables.
        module: of this package; its `train` is run on each rank.
        arguments: further ones of `train`.
        needs: packages without which it can't run.
    """

    title: str
    module: str
    arguments: tuple[Any, ...] = ()
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """A package that it needs and that is not installed."""
        return next((n for n in self.needs if not is_installed(n)), None)


CONTESTANTS: dict[str, Contestant] = {
    "fsdp2": Contestant("this program, fsdp2", "ours", ("fsdp2",)),
    "ddp": Contestant("this program, ddp", "ours", ("ddp",)),
    "bare": Contestant("bare PyTorch loop", "bare_loop"),
    "seq2seq": Contestant(
        "Seq2SeqTrainer, random", "seq2seq_trainer", ("random",), ("accelerate",)
    ),
    "seq2seq_grouped": Contestant(
        "Seq2SeqTrainer, by length", "seq2seq_trainer", ("group_by_length",), ("accelerate",)
    ),
    "lightning": Contestant("Lightning, random", "lightning_trainer", (), ("lightning",)),
    "tutorial": Contestant("FSDP1, fixed padding", "tutorial"),
}


@dataclass(frozen=True)
class Schedule:
    """How long each contestant trains.

    Attributes:
        rounds: turns that each one gets.
        segment_steps: steps that are timed in a turn.
        warmup_steps: before the first.
        few_steps: `segment_steps` of the tutorial's, whose steps are alike and long.
        keep_alive: all contestants stay in memory; else each starts anew in every round.
        timeout_seconds: for a turn, start and warm-up included.
    """

    rounds: int = 5
    segment_steps: int = 10
    warmup_steps: int = 3
    few_steps: int = 2
    keep_alive: bool = True
    timeout_seconds: float = 600.0

    def clock_options(self, name: str, contestants: Sequence[str]) -> dict[str, int]:
        """Arguments of `Clock`."""
        is_slow = name == "tutorial" and len(contestants) > 1
        return {
            "warmup_steps": min(self.warmup_steps, self.few_steps) if is_slow
            else self.warmup_steps,
            "segment_steps": min(self.few_steps, self.segment_steps) if is_slow
            else self.segment_steps,
            "segments": self.rounds if self.keep_alive else 1,
        }  # fmt: skip


@dataclass
class Outcome:
    """What a contestant has reached.

    Attributes:
        segments: one a round, of all ranks together.
        losses: by step, where it keeps them.
        failure: why there are no segments, or no more.
    """

    segments: list[Segment] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Median over the rounds."""
        return statistics.median(segment.tokens_per_second for segment in self.segments)

    def ratio_to(self, other: Outcome) -> float | None:
        """Median over the rounds of how many times as fast it was as `other` in the same one."""
        pairs = list(zip(self.segments, other.segments, strict=False))
        if not pairs:
            return None
        return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)

    def padding_share(self) -> float:
        """Of what was computed in all rounds."""
        real = sum(segment.real_tokens for segment in self.segments)
        return 1.0 - real / max(1, sum(segment.padded_tokens for segment in self.segments))

    def mfu(self, peak_flops: float | None) -> float | None:
        """Share of the devices' peak that went into real tokens; None where it is unknown."""
        if peak_flops is None:
            return None
        return statistics.median(s.flops / s.seconds / peak_flops for s in self.segments)

    def to_json(self) -> dict[str, Any]:
        """The segments, and the losses of the ones that keep them."""
        return {
            "failure": self.failure,
            "losses": {step: json_number(loss) for step, loss in self.losses.items()},
            "segments": [
                {**dataclasses.asdict(s), "tokens_per_second": s.tokens_per_second}
                for s in self.segments
            ],
        }


def compare(
    workload: Workload,
    world_size: int,
    names: Sequence[str],
    schedule: Schedule,
    console: Console,
    *,
    threads: int | None = None,
    after_round: Callable[[int, dict[str, Outcome]], None] = lambda number, outcomes: None,
) -> dict[str, Outcome]:
    """Run contestants in turn; what fails is told and left out from then on.

    Args:
        names: of `CONTESTANTS`; what they need is installed.
        threads: of each rank.
        after_round: gets the number of the round and what was found so far.
    """
    runs = {name: _Run(name, workload, world_size, schedule, names, threads) for name in names}
    outcomes = {name: run.outcome for name, run in runs.items()}
    try:
        for number in range(1, schedule.rounds + 1):
            for run in runs.values():
                _turn(run, number, console)
            after_round(number, outcomes)
    finally:
        for run in runs.values():
            run.close(force=True)  # who is done has closed its ranks itself
    return outcomes


def _turn(run: _Run, number: int, console: Console) -> None:
    if run.outcome.failure is not None:
        return
    began = time.monotonic()
    try:
        segment = run.take_turn(is_last=number == run.schedule.rounds)
    except RankFailed as failure:
        run.close(force=True)
        run.outcome.failure = OUT_OF_MEMORY if failure.out_of_memory else failure.reason
        console.warn(f"{run.title}: {run.outcome.failure}")
        if failure.details and not failure.out_of_memory:
            console.say(failure.details)
        return
    console.say(
        f"round {number}: {run.title}: {segment.tokens_per_second:,.0f} real tokens/s "
        f"({segment.steps} steps in {segment.seconds:.1f} s; with the start of it "
        f"{time.monotonic() - began:.0f} s)"
    )


class _Run:
    """A contestant with its ranks."""

    def __init__(
        self,
        name: str,
        workload: Workload,
        world_size: int,
        schedule: Schedule,
        names: Sequence[str],
        threads: int | None,
    ) -> None:
        self.title = CONTESTANTS[name].title
        self.schedule = schedule
        self.outcome = Outcome()
        self._contestant = CONTESTANTS[name]
        self._workload, self._world_size, self._threads = workload, world_size, threads
        self._clock_options = schedule.clock_options(name, names)
        self._turns: Turns | None = None

    def take_turn(self, is_last: bool) -> Segment:
        """Train the next segment.

        Raises:
            RankFailed: something went wrong; the contestant is out.
        """
        if self._turns is None:
            self._turns = Turns(
                start_ranks(self._workload.device, self._world_size, self._threads),
                self.schedule.timeout_seconds,
                train_function(self._contestant.module),
                self._workload,
                self._clock_options,
                *self._contestant.arguments,
            )
        segment = joined(self._turns.take())
        self.outcome.segments.append(segment)
        if is_last or not self.schedule.keep_alive:
            self.outcome.losses.update(self._turns.end()[0]["losses"])
            self.close()
        return segment

    def close(self, force: bool = False) -> None:
        """End its ranks, if they are still there."""
        if self._turns is not None:
            self._turns.ranks.close(force)
            self._turns = None


def start_ranks(device: str, world_size: int, threads: int | None) -> Ranks:
    """Processes for a contestant, with the same bounds of a CPU's caches for all of them."""
    environment: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        environment = {**environment, **CPU_KERNEL_CACHES, "CUDA_VISIBLE_DEVICES": ""}
    return Ranks(world_size, environment=environment, threads=threads, quiet=True)


def train_function(module: str) -> Callable[..., dict[str, Any]]:
    """The `train` of a module of this package; torch is imported on the ranks alone."""
    return _Train(module)


@dataclass(frozen=True)
class _Train:
    module: str

    def __call__(self, *args: Any) -> dict[str, Any]:
        found = importlib.import_module(f"t5_fsdp.benchmark.{self.module}")
        return found.train(*args)
