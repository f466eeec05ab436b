"""MLflow: a run at MLFLOW_TRACKING_URI, or in an SQLite file in run_dir/mlflow."""

from __future__ import annotations

import logging
import re
import shlex
import time
from typing import Any

from t5_fsdp.config import leaves
from t5_fsdp.training.trackers.tracker import DEFAULT_PROJECT, Ending, TrackedRun

# Limits of MLflow.
_MOST_PARAMETERS = 100  # in one call
_LONGEST_VALUE = 6000  # characters of a parameter
_LONGEST_NAME = 250  # characters of a figure's name
_STATUS = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


class MlflowRuns:
    """Logs to an MLflow run."""

    name = "MLflow"

    def start(self, run: TrackedRun) -> str:
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        # How a new database is made is of no interest; MLflow sets its level when it is imported.
        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        folder = (run.run_dir / "mlflow").resolve()
        is_local = not mlflow.tracking.is_tracking_uri_set()
        if is_local:
            # Options begin at the one; the other is a character, to some versions of SQLAlchemy.
            if found := re.search(r"\?|%[0-9A-Fa-f]{2}", str(folder)):
                raise ValueError(f"{folder} has {found[0]} in its name; set MLFLOW_TRACKING_URI")
            folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{folder}/mlflow.db" if is_local else mlflow.get_tracking_uri()
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._id = run.known_id("mlflow")
        if self._id is None or not self._goes_on(self._id):
            project = run.project or MLFLOW_EXPERIMENT_NAME.get() or DEFAULT_PROJECT
            self._create(run, project, (folder / "artifacts").as_uri() if is_local else None)
        where = shlex.quote(uri)
        return f"`mlflow ui --backend-store-uri {where}` shows it" if is_local else uri

    def _goes_on(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            if self._client.get_run(run_id).info.lifecycle_stage != "active":  # deleted meanwhile
                return False
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # another store than before
                return False
            raise
        self._client.update_run(run_id, status="RUNNING")
        return True

    def _create(self, run: TrackedRun, project: str, artifacts: str | None) -> None:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            number = self._client.create_experiment(project, artifact_location=artifacts)
        elif experiment.lifecycle_stage != "active":
            raise ValueError(
                f"its experiment {project} is deleted; restore it (`mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}`), or give another logging.project"
            )
        else:
            number = experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.remember_id("mlflow", self._id)
        values = [
            Param(name, str(value)[:_LONGEST_VALUE]) for name, value in leaves(run.config).items()
        ]
        for first in range(0, len(values), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=values[first : first + _MOST_PARAMETERS])

    def log(self, step: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(allowed_name(name), float(value), now, step) for name, value in figures.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        self._client.log_text(self._id, markdown, f"{name}/step-{step:08}.md")

    def finish(self, ending: Ending) -> None:
        self._client.set_terminated(self._id, _STATUS[ending])


def allowed_name(name: str) -> str:
    """A figure's name as MLflow allows it, which takes it for a path of few characters."""
    parts = re.sub(r"[^/\w.\- ]", "_", name)[:_LONGEST_NAME].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
