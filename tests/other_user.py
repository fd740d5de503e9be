"""Code of a test that runs as another user of the machine, in a child process; needs root."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OTHER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_other(action: Callable[[], object]) -> None:
    """Runs ``action`` as the user ``OTHER``; raises AssertionError if it raises."""
    start_as_other(action)()


def start_as_other(action: Callable[[], object]) -> Callable[[], None]:
    """Starts ``action`` as the user ``OTHER``; returns a function that waits for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            action()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(writing)

    def wait() -> None:
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        assert not said, said

    return wait


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory like /tmp, which the directories of pytest are not: all users may enter it and create files."""
    path = Path(tempfile.mkdtemp(prefix="hpc_train-test-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)
