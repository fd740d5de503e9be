"""Imported weights: a directory beside the runs that holds one checkpoint of a model and no optimizer.

It is no run: nothing was trained there, and its settings are the model's alone. A run begins with it as a fork begins
with a run: ``run.name=IMPORTED run.fork=NEW``.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from hpc_train.config.schema import Config, GPTConfig
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, write_json

_RECORD = "imported.json"
_FREE = ("dropout",)  # says how it is trained, not what the weights compute


def write_imported(directory: RunDirectory, model: GPTConfig, source: str) -> None:
    """Records what ``directory`` holds and where it came from."""
    write_json(directory.path / _RECORD, {"model": asdict(model), "source": source, "time": time.time()})


def imported_model(directory: RunDirectory) -> GPTConfig | None:
    """The model whose weights ``directory`` holds; None where it is not an import."""
    path = directory.path / _RECORD
    return GPTConfig(**read_json(path)["model"]) if path.exists() else None


def model_overrides(model: GPTConfig) -> list[str]:
    """The overrides that make the model of a run this one, whatever file of ``conf/model`` it starts from."""
    overrides = []
    for key, value in asdict(model).items():
        if isinstance(value, dict):
            overrides += [f"++model.{key}.{name}={_text(item)}" for name, item in value.items()]
        elif key not in ("kind", *_FREE):
            overrides.append(f"model.{key}={_text(value)}")
    return overrides


def check_start(config: Config, source: RunDirectory) -> None:
    """Raises UserError where a run of ``config`` cannot start from the imported weights in ``source``.

    The shapes alone do not tell: another base of the rotary positions or another number of heads loads and computes
    something else.
    """
    imported = imported_model(source)
    if imported is None:
        return
    model: dict[str, Any] = asdict(config.model)
    different = [
        f"model.{key}: {value} in the import, {model.get(key, 'absent')} in the run"
        for key, value in asdict(imported).items()
        if key not in _FREE and model.get(key) != value
    ]
    if different:
        raise UserError(
            f"the weights in {source.path} are of another model: " + "; ".join(different),
            where="model",
            fix=" ".join(model_overrides(imported)),
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
