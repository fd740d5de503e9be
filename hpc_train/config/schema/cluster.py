"""The keys of the group ``cluster``: the machine or the Slurm cluster that a run uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_train.config.schema.key import any_of, group, key, unless, when


@dataclass
class ContainerConfig:
    """The container in which a Slurm job runs."""

    image: str | None = key(
        None,
        "A .sif file, or an image that apptainer or pyxis can pull. null runs without a container.",
        when=when("step"),
    )
    runtime: str = key(
        "auto",
        "The container runtime. auto uses pyxis if srun supports it and the image is not a .sif file.",
        choices=("auto", "apptainer", "pyxis"),
        when=(unless("cluster.container.image", None), when("step")),
    )
    binds: list[str] = key(
        [],
        "Directories to mount besides the runs, the data and node-local storage: /data or /data:/inside.",
        when=(unless("cluster.container.image", None), when("step")),
    )


@dataclass
class FabricConfig:
    """Holds a site profile: facts about the network that cannot be detected on its nodes."""

    name: str = key("none", "The name of the profile.")
    variables: dict[str, str] = key(
        {}, "Environment variables of communication libraries for all workers. Variables that are already set win."
    )


@dataclass
class PriceConfig:
    """Holds what a GPU costs, for the costs in ``plan``, ``status`` and the page of a run."""

    per_gpu_hour: float | None = key(
        None, "The hourly price of a rented GPU, or the rate of the site. null derives it from purchase.", at_least=0
    )
    currency: str = key("", "The currency of all prices, such as EUR.")
    purchase: float | None = key(
        None, "The purchase price of a GPU, including its share of the node and the network.", above=0
    )
    years: float = key(
        4.0,
        "The time over which purchase is written off.",
        above=0,
        unit="years",
        when=unless("cluster.price.purchase", None),
    )
    use: float = key(
        0.7,
        "The share of the time in which a purchased GPU computes.",
        above=0,
        at_most=1,
        when=unless("cluster.price.purchase", None),
    )
    upkeep: float = key(
        0.0,
        "The yearly operating cost of a purchased GPU: power, cooling, space, staff.",
        at_least=0,
        when=unless("cluster.price.purchase", None),
    )
    spot: float | None = key(None, "The hourly price of a spot GPU, which the provider may reclaim.", at_least=0)
    preemptions_per_day: float = key(
        0.0,
        "The number of times per day that the provider reclaims GPUs from a job on spot GPUs.",
        at_least=0,
        when=unless("cluster.price.spot", None),
    )


@dataclass
class ClusterConfig:
    """Describes where a run is executed."""

    kind: str = key(
        "auto",
        "Whether to run on this machine, on Slurm, or with a custom scheduler. auto uses Slurm if its controller "
        "answers.",
        choices=("auto", "local", "slurm", "package.module:NAME"),
    )
    nodes: int | str = key(
        1, "The number of nodes, or on Slurm a range such as 2-4: the job starts on as many of them as are free."
    )
    gpus_per_node: int | str = key(
        "auto",
        "GPUs per node. auto uses all GPUs of a node (on Slurm: of the nodes in the partition); 0 trains on the CPU.",
        choices=("auto",),
        at_least=0,
    )
    visible_gpus: str = key(
        "own",
        "Which of the job's GPUs a rank sees. own shows it only its own GPU, as cuda:0. all shows it every GPU of the "
        "node, which torch's symmetric memory needs. It has no effect on AMD GPUs, which are all visible.",
        choices=("own", "all"),
        when=when("gpus"),
    )
    cpu_workers: int = key(4, "Ranks per node on nodes without a GPU.", at_least=1, when=when("cpus"))
    preflight: str = key(
        "quick",
        "Which checks run before the first step, unless the run uses the CPUs of one node. full also measures every "
        "pair of nodes.",
        choices=("quick", "full", "off"),
        when=any_of(when("gpus"), when("nodes")),
    )
    preflight_action: Any = key(
        {
            "tcp": "stop",
            "nvlink": "stop",
            "shared_gpu": "stop",
            "slow_device": "exclude",
            "wrong_numbers": "exclude",
            "config": "stop",
            "versions": "warn",
            "network": "warn",
            "clock": "warn",
        },
        "The action on an error that the preflight finds, by class, or one value for all classes: warn trains anyway, "
        "stop ends the job, exclude continues without the node (stop if the error concerns no single node).",
        choices=("warn", "stop", "exclude"),
        when=(unless("cluster.preflight", "off"), any_of(when("gpus"), when("nodes"))),
    )
    health_check: str | None = key(
        None,
        "A command of the site, which bash runs on each node before training. If it fails, the run does not use the "
        "node, and the last line of its output is the reason.",
    )
    health_check_timeout_s: float = key(
        60.0,
        "The time limit of health_check. A check that takes longer has failed.",
        above=0,
        unit="seconds",
        when=unless("cluster.health_check", None),
    )
    partition: str | None = key(None, "sbatch --partition.", when=when("submitted"))
    account: str | None = key(None, "sbatch --account.", when=when("submitted"))
    qos: str | None = key(None, "sbatch --qos.", when=when("submitted"))
    time: str = key("01:00:00", "The time limit of a job: sbatch --time.", when=when("submitted"))
    time_min: str | None = key(None, "The shortest acceptable time limit: sbatch --time-min.", when=when("submitted"))
    cpus_per_gpu: int | str = key(
        "auto",
        "CPU cores per rank. auto uses the partition's default, or else an equal share of the node.",
        choices=("auto",),
        at_least=1,
        when=when("step"),
    )
    mem_per_gpu: str = key(
        "auto",
        "Memory per rank, such as 64G. auto uses the partition's default, or else an equal share of the node.",
        when=when("submitted"),
    )
    mem: str | None = key(None, "Memory per node. It replaces mem_per_gpu.", when=when("submitted"))
    gpu_type: str | None = key(None, "The GPU type in --gpus-per-node=TYPE:N.", when=when("gpus"))
    machine: str = key(
        "auto",
        "The machine for which strategy=auto and the report at the end of a job predict: a machine file of hpc_train "
        "such as h100, or the path of a custom one. auto finds it by the type of the GPUs.",
    )
    gres: str | None = key(
        None, "A generic resource such as gpu:a100:4. It replaces --gpus-per-node.", when=when("submitted")
    )
    constraint: str | None = key(None, "sbatch --constraint.", when=when("submitted"))
    exclude: str | None = key(None, "Nodes that the job must not use: sbatch --exclude.", when=when("submitted"))
    nodelist: str | None = key(None, "Nodes that the job must use: sbatch --nodelist.", when=when("submitted"))
    exclusive: bool = key(False, "Whether the job has its nodes to itself: sbatch --exclusive.", when=when("submitted"))
    interface: str | None = key(
        None,
        "How nodes reach each other: by a network interface such as ib0, or by a pattern for host names such as "
        "{host}-ib0. null uses the names of the nodes in Slurm.",
        when=when("nodes"),
    )
    comment: str | None = key(
        None, "Text that is appended to the job's comment hpc_train:RUN_DIRECTORY.", when=when("submitted")
    )
    clusters: str | None = key(None, "sbatch --clusters.", when=when("submitted"))
    first: list[Any] = key(
        [],
        "Further jobs for the run. Each entry changes keys of cluster, such as {account: b}. The first job to start "
        "trains the run, and the others are cancelled.",
        when=(when("submitted"), when("launch.chain", 1)),
    )
    requeue: str = key(
        "normal",
        "How Slurm requeues the job after a node failure. expedite uses sbatch --requeue=expedite of Slurm 25.11: the "
        "job starts again at once, before all other jobs, and Slurm reserves its healthy nodes for it.",
        choices=("normal", "expedite"),
        when=(when("submitted"), when("launch.chain", 1)),
    )
    extra: dict[str, Any] = key({}, "Any other sbatch option, such as {begin: now+1hour}.", when=when("submitted"))
    env: dict[str, str] = key(
        {}, "Environment variables of the job, on Slurm and on this machine. A batch script exports them before setup."
    )
    setup: list[str] = key(
        [], "Lines of bash that run before training, such as module load or conda activate.", when=when("submitted")
    )
    teardown: list[str] = key([], "Lines of bash that run after training.", when=when("submitted"))
    python: str | None = key(
        None, "The Python interpreter on the nodes. null uses the one that submits.", when=when("step")
    )
    fabric: FabricConfig = group(FabricConfig)
    container: ContainerConfig = group(ContainerConfig)
    price: PriceConfig = group(PriceConfig)
