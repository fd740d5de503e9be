"""The metrics that a run shows to the monitoring of a site: the one table of their names, types, units and labels.

    python -m hpc_train.report.monitoring.names    prints it in Markdown, as in docs/howto/monitoring.md

Units are base units (seconds, bytes, shares from 0 to 1), as Prometheus recommends. All labels have few values: there
is no label for a rank or a step, so that the number of series does not grow with a run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hpc_train.run.exits import Failure
from hpc_train.run.ledger import Account

PREFIX = "hpc_train_"
GAUGE, COUNTER = "gauge", "counter"
RUN_LABELS = {  # of every metric
    "run": "the name of the run; SWEEP/NUMBER in a sweep",
    "run_id": "its id, which stays the same in all jobs and attempts",
    "user": "the user who runs it",
}
INFO_LABELS = ("job_id", "partition", "node", "version")

STATES = ("starting", "training", "evaluating", "restarting", "requeued", "finished", "stopped", "failed")
ACCOUNTS = tuple(field.name.removesuffix("_s") for field in fields(Account) if field.name not in ("gpu_s", "rank_s"))
FABRIC_PARTS = ("node", "rail", "world")


@dataclass(frozen=True)
class Metric:
    """Holds a row of the table.

    Attributes:
        name: without ``PREFIX``; a counter is shown with the suffix ``_total``.
        unit: empty for numbers without a unit.
        key: the key of a line of metrics (``metrics/attempt-NNN.jsonl``) with its value; None if it has another source.
        labels: besides ``RUN_LABELS``.
        choices: the values of the only label in ``labels``; empty if they are not known in advance.
    """

    name: str
    meaning: str
    unit: str = ""
    kind: str = GAUGE
    key: str | None = None
    labels: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Returns the name in a query."""
        return PREFIX + self.name + ("_total" if self.kind == COUNTER else "")


METRICS = (
    # the run
    Metric("run_info", "Always 1; its labels describe the current job of the run.", labels=INFO_LABELS),
    Metric("run_state", "1 for the state of the run, 0 for the others.", labels=("state",), choices=STATES),
    Metric("stalled", "1 if the run has made no progress for much longer than usual, else 0."),
    Metric("last_progress_timestamp_seconds", "When the run last made progress, since 1970.", "seconds"),
    Metric("attempt", "The number of the current start of the workers; the first is 0."),
    Metric("ranks", "The number of ranks.", key="world_size"),
    Metric("nodes", "The number of nodes that train."),
    Metric("allocated_gpus", "The number of GPUs that the job holds."),
    # training
    Metric("step", "The completed optimizer steps; it decreases when steps are repeated.", key="step"),
    Metric("planned_steps", "The steps at the end of training."),
    Metric("epoch", "The epoch.", key="epoch"),
    Metric("loss", "The training loss.", key="loss"),
    Metric("validation_loss", "The loss of the newest evaluation.", key="val_loss"),
    Metric("validation_accuracy_ratio", "The accuracy of the newest evaluation.", "ratio", key="val_accuracy"),
    Metric("learning_rate", "The learning rate.", key="lr"),
    Metric("gradient_norm", "The norm of the gradient before clipping.", key="grad_norm"),
    Metric("loss_scale", "The loss scale of fp16.", key="loss_scale"),
    Metric("samples", "The samples since step 0.", key="samples"),
    Metric("tokens", "The targets since step 0 that count in the loss.", key="tokens"),
    Metric("skipped_steps", "The steps skipped because their gradients were not finite.", kind=COUNTER),
    Metric("rollbacks", "The rollbacks to an earlier checkpoint because the training diverged.", kind=COUNTER),
    # speed
    Metric("step_duration_seconds", "The time per step.", "seconds", key="step_s"),
    Metric("tokens_per_second", "The targets per second.", "1/second", key="tokens_per_s"),
    Metric("samples_per_second", "The samples per second.", "1/second", key="samples_per_s"),
    Metric("model_flops_utilization_ratio", "The MFU.", "ratio", key="mfu"),
    Metric("hardware_flops_utilization_ratio", "The HFU, which counts recomputation.", "ratio", key="hfu"),
    Metric("gpu_utilization_ratio", "The share of the time in which the GPUs ran a kernel.", "ratio", key="gpu_util"),
    Metric("data_wait_ratio", "The share of the time spent waiting for data.", "ratio", key="data_wait_share"),
    Metric("host_ratio", "The share of the time in which the GPUs waited for the host.", "ratio", key="host_share"),
    Metric("communication_ratio", "The share of the time spent in communication.", "ratio", key="comm_share"),
    Metric("pipeline_bubble_ratio", "The share of the time spent in pipeline bubbles.", "ratio", key="bubble_share"),
    Metric("peak_memory_bytes", "The largest peak memory of a rank.", "bytes", key="peak_memory_bytes"),
    Metric("memory_imbalance_ratio", "That over the mean of all ranks.", "ratio", key="memory_imbalance"),
    # goodput
    Metric("goodput_ratio", "The share of the held time in steps and evaluations that were kept.", "ratio"),
    Metric(
        "time_seconds", "The time of all jobs of the run by its use. Lost work moves from steps to lost.", "seconds",
        labels=("use",), choices=ACCOUNTS,
    ),
    Metric("gpu_seconds", "The GPU time of all jobs of the run.", "seconds"),
    # failures
    Metric("restarts", "The restarts of the workers within a job.", kind=COUNTER),
    Metric("requeues", "The requeues of the job.", kind=COUNTER),
    Metric(
        "failures", "The failures of workers and nodes by class.", kind=COUNTER,
        labels=("class",), choices=tuple(str(each) for each in Failure),
    ),
    # checkpoints
    Metric("checkpoint_saves", "The checkpoints saved.", kind=COUNTER),
    Metric("checkpoint_failures", "The saves that failed.", kind=COUNTER),
    Metric("checkpoint_failures_in_a_row", "The saves that failed since the last one that succeeded."),
    Metric("last_checkpoint_step", "The step of the newest checkpoint."),
    Metric("last_checkpoint_timestamp_seconds", "When the newest checkpoint was saved, since 1970.", "seconds"),
    Metric("last_checkpoint_bytes", "Its size.", "bytes"),
    Metric("last_checkpoint_duration_seconds", "The time to write it.", "seconds"),
    # fabric
    Metric(
        "network_transmit_bytes_per_second", "The bytes that all nodes send.", "bytes/second",
        labels=("network",), choices=("rdma", "net"),
    ),
    Metric(
        "network_receive_bytes_per_second", "The bytes that all nodes receive.", "bytes/second",
        labels=("network",), choices=("rdma", "net"),
    ),
    Metric("compute_imbalance_ratio", "The longest computation of a rank over the mean.", key="compute_imbalance"),
    Metric(
        "arrival_skew_seconds", "The time per step between the first and the last rank at collectives.", "seconds",
        key="arrival_skew_s",
    ),
    Metric(
        "preflight_bandwidth_bytes_per_second",
        "The bus bandwidth that the preflight measured: of the slowest node, of the slowest rail, and of all ranks.",
        "bytes/second", labels=("part",), choices=FABRIC_PARTS,
    ),
    Metric("stragglers", "The ranks for which the others waited.", kind=COUNTER),
    Metric("slow_nodes", "The nodes and GPUs that the preflight found slow.", kind=COUNTER),
)  # fmt: skip


def table() -> str:
    """Returns the metrics as a table in Markdown."""
    rows = ["| Metric | Type | Unit | Own labels | Meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        if metric.choices and metric.name != "failures":  # troubleshooting.md lists the classes
            labels += f": {', '.join(metric.choices)}"
        rows.append(f"| `{metric.shown}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
