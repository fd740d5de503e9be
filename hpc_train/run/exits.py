"""Defines exit codes, the classes of failure, and the response to each class."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path


class Exit(IntEnum):
    """Lists the exit codes of all commands."""

    DONE = 0
    FAILED = 1
    REFUSED = 2  # rejected before the start: wrong config or input
    STOPPED = 75  # stopped on request, after a checkpoint (EX_TEMPFAIL: run again to resume)
    GAVE_UP = 93  # do not requeue
    DETACHED = 130  # the submitter was left with Ctrl-C; the jobs keep running
    NO_READER = 141  # the reader of the output exited before the end, as in `… | head` (128 + SIGPIPE)


def worst_exit(codes: Iterable[int | None]) -> Exit:
    """Returns the exit code for several jobs: the worst of their exit codes.

    None stands for a job that was not started. It counts as failed, unless other jobs were stopped and can continue.
    """
    present = set(codes)
    if None in present and Exit.STOPPED not in present:
        present.add(Exit.FAILED)
    worst_first = (Exit.FAILED, Exit.REFUSED, Exit.GAVE_UP, Exit.STOPPED)
    return next((code for code in worst_first if code in present), Exit.DONE)


class Failure(StrEnum):
    """Classes of failure, as recorded in events and used in the agent's decisions."""

    USER_ERROR = "user_error"  # an exception in the user's model, data or training code
    REFUSED = "refused"  # a UserError: wrong config, input or code; found on the login node or by a worker
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE = "device_error"  # a GPU, its memory or its driver failed, or the GPU disappeared
    KERNEL = "kernel_error"  # a GPU kernel failed: usually a bug in the code, sometimes the GPU
    COMMUNICATION = "communication"  # a collective failed: usually secondary to another rank's failure
    KILLED = "killed"  # killed by a signal that hpc_train did not send
    EXITED = "exited"  # the process ended early without an exception
    DISK_FULL = "disk_full"
    FILE_SYSTEM = "file_system"  # a file system or its server failed
    HANG = "hang"  # no step finished for much longer than a step usually takes
    CORRUPTION = "corruption"  # a rank has computed or holds wrong numbers without an error (train.verify)
    NAN = "nan"  # the loss, the gradients or the final weights are not finite
    NODE_LOST = "node_lost"  # the node's agent is gone or silent
    ROLE = "role_failed"  # a role of the run failed finally (run.roles)
    UNFIT_NODE = "unfit_node"  # the node cannot use its GPUs, or the preflight or the site's check rejects it


class Action(StrEnum):
    """Lists what the agent does when an attempt has ended."""

    FINISH = "finish"  # the run is complete
    STOP = "stop"  # a stop was requested
    REQUEUE = "requeue"  # time limit or preemption: ask Slurm to run the job again
    RESTART = "restart"  # on the same nodes, from the newest checkpoint
    # restart if the attempt made progress, or if the node may be to blame (``Ended.first``)
    RESTART_IF_FURTHER = "restart_if_further"
    RESTART_OR_REQUEUE = "restart_or_requeue"  # restart; after several attempts without a step, requeue
    RESTART_ONCE = "restart_once"  # restart only if another process may have caused the failure, and once per job
    REPLACE = "replace"  # drop the node: use a spare, continue on fewer nodes, or requeue
    FAIL = "fail"  # a retry would fail the same way
    REFUSE = "refuse"  # the config is wrong
    GIVE_UP = "give_up"  # the retries are used up


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
    """Describes the response to a class of failure. ``advice`` is the next step for the user."""

    action: Action
    advice: str = ""


# Restarts are bounded: after three attempts in a row without a new step the run gives up (elastic/decision.py).
RESPONSES: dict[Failure, Response] = {
    Failure.KILLED: Response(
        Action.RESTART,
        "SIGKILL usually comes from the kernel when the host is out of memory: increase cluster.mem or decrease "
        "batch.loader_workers. SIGSEGV, SIGBUS and SIGABRT usually come from a compiled library or a full /dev/shm",
    ),
    Failure.EXITED: Response(
        Action.RESTART,
        "the program ended without a traceback, e.g. by `exit` or os._exit(); the last log lines of the rank say more",
    ),
    Failure.COMMUNICATION: Response(
        Action.RESTART,
        "usually another rank failed first: see `logs RUN --rank all`. Otherwise check the network between the nodes",
    ),
    Failure.HANG: Response(
        Action.RESTART, "the stack dump shows the line at which the named rank is blocked and what it waits for"
    ),
    Failure.NODE_LOST: Response(
        Action.REPLACE,
        "if the node is lost again, set cluster.exclude=NODE and report it to the site's staff. Slurm restarts a "
        "requeued job after it has ended all of its processes (COMPLETING) and cred_expire has passed (BeginTime)",
    ),
    Failure.UNFIT_NODE: Response(
        Action.REPLACE,
        "set cluster.exclude=NODE and report the node to the site's staff. cluster.preflight_action=warn keeps a node "
        "that only the preflight rejected",
    ),
    Failure.DEVICE: Response(
        Action.REPLACE,
        "the GPU or its driver failed, not the code: set cluster.exclude=NODE and report the node to the site's staff. "
        "`nvidia-smi -q` (AMD: `rocm-smi -a`) and dmesg (Xid) on that node give details",
    ),
    Failure.CORRUPTION: Response(
        Action.RESTART,
        "the run continues from its newest proved checkpoint. If the same node is named again, it is left out; see "
        "the events `corruption` and docs/howto/corruption.md",
    ),
    # The first time, the GPU may be at fault. A repetition without a new step is a bug in the code.
    Failure.KERNEL: Response(
        Action.RESTART_IF_FURTHER,
        "usually an index out of range (a token or target beyond the model's vocabulary) or a custom kernel. Set "
        "CUDA_LAUNCH_BLOCKING=1 to get a traceback that ends at the failing line, fix it, and rerun with the same "
        "run.name. The run resumes from its last checkpoint, if it has one",
    ),
    # A bug fails again at the same step and is reported at once; a flaky file system or a rare sample is retried.
    Failure.USER_ERROR: Response(
        Action.RESTART_IF_FURTHER,
        "fix the error shown in the traceback, then rerun with the same run.name. The run resumes from its last "
        "checkpoint, if it has one",
    ),
    Failure.REFUSED: Response(
        Action.REFUSE, "correct the setting or the code that the message names, and run the same command again"
    ),
    # Processes of an earlier attempt or of another user may hold the memory of a GPU for a while.
    Failure.OUT_OF_MEMORY: Response(
        Action.RESTART_ONCE,
        "use a smaller batch.micro_size, train.activation_checkpointing=full, or sharded state (strategy=zero3)",
    ),
    Failure.DISK_FULL: Response(
        Action.FAIL,
        "free space on the disk that the message names, or set another run.root",
    ),
    Failure.FILE_SYSTEM: Response(
        Action.RESTART_OR_REQUEUE,
        "the file system that the message names failed, not the code: check it with `ls` and `df` on that node, and "
        "with `klist` if it needs a ticket",
    ),
    Failure.ROLE: Response(
        Action.FAIL,
        "`why RUN --role NAME` explains the failure of a role; `logs RUN --role NAME` prints its output",
    ),
    Failure.NAN: Response(Action.FAIL, "use a lower optim.lr or more optim.warmup_steps, or inspect the data"),
}


HOST_MEMORY = "out of host memory according to the kernel"  # the reason for a process that the kernel has killed
CRASHED_IMPORT = "importing torch crashed"

# Advice for causes that a message names, which takes precedence over the advice for the class of the failure.
NAMED_CAUSES: dict[str, str] = {
    r"ulimit -t": "raise the limit of CPU time: `ulimit -t unlimited` in the shell that starts the run, or in "
    "cluster.setup. If the hard limit is as low, ask the site's support or submit a job",
    r"can't start new thread": "raise the limit of processes and threads: `ulimit -u unlimited` in the shell that "
    "starts the run, or in cluster.setup; for a container a larger --pids-limit",
    r"no kernel image is available": "the installed torch, or an extension of it, has no kernels for this GPU: compare "
    "torch.cuda.get_arch_list() with torch.cuda.get_device_capability(), and install a build for the GPU; or request "
    "another type with cluster.gpu_type",
    r"/dev/shm|/torch_\d+_\d+|out of shared memory|through shared memory": "make room in the shared memory of the "
    "node: df -h /dev/shm, a larger --shm-size for a container, or batch.loader_workers=0, which needs none",
    r"Slurm killed .* for exceeding its memory": "set the larger cluster.mem that the message names",
    CRASHED_IMPORT: "run `python -c 'import torch.distributed'` on that node. SIGILL: torch was built for another CPU; "
    "otherwise check the libraries that LD_LIBRARY_PATH and LD_PRELOAD name",
    HOST_MEMORY: "set a larger cluster.mem (in a container: a larger memory limit), or reduce batch.loader_workers",
    r"elastic\.stop_grace_s": "a step and the save after it take longer: increase elastic.stop_grace_s, with which "
    "Slurm also signals the job earlier, and cluster.time if it is short",
}


FIX = re.compile(r"^  fix:    (.*)$", re.MULTILINE)  # the line of ``UserError.fix`` in a message


# Whether the run has a checkpoint (None: unknown) -> the end of the advice after a failure of the disk.
OF_DISKS = (Failure.DISK_FULL, Failure.FILE_SYSTEM)
_LEFT: dict[bool | None, str] = {
    True: "earlier checkpoints are intact",
    False: "there is no checkpoint, so the run starts again at step 0",
    None: "earlier checkpoints, if there are any, are intact",
}


def advice_for(failure: Failure, message: str, saved: bool | None = None) -> str:
    """Returns the next step for the user after a failure with ``message``: for a refusal, the fix that it names.

    Args:
        saved: whether the run has a checkpoint; None if that is unknown.
    """
    if failure is Failure.REFUSED and (fixes := FIX.findall(message)):
        return "; ".join(fixes)
    for pattern, advice in NAMED_CAUSES.items():
        if re.search(pattern, message):
            return advice
    advice = RESPONSES[failure].advice
    if failure in OF_DISKS:
        advice += f"; {_LEFT[saved]}"
    return advice


SHELL_SIGNALS = 128  # a shell exits with this plus the number of the signal that killed its command
# Exit codes of ``run.command``. Any other code means that the process ended early.
SCRIPT_EXITS: dict[int, Exit | Failure] = {
    0: Exit.DONE,
    1: Failure.USER_ERROR,  # an exception in Python; the traceback in the output may show another class
    2: Failure.REFUSED,  # wrong arguments (argparse), or no such script (Python)
    75: Exit.STOPPED,  # the script stopped by itself and continues when it is run again
    126: Failure.REFUSED,  # the program cannot be executed
    127: Failure.REFUSED,  # there is no such program
}


def end_of_script(exit_code: int, asked_to_stop: bool) -> Exit | Failure:
    """Returns how a process of ``run.command`` ended.

    Args:
        exit_code: negative for a signal.
        asked_to_stop: after a stop request every end counts as a stop, as most programs die of SIGTERM or raise an
            exception; what the script has not saved by then is lost.
    """
    if asked_to_stop:
        return Exit.STOPPED
    if exit_code < 0 or SHELL_SIGNALS < exit_code < SHELL_SIGNALS + 32:
        return Failure.KILLED
    return SCRIPT_EXITS.get(exit_code, Failure.EXITED)


class CollectiveFailure(Exception):
    """Raised by all ranks together. Without a ``__cause__`` the message is complete and no traceback is shown.

    Args:
        secondary: another rank caused the failure.
    """

    def __init__(self, message: str, secondary: bool = False) -> None:
        super().__init__(message)
        self.secondary = secondary


class ReplicaLost(Exception):
    """Raised on all ranks of a replica (``strategy.local_steps``) when a collective with other replicas has failed on
    any of them."""


class UnfitNode(CollectiveFailure):
    """Raised when a node is slow or broken. The event log records it, and the run continues without the node."""


class Diverged(CollectiveFailure, FloatingPointError):
    """Raised when the loss or the gradients are permanently not finite."""


class Corrupted(CollectiveFailure):
    """Raised when a rank has computed or holds wrong numbers, and a repetition cannot correct them."""


# Errors of a file system or its server. Second line: Lustre, NFS or FUSE whose server is gone. Third line: AFS or NFS
# after the user's Kerberos ticket has expired.
FILE_SYSTEM = frozenset(
    {errno.EIO, errno.ESTALE, errno.EROFS, errno.EREMOTEIO}
    | {errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN}
    | {errno.ENOKEY, errno.EKEYEXPIRED, errno.EKEYREVOKED}
)
# Errors that are transient for files of hpc_train, which only the file system can take away: a mount is missing, or an
# NFS server refuses an expired ticket. For other files they are mistakes of the user.
PASSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}) | FILE_SYSTEM
OWN_FILES = ("config.yaml", "run.json", "attempts", "checkpoints", "events", "metrics", "logs", ".locks")


def classify(error: BaseException, run: Path | None = None) -> Failure:
    """Returns the class of an exception that ended a worker. It inspects types and messages and needs no torch.

    Args:
        run: the run directory of the worker.
    """
    from hpc_train.errors import UserError

    if isinstance(error, UserError):  # e.g. a file of the run that cannot be read
        cause = error.__cause__
        if isinstance(cause, OSError) and classify(cause, run) is Failure.FILE_SYSTEM:
            return Failure.FILE_SYSTEM
        return Failure.REFUSED
    if isinstance(error, OSError) and error.filename is not None:  # without a file it may be an error of a socket
        passing = PASSING if _is_own_file(error.filename, run) else FILE_SYSTEM
        if error.errno in passing:
            return Failure.FILE_SYSTEM
    for type_, failure in _TYPES.items():
        if isinstance(error, type_):
            return failure
    # torch.AcceleratorError has a CUDA error code
    if any(type_.__name__ == "AcceleratorError" for type_ in type(error).__mro__):
        for failure, codes in _CUDA_CODES.items():
            if getattr(error, "error_code", None) in codes:
                return failure
    return classify_message(f"{type(error).__name__}: {error}") or Failure.USER_ERROR


def _is_own_file(name: object, run: Path | None) -> bool:
    """Returns whether hpc_train has written the file ``name`` in the directory ``run``."""
    if run is None or not isinstance(name, str | os.PathLike) or not Path(name).is_relative_to(run):
        return False
    return Path(name) == run or Path(name).relative_to(run).parts[0] in OWN_FILES


def classify_message(text: str) -> Failure | None:
    """Returns the class of the failure that ``text`` describes; None if it has no known phrase of the system or of
    torch.
    """
    return next((failure for failure, words in _WORDS.items() if any(word in text for word in words)), None)


_GPU_ERROR = re.compile(
    r"\b(cuda|hip|cudnn|miopen) (error|failure|driver|unknown|out of memory)|of GPU memory|by GPU|"
    r"\b(CUBLAS|CUDNN|CUSOLVER|ROCBLAS|HSA)_STATUS|No (CUDA|HIP) GPUs",
    re.IGNORECASE,
)


def concerns_gpu(text: str) -> bool:
    """Returns whether ``text`` is the message of an error of CUDA, HIP or one of their libraries, or of GPU memory."""
    return _GPU_ERROR.search(text) is not None


_TYPES: dict[type[BaseException], Failure] = {
    MemoryError: Failure.OUT_OF_MEMORY,
    FloatingPointError: Failure.NAN,
    UnfitNode: Failure.UNFIT_NODE,
    Corrupted: Failure.CORRUPTION,
    ReplicaLost: Failure.COMMUNICATION,
}
# cudaError_t. Code 3 (initialization error) is absent: it usually means a fork after CUDA was initialized.
_CUDA_CODES: dict[Failure, frozenset[int]] = {
    Failure.REFUSED: frozenset({209}),  # no kernel image for the device
    Failure.OUT_OF_MEMORY: frozenset({2}),
    # launch timeout, illegal address, assert, illegal instruction, misaligned address, invalid address space, invalid
    # program counter, launch failure (by NVIDIA's reference mostly an invalid pointer or shared memory out of bounds)
    Failure.KERNEL: frozenset({702, 700, 710, 715, 716, 717, 718, 719}),
    # devices unavailable, no device, invalid device, ECC, NVLink, contained (peer memory over NVLink, or hardware),
    # hardware stack error, system not ready, driver mismatch, MPS: no connection, no answer, not ready; unknown
    Failure.DEVICE: frozenset({46, 100, 101, 214, 220, 226, 714, 802, 803, 805, 806, 807, 999}),
}
# Phrases of the operating system and of torch, also when another exception quotes them; the first match counts.
_WORDS: dict[Failure, tuple[str, ...]] = {
    Failure.REFUSED: ("no kernel image is available for execution on the device",),
    Failure.OUT_OF_MEMORY: (
        "OutOfMemoryError",
        "out of memory",
        "can't allocate memory",  # torch's allocator on the CPU, after "[enforce fail at"
        "not enough memory",
        "Cannot allocate memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ),
    Failure.DISK_FULL: (
        "No space left on device",
        "Disk quota exceeded",
        "[Errno 28]",
        "[Errno 122]",
        "out of shared memory",
    ),
    Failure.FILE_SYSTEM: (
        "Stale file handle",
        "[Errno 116]",
        "Input/output error",
        "[Errno 5]",
        "Read-only file system",
        "[Errno 30]",
        "Remote I/O error",
        "[Errno 121]",
        "Cannot send after transport endpoint shutdown",
        "[Errno 108]",
        "Required key not available",
        "[Errno 126]",
        "Key has expired",
        "[Errno 127]",
    ),
    Failure.KILLED: ("a data loader process died", "DataLoader worker (pid"),
    # "device-side assertion" is absent: torch ends every CUDA error message with how to enable such assertions.
    Failure.KERNEL: (
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "an illegal instruction was encountered",
        "CUDA error: misaligned address",
        "'misaligned address'",  # as NCCL quotes it
        "operation not supported on global/shared address space",
        "CUDA error: invalid program counter",
        "unspecified launch failure",
        "the launch timed out and was terminated",
        "CUBLAS_STATUS_EXECUTION_FAILED",
        "CUDNN_STATUS_EXECUTION_FAILED",
        "Memory access fault by GPU",  # AMD's runtime, which then aborts
        "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
        "HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION",
        "HSA_STATUS_ERROR_EXCEPTION",
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
        "No HIP GPUs are available",
        "no ROCm-capable device is detected",
        "HW Exception by GPU",  # AMD's runtime: the GPU hangs or has an uncorrectable memory error
        "HIP error: unknown error",
        "invalid device ordinal",
        "driver initialization failed",
        "system not yet initialized",
        "system has unsupported display driver / cuda driver combination",
        "CUDA unknown error",
        "CUDA error: unknown error",
        "GPU is lost",
        "MPS client failed to connect to the MPS control daemon",
        "MPS server is not ready to accept new MPS client requests",
        "fallen off the bus",
        "watchdog thread terminated with exception: CUDA error",
        "watchdog thread terminated with exception: HIP error",
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
