"""The metrics of a run: one JSON object per logged step, and whoever else wants them.

TensorBoard: event files in ``<run>/tensorboard``. Needs the extra ``hpc_train[tensorboard]``.
"""

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
    """Something that gets every line besides the file: W&B, TensorBoard."""

    def log(self, line: Line) -> None:
        """Takes one line; must neither raise nor wait."""


class MetricsLog:
    """Writes ``metrics/attempt-NNN.jsonl`` of one attempt; on rank 0 only.

    Keys: time (seconds since 1970), step (optimizer steps done), epoch, attempt, world_size, loss (mean over the
    targets of this very step's global batch, so it is the same after any resume), lr, grad_norm (before clipping),
    samples and tokens (since step 0; tokens are targets that count), and since the line before: step_s (seconds per
    step), tokens_per_s, samples_per_s, save_s (seconds for which saves blocked). At evaluations val_loss, val_accuracy,
    eval_s (its seconds); where known mfu, hfu, loss_scale, and what the ranks measured: data_wait_share, comm_share,
    bubble_share, host_share (of the time), compute_imbalance, arrival_skew_s, peak_memory_bytes, memory_imbalance,
    gpu_util, rdma_tx_bytes, rdma_rx_bytes, net_tx_bytes, net_rx_bytes (``measure/ranks.py`` says what they are). A
    number that is not finite is null.
    """

    def __init__(self, run: RunDirectory, attempt: int, sinks: Sequence[Sink] = ()) -> None:
        run.metrics.mkdir(parents=True, exist_ok=True)
        self._path = run.metrics_file(attempt)
        self._sinks = sinks

    def write(self, line: Line) -> None:
        plain = {key: finite_or_none(value) for key, value in line.items() if value is not None}
        try:
            append_line(self._path, plain)
        except OSError as error:  # a full disk costs lines, not the run
            print(f"the metrics of step {plain.get('step')} are not written: {error}", flush=True)
        for sink in self._sinks:
            sink.log(plain)


def finite_or_none(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


HEAD = ("step", "time", "attempt")  # places of a line, not curves


class TensorBoard:
    """A ``metrics.Sink``; on rank 0 only.

    Args:
        first_step: steps after this one that an earlier attempt wrote are hidden.

    Raises:
        UserError: the package is missing.
    """

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "the package tensorboard is not installed",
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
