"""Defines the schema of an import path with arguments, for metrics and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_train.config.schema.key import key, required


@dataclass
class TargetConfig:
    """A class or function that is built by calling ``_target_`` with ``args``."""

    _target_: str = required("The class or function: package.module.Name.")
    args: dict[str, Any] = key({}, "The keyword arguments of _target_.")
