"""Translates a refusal of sbatch: every line that it or a submit plugin of the site prints, and a fix that fits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.schedulers.slurm.client import NO_CONFIGURATION, UNREACHABLE
from hpc_train.schedulers.slurm.variables import Receiver, preset_clusters, reaches

AUTHENTICATION = re.compile(r"munge|authentication (error|plugin)|Invalid authentication", re.IGNORECASE)
TOO_FEW_NOW = "Requested node configuration is not available"  # also for impossible requests
NODES = "sinfo -o '%P %D %c %m %G %f' lists the nodes, cores, memory in MiB, GPUs and features of each partition"
GENERAL = "partition, account, qos, time, nodes, gpus_per_node"

# What Slurm says, the keys that it is about, and the fix. The first match counts. The words are those of
# slurm_strerror(): https://github.com/SchedMD/slurm/blob/master/src/common/slurm_errno.c
KNOWN: Mapping[str, tuple[str, str]] = {
    TOO_FEW_NOW: ("nodes, gpus_per_node, cpus_per_gpu, mem, constraint", NODES),
    "Invalid feature specification": ("constraint", NODES),
    "Invalid generic resource": ("gpus_per_node, gpu_type", NODES),
    "Memory specification can not be satisfied": ("mem", NODES),
    "Memory required by task is not available": ("mem", NODES),
    "CPU count per node can not be satisfied": ("cpus_per_gpu", NODES),
    "Node count specification invalid": ("nodes", NODES),
    "Invalid node name": ("nodelist, exclude", "sinfo -N lists the names of the nodes"),
    "Invalid partition": ("partition", "sinfo -s lists the partitions"),
    "Invalid account": ("account, partition", "sacctmgr show assoc user=$USER lists your accounts and their QOS"),
    "Invalid qos": ("qos", "sacctmgr show assoc user=$USER lists your accounts and their QOS"),
    "Invalid wckey": ("wckey", "sacctmgr show wckey user=$USER lists yours"),
    "Requested time limit is invalid": ("time", "sinfo -s lists the time limit of each partition"),
    "Requested partition configuration": ("partition, nodes, time", "sinfo -s lists the limits of each partition"),
    "Requested reservation is invalid": ("reservation", "scontrol show res lists the reservations"),
    "Job dependency problem": ("dependency", "name jobs that squeue or sacct still know"),
    "Job violates accounting/QOS policy": (
        "time, nodes, qos",
        "wait until other jobs end, or request less: sacctmgr show qos lists the limits",
    ),
}
_OPTION = re.compile(r"--([a-z][a-z-]+)")


def refusal(said: str) -> UserError:
    """Returns the error for a refused submission, with all that was printed.

    Args:
        said: the standard error of sbatch.
    """
    lines = [line.rstrip() for line in said.splitlines() if line.strip()] or ["no reason given"]
    words = lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
    if AUTHENTICATION.search(said):
        return UserError(
            f"Slurm could not authenticate this user: {words}",
            where="munge on this machine",
            fix="this is a fault of the machine and not of the job: try again later or on another login node, and "
            "report it to the site's support",
        )
    if any(text in said for text in (*UNREACHABLE, NO_CONFIGURATION)):
        return UserError(
            f"no Slurm controller answers: {words}",
            where="cluster.kind",
            fix="submit from a login node, when `scontrol ping` says that the controller is up; or cluster=local",
        )
    keys, fix = _fix(said, several=len(lines) > 1)
    where = ", ".join(f"cluster.{key}" for key in keys.split(", "))
    named, others = shell_options(said)
    if named:
        where = ", ".join(f"{name} of this shell" for name in named)
        fix = f"unset {' '.join(named)}, or change the value to one that this cluster accepts"
    elif others:
        fix += f"; sbatch also reads {', '.join(others)} of this shell"
    return UserError(f"sbatch refused the job: {words}", where=where, fix=fix)


def shell_options(said: str, environment: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Returns the variables of the shell that set options of sbatch: those that a refusal is about, and the others.

    sbatch refuses a wrong value even where its command line has another one.
    """
    names = [name for name in environment if name.startswith("SBATCH_") and reaches(name, Receiver.SBATCH)]
    if preset_clusters(environment) is not None:
        names += [name for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS") if environment.get(name)]
    named = sorted(name for name in names if _is_about(said, name, environment[name]))
    return named, sorted({*names} - {*named})


_LONG_OPTIONS = {"SBATCH_TIMELIMIT": "time", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_REQ_SWITCH": "switches"}


def _is_about(said: str, name: str, value: str) -> bool:
    """Returns whether a refusal names the value of a variable or its option."""
    option = _LONG_OPTIONS.get(name) or name.partition("_")[2].lower().replace("_", "-")
    by_value = value != "" and re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", said) is not None
    return by_value or re.search(rf"--{option}\b(?!-)|\binvalid {option}\b", said, re.IGNORECASE) is not None


def _fix(said: str, several: bool) -> tuple[str, str]:
    """Returns the keys of ``cluster`` that the refusal is about, and the fix."""
    known = {field.name for field in fields(ClusterConfig)}
    options = (option.replace("-", "_") for option in _OPTION.findall(said))
    if named := ", ".join(dict.fromkeys(option for option in options if option in known)):
        return named, f"set what the message asks for: {', '.join(f'cluster.{key}=VALUE' for key in named.split(', '))}"
    if found := next((entry for text, entry in KNOWN.items() if text.lower() in said.lower()), None):
        return found
    if several:
        return GENERAL, "the site explains the refusal in the lines above; the keys of cluster are sbatch's options"
    return GENERAL, f"cluster.{GENERAL} as this cluster allows them"
