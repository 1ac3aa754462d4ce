"""MLflow: the recipe as parameters, the metrics of a run and the addresses of its checkpoints."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adapters.tracking.tracker import TrackedRun, TrackedStep, Tracker, TrackerFailed

if TYPE_CHECKING:  # MLflow is an extra
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

RUN_TAG = "ratchet.run"
"""Tag by which the MLflow run of a run is found."""
LAST_STEP = "step"
"""Metric with the number of the step, by which a run that goes on knows what it has."""
LONGEST_PARAMETER = 6000
PARAMETERS_A_BATCH = 100
NOT_OF_A_NAME = re.compile(r"[^\w\-. :/]")


class MlflowTracker(Tracker):
    """The MLflow run of a run, at MLFLOW_TRACKING_URI, or else in `mlflow.db` beside the runs."""

    def __init__(self, experiment: str, run: TrackedRun) -> None:
        with _failing():
            self._client = _client(run)
            self._run = _find_or_create(self._client, experiment, run)
            self._log_parameters(run.config)

    def next_step(self) -> int:
        """Return the step after the last one that MLflow has."""
        with _failing():
            found = self._client.get_run(self._run.info.run_id).data.metrics.get(LAST_STEP)
        return 0 if found is None else int(found) + 1

    def send(self, step: TrackedStep) -> None:
        """Log a step in one batch; its scores count by the checkpoint that they are of."""
        from mlflow.entities import Metric, RunTag

        moment = int(step.seconds() * 1000)
        logged = [
            Metric(NOT_OF_A_NAME.sub("_", name), float(value), moment, number)
            for number, values in (
                (step.checkpoint, step.scores()),
                (step.number, {**step.metrics(), LAST_STEP: step.number}),
            )
            for name, value in values.items()
        ]
        tags = [
            RunTag(f"checkpoint.{weights.policy}{weights.step}", weights.state)
            for weights in step.weights()
        ]
        with _failing():
            self._client.log_batch(self._run.info.run_id, metrics=logged, tags=tags)

    def close(self) -> None:
        """End the MLflow run; one that goes on is running again."""
        with _failing():
            self._client.set_terminated(self._run.info.run_id)

    def _log_parameters(self, config: Mapping[str, object]) -> None:
        """Log the parameters that the MLflow run does not have; MLflow lets none be changed."""
        from mlflow.entities import Param

        missing = [
            Param(name, str(value)[:LONGEST_PARAMETER])
            for name, value in config.items()
            if name not in self._run.data.params
        ]
        for first in range(0, len(missing), PARAMETERS_A_BATCH):
            some = missing[first : first + PARAMETERS_A_BATCH]
            self._client.log_batch(self._run.info.run_id, params=some)


def _client(run: TrackedRun) -> "MlflowClient":
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each table that it makes
    if "MLFLOW_TRACKING_URI" in os.environ:
        return MlflowClient()
    return MlflowClient(tracking_uri=f"sqlite:///{run.shared.resolve() / 'mlflow.db'}")


def _find_or_create(client: "MlflowClient", experiment: str, run: TrackedRun) -> "MlflowRun":
    found = client.get_experiment_by_name(experiment)
    home = client.create_experiment(experiment) if found is None else found.experiment_id
    begun = client.search_runs([home], filter_string=f"tags.`{RUN_TAG}` = '{run.id}'")
    if not begun:
        return client.create_run(home, tags={RUN_TAG: run.id}, run_name=run.name)
    client.update_run(begun[0].info.run_id, status="RUNNING")
    return begun[0]


@contextmanager
def _failing() -> Iterator[None]:
    """Raise TrackerFailed for an error of MLflow's or of its server's."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        raise TrackerFailed(f"{type(error).__name__}: {error}") from error
