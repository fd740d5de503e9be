"""Whether somebody is there to be asked."""

from __future__ import annotations

import sys

from rich.console import Console


def can_ask(console: Console) -> bool:
    """Whether ``console`` writes to a terminal and a person can answer."""
    return console.is_terminal and sys.stdin.isatty()
