"""How many files and sockets a process may have open at a time (``ulimit -n``)."""

from __future__ import annotations

import resource
from contextlib import suppress

MOST = 1 << 20  # the kernel's default ceiling (fs.nr_open); some programs go through all descriptors one by one


def raise_descriptor_limit() -> None:
    """Sets the soft limit to the hard one; processes that start later inherit it.

    The soft limit is mostly 1024, for programs that call select(). gloo alone needs several sockets for each rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the limit stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
