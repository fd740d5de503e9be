"""Writes the metrics of a run as one JSON object per logged step, and forwards them to TensorBoard and W&B.

All attempts of a run log to one W&B run. A separate thread makes all calls of wandb, behind a bounded queue. If wandb
fails, hangs or is not installed, training continues and reports that once.
"""

from __future__ import annotations

import html
import math
import netrc
import os
import queue
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from hpc_train.config.schema import WandbConfig
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.file_writer import FileWriter

Line = dict[str, Any]


class Sink(Protocol):
    """Receives every line of metrics in addition to the file, e.g. W&B or TensorBoard."""

    def log(self, line: Line) -> None:
        """Logs one line; must neither raise nor block."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs text of a hook; must neither raise nor block."""


class MetricsLog:
    """Writes ``metrics/attempt-NNN.jsonl`` of one attempt, on rank 0 only.

    Every line has the keys time (seconds since 1970), step (completed optimizer steps), epoch, attempt, world_size,
    loss (mean over the targets of this step's global batch), lr, grad_norm (before clipping), samples and tokens (since
    step 0; tokens are targets that count). These values cover the time since the previous line: step_s (seconds per
    step), tokens_per_s, samples_per_s, save_s (seconds for which saves blocked training). Evaluations add val_loss,
    val_accuracy, val_NAME of each metric, val_SET_loss and so on of further evaluation sets, and eval_s. If known,
    there are also mfu, hfu, loss_scale, and the values that ``over_ranks`` in ``measure/stragglers.py`` describes:
    data_wait_share, comm_share, bubble_share, host_share, compute_imbalance, arrival_skew_s, peak_memory_bytes,
    memory_imbalance, gpu_util, rdma_tx_bytes, rdma_rx_bytes, net_tx_bytes and net_rx_bytes. A number that is not finite
    is written as null.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, sinks: Sequence[Sink] = (), events: EventLog | None = None
    ) -> None:
        self._path = run.metrics_file(attempt)
        self._writer = FileWriter("the metrics")
        self._writer.on_outage = None if events is None else events.write_outage
        self._sinks = sinks

    def write(self, line: Line) -> None:
        plain = {key: finite_or_none(value) for key, value in line.items() if value is not None}
        self._writer.append(self._path, plain)
        for sink in self._sinks:
            sink.log(plain)

    def text(self, step: int, name: str, text: str) -> None:
        """Sends text to W&B and TensorBoard."""
        for sink in self._sinks:
            sink.text(step, name, text)

    def close(self) -> None:
        """Waits a few seconds for lines that the file system does not accept."""
        self._writer.close()


def finite_or_none(value: Any) -> Any:
    """Replaces NaN and infinity by None, since JSON cannot represent them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


HEAD = ("step", "time", "attempt")  # keys that identify a line and are not plotted


class TensorBoard:
    """Writes TensorBoard event files to ``<run>/tensorboard``; a ``Sink`` on rank 0 only.

    Args:
        first_step: hides later steps that an earlier attempt wrote.

    Raises:
        UserError: the extra ``hpc_train[tensorboard]`` is not installed.
    """

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "telemetry.tensorboard=true needs the package tensorboard, which is not installed",
                where="telemetry.tensorboard",
                fix="pip install 'hpc_train[tensorboard]', or telemetry.tensorboard=false",
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step + 1)
        self._failed = False

    def log(self, line: dict[str, Any]) -> None:
        with self._failures_reported():
            for key, value in line.items():
                if key not in HEAD and isinstance(value, int | float):
                    self._writer.add_scalar(key, value, global_step=line["step"], walltime=line["time"])

    def text(self, step: int, name: str, text: str) -> None:
        with self._failures_reported():
            self._writer.add_text(name, f"```\n{text}\n```", global_step=step)

    def close(self) -> None:
        with self._failures_reported():
            self._writer.close()

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        """Prints the first error; the thread of the ``SummaryWriter`` ends at an error and raises it at every call."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                print(f"cannot write the files of TensorBoard; continuing without it: {error}", flush=True)


SERVICE = "https://api.wandb.ai"
OFFLINE = "recording offline, upload later with wandb sync"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
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

    The thread imports wandb when it has the first line of metrics. The import and the start of a W&B run take more than
    a second of processor time, which would otherwise delay the first step of every attempt.

    Args:
        tell: called with each message for the user.

    Attributes:
        mode: online, offline or disabled; None until the thread has determined it.
        problem: why the metrics were not recorded to the end; None if they were.
    """

    def __init__(self, settings: WandbConfig, identity: WandbIdentity, tell: Callable[[str], object] = print) -> None:
        self._settings = settings
        self._identity = identity
        self._tell = tell
        self.problem: str | None = None
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

    def text(self, step: int, name: str, text: str) -> None:
        self.log({"step": step, name: text})

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
            self.mode = resolve_mode(self._settings.mode, self._tell)
            if self.mode == "disabled":
                self._inactive = True
                return
            self._session()
        except BaseException as error:  # wandb.errors derive from several bases, SystemExit among them
            self._give_up(f"{type(error).__name__}: {error}")

    def _session(self) -> None:
        line = self._queue.get()
        import wandb

        if self.mode == "offline" and (old := _loses_attempts(wandb.__version__)):
            self._tell(old)
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
        while line is not None:
            run.log({key: _as_html(value) if isinstance(value, str) else value for key, value in line.items()})
            line = self._queue.get()
        if self._checkpoint is not None:
            artifact = wandb.Artifact(f"checkpoint-{identity.run_id}", type="model")
            artifact.add_dir(str(self._checkpoint))
            run.log_artifact(artifact)
        run.finish()

    def _give_up(self, reason: str) -> None:
        if not self._inactive:
            self._inactive = True
            self.problem = reason
            self._tell(f"W&B: {reason}; continuing without it, the metrics are in {self._identity.directory}/metrics")


def _as_html(text: str) -> Any:
    """Returns text in the form that W&B shows with its line breaks."""
    import wandb

    return wandb.Html(f"<pre>{html.escape(text)}</pre>")


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


def resolve_mode(asked: str, tell: Callable[[str], object] = print) -> str:
    """Resolves ``auto`` to WANDB_MODE, else to online. Online needs a key and a service that responds, else it is
    offline, which is told unless there is no key and ``auto`` was asked.
    """
    chosen = os.environ.get("WANDB_MODE", "") if asked == "auto" else asked
    if chosen in ("offline", "disabled") or (asked == "auto" and chosen == "online"):
        return chosen
    service = os.environ.get("WANDB_BASE_URL") or SERVICE
    if not _has_key(service):
        if asked == "online":
            tell(f"W&B: there is no API key for {service}; {OFFLINE}. Before the next run: wandb login")
        return "offline"
    if not _answers(service):
        tell(f"W&B: {service} did not respond within {ANSWER_S:g} s; {OFFLINE}")
        return "offline"
    return "online"


def _has_key(service: str) -> bool:
    if any(os.environ.get(name) for name in KEYS):
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
