"""How a run ends: exit codes, the class of each failure, and what is done about each class."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Exit(IntEnum):
    """Exit codes under every door."""

    DONE = 0
    FAILED = 1
    REFUSED = 2  # before start: a wrong config or input
    STOPPED = 75  # on request, after a checkpoint (EX_TEMPFAIL: run it again to go on)
    GAVE_UP = 93  # do not requeue
    DETACHED = 130  # the submitter left by Ctrl-C; the jobs run on


class Failure(StrEnum):
    """Classes of failure, as events and the agent's decisions name them."""

    USER_ERROR = "user_error"  # an exception in the model, the data or the config
    REFUSED = "refused"  # a ConfigError: nothing was started
    OUT_OF_MEMORY = "out_of_memory"
    COMMUNICATION = "communication"  # a collective failed: mostly the echo of another rank's failure
    KILLED = "killed"  # by a signal that nobody here sent
    EXITED = "exited"  # the process ended early without an exception
    DISK_FULL = "disk_full"
    HANG = "hang"  # no step for much longer than a step takes
    NAN = "nan"  # the loss or the gradients stay without finite values, or the result at the end is not finite
    NODE_LOST = "node_lost"  # its agent is gone or silent
    UNFIT_NODE = "unfit_node"  # the preflight has named a slow or broken one


class Action(StrEnum):
    """What is done when an attempt has ended."""

    FINISH = "finish"  # the run is done
    STOP = "stop"  # somebody asked for it
    REQUEUE = "requeue"  # the time limit or a preemption: Slurm is asked to run the job again
    RESTART = "restart"  # in place, on the same nodes, from the newest checkpoint
    RESTART_IF_FURTHER = "restart_if_further"  # the same, where the attempt has got further than those before it
    REPLACE = "replace"  # without the node: a spare takes over, or fewer nodes go on, or the job is requeued
    FAIL = "fail"  # repeating it would end the same way
    REFUSE = "refuse"  # a mistake in the config
    GIVE_UP = "give_up"  # it was repeated often enough


EXITS: dict[Action, Exit] = {
    Action.FINISH: Exit.DONE,
    Action.STOP: Exit.STOPPED,
    Action.REQUEUE: Exit.STOPPED,
    Action.FAIL: Exit.FAILED,
    Action.REFUSE: Exit.REFUSED,
    Action.GIVE_UP: Exit.GAVE_UP,
}


@dataclass(frozen=True)
class Response:
    """What a class of failure asks for; ``advice`` is what the user can do."""

    action: Action
    advice: str = ""


# All restarts are bounded: three attempts in a row without a new step give the run up (elastic/decision.py).
RESPONSES: dict[Failure, Response] = {
    Failure.KILLED: Response(
        Action.RESTART,
        "SIGKILL without a sender is mostly the kernel's, out of host memory: a larger cluster.mem, fewer "
        "batch.loader_workers. SIGSEGV, SIGBUS or SIGABRT: a compiled library, or a full /dev/shm",
    ),
    Failure.EXITED: Response(
        Action.RESTART, "some code calls exit(): the last lines of that rank in its log tell where"
    ),
    Failure.COMMUNICATION: Response(
        Action.RESTART, "mostly another rank failed first: logs RUN --rank all; else the network between the nodes"
    ),
    Failure.HANG: Response(
        Action.RESTART, "the stacks show the line that the named rank stands at, and what it waits for"
    ),
    Failure.NODE_LOST: Response(
        Action.REPLACE,
        "a node that is lost again: cluster.exclude=NODE, and tell the staff. When a requeued job starts again is up "
        "to the site: Slurm first ends all of its processes (COMPLETING), then waits for cred_expire (BeginTime)",
    ),
    Failure.UNFIT_NODE: Response(
        Action.REPLACE, "cluster.exclude=NODE, and tell the staff; cluster.preflight_action=warn trains with it"
    ),
    # A wrong line fails again at the same step: that is told at once. A flaky file system or a rare sample is not.
    Failure.USER_ERROR: Response(
        Action.RESTART_IF_FURTHER,
        "mend the line that the traceback ends at; the same command with run.name goes on from the last checkpoint",
    ),
    Failure.REFUSED: Response(Action.REFUSE, "the message says what to change"),
    Failure.OUT_OF_MEMORY: Response(
        Action.FAIL,
        "a smaller batch.micro_size, train.activation_checkpointing=full, or sharded state (strategy=zero3)",
    ),
    Failure.DISK_FULL: Response(
        Action.FAIL, "make room on the disk that it names, or take another run.root; what was saved before is whole"
    ),
    Failure.NAN: Response(Action.FAIL, "a lower optim.lr, more optim.warmup_steps, or look at the data"),
}


class UnfitNode(Exception):
    """A node is slow or broken, as the message says. It stands in the event log; the run is to go on without it."""


class CollectiveFailure(Exception):
    """All ranks raise it together. Without a ``__cause__`` its message tells all: a traceback says nothing more.

    Args:
        echo: another rank is the one to name.
    """

    def __init__(self, message: str, echo: bool = False) -> None:
        super().__init__(message)
        self.echo = echo


class Diverged(CollectiveFailure, FloatingPointError):
    """The loss or the gradients are not finite, for good."""


def classify(error: BaseException) -> Failure:
    """The class of an exception that ended a worker. Looks at types and messages; needs no torch."""
    from hpc_train.config.errors import ConfigError

    if isinstance(error, ConfigError):
        return Failure.REFUSED
    for type_, failure in _TYPES.items():
        if isinstance(error, type_):
            return failure
    text = f"{type(error).__name__}: {error}"
    found = (failure for failure, words in _WORDS.items() if any(word in text for word in words))
    return next(found, Failure.USER_ERROR)


_TYPES: dict[type[BaseException], Failure] = {
    MemoryError: Failure.OUT_OF_MEMORY,
    FloatingPointError: Failure.NAN,
    UnfitNode: Failure.UNFIT_NODE,
}
# Words of the operating system and of torch, also where another exception quotes them; the first that fits counts.
_WORDS: dict[Failure, tuple[str, ...]] = {
    Failure.OUT_OF_MEMORY: (
        "OutOfMemoryError",
        "out of memory",
        "can't allocate memory",  # torch's allocator on the CPU, after "[enforce fail at"
        "not enough memory",
        "Cannot allocate memory",
    ),
    Failure.DISK_FULL: (
        "No space left on device",
        "Disk quota exceeded",
        "[Errno 28]",
        "[Errno 122]",
        "out of shared memory",
    ),
    Failure.KILLED: ("a data loader process died", "DataLoader worker (pid"),
    Failure.COMMUNICATION: (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "Connection closed by peer",
        "Connection reset by peer",
        "Connection refused",
        "Broken pipe",
        "Socket Timeout",
        "[enforce fail at",
        "gloo/transport",
        "NCCL error",
        "Timed out waiting",
    ),
}
