"""Writes the metrics of a run as one JSON object per logged step, and forwards them to sinks such as TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_line

Line = dict[str, Any]


class Sink(Protocol):
    """Receives every line of metrics in addition to the file, e.g. W&B or TensorBoard."""

    def log(self, line: Line) -> None:
        """Logs one line; must neither raise nor block."""


class MetricsLog:
    """Writes ``metrics/attempt-NNN.jsonl`` of one attempt, on rank 0 only.

    Every line has the keys time (seconds since 1970), step (completed optimizer steps), epoch, attempt, world_size,
    loss (mean over the targets of this step's global batch), lr, grad_norm (before clipping), samples and tokens (since
    step 0; tokens are targets that count). These values cover the time since the previous line: step_s (seconds per
    step), tokens_per_s, samples_per_s, save_s (seconds for which saves blocked training). Evaluations add val_loss,
    val_accuracy and eval_s. If known, there are also mfu, hfu, loss_scale, and the values that ``over_ranks`` in
    ``measure/stragglers.py`` describes: data_wait_share, comm_share, bubble_share, host_share, compute_imbalance,
    arrival_skew_s, peak_memory_bytes, memory_imbalance, gpu_util, rdma_tx_bytes, rdma_rx_bytes, net_tx_bytes and
    net_rx_bytes. A number that is not finite is written as null.
    """

    def __init__(self, run: RunDirectory, attempt: int, sinks: Sequence[Sink] = ()) -> None:
        run.metrics.mkdir(parents=True, exist_ok=True)
        self._path = run.metrics_file(attempt)
        self._sinks = sinks

    def write(self, line: Line) -> None:
        plain = {key: finite_or_none(value) for key, value in line.items() if value is not None}
        try:
            append_line(self._path, plain)
        except OSError as error:  # a full disk must not stop the run
            print(f"cannot write the metrics of step {plain.get('step')}: {error}", flush=True)
        for sink in self._sinks:
            sink.log(plain)


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

    def log(self, line: dict[str, Any]) -> None:
        for key, value in line.items():
            if key not in HEAD and isinstance(value, int | float):
                self._writer.add_scalar(key, value, global_step=line["step"], walltime=line["time"])

    def close(self) -> None:
        self._writer.close()
