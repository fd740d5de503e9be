"""Keys and tokens never reach a run directory: a config that would write one is refused.

``${oc.env:WANDB_API_KEY}`` is convenient and would be frozen in clear text, readable for whoever may read the run.
Workers inherit the environment, so nothing needs to be copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.errors import ConfigError

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$|\d)", re.IGNORECASE
)
FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
SHORTEST = 8  # characters; a shorter value of a secret's variable stands in too many innocent places
MEND = "leave it in the environment: workers inherit it; the config is written to the run directory in clear text"


def refuse_secrets(node: DictConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where a value is, holds, or is taken from a secret of the environment."""
    held = _secrets(environment)
    for key, raw in leaves(OmegaConf.to_container(node, resolve=False)):
        for name in FROM_ENVIRONMENT.findall(raw):
            if SECRET_NAME.search(name):
                raise ConfigError(f"{key} takes the secret {name} from the environment", where=key, mend=MEND)
        value = _resolved(node, key) if "${" in raw else raw
        _refuse(key, value, held)


def refuse_secret_arguments(arguments: Iterable[str], environment: Mapping[str, str] = os.environ) -> None:
    """The same for the command line, which Hydra writes down too."""
    held = _secrets(environment)
    for argument in arguments:
        _refuse(argument.split("=", 1)[0], argument, held)


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}


def _refuse(key: str, value: str, held: Mapping[str, str]) -> None:
    for name, secret in held.items():
        if secret in value:
            raise ConfigError(f"{key} holds the value of the secret {name}", where=key, mend=MEND)


def _resolved(node: DictConfig, key: str) -> str:
    try:
        return str(OmegaConf.select(node, key))
    except OmegaConfBaseException:
        return ""  # what does not resolve is reported where values are converted


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and text of every string in nested dicts and lists."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value
