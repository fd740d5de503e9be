"""Finds the webhook that receives the messages of a run. Its URL is a secret, so no config contains it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from hpc_train.config.schema import MessagesConfig
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
