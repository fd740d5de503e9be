"""Finds the MLflow server to which runs report, at submission and again in the process that reports."""

from __future__ import annotations

import os
import socket
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


ANSWER_S = 5.0


def check_answers(uri: str) -> None:
    """Raises UserError if no server accepts connections at ``uri``; MLflow's client itself tries for minutes."""
    address = urlsplit(uri)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"the MLflow server {address.hostname}:{port} does not respond: {error}",
            where="telemetry.mlflow.uri, MLFLOW_TRACKING_URI",
            fix="start the server, or run the command on a machine with a route to it",
        ) from error
