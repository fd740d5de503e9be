"""Tells what replaces Hydra's launchers that submit jobs, and the keys of the submitit launcher."""

from __future__ import annotations

REPLACED = {
    "submitit_slurm": "remove it; cluster=slurm -m submits to Slurm, with cluster.partition=P cluster.time=T",
    "submitit_local": "remove it; cluster=local -m runs the jobs on this machine",
    "joblib": "remove it; with cluster=local -m as many jobs run at once as there are GPUs or cores for",
}
SWEEPERS = {  # name -> package
    "optuna": "hydra-optuna-sweeper",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
}
# hydra.launcher.KEY of the submitit launcher -> the key that replaces it
SUBMITIT_KEYS = {
    "account": "cluster.account",
    "additional_parameters": "cluster.extra",
    "array_parallelism": "launch.array_parallelism",
    "comment": "cluster.comment",
    "constraint": "cluster.constraint",
    "cpus_per_gpu": "cluster.cpus_per_gpu",
    "exclude": "cluster.exclude",
    "gpus_per_node": "cluster.gpus_per_node",
    "mail_type": "cluster.extra",
    "mail_user": "cluster.extra",
    "max_num_timeout": "elastic.max_requeues",
    "mem_gb": "cluster.mem",
    "nodelist": "cluster.nodelist",
    "nodes": "cluster.nodes",
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "setup": "cluster.setup",
    "n_jobs": "launch.array_parallelism",  # of the joblib launcher
    "submitit_folder": "run.root",
    "timeout_min": "cluster.time",
}


def instead_of(group: str, option: str) -> str | None:
    """Returns what replaces a launcher that is not installed, or how to install a sweeper; None for unknown names."""
    if group == "hydra/launcher":
        return REPLACED.get(option)
    package = SWEEPERS.get(option) if group == "hydra/sweeper" else None
    return package and f"pip install {package}; its trials then run through the launcher of hpc_train"


def instead_of_key(key: str) -> str | None:
    """Returns what replaces ``hydra.launcher.NAME`` of the submitit launcher or a variable of Hydra; else None."""
    group, _, name = key.rpartition(".")
    if group == "hydra.job.env_set":
        return f"+cluster.env.{name}=VALUE"
    if group != "hydra.launcher":
        return None
    known = SUBMITIT_KEYS.get(name)
    return f"{known}=VALUE" if known else "remove it; the groups cluster and launch configure the jobs"
