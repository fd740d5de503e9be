"""The commands of ``python -m hpc_train``.

A command is a function of ``arguments: list[str]`` that returns an exit code (``run/exits.py``) and raises
``UserError`` for a user's mistake. ``cli.py`` imports its module only when the command is called.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """Describes a command: its function as "module:function", its line in the help, and the heading above it."""

    function: str
    summary: str
    heading: str


_TRAIN = "Train"
_LOOK = "Look at runs"
_MANAGE = "Manage runs"
_USE = "Use a model"
_PREPARE = "Prepare and check"
_SCRIPTS = "Write batch scripts"

# by the name on the command line, in the order of the help
COMMANDS = {
    "train": Command("early:train", "train in the foreground, or submit with -m; the default command", _TRAIN),
    "status": Command("status:main", "the state of runs", _LOOK),
    "top": Command("top:main", "runs live in the terminal", _LOOK),
    "logs": Command("logs:main", "the output of workers", _LOOK),
    "why": Command("why:main", "why runs failed, or why a job waits", _LOOK),
    "compare": Command("compare:main", "the settings and the metrics of runs, the best first", _LOOK),
    "plot": Command("plot:main", "loss, throughput, memory and time shares in one picture", _LOOK),
    "report": Command("report:main", "a page about a run or a sweep, as one HTML file to keep or mail", _LOOK),
    "stacks": Command("submitted:stacks", "the stacks of all ranks of a live run", _LOOK),
    "wait": Command("submitted:wait", "wait until runs end", _LOOK),
    "sync": Command("sync:main", "send the metrics of runs to W&B, MLflow or TensorBoard", _MANAGE),
    "resume": Command("submitted:resume", "submit a run again", _MANAGE),
    "retry": Command("submitted:retry", "submit the failed runs of a sweep again", _MANAGE),
    "cancel": Command("submitted:cancel", "end runs", _MANAGE),
    "checkpoint": Command(
        "checkpoints.checkpoint:main", "list, verify, export, promote and import checkpoints", _MANAGE
    ),
    "evaluate": Command("checkpoints.evaluate:main", "the metrics of a checkpoint on any data, under any layout", _USE),
    "generate": Command("checkpoints.generate:main", "texts that a language model continues", _USE),
    "plan": Command("plan:main", "time, memory and cost of each layout that fits, before it queues", _PREPARE),
    "prepare": Command("prepare:main", "token files and image shards", _PREPARE),
    "doctor": Command("doctor:main", "check this machine, or the nodes of a job", _PREPARE),
    "bench": Command("bench:main", "benchmarks", _PREPARE),
    "script": Command("batch:print_script", "print a batch script", _SCRIPTS),
    "freeze": Command("batch:freeze_run", "write the directory of a run and print it", _SCRIPTS),
    "agent": Command("early:agent", "run the agent of a node on a frozen run", _SCRIPTS),
    "help": Command("help:main", "this page, or the options of a command", "Help"),
}


def function_of(name: str) -> Callable[[list[str]], int]:
    """Imports the module of the command ``name`` and returns its function."""
    module, function = COMMANDS[name].function.split(":")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return command
