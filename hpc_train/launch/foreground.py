"""A run in the foreground: the agent in this process, the progress on the terminal, and how to go on afterwards."""

from __future__ import annotations

import signal
import sys

from rich.console import Console

from hpc_train.config.freeze import load
from hpc_train.elastic.agent import run_agent
from hpc_train.launch.watch import resume_command
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.telemetry.progress import Progress


def run_in_foreground(run: RunDirectory) -> int:
    """Trains the frozen ``run`` to its end on this machine; returns the exit code."""
    console = Console()
    go_on = resume_command(sys.argv[1:], run, load(run).run.root)
    progress = Progress(run, console, go_on)
    code = run_agent(run, progress.tick)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late second Ctrl-C is not to hide how it ended
    progress.finish(failed=code not in (Exit.DONE, Exit.STOPPED))
    if code == Exit.STOPPED:
        print(f"stopped after a checkpoint; this goes on:\n  {go_on}")
    return code
