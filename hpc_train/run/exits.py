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
    REFUSED = "refused"  # a UserError: nothing was started
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE = "device_error"  # a GPU, its memory or its driver has failed, or the GPU is gone
    KERNEL = "kernel_error"  # a kernel on a GPU has failed: mostly by the code, sometimes by the GPU
    COMMUNICATION = "communication"  # a collective failed: mostly the echo of another rank's failure
    KILLED = "killed"  # by a signal that nobody here sent
    EXITED = "exited"  # the process ended early without an exception
    DISK_FULL = "disk_full"
    HANG = "hang"  # no step for much longer than a step takes
    NAN = "nan"  # the loss or the gradients stay without finite values, or the result at the end is not finite
    NODE_LOST = "node_lost"  # its agent is gone or silent
    UNFIT_NODE = "unfit_node"  # it cannot use its GPUs, or the preflight has named it as slow or broken


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
        Action.REPLACE,
        "cluster.exclude=NODE, and tell the staff; cluster.preflight_action=warn trains with a node that only the "
        "preflight has named",
    ),
    Failure.DEVICE: Response(
        Action.REPLACE,
        "the GPU or its driver has failed, not the code: cluster.exclude=NODE, and tell the staff. On that node "
        "nvidia-smi -q and dmesg (Xid) say more",
    ),
    # It may be the GPU once. The same again without a new step is the code (elastic/coordinator.py).
    Failure.KERNEL: Response(
        Action.RESTART_IF_FURTHER,
        "mostly an index out of range: a token or a target that the model has no row for, or a custom kernel. "
        "CUDA_LAUNCH_BLOCKING=1 in the environment lets the traceback end at the line; the same command with run.name "
        "goes on from the last checkpoint",
    ),
    # A wrong line fails again at the same step: that is told at once. A flaky file system or a rare sample is not.
    Failure.USER_ERROR: Response(
        Action.RESTART_IF_FURTHER,
        "fix the line that the traceback ends at; the same command with run.name goes on from the last checkpoint",
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
    from hpc_train.errors import UserError

    if isinstance(error, UserError):
        return Failure.REFUSED
    for type_, failure in _TYPES.items():
        if isinstance(error, type_):
            return failure
    return _by_cuda_code(error) or in_words(f"{type(error).__name__}: {error}") or Failure.USER_ERROR


def in_words(text: str) -> Failure | None:
    """The class of a failure that is told by ``text``; None where it holds no words of the system or of torch."""
    return next((failure for failure, words in _WORDS.items() if any(word in text for word in words)), None)


def _by_cuda_code(error: BaseException) -> Failure | None:
    """The class of a ``torch.AcceleratorError`` (torch 2.8), which has the number of the CUDA error."""
    if not any(type_.__name__ == "AcceleratorError" for type_ in type(error).__mro__):
        return None
    code = getattr(error, "error_code", None)
    return next((failure for failure, codes in _CUDA_CODES.items() if code in codes), None)


_TYPES: dict[type[BaseException], Failure] = {
    MemoryError: Failure.OUT_OF_MEMORY,
    FloatingPointError: Failure.NAN,
    UnfitNode: Failure.UNFIT_NODE,
}
# cudaError_t. Not 3, initialization error: that is mostly CUDA in a process forked after CUDA was used.
_CUDA_CODES: dict[Failure, frozenset[int]] = {
    Failure.OUT_OF_MEMORY: frozenset({2}),
    # illegal address, assert, illegal instruction, misaligned address, invalid address space, invalid program counter,
    # launch failure (by NVIDIA's reference mostly an invalid pointer or shared memory out of bounds)
    Failure.KERNEL: frozenset({700, 710, 715, 716, 717, 718, 719}),
    # devices unavailable, no device, invalid device, ECC, NVLink, contained (peer memory over NVLink, or hardware),
    # hardware stack error, system not ready, driver mismatch, unknown
    Failure.DEVICE: frozenset({46, 100, 101, 214, 220, 226, 714, 802, 803, 999}),
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
    # Not "device-side assertion": torch ends the message of every CUDA error with how to compile them in.
    Failure.KERNEL: (
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "an illegal instruction was encountered",
        "CUDA error: misaligned address",
        "'misaligned address'",  # as NCCL quotes it
        "operation not supported on global/shared address space",
        "CUDA error: invalid program counter",
        "unspecified launch failure",
    ),
    Failure.DEVICE: (
        "uncorrectable ECC error",
        "uncorrectable NVLink error",
        "NVLink error",
        "hardware stack error",
        "devices are busy or unavailable",
        "device(s) is/are busy or unavailable",
        "No CUDA GPUs are available",
        "no CUDA-capable device is detected",
        "invalid device ordinal",
        "driver initialization failed",
        "system not yet initialized",
        "system has unsupported display driver / cuda driver combination",
        "CUDA unknown error",
        "CUDA error: unknown error",
        "GPU is lost",
        "fallen off the bus",
        "watchdog thread terminated with exception: CUDA error",
    ),
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
