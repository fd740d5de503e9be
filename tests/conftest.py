"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpc_train import cli
from tests.doors.command import environment


@pytest.fixture
def called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls the command line in this process, in ``tmp_path``: for commands that start no workers."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with mock.patch.dict(os.environ, environment(), clear=True):
            try:
                code: Any = cli.run(arguments)
            except SystemExit as end:  # of argparse
                code = end.code
        return subprocess.CompletedProcess(arguments, int(code or 0), *capsys.readouterr())

    return call


def pytest_configure() -> None:
    """What is started must see Ctrl-C and a lost terminal.

    A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and children inherit that; a handler they
    do not inherit.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of Slurm first: they take longest, mostly waiting, and go to one process as a whole."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: a file's tests share its fixtures, and the tests of Slurm their clusters."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    return ByFile(config, log)
