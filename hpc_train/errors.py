"""The one exception of a user's mistake.

The words of a fix: the allowed values, the nearest first.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class UserError(Exception):
    """A wrong setting or input, found before anything was started (exit code 2).

    Args:
        what: what is wrong, with the offending value.
        where: the config key, file or option that sets it, e.g. ``batch.global_size``.
        fix: what to change, concretely.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        where = f"\n  set in: {self.where}" if self.where else ""
        fix = f"\n  fix:    {self.fix}" if self.fix else ""
        return f"{self.what}{where}{fix}"


def nearest(value: object, allowed: Sequence[str]) -> str:
    """``did you mean X? (X | Y | Z)``, or the allowed values alone where nothing is near."""
    choices = " | ".join(allowed)
    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f"did you mean {close[0]}? ({choices})" if close else f"one of {choices}"
