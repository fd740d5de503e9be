"""A child process that never outlives its parent, not even one that was killed with -9."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Called first thing in a forked child: the kernel sends ``death_signal`` when the parent ends.

    "The parent" is the *thread* that forked: fork from one that lives as long as its process.

    Args:
        parent: process id of the parent, taken before the fork. A parent that died before this call is noticed by it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os._exit(1)
