"""Keeps keys and tokens out of run directories, logs and trackers.

A config that contains a secret of the environment is refused, and files with secrets are not copied with the code.
Workers inherit the environment, so no config needs ``${oc.env:WANDB_API_KEY}``, which would be frozen in clear text.

The values of ``cluster.env``, and tokens that lines of ``cluster.setup`` export, may be secrets that are set nowhere
else. They are only in the frozen config and in batch scripts, which their owner alone can then read (with ``run.group``
the group, too).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from fnmatch import translate
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.errors import UserError

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|WEBHOOK)(_|$|\d)", re.IGNORECASE
)
FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
ASSIGNMENT = re.compile(r"""\b(\w+)=('[^']*'|"[^"]*"|[^\s;&|]+)""")
PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s@/]+@")  # a password in an address
TOKEN = re.compile(r"\b(Bearer\s+|hf_|gh[ps]_|sk-)[\w.~+/=-]{8,}")  # a token of a widespread service
HIDDEN = "(hidden)"
SHORTEST = 8  # characters; a shorter value would also occur in harmless text
# Names of files in which tools keep keys, tokens and passwords, in lower case. Python modules are always copied.
SECRET_DIRECTORIES = frozenset({".aws", ".azure", ".gcloud", ".gnupg", ".kube", ".ssh"})
SECRET_FILES = (
    *(".env", ".env.*", ".envrc", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc"),
    *(".htpasswd", ".vault-token", ".dockercfg", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519"),
    *("id_ed25519_sk", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *(f"{name}{suffix}" for name in ("credentials", "secrets") for suffix in ("", ".json", ".yaml", ".yml", ".toml")),
    *("credentials.ini", "secrets.ini", "credentials.csv", "client_secret*.json", "service[-_]account*.json"),
    *("application_default_credentials.json", "kaggle.json"),
)
SECRET_FILE = re.compile("|".join(map(translate, SECRET_FILES)))
NO_SECRET_FILES = (".env.example", ".env.sample", ".env.template", ".env.dist")  # examples without values
FIX = "remove it from the config, which is stored in clear text; workers inherit it from the environment"


def refuse_secrets(values: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError if a text in nested dicts and lists contains a secret of the environment, or reads one."""
    held = environment_secrets(environment)
    for key, text in leaves(values):
        for name in FROM_ENVIRONMENT.findall(text):
            if SECRET_NAME.search(name):
                raise UserError(f"{key} reads the secret {name} from the environment", where=key, fix=FIX)
        _refuse(key, text, held)


def refuse_secret_arguments(arguments: Iterable[str], environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError if an argument contains a secret of the environment; Hydra records the command line as well."""
    held = environment_secrets(environment)
    for argument in arguments:
        _refuse(argument.split("=", 1)[0], argument, held)


def is_secret_file(name: str) -> bool:
    """Returns whether a file (relative to the work tree) has a name that tools use for keys, tokens or passwords."""
    *directories, file = name.lower().split("/")
    if file in NO_SECRET_FILES or file.endswith(".py"):
        return False
    return SECRET_FILE.match(file) is not None or not SECRET_DIRECTORIES.isdisjoint(directories)


def file_mode(config: Config) -> int:
    """Returns the permissions of files that hold the whole config; the umask reduces them."""
    if all(shown(f"cluster.{key}", value) == value for key, value in _possible_secrets(config)):
        return 0o666
    return 0o600 if config.run.group is None else 0o660


def without_secrets(config: Config) -> dict[str, Any]:
    """Returns the config as nested dicts for trackers and logs, without the values of ``cluster.env``."""
    nested = asdict(config)
    for key, value in _possible_secrets(config):
        nested["cluster"][key] = shown(f"cluster.{key}", value)
    return nested


def _possible_secrets(config: Config) -> Iterator[tuple[str, Any]]:
    for key in ("env", "setup", "teardown"):
        yield key, getattr(config.cluster, key)


def shown(key: str, value: Any) -> Any:
    """Returns a value of the config as messages may show it.

    The values of ``cluster.env`` are hidden, and so are assignments to variables with the name of a secret in
    ``cluster.setup`` and ``cluster.teardown``.
    """
    if key == "cluster.env" or key.startswith("cluster.env."):
        return dict.fromkeys(value, HIDDEN) if isinstance(value, dict) else HIDDEN
    if key in ("cluster.setup", "cluster.teardown") and isinstance(value, list):
        return [ASSIGNMENT.sub(_hidden, line) for line in value]
    return value


def shown_override(override: str) -> str:
    """Returns an override as ``run.json`` may record it, see ``shown``."""
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    if name == "cluster":  # a choice of a file, or a table with all keys
        return f"{key}={HIDDEN}" if "{" in value else override
    if name == "cluster.env" or name.startswith("cluster.env."):
        return f"{key}{equals}{HIDDEN}"
    hides = name in ("cluster.setup", "cluster.teardown")
    return f"{key}{equals}{ASSIGNMENT.sub(_hidden, value) if hides else value}"


def _hidden(assignment: re.Match[str]) -> str:
    return f"{assignment[1]}={HIDDEN}" if SECRET_NAME.search(assignment[1]) else assignment[0]


def redacted(text: str, values: Iterable[str]) -> str:
    """Returns ``text`` of any origin without ``values``, assignments to variables with the name of a secret, passwords
    in addresses, and tokens of widespread services.
    """
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = PASSWORD.sub(rf"\1{HIDDEN}@", ASSIGNMENT.sub(_hidden, text))
    return TOKEN.sub(rf"\1{HIDDEN}", text)


def environment_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}


def _refuse(key: str, value: str, held: Mapping[str, str]) -> None:
    for name, secret in held.items():
        if secret in value:
            raise UserError(f"{key} contains the value of the secret {name}", where=key, fix=FIX)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the text of every string in nested dicts and lists."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value
