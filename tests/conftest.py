"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """What is started must see Ctrl-C and a lost terminal.

    A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and children inherit that; a handler they
    do not inherit.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
