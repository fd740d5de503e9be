"""What holds for all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group: tests that one process runs, one after the other (pytest-xdist)")
    _let_signals_through()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n``: a file's tests share its fixtures, and the tests of Slurm their clusters."""
    for item in items:
        slurm = item.path.is_relative_to(HERE / "slurm")
        item.add_marker(pytest.mark.xdist_group("slurm" if slurm else str(item.path)))


def _let_signals_through() -> None:
    """What is started must see Ctrl-C and a lost terminal.

    A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and children inherit that; a handler they
    do not inherit.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
