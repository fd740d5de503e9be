"""Starts a process that keeps opening connections to a port and sends nothing on them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SCRIPT = """
import collections, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
port, held = int(sys.argv[1]), collections.deque(maxlen=int(sys.argv[2]))
while True:
    try:
        held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        sys.stdout.write(".")
        sys.stdout.flush()
    except OSError:
        pass
    time.sleep(0.001 if len(held) == held.maxlen else 0)
"""


@contextmanager
def flood(port: int, held: int = 400) -> Iterator[Callable[[int], None]]:
    """Keeps up to ``held`` connections from another process open inside the ``with`` block.

    It yields a function that waits until the given number of connections has been opened.
    """
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(port), str(held)], stdout=subprocess.PIPE)
    assert process.stdout is not None

    def wait(opened: int) -> None:
        assert process.stdout is not None
        assert len(process.stdout.read(opened)) == opened

    try:
        yield wait
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
