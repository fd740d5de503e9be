"""Sends the metrics of a run to W&B. All jobs of a run log to one W&B run."""

from __future__ import annotations

import html
import netrc
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_train.config.schema import WandbConfig
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.schedulers.slurm.variables import Receiver, withheld
from hpc_train.telemetry.sinks.tracker import Line, Position, Session, Tracker

SERVICE = "https://api.wandb.ai"
OFFLINE = "recording offline, send the metrics later with python -m hpc_train sync"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
ONLINE = "telemetry.wandb.mode=online"
SENT = "metrics, config, versions, paths, and the name and load of the first node"  # secrets are left out
ACCEPTED = ("online", "offline", "disabled")  # values of WANDB_MODE
OLDER = {"run": "online", "dryrun": "offline", "shared": "online"}  # other values of WANDB_MODE that wandb knows
ANSWER_S = 5.0  # time limit for the service to respond; after that the run is offline


class Wandb(Tracker):
    """Sends lines to W&B. Recorded offline, it gets the lines of one job, and ``sync`` sends each step once; ``sync``
    sends several runs and records nothing offline.

    Attributes:
        mode: online, offline or disabled; None until it has been determined.
    """

    name = "wandb"
    label = "W&B"
    acknowledges = False  # the process of wandb sends in the background
    _run: Any

    def __init__(self, session: Session) -> None:
        self._identity = session.identity
        super().__init__(RunDirectory(self._identity.directory), session.live)
        self._session = session
        self._settings = session.config.telemetry.wandb
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.mode: str | None = None
        self._record: Mapping[str, Any] = self.directory.record().get("wandb") or {} if self.is_live else {}
        self.url: str | None = self._record.get("url")  # of the last job; kept by a job that cannot reach the service

    @property
    def where(self) -> str:
        return f"{service()}/{self._settings.entity or ''}/{self._settings.project}"

    def open(self) -> bool:
        self.mode = resolve_mode(self._settings.mode, self._record, self._session.notify) if self.is_live else "online"
        if self.mode != "disabled":
            _leave_sweep(self._session.notify)
        if not self.is_live and (why := why_offline()) is not None:
            fix = "wandb login, or WANDB_API_KEY, on a machine with a route to the service"
            raise UserError(f"W&B: {why}", where="WANDB_API_KEY, WANDB_BASE_URL", fix=fix)
        if self.mode == "offline":
            self._init()
            return True
        return self.mode == "online" and super().open()

    def connect(self, position: Position) -> Position:
        self._init()
        if not self._run.resumed:
            return replace(position, step=0)
        step = self._run.summary.get("step")  # the step of the last line that has arrived
        return replace(position, step=step if isinstance(step, int) else position.step)

    def _init(self) -> None:
        import wandb

        identity = self._identity
        folder = str(identity.directory)
        if self.mode == "online":  # nothing in it is needed later: ``sync`` reads the metrics of the run
            self._temporary = tempfile.TemporaryDirectory(prefix="hpc_train-wandb-", ignore_cleanup_errors=True)
            folder = self._temporary.name
        if os.environ.get("WANDB_MODE") not in (*ACCEPTED, *OLDER):
            os.environ.pop("WANDB_MODE", None)  # wandb refuses an unknown value, even where ``mode`` replaces it
        self._run = wandb.init(
            id=identity.run_id,
            resume="allow",
            name=identity.name,
            group=identity.group,
            project=self._settings.project,
            entity=self._settings.entity,
            config=identity.config,
            dir=folder,
            mode=self.mode,  # type: ignore[arg-type]
            # the agent logs the worker's output, and the run directory has a snapshot of the code; processor time and
            # memory are those of the agent, which has started this process, and of all its descendants
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                reinit="default" if self.is_live else "create_new",
                x_stats_pid=os.getppid() if self.is_live else os.getpid(),
                x_stats_track_process_tree=self.is_live,
            ),
        )
        self.url = self._run.url or self.url  # an offline run has no URL
        # use a custom step, because W&B drops lines with a smaller step, which a resume produces
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, lines: Sequence[Line]) -> None:
        if self.mode == "offline":
            self.send(self._of_this_job(lines))
        else:
            super().write(lines)

    def write_texts(self, texts: Sequence[Line]) -> None:
        super().write_texts(self._of_this_job(texts) if self.mode == "offline" else texts)

    def _of_this_job(self, lines: Sequence[Line]) -> list[Line]:
        return [line for line in lines if line["attempt"] >= (self._session.first_attempt or 0)]

    def send(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._run.log(line)

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._run.log({"step": step, name: wandb.Html(f"<pre>{html.escape(text)}</pre>")})  # keeps the line breaks

    def log_artifact(self, artifact: Any, aliases: Sequence[str]) -> Any:
        """Uploads an artifact of the open run, and returns it when the service has it."""
        return self._run.log_artifact(artifact, aliases=list(aliases)).wait()

    def finish(self) -> None:
        if self.mode == "offline":
            self.disconnect()
        else:
            super().finish()

    def disconnect(self) -> None:
        import wandb

        folder = self._session.checkpoint()
        if folder is not None:
            artifact = wandb.Artifact(f"checkpoint-{self._identity.run_id}", type="model")
            artifact.add_dir(str(folder))
            self._run.log_artifact(artifact)
        self._run.finish()
        wandb.teardown()  # ends W&B's process, which removes its socket
        if self._temporary is not None:
            self._temporary.cleanup()

    def outcome(self) -> dict[str, Any]:
        return {"mode": self.mode, "url": self.url}


def _leave_sweep(notify: Callable[[str], object]) -> None:
    """Removes the variables of a sweep of W&B from this process, unless its agent has started the run.

    An agent also sets the id of the run, which is then used, and writes a file with its parameters.
    """
    sweep = os.environ.get("WANDB_SWEEP_ID")
    parameters = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    run_id = os.environ.get("WANDB_RUN_ID")
    if sweep and run_id and parameters and Path(parameters).is_file():
        notify(f"W&B: the agent of the sweep {sweep} gives the run the id {run_id}")
        return
    for name in withheld(Receiver.WANDB):
        if name.startswith("WANDB_"):
            notify(f"W&B: {name} is not used, since no agent of a sweep has started this run")
            del os.environ[name]


def service() -> str:
    return os.environ.get("WANDB_BASE_URL") or SERVICE


def requested_mode(
    setting: str, record: Mapping[str, Any] | None, notify: Callable[[str], object] = lambda message: None
) -> str:
    """Returns the mode that the user wants: ``auto`` is WANDB_MODE, else online for a run that was online before, else
    disabled. An unknown WANDB_MODE is reported and not used.

    Args:
        setting: ``telemetry.wandb.mode``.
        record: the entry about W&B in ``run.json``.
    """
    if setting != "auto":
        return setting
    variable = os.environ.get("WANDB_MODE", "")
    mode = OLDER.get(variable, variable)
    if mode in ACCEPTED:
        return mode
    if mode:
        notify(f"W&B: WANDB_MODE is {mode!r}, which is not used; it may be {', '.join(ACCEPTED)}")
    was_online = record and (record.get("url") or record.get("mode") == "online")
    return "online" if was_online else "disabled"


def resolve_mode(setting: str, record: Mapping[str, Any] | None, notify: Callable[[str], object] = print) -> str:
    """Returns the mode in which W&B runs: online needs a key and a service that responds, else it is offline, which is
    reported. See ``requested_mode``.
    """
    mode = requested_mode(setting, record, notify)
    if mode == "online" and (why := why_offline()) is not None:
        notify(f"W&B: {why}; {OFFLINE}")
        return "offline"
    return mode


def not_sent_notice(settings: WandbConfig, record: Mapping[str, Any] | None = None) -> str | None:
    """Returns a line for a user with a key whose run sends nothing to W&B by default; None for other users."""
    notices: list[str] = []
    if settings.mode != "auto" or requested_mode("auto", record, notices.append) != "disabled":
        return None
    if notices:
        return notices[0]
    if os.environ.get("WANDB_MODE") or not _has_key(service()):
        return None
    return f"W&B: nothing is sent, although there is a key for {service()}; {ONLINE} sends {SENT}"


def why_offline() -> str | None:
    """Returns why nothing can be sent to the service from here; None if it responds and there is a key."""
    import urllib.error
    import urllib.request  # takes 50 ms, which commands on a login node do not need

    address = service()
    if not _has_key(address):
        return f"there is no API key for {address}; wandb login stores one"
    try:
        urllib.request.urlopen(f"{address.rstrip('/')}/healthz", timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return None  # any HTTP status is a response
    except OSError:
        return f"{address} did not respond within {ANSWER_S:g} s"
    return None


def _has_key(service: str) -> bool:
    if any(os.environ.get(name) for name in KEYS):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(service).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
