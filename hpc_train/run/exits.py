"""How a run ends: exit codes, and the class of each failure."""

from __future__ import annotations

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


def classify(error: BaseException) -> Failure:
    """The class of an exception that ended a worker. Looks at types and messages; needs no torch."""
    from hpc_train.config.errors import ConfigError

    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConfigError):
        return Failure.REFUSED
    if isinstance(error, MemoryError) or "OutOfMemoryError" in text or "out of memory" in text:
        return Failure.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        return Failure.DISK_FULL
    if any(mark in text for mark in _COMMUNICATION):
        return Failure.COMMUNICATION
    return Failure.USER_ERROR


_COMMUNICATION = (
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
)
