"""Runs as the process of ``run.command``, which dies with the agent and is bound to its CPUs, and executes the command.

    python -m hpc_train.elastic.exec_script AGENT_PID CPUS PROGRAM [ARGUMENT...]

CPUS is a list of numbers separated by commas, or - for no binding. It exits with 127 if the program does not exist and
with 126 if it cannot be executed, as a shell does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

from hpc_train.run.processes import allow_inspection, die_with_parent

NOT_FOUND, NOT_EXECUTABLE = 127, 126


def main(arguments: list[str]) -> int:
    """Executes the command; returns only if that fails."""
    agent, cpus, *command = arguments
    die_with_parent(int(agent))
    allow_inspection(int(agent))
    if cpus != "-":
        with contextlib.suppress(OSError):  # the job may have lost these CPUs: stay unbound
            os.sched_setaffinity(0, map(int, cpus.split(",")))
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to all processes, and the agent sends SIGTERM
        signal.signal(number, signal.SIG_IGN)  # a program keeps this unless it installs a handler
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"run.command: cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        if isinstance(error, FileNotFoundError):
            return NOT_FOUND
        return NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
