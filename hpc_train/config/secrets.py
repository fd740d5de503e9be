"""Keys and tokens never reach a run directory: a config that would write one is refused, a file that holds one is not
copied with the code.

``${oc.env:WANDB_API_KEY}`` is convenient and would be frozen in clear text, readable for whoever may read the run.
Workers inherit the environment, so nothing needs to be copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.errors import UserError

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$|\d)", re.IGNORECASE
)
FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
SHORTEST = 8  # characters; a shorter value of a secret's variable stands in too many innocent places
# Names under which tools keep keys, tokens and passwords; compared in lower case. Python modules are never among them.
SECRET_DIRECTORIES = frozenset({".aws", ".azure", ".gcloud", ".gnupg", ".kube", ".ssh"})
SECRET_FILES = (
    *(".env", ".env.*", ".envrc", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc"),
    *(".htpasswd", ".vault-token", ".dockercfg", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519"),
    *("id_ed25519_sk", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *(f"{name}{suffix}" for name in ("credentials", "secrets") for suffix in ("", ".json", ".yaml", ".yml", ".toml")),
    *("credentials.ini", "secrets.ini", "credentials.csv", "client_secret*.json", "service[-_]account*.json"),
    *("application_default_credentials.json", "kaggle.json"),
)
NO_SECRET_FILES = (".env.example", ".env.sample", ".env.template", ".env.dist")  # they show what an .env would hold
MEND = "leave it in the environment: workers inherit it; the config is written to the run directory in clear text"


def refuse_secrets(node: DictConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError where a value is, holds, or is taken from a secret of the environment."""
    held = _secrets(environment)
    for key, raw in leaves(OmegaConf.to_container(node, resolve=False)):
        for name in FROM_ENVIRONMENT.findall(raw):
            if SECRET_NAME.search(name):
                raise UserError(f"{key} takes the secret {name} from the environment", where=key, fix=MEND)
        value = _resolved(node, key) if "${" in raw else raw
        _refuse(key, value, held)


def refuse_secret_arguments(arguments: Iterable[str], environment: Mapping[str, str] = os.environ) -> None:
    """The same for the command line, which Hydra writes down too."""
    held = _secrets(environment)
    for argument in arguments:
        _refuse(argument.split("=", 1)[0], argument, held)


def is_secret_file(name: str) -> bool:
    """Whether the name of a file, relative to the work tree, says that it holds keys, tokens or passwords."""
    path = PurePath(name.lower())
    if path.name in NO_SECRET_FILES or path.suffix == ".py":
        return False
    return any(fnmatchcase(path.name, pattern) for pattern in SECRET_FILES) or not SECRET_DIRECTORIES.isdisjoint(
        path.parts[:-1]
    )


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}


def _refuse(key: str, value: str, held: Mapping[str, str]) -> None:
    for name, secret in held.items():
        if secret in value:
            raise UserError(f"{key} holds the value of the secret {name}", where=key, fix=MEND)


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
