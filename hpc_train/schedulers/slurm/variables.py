"""Defines which environment variables reach Slurm's commands, batch scripts, steps and W&B, and why.

The shell of a submission may hold variables of another job, of its user's habits, or of a wrapper. Slurm's commands
read most of them as options: a filter of ``squeue`` hides live jobs, an option of ``sbatch`` turns one run into an
array, and one of ``srun`` pins all ranks to a core. The first rule that matches a variable applies. A variable that no
rule matches reaches all receivers.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase


class Receiver(Enum):
    """Lists the programs that read the environment."""

    QUERY = auto()  # squeue, sinfo, sacct, sacctmgr, scontrol and scancel, as Python runs them
    SBATCH = auto()  # sbatch, and the environment of the job, which sbatch copies
    SCRIPT = auto()  # the commands of a batch script, and srun in the shell of an allocation
    INNER_STEP = auto()  # srun within another step
    WANDB = auto()  # the W&B client of the run


@dataclass(frozen=True)
class Rule:
    """Defines how a group of variables is treated.

    Attributes:
        names: names, or prefixes that end with ``*``.
        reaches: the receivers that get them.
        reason: the reason for this choice, as the end of a sentence.
        instead: what replaces a variable that does not reach sbatch.
    """

    names: tuple[str, ...]
    reaches: frozenset[Receiver]
    reason: str
    instead: str = ""

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)


def _rule(names: str, reaches: tuple[Receiver, ...], reason: str, instead: str = "") -> Rule:
    return Rule(tuple(names.split()), frozenset(reaches), reason, instead)


_ALL = tuple(Receiver)
_OF_SLURM = (Receiver.QUERY, Receiver.SBATCH, Receiver.SCRIPT, Receiver.INNER_STEP)
# The names are from the manual pages (INPUT ENVIRONMENT VARIABLES) of Slurm 20.11 to 25.05.
RULES = (
    _rule("SLURM_CONF SLURM_CONF_SERVER", _ALL, "it selects the cluster of this machine"),
    _rule("SLURM_JWT SLURM_SACK_*", _ALL, "it authenticates the user"),
    _rule(
        "SLURM_ROOT SLURM_HOME SLURM_DIR SLURM_PREFIX SLURM_PATH SLURM_BIN*",
        _ALL,
        "it says where the site has installed Slurm; wrappers of its commands read it",
    ),
    _rule(
        "SLURM_CLUSTERS SBATCH_CLUSTERS",
        (),
        "every command would ask another cluster, also about the jobs of this one; it sets the default of "
        "cluster.clusters, which is an option of the commands that need it",
    ),
    # options of sbatch
    _rule("SBATCH_ARRAY_INX", (), "one run would become several tasks", "-m with a list of values runs a sweep"),
    _rule("SBATCH_WAIT", (), "sbatch would return only at the end of the job", "launch.detach=false waits for the job"),
    _rule(
        "SBATCH_GPUS SBATCH_GPUS_PER_* SBATCH_CPUS_PER_GPU SBATCH_GRES SBATCH_TRES_PER_TASK",
        (),
        "it would contradict or reduce the GPUs and cores that the job requests",
        "use cluster.gpus_per_node, cluster.cpus_per_gpu or cluster.gres",
    ),
    _rule(
        "SBATCH_CPU_BIND* SBATCH_MEM_BIND* SBATCH_GPU_BIND SBATCH_TRES_BIND SBATCH_DISTRIBUTION",
        (),
        "the one task of a node has all cores and GPUs of the job there and divides them among the ranks",
    ),
    _rule("SBATCH_INPUT SBATCH_ERROR", (), "the log of the job would lack what its processes print"),
    _rule("SBATCH_*", (Receiver.SBATCH, Receiver.SCRIPT), "it is a default of the user or of the site"),
    # options of the commands that ask and cancel
    _rule("SQUEUE_*", (), "squeue would hide jobs or print other columns, and live jobs would look ended"),
    _rule("SINFO_*", (), "sinfo would hide partitions and nodes or print other columns"),
    _rule("SACCT_*", (), "sacct would hide jobs or print other columns"),
    _rule("SCANCEL_*", (), "scancel would ask for a confirmation, or skip jobs"),
    _rule("SCONTROL_*", (), "scontrol would print other partitions and nodes"),
    _rule("SLURM_TIME_FORMAT SLURM_BITSTR_LEN", (), "times and arrays would be printed in another form"),
    _rule("SALLOC_*", _ALL, "only salloc reads it, which hpc_train does not run"),
    # options of srun
    _rule("SLURM_TRES_PER_TASK", (), "since Slurm 23.11 srun refuses a step in which it differs from the cores"),
    _rule("SLURM_CPU_BIND* SLURM_MEM_BIND*", (), "it would pin all ranks of a node to a few cores"),
    _rule("SLURM_GPU_BIND SLURM_TRES_BIND SLURM_GRES", (), "it would take GPUs of the job away from its step"),
    _rule("SLURM_TIMELIMIT", (), "it would end the step before the job"),
    _rule("SLURM_DISTRIBUTION SLURM_HOSTFILE", (), "it would place the tasks of the step on other nodes"),
    _rule("SLURM_OVERCOMMIT SLURM_CORE_SPEC SLURM_THREAD_SPEC", (), "it would take cores away from the step"),
    _rule("SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_LABELIO", (), "the log of the job would lack lines"),
    _rule("SLURM_REMOTE_CWD", (), "relative paths of the run would refer to another directory"),
    _rule("SLURM_EXIT_ERROR SLURM_EXIT_IMMEDIATE SLURM_IMMEDIATE SLURM_NO_KILL", (), "it changes how steps end"),
    _rule("SLURM_MULTI_PROG", (), "srun would read the program as a list of programs"),
    _rule("SRUN_CPUS_PER_TASK", (Receiver.SCRIPT,), "srun takes the cores of a task from it since Slurm 22.05"),
    _rule("SRUN_*", (), "it is an option of another step"),
    _rule(
        "SLURM_JOB_ID SLURM_JOBID",
        (Receiver.SCRIPT, Receiver.INNER_STEP),
        "it says in which job a step runs; a new job gets its own",
    ),
    _rule("SLURM_*", (Receiver.SCRIPT,), "it describes a job to its steps, and would describe another job wrongly"),
    # W&B
    _rule(
        "WANDB_SWEEP_ID WANDB_SWEEP_PARAM_PATH",
        _OF_SLURM,
        "W&B would give the run another id at each start, and another project",
    ),
)


def rule_of(name: str) -> Rule | None:
    """Returns the rule for a variable; None if it reaches everything."""
    return next((rule for rule in RULES if rule.matches(name)), None)


def reaches(name: str, receiver: Receiver) -> bool:
    rule = rule_of(name)
    return rule is None or receiver in rule.reaches


def environment_for(receiver: Receiver) -> dict[str, str]:
    """Returns the variables of this process that reach ``receiver``."""
    # not items(), because another thread may remove a variable meanwhile
    values = {name: os.environ.get(name) for name in list(os.environ) if reaches(name, receiver)}
    return {name: value for name, value in values.items() if value is not None}


def withheld(receiver: Receiver) -> list[str]:
    """Returns the names of the variables of this process that do not reach ``receiver``."""
    return sorted(name for name in os.environ if not reaches(name, receiver))


def unset_lines() -> list[str]:
    """Returns bash lines that unset the variables that must not reach the commands of a batch script."""
    names = [name for rule in RULES if Receiver.SCRIPT not in rule.reaches for name in rule.names]
    words = [
        f'"${{!{name[:-1]}@}}"' if name.endswith("*") else name for name in names if not name.startswith("SBATCH_")
    ]
    text = textwrap.wrap(f"unset {' '.join(words)}", 118, subsequent_indent="  ", break_long_words=False)
    return [
        "# variables of the shell that squeue, scontrol and srun would read as options",
        *" \\\n".join(text).split("\n"),
    ]


def preset(option: str) -> str | None:
    """Returns the value that ``SBATCH_*`` sets for an option which a submission does not have; None without one."""
    name = f"SBATCH_{option.upper()}"
    return os.environ.get(name) or None if reaches(name, Receiver.SBATCH) else None


def notes_of_withheld() -> list[str]:
    """Returns a note for each option of sbatch that the shell sets and a submission does not get."""
    notes = []
    for name in withheld(Receiver.SBATCH):
        rule = rule_of(name)
        if rule is not None and name.startswith("SBATCH_") and name != "SBATCH_CLUSTERS":
            use = f"; {rule.instead}" if rule.instead else ""
            notes.append(f"note: {name} of this shell does not reach sbatch, because {rule.reason}{use}")
    return notes
