"""The commands of ``python -m hpc_train``.

A command is a function of ``arguments: list[str]`` that returns an exit code (``run/exits.py``) and raises
``UserError`` for a user's mistake. ``cli.py`` imports its module only when the command is called.
"""

from collections.abc import Callable
from enum import Flag, auto
from typing import NamedTuple

from hpc_train.registration import registered


class Words(Flag):
    RUNS = auto()  # the name or path of a run or sweep
    OVERRIDES = auto()  # overrides of the config


class Command(NamedTuple):
    """Describes a command.

    Attributes:
        function: "module:function".
        summary: the line of the command in the help.
        heading: the section of the help that lists the command.
        takes: the kinds of its positional arguments.
        actions: the values that its first argument may have; () if there is no such list.
    """

    function: str
    summary: str
    heading: str
    takes: Words = Words(0)
    actions: tuple[str, ...] = ()


RUNS = Words.RUNS
OVERRIDES = Words.OVERRIDES
BENCHMARKS = {
    "step": "measures training steps, optionally compared with a bare PyTorch loop",
    "batch": "finds the fastest micro-batch size that fits into memory, and the gradient noise scale",
    "scaling": "measures strong and weak scaling over nodes or workers, for a proposal",
    "checkpoint": "measures saves and loads, compared with plain DCP",
    "collectives": "measures the bandwidth of collectives by operation and message size",
    "machine": "measures the numbers of a machine file for `plan`",
}

_START = "Start a project"
_TRAIN = "Train"
_LOOK = "Look at runs"
_MANAGE = "Manage runs"
_USE = "Use a model"
_PREPARE = "Prepare and check"
_SCRIPTS = "Write batch scripts"

# by the name on the command line, in the order of the help
COMMANDS = {
    "init": Command("init:main", "make a project that trains at once; --site: describe a cluster", _START),
    "train": Command(
        "early:train", "train in the foreground, or submit with -m; the default command", _TRAIN, OVERRIDES
    ),
    "exec": Command("exec:main", "run any program on all GPUs or nodes, as torchrun does", _TRAIN),
    "status": Command("status:main", "show the state of runs", _LOOK, RUNS),
    "top": Command("top:main", "watch runs in the terminal", _LOOK, RUNS),
    "logs": Command("logs:main", "print the output of workers", _LOOK, RUNS),
    "why": Command("why:main", "explain why runs failed, or why a job waits", _LOOK, RUNS),
    "compare": Command("compare:main", "compare the settings and metrics of runs, the best first", _LOOK, RUNS),
    "plot": Command("plot:main", "draw loss, throughput, memory and time shares", _LOOK, RUNS),
    "report": Command("report:main", "write a self-contained HTML report on a run or a sweep", _LOOK, RUNS),
    "support": Command("support:main", "collect what to send to a maintainer, without secrets", _LOOK, RUNS),
    "stacks": Command("submitted:stacks", "print the stacks of all ranks of a live run", _LOOK, RUNS),
    "debug": Command("debug:main", "look into a rank of a live run with pdb; all ranks wait", _LOOK, RUNS),
    "wait": Command("submitted:wait", "wait until runs end", _LOOK, RUNS),
    "sync": Command("sync:main", "send the metrics of runs to W&B, MLflow or TensorBoard", _MANAGE, RUNS),
    "resume": Command("submitted:resume", "submit a run again", _MANAGE, RUNS),
    "retry": Command("submitted:retry", "submit the failed runs of a sweep again", _MANAGE, RUNS),
    "cancel": Command("submitted:cancel", "end runs", _MANAGE, RUNS),
    "resize": Command("submitted:resize", "continue a live run on another number of nodes", _MANAGE, RUNS),
    "checkpoint": Command(
        "checkpoint:main",
        "list, verify, export, promote, release and import checkpoints",
        _MANAGE,
        RUNS,
        ("list", "verify", "export", "promote", "release", "import"),
    ),
    "evaluate": Command(
        "model:evaluate", "compute the metrics of a checkpoint on any data and layout", _USE, RUNS | OVERRIDES
    ),
    "generate": Command("model:generate", "continue prompts with a trained language model", _USE, RUNS | OVERRIDES),
    "plan": Command(
        "plan:main", "estimate time, memory and cost of each layout before you submit", _PREPARE, OVERRIDES
    ),
    "prepare": Command("prepare:main", "write token files or image shards", _PREPARE),
    "doctor": Command("doctor:main", "check this machine, or the nodes of a job", _PREPARE, OVERRIDES),
    "bench": Command("bench:main", "run a benchmark", _PREPARE, OVERRIDES, (*BENCHMARKS,)),
    "script": Command("batch:print_script", "print a batch script", _SCRIPTS, OVERRIDES),
    "freeze": Command("batch:freeze_run", "create the run directory and print its path", _SCRIPTS, OVERRIDES),
    "agent": Command("early:agent", "run the agent of a node on a frozen run", _SCRIPTS),
    "help": Command("help:main", "print this page, or the options of a command", "Help"),
}


def function_of(name: str) -> Callable[[list[str]], int]:
    """Imports the module of the command ``name`` and returns its function."""
    return registered(f"{__name__}.{COMMANDS[name].function}")
