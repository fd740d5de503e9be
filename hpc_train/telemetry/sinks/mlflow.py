"""Sends the metrics of a run to an MLflow server. All jobs of a run log to one MLflow run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from hpc_train.config.import_path import install_extra
from hpc_train.config.values import check_answers, server_uri
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import flatten
from hpc_train.telemetry.sinks.tracker import HEAD, Identity, Line, Position, Session, Tracker

RUN_TAG, STEP_TAG, SWEEP_TAG = "hpc_train.run_id", "hpc_train.step", "hpc_train.sweep"
BATCH_METRICS = 1000  # the server's limits for one request
BATCH_PARAMS = 100
PARAM_CHARACTERS = 6000
NOT_IN_NAMES = re.compile(r"[^\w\-./ :]")


class Mlflow(Tracker):
    """Sends lines to an MLflow server.

    One request sends the values and the last step, so each step arrives once even if the process is killed. Raises
    UserError if the extra ``hpc_train[mlflow]`` is not installed, or the address names no server. Without a job that
    trains, a server that does not respond is an error at once.
    """

    name = "mlflow"
    label = "MLflow"
    _client: Any

    def __init__(self, session: Session) -> None:
        self._identity = session.identity
        super().__init__(RunDirectory(self._identity.directory), session.live)
        settings = session.config.telemetry.mlflow
        self.uri = server_uri(settings)
        check_installed()
        self._experiment = settings.experiment
        self._notify = session.notify
        self._texts = True
        self._url: str | None = None

    @property
    def where(self) -> str:
        return f"{self.uri} {self._experiment}"

    def open(self) -> bool:
        if not self.is_live:
            check_answers(self.uri)
        return super().open()

    def connect(self, position: Position) -> Position:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self.uri)
        run = find_or_create(self._client, self._experiment, self._identity)
        plain = flatten(self._identity.config)
        params = {NOT_IN_NAMES.sub("_", key): str(value)[:PARAM_CHARACTERS] for key, value in plain}
        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]  # immutable ones
        for first in range(0, len(missing), BATCH_PARAMS):
            self._client.log_batch(run.info.run_id, params=missing[first : first + BATCH_PARAMS])
        self._client.update_run(run.info.run_id, status="RUNNING")
        self._url = f"{self.uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        return replace(position, step=int(run.data.tags.get(STEP_TAG, 0)), run=run.info.run_id)

    def send(self, lines: Sequence[Line]) -> None:
        from mlflow.entities import RunTag

        for last, metrics in _batches(lines):
            self._client.log_batch(self.position.run, metrics=metrics, tags=[RunTag(STEP_TAG, str(last))])

    def text(self, step: int, name: str, text: str) -> None:
        """Stores a text as an artifact; the server may have no place for artifacts."""
        if not self._texts:
            return
        try:
            self._client.log_text(self.position.run, text, f"{name}/step-{step:08d}.txt")
        except Exception as error:
            self._texts = False
            self._notify(f"MLflow: texts are not stored: {error}")

    def disconnect(self) -> None:
        total = self.directory.record().get("total_steps")
        done = isinstance(total, int) and self.position.step >= total
        # a run that has stopped before its last step waits for its next job
        self._client.update_run(self.position.run, status="FINISHED" if done else "SCHEDULED")

    def outcome(self) -> dict[str, Any]:
        return {"url": self._url}


def check_installed() -> None:
    """Raises UserError if MLflow's client is not installed."""
    if find_spec("mlflow") is None:
        raise UserError(
            "MLflow needs the package mlflow-skinny, which is not installed",
            where="telemetry.mlflow.uri",
            fix=install_extra("mlflow"),
        )


def find_or_create(client: Any, experiment: str, identity: Identity) -> Any:
    """Returns the MLflow run with the id of the run in a tag; all jobs and ``sync`` use the same one."""
    present = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if present is None else present.experiment_id
    same = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{identity.run_id}'", max_results=1)
    if same:
        return same[0]
    tags = {RUN_TAG: identity.run_id}
    if identity.group is not None:
        tags[SWEEP_TAG] = identity.group
    return client.create_run(experiment_id, tags=tags, run_name=identity.name)


def _batches(lines: Sequence[Line]) -> Iterator[tuple[int, list[Any]]]:
    """Yields the metrics of whole lines, as many as fit into one request, with the last step of each batch."""
    batch: list[Any] = []
    last = 0
    for line in lines:
        metrics = list(_metrics(line))
        if batch and len(batch) + len(metrics) > BATCH_METRICS:
            yield last, batch
            batch = []
        batch += metrics
        last = line["step"]
    if batch:
        yield last, batch


def _metrics(line: Line) -> Iterator[Any]:
    from mlflow.entities import Metric

    for key, value in line.items():
        if key not in HEAD and isinstance(value, int | float):
            yield Metric(NOT_IN_NAMES.sub("_", key), float(value), int(1000 * line["time"]), line["step"])
