"""The training loop: steps, meters, validation, checkpoints, interruptions."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from t5_fsdp.checkpoint.format import RunState, complete_checkpoints, is_checkpoint
from t5_fsdp.checkpoint.manager import CheckpointManager, SavedCheckpoint
from t5_fsdp.checkpoint.retention import best_steps
from t5_fsdp.config import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)
from t5_fsdp.console import Console, Progress
from t5_fsdp.data.batching import Batches, StepBatch
from t5_fsdp.distributed import World
from t5_fsdp.errors import Preempted
from t5_fsdp.evaluation.evaluate import EvaluationStopped, ScoringFailed, Validation
from t5_fsdp.evaluation.shown_summaries import as_lines, as_markdown
from t5_fsdp.interruption import Interruption
from t5_fsdp.model.flops import T5Shape
from t5_fsdp.parallel.compilation import MOST_GRAPHS, num_compilations
from t5_fsdp.parallel.engine import Engine
from t5_fsdp.parallel.wrapping import blocks_at_work
from t5_fsdp.quantities import counted
from t5_fsdp.seeding import seed_torch
from t5_fsdp.training.early_stopping import (
    describe_early_stop,
    stops_early,
    validations_without_best,
)
from t5_fsdp.training.loss_scale import LossScale, initial_loss_scale
from t5_fsdp.training.meters import Meters
from t5_fsdp.training.metrics import MetricsLog, describe, describe_briefly, write_status
from t5_fsdp.training.optimizer import learning_rate, take_step
from t5_fsdp.training.out_of_memory import Estimate, MemoryGuard
from t5_fsdp.training.profiling import MemorySnapshots, StepTraces
from t5_fsdp.training.step_result import HostCopy, StepInFlight, StepResult, refusal
from t5_fsdp.training.trackers.trackers import Trackers

_SETTLE_SECONDS = 20.0  # torchrun kills what has not ended 30 s after its signal
# Skipped in a row where fp16 looks for the largest scale that its gradients stand.
_SKIPPED_WITH_FP16 = 25


@dataclass(frozen=True)
class LoopOptions:
    """The sections of the configuration that the loop reads."""

    seed: int
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig

    @property
    def skip_limit(self) -> int:
        """Steps in a row that are skipped, not being finite, before the run stops."""
        if self.train.skip_nonfinite_steps is not None:
            return self.train.skip_nonfinite_steps
        return _SKIPPED_WITH_FP16 if self.parallel.uses_fp16 else 0


@dataclass
class Requests:
    """What ranks ask for between two steps, the same on every rank."""

    stop: bool
    save_failed: bool
    save_is_due: bool


def total_steps(steps_per_epoch: int | None, train: TrainConfig) -> int:
    """Length of the run: epochs or max_steps, whichever comes first; a stream knows no epochs."""
    if steps_per_epoch is None:
        assert train.max_steps is not None
        return train.max_steps
    # Rounded first: 100 x 0.07 is a little more than 7 in binary.
    steps = max(1, math.ceil(round(steps_per_epoch * train.epochs, 9)))
    return steps if train.max_steps is None else min(steps, train.max_steps)


class Trainer:
    """Trains from `state.step` to the end of the run.

    Args:
        engine: the sharded model with its weights in place.
        batches: this rank's share of every step.
        state: where the run stands; changed as it goes on, saved with each checkpoint.
        save: begins to write the checkpoint of `state`.
        validate: loss and ROUGE of the validation subset for a step; None without such a split.
        peak_flops: of all devices together, FLOP a second, or None where unknown.
        trackers: where figures and shown summaries go beside metrics.jsonl.
        estimate_memory: for the advice when memory runs out; None where there is no closed form.
    """

    def __init__(
        self,
        options: LoopOptions,
        *,
        run_dir: Path,
        world: World,
        console: Console,
        interruption: Interruption,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        state: RunState,
        checkpoints: CheckpointManager,
        save: Callable[[RunState], None],
        validate: Callable[[int], Validation] | None,
        shape: T5Shape,
        peak_flops: float | None,
        trackers: Trackers,
        estimate_memory: Estimate | None = None,
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._world, self._console = world, console
        self._interruption = interruption
        self._engine, self._optimizer = engine, optimizer
        self._batches, self._state = batches, state
        self._checkpoints, self._save, self._validate = checkpoints, save, validate
        # Units that lie in a block are gathered in its forward pass, which then waits for others.
        by_block = options.parallel.wrap == "block"
        self._meters = Meters(
            world,
            shape=shape,
            peak_flops=peak_flops,
            window=state.window,
            blocks=blocks_at_work(engine.model) if by_block else [],
        )
        self._traces = StepTraces(run_dir, options.logging.profile, world, console)
        self._snapshots = MemorySnapshots(run_dir, options.logging.memory_snapshot, world, console)
        sections = options.parallel, options.optimizer, options.train
        self._memory = MemoryGuard(
            world, sections, batches.longest_example, estimate_memory, self._snapshots
        )
        self._scale = LossScale(
            initial_loss_scale(options.parallel), state.loss_scale, world.device
        )
        self._in_flight: deque[StepInFlight] = deque()
        self._result: StepResult | None = None  # of the last step that was settled
        self._metrics = MetricsLog(run_dir if world.is_main else None, trackers)
        self._last = total_steps(batches.steps_per_epoch, options.train)
        # A run that branches off has not got the checkpoint it starts from.
        own = state.step > 0 and is_checkpoint(checkpoints.path(state.step))
        # Of these the first is being written, or is; the second has its COMPLETE (on rank 0).
        self._begun_step = self._saved_step = state.step if own else None
        checkpoints.on_saved = self._note_saved
        self._last_save_began = time.monotonic()
        self._num_compilations = self._num_skipped = 0
        self._has_shown_documents = False

    def run(self) -> str:
        """Train to the last step, or to where validation says that it gets no better.

        Returns:
            What was done, in words.

        Raises:
            Preempted: a signal asked to stop; the checkpoint is written.
            UserError: a step is not finite, with its examples; a checkpoint can't be written;
                memory ran out.
        """
        try:
            self._run()
        except BaseException as error:
            # What is being written may be the last thing that is kept of the run.
            self._checkpoints.settle(_SETTLE_SECONDS)
            self._metrics.close("preempted" if isinstance(error, Preempted) else "failed")
            raise
        if self._num_skipped:
            self._console.warn(f"skipped in this launch: {counted(self._num_skipped, 'step')}")
        message = f"trained {counted(self._last, 'step')}"
        if self._stops_early():
            folder = self._checkpoints.path(self._state.step).parent
            message = describe_early_stop(
                self._state.scores,
                self._options.evaluation,
                self._state.step,
                self._last,
                folder,
            )
        self._status("finished", message)
        self._metrics.close("finished")
        return f"{message} ({self._meters.describe_launch()})"

    def _stops_early(self) -> bool:
        at_end = self._state.step >= self._last
        return not at_end and stops_early(self._state.scores, self._options.evaluation)

    def _run(self) -> None:
        first = self._state.step + 1
        self._traces.warn_of_others(first, self._last)
        self._status("running", "")
        with self._console.progress(self._last, "training", self._state.step) as progress:
            if self._state.step and self._validation_is_due(self._state.step):
                # The run was stopped between that step's checkpoint and its validation.
                with self._interruption.deferred():
                    self._validate_step(self._state.step)
            with contextlib.ExitStack() as stack:
                last = 0 if self._stops_early() else self._last
                self._begin_step()
                for batch in self._batches.iterate(first, last):
                    self._meters.lap("data")
                    with self._traces.step(batch.step, self._meters.catch_up):
                        with self._memory.step(batch):
                            losses, norm = self._compute_gradients(batch)
                            if batch.step == first:
                                # Until here a signal stops at once: compiling may take minutes,
                                # and there was nothing to save.
                                stack.enter_context(self._interruption.deferred())
                            self._update(batch, losses, norm)
                            # In the step's time: here the host waits for a GPU that is behind it.
                            # And before the ranks agree, who else would hear of a signal a step
                            # later.
                            self._settle(leave=1)
                            requests = self._agree()
                        self._meters.end_step()
                    self._after_step(batch, requests, progress)
                    if self._stops_early():
                        break
                    self._begin_step()
                self._checkpoints.close()

    def _begin_step(self) -> None:
        step = self._state.step + 1
        self._meters.begin_step(is_sampled=step <= self._last and self._is_logged(step))

    def _is_logged(self, step: int) -> bool:
        if step % self._options.logging.every_steps == 0 or step == self._last:
            return True
        # The run may end there, which is known behind the checkpoint that its window stands in.
        may_stop = self._options.evaluation.early_stopping_patience is not None
        return may_stop and self._validation_is_due(step)

    def _compute_gradients(self, batch: StepBatch) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Leave the step's clipped gradients in the model; losses of the micro-batches, norm."""
        seed_torch(self._options.seed, "dropout", batch.step, self._world.rank)
        self._engine.model.train()
        losses = [self._forward_backward(batch, index) for index in range(len(batch.micro_batches))]
        self._memory.micro_batch = None
        self._scale.unscale(self._optimizer)
        norm = self._engine.clip_grad_norm(self._options.optimizer.grad_clip_norm)
        self._meters.lap("optimizer")
        return losses, norm.to(self._world.device)

    def _update(self, batch: StepBatch, losses: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Change the weights, if all is finite. What became of it is read later, by `_settle`.

        A host that waited for each step's figures would leave its GPU without work until the next
        step's first kernels are there.
        """
        loss_sum = self._world.all_reduce(torch.stack(losses).double().sum())
        self._meters.lap("communication")
        # Loss and norm are the same on every rank, so all of them skip, or none does.
        is_skipped = (~(loss_sum.isfinite() & norm.isfinite())).float()
        figures = torch.stack([loss_sum, norm.double(), self._scale.factor.double()])
        rate = self._rate(batch.step)
        take_step(self._optimizer, number=batch.step, rate=rate, is_skipped=is_skipped)
        self._scale.update(is_skipped)
        self._optimizer.zero_grad()
        self._meters.lap("optimizer")
        self._in_flight.append(StepInFlight(batch, losses, HostCopy(figures)))

    def _agree(self) -> Requests:
        """Hosts hear of each other's requests; their devices go on meanwhile."""
        found = self._world.sum(
            [
                float(self._asked_to_stop()),
                float(self._checkpoints.has_failed),
                float(self._minutes_are_over()),
            ]
        )
        self._meters.lap("communication")
        return Requests(*(count > 0 for count in found))

    def _settle(self, leave: int = 0) -> None:
        """Read and count what became of the steps, but for the `leave` last ones.

        Every rank has to do it behind the same step, so that all refuse a step, or none does.
        """
        while len(self._in_flight) > leave:
            step = self._in_flight.popleft()
            result = self._result = step.result()
            if result.is_finite:
                self._state.skipped_in_a_row = 0
            else:
                self._skip(step, result)
            self._meters.count(step.batch, result.loss_sum, result.is_finite)

    def _skip(self, step: StepInFlight, result: StepResult) -> None:
        """Count a step that changed nothing.

        Raises:
            UserError: too many in a row.
        """
        number, limit = step.batch.step, self._options.skip_limit
        in_a_row = self._state.skipped_in_a_row + 1
        if in_a_row > limit:
            self._state.step = number - 1  # what was computed since then counts for nothing
            self._checkpoints.wait()
            suspects = step.suspects(result, self._world)
            self._world.on_rank_zero(lambda: self._refuse(step, result, in_a_row, suspects))
        self._state.skipped_in_a_row = in_a_row
        self._num_skipped += 1
        scale = f" at loss scale {result.loss_scale:g}" if self._scale.is_dynamic else ""
        self._console.warn(
            f"step {number} is skipped, its loss or gradient is not finite{scale} ({in_a_row} "
            f"in a row, at most {limit})"
        )

    def _refuse(
        self, step: StepInFlight, result: StepResult, in_a_row: int, suspects: list[str]
    ) -> NoReturn:
        raise refusal(
            step.batch,
            result,
            in_a_row=in_a_row,
            limit=self._options.skip_limit,
            suspects=suspects,
            last_good=next(reversed(complete_checkpoints(self._run_dir)), None),
            uses_fp16=self._options.parallel.uses_fp16,
        )

    def _forward_backward(self, batch: StepBatch, index: int) -> torch.Tensor:
        self._memory.micro_batch = index
        micro = batch.micro_batches[index].to(self._world.device)
        with self._engine.micro_batch(is_last=index == len(batch.micro_batches) - 1):
            objective, cross_entropy = self._engine.model(**micro.loss_inputs())
            self._meters.lap("forward")
            self._engine.backward(self._scale.scale(objective) / batch.target_tokens)
        self._meters.lap("backward")
        return cross_entropy

    def _minutes_are_over(self) -> bool:
        # Rank 0's clock decides for all.
        minutes = self._options.checkpoint.every_minutes
        waited = time.monotonic() - self._last_save_began
        return self._world.is_main and minutes is not None and waited >= 60.0 * minutes

    def _asked_to_stop(self) -> bool:
        return self._interruption.requested is not None

    def _rate(self, step: int) -> float:
        options = self._options
        return learning_rate(step, self._last, options.optimizer.lr, options.schedule)

    def _after_step(self, batch: StepBatch, requests: Requests, progress: Progress) -> None:
        step = self._state.step = batch.step
        self._state.place = batch.place
        self._checkpoints.poll()
        if requests.save_failed:
            self._checkpoints.wait()  # raises why
        self._snapshots.after_step()
        ends, is_logged = step == self._last, self._is_logged(step)
        every = self._options.checkpoint.every_steps
        is_due = requests.save_is_due or (every is not None and step % every == 0)
        validation_is_due = self._validation_is_due(step)
        if ends or requests.stop or is_logged or is_due or validation_is_due:
            self._meters.catch_up()
            self._settle()
        if is_logged:
            self._log(batch, progress)
        progress.advance(1)
        # Before the validation: what may fail there, or take too long for a preempted machine,
        # must not cost the steps. A validation that was left out is made up for by the resume.
        if ends or requests.stop or is_due:
            self._checkpoint(step)
        if requests.stop and not (ends and not validation_is_due):
            self._stop()
        if validation_is_due:
            self._validate_step(step)

    def _log(self, batch: StepBatch, progress: Progress) -> None:
        result, skipped = self._result, self._meters.skipped_steps
        assert result is not None
        row: dict[str, Any] = {
            "epoch": batch.epoch,
            **self._meters.row(),
            "learning_rate": self._rate(batch.step),
            "grad_norm": result.grad_norm,
            "examples_seen": batch.examples_seen,
        }
        if self._options.skip_limit > 0:
            row["skipped_steps"] = skipped
        if self._scale.is_dynamic:
            row["loss_scale"] = result.loss_scale
        self._metrics.write("train", batch.step, row)
        progress.note(f"(to step {batch.step}: {describe(row)})", describe_briefly(row))
        if self._options.parallel.compile:
            self._say_compilations(batch.step)

    def _say_compilations(self, step: int) -> None:
        count = num_compilations()
        if count > self._num_compilations:
            compiled = counted(count, "graph")
            self._console.say(f"to step {step}: {compiled} compiled, of {MOST_GRAPHS} at most")
        self._num_compilations = count

    def _validation_is_due(self, step: int) -> bool:
        every = self._options.evaluation.every_steps
        due = step == self._last or (every is not None and step % every == 0)
        return self._validate is not None and due and str(step) not in self._state.scores

    def _validate_step(self, step: int) -> None:
        """Loss and ROUGE of the validation subset; a new best is saved if it is not yet."""
        validation = self._figures_or_end(step)
        self._state.scores[str(step)] = {
            name: value
            for name, value in validation.figures.items()
            if name not in ("examples", "seconds")
        }
        self._log_validation(step, validation)
        ranked = best_steps(self._state.scores, self._options.evaluation.best_metric, None)
        is_new_best = self._options.checkpoint.keep_best > 0 and ranked[:1] == [step]
        if self._begun_step == step:
            self._checkpoints.record_scores(self._state)
        elif is_new_best or self._stops_early():
            self._checkpoint(step)

    def _figures_or_end(self, step: int) -> Validation:
        """What the validation gives; where it gives nothing, the step is saved before that ends."""
        assert self._validate is not None
        failure = None
        try:
            with self._meters.outside_steps("evaluation"):
                return self._validate(step)
        except EvaluationStopped:
            pass
        except ScoringFailed as error:
            failure = error
        if self._begun_step != step:
            self._checkpoint(step)
        if failure is None:
            self._stop()
        self._checkpoints.wait()
        return self._world.on_rank_zero(failure.tell)

    def _log_validation(self, step: int, validation: Validation) -> None:
        figures = validation.figures
        row = {**figures, "evaluation_share": self._meters.evaluation_share}
        self._metrics.write("validation", step, row)
        points = (100 * figures[name] for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"))
        self._console.say(
            f"step {step}: validation loss {figures['loss']:.3f}, ROUGE-1/2/L/Lsum "
            + " / ".join(f"{value:.1f}" for value in points)
            + f"\n  {counted(int(figures['examples']), 'example')} in {figures['seconds']:.1f} s; "
            f"{row['evaluation_share']:.0%} of the time so far is validation"
        )
        for number, shown in enumerate(validation.shown):
            self._console.say(as_lines(shown, with_document=not self._has_shown_documents))
            self._metrics.add_text(f"summaries/{number + 1}", step, as_markdown(shown))
        self._has_shown_documents = True
        self._say_patience(step)

    def _say_patience(self, step: int) -> None:
        options = self._options.evaluation
        count = validations_without_best(
            self._state.scores, options.best_metric, options.early_stopping_min_delta
        )
        if options.early_stopping_patience is not None and count:
            self._console.say(
                f"step {step}: {count} of {options.early_stopping_patience} validations without a "
                f"better {options.best_metric}"
            )

    def _stop(self) -> NoReturn:
        """End between two steps, with the checkpoint of the last one on disk."""
        self._checkpoints.wait()
        raise Preempted(
            f"stopped by a signal after step {self._state.step}; the same command goes on from it"
        )

    def _checkpoint(self, step: int) -> None:
        self._state.window = self._meters.to_json()
        self._state.loss_scale = self._scale.to_json()
        self._last_save_began = time.monotonic()
        with self._meters.outside_steps("checkpoint"):
            self._save(self._state)
        self._begun_step = step

    def _note_saved(self, saved: SavedCheckpoint) -> None:
        self._saved_step = saved.step
        self._metrics.write("checkpoint", saved.step, saved.row())
        self._status("running", "")
        self._console.say(f"step {saved.step}: checkpoint {self._checkpoints.path(saved.step)}")

    def _status(self, state: str, message: str) -> None:
        if self._world.is_main:
            saved = self._checkpoints.path(self._saved_step) if self._saved_step else None
            write_status(
                self._run_dir, state, self._state.step, str(saved) if saved else None, message
            )
