"""Finds the addresses of the services to which runs report: a webhook, and a server of MLflow.

They are looked up at submission, and again in the processes that report. The URL of a webhook is a secret, so no config
contains it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from hpc_train.config.schema import MessagesConfig, MlflowConfig
from hpc_train.errors import UserError

URL = "HPC_TRAIN_WEBHOOK_URL"
KINDS = ("failed", "requeued", "finished", "slow", "idle")


def message_kinds(settings: MessagesConfig) -> frozenset[str]:
    """Returns the kinds of messages that ``telemetry.messages.on`` asks for.

    Raises:
        UserError: it is neither all nor a list of kinds.
    """
    given = [*KINDS] if settings.on == "all" else settings.on
    if isinstance(given, list) and all(kind in KINDS for kind in given):
        return frozenset(given)
    raise UserError(
        f"telemetry.messages.on is {settings.on!r}, which is neither all nor a list of kinds of messages",
        where="telemetry.messages.on",
        fix=f"all, or a list such as [failed,finished] of: {', '.join(KINDS)}",
    )


def webhook(settings: MessagesConfig) -> str | None:
    """Returns the URL to which messages are sent: ``$HPC_TRAIN_WEBHOOK_URL``, or that in the file; None without both.

    Raises:
        UserError: the file cannot be read, or it does not contain a URL.
    """
    where, url = URL, os.environ.get(URL, "")
    if not url and settings.webhook_file is not None:
        where = "telemetry.messages.webhook_file"
        try:
            url = Path(settings.webhook_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"the file with the URL of the webhook cannot be read: {error}",
                where=where,
                fix=f"name a file that contains only the URL and that you alone can read, or set {URL}",
            ) from error
    url = url.strip()
    if not url:
        return None
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        fix = "https://..., as Slack, Mattermost or your own server shows it"
        raise UserError("the URL of the webhook is not an http or https URL", where=where, fix=fix)
    return url


def check_messages(settings: MessagesConfig) -> None:
    """Raises UserError if the kinds of messages are unknown, or the webhook is given and cannot be found."""
    message_kinds(settings)
    webhook(settings)


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
