"""Early stopping: a function of the scores that a checkpoint holds, so a resume decides alike."""

from __future__ import annotations

import math
from pathlib import Path

from t5_fsdp.checkpoint.format import folder_name, is_checkpoint
from t5_fsdp.checkpoint.retention import Scores, best_steps
from t5_fsdp.config import EvaluationConfig


def validations_without_best(scores: Scores, metric: str, min_delta: float = 0.0) -> int:
    """How many validations have passed since one was the best so far by more than `min_delta`.

    Args:
        scores: validation figures by step.
        metric: "loss", the lower the better, or the higher the better; not finite is never better.
        min_delta: in the unit of the metric; ROUGE is between 0 and 1.
    """
    sign = -1 if metric == "loss" else 1
    best = -math.inf
    count = 0
    for step in sorted(scores, key=int):
        value = scores[step].get(metric)
        if value is not None and math.isfinite(value) and sign * value > best + min_delta:
            best, count = sign * value, 0
        else:
            count += 1
    return count


def stops_early(scores: Scores, options: EvaluationConfig) -> bool:
    """Whether `options.early_stopping_patience` is used up."""
    patience = options.early_stopping_patience
    if patience is None:
        return False
    return (
        validations_without_best(scores, options.best_metric, options.early_stopping_min_delta)
        >= patience
    )


def describe_early_stop(
    scores: Scores, options: EvaluationConfig, step: int, last_step: int, checkpoints: Path
) -> str:
    """Why a run ends before its last step, and where its best checkpoint is.

    Args:
        checkpoints: the folder that they are in.
    """
    metric, min_delta = options.best_metric, options.early_stopping_min_delta
    count = validations_without_best(scores, metric, min_delta)
    by = f" by more than {min_delta:g}" if min_delta else ""
    text = (
        f"stopped early at step {step} of {last_step}: {count} "
        f"{'validation' if count == 1 else 'validations in a row'} without a better {metric}{by}"
    )
    ranked = best_steps(scores, metric, None)
    if not ranked:
        return f"{text}; it never was finite"
    best = ranked[0]
    folder = checkpoints / folder_name(best)
    where = str(folder) if is_checkpoint(folder) else f"{checkpoints} has no checkpoint of it"
    return f"{text}; the best is step {best} ({scores[str(best)][metric]:.4f}): {where}"
