"""The order of names that end in numbers."""

from __future__ import annotations

import re


def natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders mlx5_9 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
