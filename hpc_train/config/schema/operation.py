"""The keys of the groups that operate a run: ``checkpoint``, ``elastic``, ``telemetry``, ``launch`` and ``run``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_train.config.schema.key import NOT_DEBUGGED, any_of, group, key, unless, when


@dataclass
class CheckpointConfig:
    """When and how checkpoints are saved. A run always saves on a stop request and at the end."""

    every: str = key(
        "auto",
        "The interval between checkpoints: a number of steps (500), a time (30m, 2h), 0 for none, or auto, which "
        "derives it from the cost of a save and the failure rate.",
        when=NOT_DEBUGGED,
    )
    keep: int = key(2, "The number of newest checkpoints to keep.", at_least=1)
    keep_every: int = key(
        0,
        "Also keeps the first checkpoint of every interval of this many steps. 0 disables it.",
        at_least=0,
        unit="steps",
    )
    keep_best: str | None = key(
        None,
        "Also keeps the best checkpoint by this metric of evaluations, such as val_loss, and saves one at each "
        "evaluation that is better than all before.",
    )
    best_mode: str = key(
        "auto",
        "Whether the lowest (min) or the highest (max) value of keep_best is the best. auto knows val_loss, "
        "val_accuracy and the built-in metrics.",
        choices=("auto", "min", "max"),
        when=unless("checkpoint.keep_best", None),
    )
    verify: str = key(
        "full",
        "What is verified before a checkpoint is loaded. full reads and hashes every byte; sizes compares file sizes.",
        choices=("full", "sizes"),
    )
    asynchronous: bool | str = key(
        "auto",
        "Whether training continues while a copy of the state in host memory is written. auto is true on GPUs and "
        "false on CPUs. Where host memory is short, saves are synchronous.",
        choices=("auto",),
        when=NOT_DEBUGGED,
    )
    wait_for_room_s: float = key(
        600.0,
        "How long the last save of a run is retried while the disk is full or its server is unreachable.",
        at_least=0,
        unit="seconds",
    )
    commit: str = key(
        "auto",
        "How a save is committed: rename of its directory, or a marker file COMMITTED for mounted buckets. auto "
        "decides by the file system.",
        choices=("auto", "rename", "marker"),
    )


@dataclass
class ElasticConfig:
    """How a run handles failures and stop requests."""

    collective_timeout_s: float = key(600.0, "The timeout of a collective operation.", above=0, unit="seconds")
    hang_timeout_s: str = key(
        "auto",
        "The number of seconds after which a step counts as a hang and the workers restart. 0 means no limit. auto "
        "uses 5 times the 99th percentile of the last 256 steps, at least 3 s, and at least 120 s on several nodes "
        "or GPUs. Before 5 steps are known, it uses 5 times the first step and at least 30 s. A number also bounds the "
        "first step, which has at least 600 s with train.compile. Time in which a worker waits for a processor does "
        "not count.",
    )
    start_timeout_s: float = key(
        1800.0,
        "The time after which the workers restart if one has not finished its imports, connected to the others and "
        "loaded data and checkpoint. It also bounds the first step, unless hang_timeout_s is a number.",
        above=0,
        unit="seconds",
        when=unless("elastic.hang_timeout_s", "0"),
    )
    stop_grace_s: float | int | str = key(
        "auto",
        "The time between a stop request and the kill of the workers. A job is asked to stop this long before its "
        "time limit. auto derives it from the durations of a save and a step.",
        choices=("auto",),
        above=0,
        unit="seconds",
    )
    max_requeues: int = key(
        10,
        "The number of requeues of a Slurm job. Each requires a new checkpoint since the previous one.",
        at_least=0,
        when=when("in_job"),
    )
    max_restarts: int | None = key(
        None,
        "The number of restarts in a job, after any failure but a refusal. null restarts only where that can help, "
        "until three attempts in a row reached no new step.",
        at_least=0,
    )
    spares: int = key(
        0, "Idle nodes besides cluster.nodes that replace lost nodes.", at_least=0, unit="nodes", when=when("in_job")
    )
    min_nodes: int | None = key(
        None,
        "The smallest number of nodes on which the run continues after it loses nodes. null requeues the job instead.",
        at_least=1,
        when=when("nodes"),
    )
    grow: str = key(
        "never",
        "Whether the run asks for more nodes while it trains: with idle by a job of low priority, with always by one "
        "of its usual priority. A resize request of a user ends this.",
        choices=("never", "idle", "always"),
        when=when("in_job"),
    )
    max_nodes: int | None = key(
        None,
        "The number of nodes up to which the run grows.",
        at_least=1,
        when=unless("elastic.grow", "never"),
    )
    priority: int = key(
        0,
        "How urgent the run is among the jobs of the same user. While a pending job of higher priority lacks nodes, "
        "runs with min_nodes give theirs back. Jobs of other programs have priority 0.",
        when=when("in_job"),
    )
    shrink_interval_s: float = key(
        3600.0,
        "The least time between two changes to fewer nodes for more urgent jobs.",
        at_least=0,
        unit="seconds",
        when=(unless("elastic.min_nodes", None), when("in_job")),
    )
    heartbeat_timeout_s: float = key(
        15.0, "The time without a heartbeat after which a node counts as lost.", above=0, unit="seconds"
    )
    join_timeout_s: float = key(
        300.0,
        "How long to wait for a node to join before the run continues without it.",
        above=0,
        unit="seconds",
        when=when("nodes"),
    )
    exclude_hours: float = key(
        24.0,
        "How long a node's failures are remembered. A node that failed twice in this time is excluded.",
        at_least=0,
        unit="hours",
        when=when("in_job"),
    )


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = key(
        "auto",
        "Whether metrics are sent to W&B. auto follows WANDB_MODE, keeps a run online that was online before, and "
        "otherwise sends and writes nothing. online records offline where the service does not answer.",
        choices=("auto", "online", "offline", "disabled"),
        when=NOT_DEBUGGED,
    )
    project: str = key("hpc_train", "The W&B project.")
    entity: str | None = key(None, "The W&B entity. null uses the default of the account.")
    log_checkpoint: bool = key(
        False,
        "Whether the last checkpoint is uploaded as an artifact at the end.",
        when=unless("telemetry.wandb.mode", "disabled"),
    )


@dataclass
class MlflowConfig:
    """MLflow, which needs a server and the extra hpc_train[mlflow]."""

    uri: str | None = key(
        None,
        "The address of the MLflow server, such as http://HOST:5000. auto takes MLFLOW_TRACKING_URI. null sends "
        "nothing during training.",
    )
    experiment: str = key("hpc_train", "The MLflow experiment.")


@dataclass
class ProfileConfig:
    """A profile of some steps, written to profile/ in the run directory."""

    steps: str | None = key(None, "The steps to profile: 10, or 10-12. null profiles nothing.")
    ranks: Any = key(
        0, "The ranks to profile: a rank, a list such as [0,3], or all.", when=unless("telemetry.profile.steps", None)
    )


@dataclass
class PrometheusConfig:
    """How a run exports its metrics to Prometheus."""

    file: str | None = key(
        None,
        "A file that always has the current metrics in the text format of Prometheus. auto is metrics/current.prom in "
        "the run directory. A directory, such as that of the node exporter, gets hpc_train_RUN_ID.prom.",
    )
    port: int | str | None = key(
        None,
        "The port at which the first node serves the metrics. auto or 0 takes a free one. null serves none.",
        choices=("auto",),
        at_least=0,
        at_most=65535,
    )
    host: str = key(
        "auto",
        "The address or host name to serve them on. auto is the address at which the nodes meet, the name of the only "
        "node, or outside of a job the loopback interface.",
        when=unless("telemetry.prometheus.port", None),
    )
    token_file: str | None = key(
        None,
        "A file of mode 0600 with the token that Prometheus must send. null creates and uses "
        "~/.config/hpc_train/prometheus.token where other machines can reach the port, and no token on loopback.",
        when=unless("telemetry.prometheus.port", None),
    )
    targets_dir: str | None = key(
        None,
        "A directory in which Prometheus looks for targets (file_sd_configs). The run has a file there.",
        when=unless("telemetry.prometheus.port", None),
    )
    interval_s: float = key(
        15.0,
        "The time between two updates, also of OTLP.",
        above=0,
        unit="seconds",
        when=any_of(
            unless("telemetry.prometheus.file", None),
            unless("telemetry.prometheus.port", None),
            when("telemetry.otlp", True),
        ),
    )


@dataclass
class TelemetryConfig:
    """Sets what is measured and where it is reported."""

    log_every: int = key(10, "Steps between two log lines.", at_least=1, unit="steps", when=NOT_DEBUGGED)
    wandb: WandbConfig = group(WandbConfig)
    mlflow: MlflowConfig = group(MlflowConfig)
    tensorboard: bool = key(False, "Whether metrics are also written for TensorBoard.")
    prometheus: PrometheusConfig = group(PrometheusConfig)
    otlp: bool = key(
        False, "Whether metrics are also sent to the OpenTelemetry collector at $OTEL_EXPORTER_OTLP_ENDPOINT."
    )
    profile: ProfileConfig = group(ProfileConfig)
    gpu_idle_minutes: float = key(
        20.0,
        "Warns when the GPUs of a node have been idle for this time, before a watchdog of the site ends the job. 0 "
        "disables the warning.",
        at_least=0,
        unit="minutes",
        when=when("gpus"),
    )


@dataclass
class LaunchConfig:
    """How jobs are submitted with ``-m``."""

    dry_run: bool = key(False, "Prints what would be submitted and writes nothing.")
    detach: bool = key(False, "Exits after submission instead of waiting for the jobs.", when=when("launched"))
    array_parallelism: int | str = key(
        "auto",
        "The number of jobs of a sweep that run at the same time; on Slurm, per job array. auto runs as many as fit.",
        choices=("auto",),
        at_least=1,
        when=when("launched"),
    )
    chain: int = key(
        1,
        "The number of consecutive Slurm jobs of one run, for sites that do not requeue jobs.",
        at_least=1,
        when=when("submitted"),
    )
    confirm_gpu_hours: float = key(
        50.0,
        "A submission that may cost more, including requeues, asks for confirmation.",
        at_least=0,
        unit="GPU hours",
        when=when("submitted"),
    )
    yes: bool = key(False, "Submits without asking for confirmation.", when=when("submitted"))


@dataclass
class RunConfig:
    """Configures the run directory."""

    root: str = key(
        "outputs",
        "The parent of run directories. conf/ uses $HPC_TRAIN_ROOT, else hpc_train in the site's scratch space, else "
        "outputs.",
    )
    name: str | None = key(None, "The name of the run. A second call with the same name resumes the run.")
    fork: str | None = key(
        None,
        "The name of a new run that starts from the newest checkpoint of run.name and may change its model, data, "
        "batch and optimizer.",
    )
    group: str | None = key(None, "A Unix group whose members can read and change the files of the run.")
    on_event: str | None = key(
        None,
        "A command that bash runs for each event of the first node's agent, with the event as a line of JSON on its "
        "standard input and the run directory in $HPC_TRAIN_RUN_DIR. It has 10 seconds, and does not delay restarts.",
    )
    max_gpu_hours: float | None = key(
        None,
        "The budget of all jobs of the run. The run saves and stops when it is spent.",
        above=0,
        unit="GPU hours",
        when=when("gpus"),
    )
    snapshot: bool | str = key(
        True,
        "Whether jobs run from a copy of the git work tree, so that later edits do not affect waiting jobs. The runs "
        "of a run root share copies in .code/; copy writes one into the run directory, which can then be moved.",
        choices=("copy",),
    )
    entry: str | None = key(
        None,
        "A function, package.module:function, that runs in every worker instead of the trainer. It is called with an "
        "hpc_train.loop.Context.",
    )
    args: dict[str, Any] = key({}, "The arguments of run.entry: +run.args.NAME=VALUE is context.args[NAME].")
    command: Any = key(
        None,
        "A command that runs in every worker instead of the trainer, with the variables of torchrun: "
        "[python, train.py, --lr, 0.1], or the same as one string.",
    )
    per: str = key(
        "gpu",
        "Whether run.command runs once for each GPU, or once per node: one process, which sees all GPUs of its node.",
        choices=("gpu", "node"),
        when=unless("run.command", None),
    )
    roles: dict[str, Any] = key(
        {},
        "Processes of different kinds in one job: a mapping of the name of each role to its command, and if needed "
        "nodes, per, procs, gpus, partition, constraint, cpus, mem, ready, after and on_failure. docs/howto/roles.md "
        "explains them.",
    )
    progress_dir: str | None = key(
        None,
        "A directory in which newer files show that run.command makes progress. null relies on the file "
        "$HPC_TRAIN_PROGRESS.",
    )
