"""One W&B run from a training's first attempt to its last, that can do the training no harm.

Every call of wandb happens in a thread of its own behind a bounded queue; when it fails, hangs or is absent, the
training goes on and says so once.
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
ANSWER_S = 5.0  # how long the service may take to answer before a run is offline
QUEUED_LINES = 10_000
FINISH_S = 30.0
ARTIFACT_S = 600.0  # to finish when a checkpoint is uploaded as well
SYNCS_ALL = (0, 29)  # the first wandb whose `wandb sync` keeps every attempt of an offline run, as the dependencies say


@dataclass(frozen=True)
class WandbIdentity:
    """Who a run is on W&B."""

    run_id: str  # the same over all attempts
    name: str
    group: str | None  # the sweep
    directory: Path  # the run directory; wandb writes into its folder wandb/
    config: dict[str, Any]  # with the code version


class WandbRun:
    """A ``metrics.Sink``; on rank 0 only."""

    def __init__(self, settings: WandbConfig, identity: WandbIdentity) -> None:
        self._settings, self._identity = settings, identity
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUED_LINES)
        self._checkpoint: Path | None = None
        self._trouble = False
        self.mode: str | None = None  # known once the thread has found out
        self.url: str | None = None
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, line: dict[str, Any]) -> None:
        if self._trouble:
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._give_up(f"{QUEUED_LINES} lines wait to be sent")

    def finish(self, checkpoint: Path | None = None) -> None:
        """Sends what is left and ends the W&B run, in bounded time.

        Args:
            checkpoint: a checkpoint's directory to upload as an artifact.
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
                self._trouble = True
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
            # the agent has the worker's output already, and the snapshot of the code is the run directory's matter
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self.url = run.url
        # Steps of our own: after a resume they go back, and W&B drops what comes with a smaller step of its own.
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
        if not self._trouble:
            self._trouble = True
            print(f"W&B: {reason}; the run goes on without it, its metrics are in {self._identity.directory}/metrics")


def _loses_attempts(version: str) -> str | None:
    """A warning for a wandb that does not upload all attempts of an offline run."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found >= SYNCS_ALL:
        return None
    needed = ".".join(map(str, SYNCS_ALL))
    return (
        f"W&B: wandb {version} is installed, and `wandb sync` below {needed} keeps only the last attempt of an offline "
        f"run. Run pip install 'wandb>={needed}' before you upload this run"
    )


def resolve_mode(asked: str) -> str:
    """``auto`` becomes online where a key is set and the service answers, else offline; WANDB_MODE decides it too."""
    if asked != "auto":
        return asked
    chosen = os.environ.get("WANDB_MODE", "")
    if chosen in ("online", "offline", "disabled"):
        return chosen
    service = os.environ.get("WANDB_BASE_URL") or SERVICE
    if not _has_key(service):
        return "offline"
    if not _answers(service):
        print(f"W&B: {service} does not answer within {ANSWER_S:g} s; offline, send it later with wandb sync")
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
        return True  # it answers, if only that there is no such page
    except OSError:
        return False
    return True
