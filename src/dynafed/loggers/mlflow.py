"""Logs to MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynafed.callbacks import RunContext
from dynafed.errors import UserError, first_line
from dynafed.loggers.base import Rows, RunLogger, run_name

if TYPE_CHECKING:
    from PIL.Image import Image


MOST = 1000
"""Metrics in one request, as MLflow allows."""


class MLflow(RunLogger):
    """Logs to the MLflow store `tracking_uri`: by default that of MLFLOW_TRACKING_URI, else mlflow.db in this folder.

    Runs go to the experiment `experiment`, by default that of MLFLOW_EXPERIMENT_NAME, else "dynafed".
    """

    name = "mlflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        super().__init__()
        self.tracking_uri = tracking_uri
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dynafed"

    def open(self, run: RunContext, config: Mapping[str, Any], before: str | None) -> str:
        """Begin a run of MLflow, or go on with it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        try:
            self.client = MlflowClient(self.tracking_uri)
            found = self.client.get_experiment_by_name(self.experiment)
            place = found.experiment_id if found else self.client.create_experiment(self.experiment)
        except MlflowException as error:
            raise UserError(f"mlflow: {first_line(error)}") from None
        if before and self._resume(before):
            return before
        tags = {"dynafed.path": str(run.path.resolve())}
        self.id = str(self.client.create_run(place, run_name=run_name(run.path), tags=tags).info.run_id)
        self.client.log_batch(self.id, params=[Param(key, str(value)) for key, value in config.items()])
        return self.id

    def _resume(self, known_as: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self.client.update_run(known_as, status="RUNNING")
        except MlflowException:  # of another store
            return False
        self.id = known_as
        return True

    def log_numbers(self, values: Mapping[str, float], round_num: int) -> None:
        """Add a round to curves."""
        self._log([(name, value, round_num) for name, value in values.items()])

    def log_curve(self, name: str, points: Mapping[int, float]) -> None:
        """Add a curve."""
        self._log([(name, value, step) for step, value in points.items()])

    def _log(self, points: Sequence[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value, step in points]
        for start in range(0, len(metrics), MOST):
            self.client.log_batch(self.id, metrics=metrics[start : start + MOST])

    def log_image(self, name: str, image: Image, step: int) -> None:
        """Add a picture as an artifact."""
        self.client.log_image(self.id, image, key=name, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table as an artifact, in the form that MLflow's page shows as one."""
        self.client.log_dict(self.id, {"columns": list(columns), "data": [list(row) for row in rows]}, f"{name}.json")

    def log_summary(self, summary: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Put the numbers into MLflow's table of runs."""
        self.log_numbers(summary, 0)

    def close(self, failed: bool) -> None:
        """End the run of MLflow."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")
