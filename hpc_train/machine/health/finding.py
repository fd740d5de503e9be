"""Defines a finding, which is a line in the report of ``doctor``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"
UNCHECKED = "not known: "  # the beginning of the text if a check was not possible
_ORDER = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check. ``level`` is ``ok``, ``warning`` or ``error``; the last two have a ``fix``."""

    subject: str
    level: str
    text: str
    fix: str = ""

    @property
    def unknown(self) -> bool:
        """Returns whether the check was not possible here. This is neither a problem nor a sign of health."""
        return self.text.startswith(UNCHECKED)


def worst(findings: Iterable[Finding]) -> str:
    return max((finding.level for finding in findings), key=_ORDER.index, default=OK)
