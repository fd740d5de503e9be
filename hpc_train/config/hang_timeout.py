"""``elastic.hang_timeout_s``: ``auto``, seconds, or 0."""

from __future__ import annotations

from hpc_train.config.errors import ConfigError


def parse_hang_timeout(text: str) -> float | None:
    """Seconds; 0 where nothing is taken for a hang; None where the bound is to be learned.

    Raises:
        ConfigError: it is none of the three.
    """
    if text == "auto":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if 0 <= seconds < float("inf"):
        return seconds
    raise ConfigError(
        f"elastic.hang_timeout_s is {text!r}",
        where="elastic.hang_timeout_s",
        mend="auto, the seconds that a step may take, or 0 to wait for ever",
    )
