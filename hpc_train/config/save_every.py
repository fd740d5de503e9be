"""``checkpoint.every``: so many steps, so many minutes, or ``auto``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.config.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SaveEvery:
    """One of the three is set, or none: then only on a stop request and at the end."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False


def parse_save_every(text: str) -> SaveEvery:
    """
    Raises:
        ConfigError: it is none of the three.
    """
    if text == "auto":
        return SaveEvery(auto=True)
    if re.fullmatch(r"\d+", text):
        return SaveEvery(steps=int(text))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match and float(match[1]) > 0:
        return SaveEvery(seconds=float(match[1]) * _SECONDS[match[2]])
    raise ConfigError(
        f"checkpoint.every is {text!r}",
        where="checkpoint.every",
        mend="steps (500), minutes (30m) or hours (2h), auto, or 0 to save on a stop request and at the end only",
    )
