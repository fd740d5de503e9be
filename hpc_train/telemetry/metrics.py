"""Writes the metrics of a run as one JSON object per logged step, and forwards them to the sinks (see ``sinks/``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.file_writer import FileWriter
from hpc_train.telemetry.sinks.sink import Line, Sink


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
        """Sends text to the sinks."""
        for sink in self._sinks:
            sink.text(step, name, text)

    def close(self) -> None:
        """Waits in bounded time for the sinks and for lines that the file system does not accept."""
        for sink in self._sinks:
            sink.end()
        self._writer.close()
        for sink in self._sinks:
            sink.close()


def finite_or_none(value: Any) -> Any:
    """Replaces NaN and infinity by None, since JSON cannot represent them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
