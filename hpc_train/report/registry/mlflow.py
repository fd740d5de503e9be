"""Stores checkpoints as versions of a registered model of MLflow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

from hpc_train.config.schema import MlflowConfig
from hpc_train.config.values import check_answers, server_uri
from hpc_train.report.registry.lineage import MANIFEST
from hpc_train.report.registry.registry import CHECKPOINT, Model, Promoted, bad_reference
from hpc_train.telemetry.sinks.identity import Identity
from hpc_train.telemetry.sinks.mlflow import check_installed, find_or_create

REFERENCE = re.compile(r"(?P<name>[^@/:]+)(@(?P<alias>[^@/]+)|/(?P<version>\d+))")
TAG_CHARACTERS = 5000


class MlflowRegistry:
    """Keeps models in the registry of an MLflow server. The files are artifacts of the MLflow run of the training."""

    name: ClassVar[str] = "mlflow"

    def __init__(self, settings: MlflowConfig) -> None:
        self._uri = server_uri(settings)
        self._experiment = settings.experiment
        check_installed()
        check_answers(self._uri)

    def promote(self, model: Model) -> Promoted:
        client = self._client()
        found = _version_of(client, model)
        version = self._create(client, model) if found is None else found
        for alias in model.aliases:
            client.set_registered_model_alias(model.name, alias, version)
        reference = f"mlflow:{model.name}@{model.aliases[0]}" if model.aliases else f"mlflow:{model.name}/{version}"
        return Promoted(version, reference, f"{self._uri.rstrip('/')}/#/models/{model.name}/versions/{version}")

    def fetch(self, reference: str, to: Path) -> None:
        from mlflow.artifacts import download_artifacts

        match = REFERENCE.fullmatch(reference)
        if match is None:
            raise bad_reference(f"mlflow:{reference}", "mlflow:NAME@ALIAS or mlflow:NAME/VERSION")
        client, name, version = self._client(), match["name"], match["version"]
        if version is None:
            version = client.get_model_version_by_alias(name, match["alias"]).version
        source = client.get_model_version_download_uri(name, version)
        to.mkdir(parents=True, exist_ok=True)
        download_artifacts(artifact_uri=source, dst_path=str(to), tracking_uri=self._uri)
        downloaded = to / source.rstrip("/").rpartition("/")[2]
        if downloaded.is_dir():  # the directory itself, for some stores
            for path in list(downloaded.iterdir()):
                path.rename(to / path.name)
            downloaded.rmdir()

    def _client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self._uri, registry_uri=self._uri)

    def _create(self, client: Any, model: Model) -> str:
        """Uploads the files and returns the number of the new version."""
        from mlflow.exceptions import MlflowException

        run = find_or_create(client, self._experiment, Identity.of(model.config, model.run))
        run_id, folder = run.info.run_id, f"model-{model.about[MANIFEST][:12]}"
        client.log_artifacts(run_id, str(model.folder), f"{folder}/{CHECKPOINT}")
        client.log_artifacts(run_id, str(model.notes), folder)
        try:
            client.create_registered_model(model.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{run.info.artifact_uri}/{folder}"
        created = client.create_model_version(model.name, source, run_id, tags=_tags(model), await_creation_for=0)
        return str(created.version)


def _tags(model: Model) -> dict[str, str]:
    return {
        f"hpc_train.{key}": (value if isinstance(value, str) else json.dumps(value))[:TAG_CHARACTERS]
        for key, value in model.about.items()
        if value is not None
    }


def _version_of(client: Any, model: Model) -> str | None:
    """Returns the version that holds this checkpoint; None if there is none."""
    versions = client.search_model_versions(f"name='{model.name}'")
    same = [each for each in versions if each.tags.get(f"hpc_train.{MANIFEST}") == model.about[MANIFEST]]
    return str(same[0].version) if same else None
