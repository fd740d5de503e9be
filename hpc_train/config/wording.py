"""The words of a mend: the allowed values, the nearest first."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(value: object, allowed: Sequence[str]) -> str:
    """``did you mean X? (X | Y | Z)``, or the allowed values alone where nothing is near."""
    choices = " | ".join(allowed)
    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f"did you mean {close[0]}? ({choices})" if close else f"one of {choices}"
