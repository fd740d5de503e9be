"""The files of ``conf/``: their directory, their groups and options, and their content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

PRIMARY = "config"


def config_directory() -> Path:
    """Returns ``hpc_train/conf`` in an installed wheel, or the repository's ``conf/`` in an editable install."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


@cache
def packaged(name: str) -> Mapping[str, Any]:
    """Returns the content of a file of the package, such as ``strategy/dp``, without composing it."""
    text = (config_directory() / f"{name}.yaml").read_text(encoding="utf-8")
    return MappingProxyType(yaml.safe_load(text))


def config_groups(directories: Iterable[Path] = ()) -> dict[str, list[str]]:
    """Returns the names of the options of each config group, such as ``cluster/fabric``. ``directories`` are the user's
    directories with further groups and options."""
    groups: dict[str, set[str]] = {}
    for directory in (config_directory(), *directories):
        for path in directory.glob("*/**/*.yaml"):
            group = path.parent.relative_to(directory).as_posix()
            if not any(part.startswith(".") for part in path.relative_to(directory).parts):
                groups.setdefault(group, set()).add(path.stem)
    return {group: sorted(groups[group]) for group in sorted(groups)}
