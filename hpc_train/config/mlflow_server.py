"""Finds the address of the MLflow server, at submission and in the workers."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from hpc_train.config.schema import MlflowConfig
from hpc_train.errors import UserError


def server_uri(settings: MlflowConfig) -> str:
    """Returns the address of the MLflow server.

    Raises:
        UserError: none is set, or it is not that of a server.
    """
    uri = settings.uri if settings.uri not in (None, "auto") else os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UserError(
            "the address of the MLflow server is not set",
            where="telemetry.mlflow.uri, MLFLOW_TRACKING_URI",
            fix="telemetry.mlflow.uri=http://HOST:5000, or export MLFLOW_TRACKING_URI",
        )
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https") or uri.startswith("databricks"):
        return uri
    why = "MLflow no longer writes to its file store"
    if scheme not in ("", "file"):
        why = (
            "a database needs a server in front of it, since nodes cannot lock a file of SQLite on a shared file system"
        )
    raise UserError(
        f"the MLflow address {uri!r} is not that of a server: {why}",
        where="telemetry.mlflow.uri, MLFLOW_TRACKING_URI",
        fix="start `mlflow server --backend-store-uri sqlite:///mlflow.db --host HOST`, and set http://HOST:5000",
    )
