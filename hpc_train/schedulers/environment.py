"""Reads the allocation of a job of PBS, LSF, Flux, Kubernetes or plain ssh from documented variables.

The template or the scheduler that starts the agents sets them; docs/schedulers.md has the table. They take precedence
over Slurm's variables, since Flux runs inside jobs of Slurm.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.errors import UserError
from hpc_train.schedulers.scheduler import CurrentJob
from hpc_train.units import counted

NODES = "HPC_TRAIN_NODES"
NODE_RANK = "HPC_TRAIN_NODE_RANK"
ADDRESS = "HPC_TRAIN_ADDRESS"
GPUS = "HPC_TRAIN_GPUS"
JOB_ID = "HPC_TRAIN_JOB_ID"
RESTART = "HPC_TRAIN_RESTART"
LAUNCH = "HPC_TRAIN_LAUNCH"
END_TIME = "HPC_TRAIN_END_TIME"
REQUEUE = "HPC_TRAIN_REQUEUE"
EXCLUDE = "HPC_TRAIN_EXCLUDE"  # which the command of REQUEUE gets
OF_THIS_START = (NODES, NODE_RANK, ADDRESS, GPUS, JOB_ID, RESTART, LAUNCH, END_TIME, REQUEUE)

REQUEUE_S = 120.0


def number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the value of a variable that holds a whole number; None if it is not set. Raises UserError otherwise."""
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} is not a whole number", where=name, fix=f"{name}=N, or leave it unset")
    return int(text)


@dataclass(frozen=True)
class EnvironmentJob(CurrentJob):
    """A job that describes itself by variables.

    Attributes:
        node_names: the names of the nodes, in order.
        address: the address of the first node, at which the agents meet.
        gpus: GPUs per node; None for all that are visible.
        launch: an id of this start of the job.
        requeue: the line of bash that requests a requeue; empty without one.
    """

    scheduler = "the scheduler"

    node_names: tuple[str, ...] = ()
    address: str = ""
    gpus: int | None = None
    launch: str = "0"
    requeue: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> EnvironmentJob:
        """Reads the variables; the batch script around the agents has no ``node_rank``, which is then -1.

        Raises UserError if a variable is wrong.
        """
        names = tuple(re.split(r"[\s,]+", environment[NODES].strip(" ,\n")))
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"{NODES} has {', '.join(twice)} more than once, but each node runs one agent",
                where=NODES,
                fix="name each node once: sort -u FILE | paste -sd,",
            )
        odd = [name for name in names if not re.fullmatch(r"[\w.:-]+", name)]
        if odd:
            what = f"{NODES} has {odd[0]!r}, which cannot be a host name"
            raise UserError(what, where=NODES, fix="host names or addresses, separated by commas")
        node_rank = number(NODE_RANK, environment)
        if node_rank is None:
            node_rank = -1
            if len(names) == 1:
                node_rank = 0
        if node_rank >= len(names):
            raise UserError(
                f"{NODE_RANK} is {node_rank}, but {NODES} has {counted(len(names), 'node', 'nodes')}",
                where=NODE_RANK,
                fix=f"the position of this node in {NODES}, from 0 to {len(names) - 1}",
            )
        job_id = environment.get(JOB_ID, "")
        launch = environment.get(LAUNCH, "0")
        for name, value in ((JOB_ID, job_id), (LAUNCH, launch)):
            if not re.fullmatch(r"[A-Za-z0-9_-]+", value):  # a part of the names of files
                what = f"{name}={value!r} must consist of letters, digits, _ and -"
                raise UserError(
                    what, where=name, fix=f'{name}="${{ID//[^[:alnum:]]/-}}" in bash, with the id of the job'
                )
        return cls(
            job_id=job_id,
            restart=number(RESTART, environment) or 0,
            node_rank=node_rank,
            node_names=names,
            address=environment.get(ADDRESS) or names[0],
            gpus=number(GPUS, environment),
            launch=launch,
            end_time=number(END_TIME, environment),
            requeue=environment.get(REQUEUE, ""),
        )

    @property
    def node_name(self) -> str:
        """The name of this node. Raises UserError if its number is not known."""
        if self.node_rank < 0:
            raise UserError(
                f"{NODE_RANK} is not set, and {NODES} has {len(self.node_names)} nodes",
                where=NODE_RANK,
                fix=f"set it for each agent: its position in {NODES}, from 0 to {len(self.node_names) - 1}",
            )
        return self.node_names[self.node_rank]

    def why_no_requeue(self) -> str | None:
        if self.requeue:
            return None
        return f"{REQUEUE} has no command that requeues job {self.job_id}"

    def requeue_command(self, chained: bool) -> Sequence[str]:
        return ["bash", "-c", self.requeue]

    def ask(self, command: Sequence[str], exclude: str = "") -> bool:
        # a command such as `flux batch` passes its environment on to the next job
        variables = {name: value for name, value in os.environ.items() if name not in OF_THIS_START}
        variables[EXCLUDE] = exclude
        try:
            done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, timeout=REQUEUE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def nodes(self) -> int | None:
        return len(self.node_names)
