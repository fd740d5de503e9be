"""What holds for all tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpc_train import cli
from tests.doors.command import environment

HEAVY = ("tests/slurm/", "tests/faults/", "tests/layouts/", "tests/doors/", "tests/checkpoint/")  # first, in this order
LONG_FORMS = {  # of which --long-share chooses, with the seconds that a case takes on two cores
    "tests/faults/test_faults.py::test_twenty_trials[": 120,
    "tests/faults/test_nodes.py::": 90,
    "tests/faults/test_slurm.py::": 100,
    "tests/checkpoint/test_crash_states.py::": 120,
    "tests/checkpoint/test_errors.py::": 120,
}
SHARE_S, BEGINS_S, CASE_S = 420, 480, 240  # of a share: planned, no case begins later, the most for one case


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-share", metavar="SEED", help="run only the long forms that SEED draws; minutes")


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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest folders come first: with ``-n`` no process is left with one of them at the end."""
    items.sort(key=lambda item: next((place for place, head in enumerate(HEAVY) if item.nodeid.startswith(head)), 9))
    if config.getoption("--long-share") is not None:
        items[:] = _long_share(items, config.getoption("--long-share"))
        print("\nlong forms of this share:", *(item.nodeid for item in items), sep="\n  ")
        config.stash[BEGAN] = time.monotonic()


BEGAN = pytest.StashKey[float]()


def _long_share(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """The cases that ``seed`` draws, the same for the same code, until they fill SHARE_S."""
    cost = {item: next((s for head, s in LONG_FORMS.items() if item.nodeid.startswith(head)), 0) for item in items}
    drawn = random.Random(seed).sample(among := [item for item in items if cost[item]], len(among))
    chosen, left = [], SHARE_S
    for item in drawn:
        if cost[item] <= left:
            item.add_marker(pytest.mark.timeout(CASE_S))
            chosen.append(item)
            left -= cost[item]
    return chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A slow machine does fewer cases of a share."""
    if time.monotonic() - item.config.stash.get(BEGAN, float("inf")) > BEGINS_S:
        pytest.skip("the time of the share is used up")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: a file's tests share its fixtures, and the tests of Slurm their clusters."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    return ByFile(config, log)
