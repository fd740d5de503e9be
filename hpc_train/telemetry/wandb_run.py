"""Logs a training to one W&B run over all its attempts, without affecting the training.

A separate thread makes all calls of wandb, behind a bounded queue. If wandb fails, hangs or is not installed, training
continues and reports that once.
"""

from __future__ import annotations

import netrc
import os
import queue
import re
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_train.config.schema import WandbConfig

SERVICE = "https://api.wandb.ai"
ANSWER_S = 5.0  # time limit for the service to respond; after that the run is offline
QUEUED_LINES = 10_000
FINISH_S = 30.0
ARTIFACT_S = 600.0  # time limit to finish with the upload of a checkpoint
SYNCS_ALL = (0, 29)  # the first version whose `wandb sync` keeps all attempts of an offline run, as in pyproject.toml


@dataclass(frozen=True)
class WandbIdentity:
    """Identifies a run on W&B.

    Attributes:
        run_id: the same for all attempts.
        group: the name of the sweep.
        directory: the run directory; wandb writes to its subdirectory wandb/.
        config: the config and the code version.
    """

    run_id: str
    name: str
    group: str | None
    directory: Path
    config: dict[str, Any]


class WandbRun:
    """Sends metrics to W&B in a separate thread; a ``metrics.Sink`` on rank 0 only.

    Attributes:
        mode: online, offline or disabled; None until the thread has determined it.
    """

    def __init__(self, settings: WandbConfig, identity: WandbIdentity) -> None:
        self._settings = settings
        self._identity = identity
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUED_LINES)
        self._checkpoint: Path | None = None
        self._inactive = False
        self.mode: str | None = None
        self.url: str | None = None
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, line: dict[str, Any]) -> None:
        if self._inactive:
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._give_up(f"{QUEUED_LINES} lines are waiting to be sent")

    def finish(self, checkpoint: Path | None = None) -> None:
        """Sends the remaining lines and ends the W&B run, in bounded time.

        Args:
            checkpoint: directory of a checkpoint to upload as an artifact.
        """
        self._checkpoint = checkpoint
        limit = ARTIFACT_S if checkpoint else FINISH_S
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            limit = 0.0
        self._thread.join(limit)
        if self._thread.is_alive():
            self._give_up(f"it did not finish in {limit:g} s")

    def _work(self) -> None:
        try:
            self.mode = resolve_mode(self._settings.mode)
            if self.mode == "disabled":
                self._inactive = True
                return
            self._session()
        except BaseException as error:  # wandb.errors derive from several bases, SystemExit among them
            self._give_up(f"{type(error).__name__}: {error}")

    def _session(self) -> None:
        import wandb

        if self.mode == "offline" and (old := _loses_attempts(wandb.__version__)):
            print(old)
        identity = self._identity
        run = wandb.init(
            id=identity.run_id,
            resume="allow",
            name=identity.name,
            group=identity.group,
            project=self._settings.project,
            entity=self._settings.entity,
            config=identity.config,
            dir=str(identity.directory),
            mode=self.mode,  # type: ignore[arg-type]
            # the agent logs the worker's output, and the run directory has a snapshot of the code
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self.url = run.url
        # use a custom step, because W&B drops lines with a smaller step, which a resume produces
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        while (line := self._queue.get()) is not None:
            run.log(line)
        if self._checkpoint is not None:
            artifact = wandb.Artifact(f"checkpoint-{identity.run_id}", type="model")
            artifact.add_dir(str(self._checkpoint))
            run.log_artifact(artifact)
        run.finish()

    def _give_up(self, reason: str) -> None:
        if not self._inactive:
            self._inactive = True
            print(f"W&B: {reason}; continuing without it, the metrics are in {self._identity.directory}/metrics")


def _loses_attempts(version: str) -> str | None:
    """Returns a warning if this version of wandb does not upload all attempts of an offline run."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found >= SYNCS_ALL:
        return None
    needed = ".".join(map(str, SYNCS_ALL))
    return (
        f"W&B: `wandb sync` of the installed wandb {version} uploads only the last attempt of an offline run. "
        f"Run pip install 'wandb>={needed}' before you upload this run"
    )


def resolve_mode(asked: str) -> str:
    """Resolves ``auto`` to WANDB_MODE, else to online if a key is set and the service responds, else to offline."""
    if asked != "auto":
        return asked
    chosen = os.environ.get("WANDB_MODE", "")
    if chosen in ("online", "offline", "disabled"):
        return chosen
    service = os.environ.get("WANDB_BASE_URL") or SERVICE
    if not _has_key(service):
        return "offline"
    if not _answers(service):
        print(f"W&B: {service} did not respond within {ANSWER_S:g} s; logging offline, upload later with wandb sync")
        return "offline"
    return "online"


def _has_key(service: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(service).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _answers(service: str) -> bool:
    try:
        urllib.request.urlopen(f"{service.rstrip('/')}/healthz", timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return True  # any HTTP status is a response
    except OSError:
        return False
    return True
