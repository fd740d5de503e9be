"""Writes the metrics of a run as one JSON object per logged step, and its texts; trackers read both (``sinks/``)."""

from __future__ import annotations

import math
import time
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.file_writer import FileWriter


class MetricsLog:
    """Writes ``metrics/attempt-NNN.jsonl`` of one attempt, on rank 0 only.

    Every line has the keys time (seconds since 1970), step (completed optimizer steps), epoch, attempt, world_size,
    loss (mean over the targets of this step's global batch), lr, grad_norm (before clipping), samples and tokens (since
    step 0; tokens are targets that count). These values cover the time since the previous line: step_s (seconds per
    step), tokens_per_s, samples_per_s, save_s (seconds for which saves blocked training), verify_s (seconds of steps
    in which ``train.verify`` repeated passes). Evaluations add val_loss,
    val_accuracy, val_NAME of each metric, val_SET_loss and so on of further evaluation sets, and eval_s. If known,
    there are also mfu (of the peak in bf16), mfu_of_precision, hfu, loss_scale, and the values that ``over_ranks`` in
    ``train/watch/stragglers.py`` describes: data_wait_share, comm_share, bubble_share, host_share, compute_imbalance,
    arrival_skew_s, peak_memory_bytes, memory_imbalance, gpu_util, rdma_tx_bytes, rdma_rx_bytes, net_tx_bytes and
    net_rx_bytes. With experts, there are those of ``load_metrics`` in ``models/moe.py``: expert_load, expert_load_max,
    expert_entropy and dropped_share. A number that is not finite is written as null.
    """

    def __init__(self, run: RunDirectory, attempt: int, events: EventLog | None = None) -> None:
        self._path = run.metrics_file(attempt)
        self._texts = run.texts / self._path.name
        self._attempt = attempt
        self._now = time.time
        self._writer = FileWriter("the metrics")
        if events is not None:
            self._now = events.now
            self._writer.on_outage = events.write_outage

    def write(self, line: dict[str, Any]) -> None:
        plain = {key: finite_or_none(value) for key, value in line.items() if value is not None}
        self._writer.append(self._path, plain)

    def text(self, step: int, name: str, text: str) -> None:
        """Writes text of a hook to ``texts/attempt-NNN.jsonl``."""
        head = {"time": self._now(), "step": step, "attempt": self._attempt}
        self._writer.append(self._texts, head | {"name": name, "text": text})

    def close(self) -> None:
        """Waits, for a bounded time, until the pending lines are written."""
        self._writer.close()


def finite_or_none(value: Any) -> Any:
    """Replaces NaN and infinity by None, since JSON cannot represent them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
