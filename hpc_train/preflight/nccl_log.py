"""Makes NCCL log its transports (``NCCL_DEBUG=INFO``, ``NCCL_DEBUG_SUBSYS=INIT,NET``) and parses the log. No torch.

The parser supports the lines of NCCL 2.4 to 2.30, which ``net.cc``, ``net_ib`` and ``net_socket.cc`` print:

    n1:7:19 [0] NCCL INFO Using network IB
    n1:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
    n1:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM

RCCL prints the same lines.

NCCL reads these variables once per process and then writes its warnings to the same log. A thread copies the warnings
to standard error, which goes to the log of the node.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SOCKET = "Socket"
QUIET = ("", "VERSION", "WARN")  # with these levels of NCCL_DEBUG, the log may be redirected to memory
_CHOSEN = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
# a plugin's name may contain a space; (relay), /GDRDMA(mode) and /Shared follow the device number
_NETWORK = re.compile(r" via NET/([^/\n]+)/\d+(\S*)")
_INSIDE = re.compile(r" via (P2P|SHM|direct shared memory)\b")


@dataclass(frozen=True)
class Transport:
    """Describes the transports of the communicators of one rank.

    Attributes:
        networks: the networks of its channels to other nodes, as NCCL names them (``IB``, ``Socket``, ``AWS
            Libfabric``); without such channels the network that NCCL selected, if any.
        gpu_direct: whether all those channels read GPU memory from the NIC; None without channels.
        inside: the transports of its channels inside the node: ``P2P``, ``SHM``.
    """

    networks: tuple[str, ...] = ()
    gpu_direct: bool | None = None
    inside: tuple[str, ...] = ()

    @property
    def over_sockets(self) -> bool:
        return SOCKET in self.networks


def parse_transport(log: str) -> Transport:
    """Parses the log of one rank; missing facts stay empty."""
    networks = dict.fromkeys(_CHOSEN.findall(log)[-1:])
    gpu_direct = None
    channels = _NETWORK.findall(log)
    if channels:
        networks = dict.fromkeys(name for name, _ in channels)
        gpu_direct = all("/GDRDMA" in rest for _, rest in channels)
    inside = ("SHM" if "shared" in transport else transport for transport in _INSIDE.findall(log))
    return Transport(tuple(networks), gpu_direct, tuple(dict.fromkeys(inside)))


FOLLOW_S = 1.0  # shorter than the time from a warning until NCCL's watchdog aborts the process
WARNING = b"NCCL WARN"


class NCCLLog:
    """Holds NCCL's log of this process in memory.

    If each rank read a file on the shared file system once per second, the metadata server would get thousands of
    operations per second. ``path`` is the path that NCCL opens. It contains the id of this process instead of ``self``:
    otherwise NCCL in a child process, which inherits the environment, would truncate whatever file has this descriptor
    there."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("nccl-log")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self, begin: int = 0) -> bytes:
        """Returns the log from byte ``begin`` on."""
        return os.pread(self._descriptor, max(0, os.fstat(self._descriptor).st_size - begin), begin)


def log_transport() -> NCCLLog | None:
    """Makes NCCL log its transports to memory, before its first communicator. Returns None if the user's log is in use.

    NCCL keeps the log open, so the log exists as long as the process.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() not in QUIET or "NCCL_DEBUG_FILE" in os.environ:
        return None
    log = NCCLLog()
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log.path}
    return log


def logged_transport(log: NCCLLog | None) -> Transport | None:
    """Returns the logged transport; None without a log."""
    if log is None:
        return None
    return parse_transport(log.read().decode(errors="replace"))


class WarningCopier:
    """Copies each warning in a growing log to standard error once, and writes the log to the file ``copy`` when there
    is one."""

    def __init__(self, log: NCCLLog, copy: Path) -> None:
        self._log = log
        self._kept = copy
        self._position = 0

    def copy(self) -> None:
        """Copies the warnings in the complete lines since the last call."""
        new = self._log.read(self._position)
        complete = new[: new.rfind(b"\n") + 1]
        self._position += len(complete)
        warnings = [line for line in complete.splitlines() if WARNING in line]
        for line in warnings:
            print(line.decode(errors="replace"), file=sys.stderr, flush=True)
        if warnings:  # NCCL may abort the process soon
            self.keep()

    def keep(self) -> None:
        """Writes the log to the file if the log is not empty. Errors of the file system are ignored."""
        content = self._log.read()
        if content:
            with suppress(OSError):
                self._kept.parent.mkdir(parents=True, exist_ok=True)
                self._kept.write_bytes(content)


@contextmanager
def copied_warnings(log: NCCLLog, copy: Path) -> Iterator[None]:
    """Copies the warnings in NCCL's log to standard error inside the ``with`` block.

    The full log is written to ``copy`` after each warning and after an exception. If there was no exception, the file
    is removed.
    """
    copier = WarningCopier(log, copy)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(FOLLOW_S):
            copier.copy()

    thread = threading.Thread(target=follow, name="NCCL warnings", daemon=True)
    thread.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        ended.set()
        thread.join(FOLLOW_S)
        copier.copy()
        if failed:
            copier.keep()
        else:
            copy.unlink(missing_ok=True)
