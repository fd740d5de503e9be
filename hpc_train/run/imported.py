"""Records imported weights, and gives the runs that start from them the model of the import.

An import is a directory next to the runs with a checkpoint of step 0 and a record of its model. ``run.fork`` starts a
run from it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_train.config.extensions import from_plain
from hpc_train.config.run_path import default_root, directory_to_fork, run_directory
from hpc_train.config.schema import Config, GPTConfig
from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json

_IMPORTED = "imported.json"
PUBLISHED = "published"  # the key of ``Others`` in the import, and in the record of a run that was forked from it
Others = Mapping[str, Mapping[str, Any]]  # file name -> values of published files that an export writes again
_FREE = ("dropout",)  # affects training, not what the weights compute


def import_directory(root: Path, name: str) -> RunDirectory:
    """Returns the directory for an import with ``name`` below ``root``.

    Raises:
        UserError: the name is taken.
    """
    directory = RunDirectory(Path(run_directory(str(root), name)))
    if directory.path.exists() and any(directory.path.iterdir()):
        raise UserError(f"{directory.path} already exists", where="--to", fix="choose another name")
    return directory


def write_imported(directory: RunDirectory, model: GPTConfig, source: str, others: Others) -> None:
    """Records the model that ``directory`` holds, the source of its weights, and the ``others``."""
    content = {"model": asdict(model), "source": source, PUBLISHED: others, "time": time.time()}
    write_json(directory.path / _IMPORTED, content)


def published(directory: RunDirectory) -> Others | None:
    """Returns the values of published files that an import, or a run that descends from one, exports again.

    Returns None for a run that started from scratch, or from an import of an earlier version.
    """
    path = directory.path / _IMPORTED
    record = directory.json(path) if path.exists() else directory.record()
    others: Others | None = record.get(PUBLISHED)
    return others


def imported_model(directory: RunDirectory) -> GPTConfig | None:
    """Returns the model whose weights ``directory`` holds; None if it is not an import.

    Raises:
        DamagedFile: the file that describes it is damaged.
    """
    path = directory.path / _IMPORTED
    if not path.exists():
        return None
    content = directory.json(path)
    try:
        return from_plain(GPTConfig, content["model"])
    except (KeyError, TypeError) as error:
        what = f"{path} does not describe a model: {type(error).__name__}: {error}"
        raise DamagedFile(what, where=str(path), fix="import the weights again") from error


def model_overrides(model: GPTConfig) -> list[str]:
    """Returns the overrides that configure this model on top of any file of ``conf/model``."""
    overrides = []
    values = asdict(model)
    if model.moe.experts is None:
        values["moe"] = {"experts": None}
    for key, value in values.items():
        if isinstance(value, dict):
            overrides += [f"++model.{key}.{name}={_override_value(item)}" for name, item in value.items()]
        elif key not in ("kind", *_FREE):
            overrides.append(f"model.{key}={_override_value(value)}")
    return overrides


def with_imported_model(arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with the overrides of the import that ``run.fork`` starts from, if there is one.

    They come first, so that overrides of single keys replace them: ``check_start`` then names those that differ. A
    model that is chosen with ``model=`` stays.
    """
    from hpc_train.config.command_line import CommandLine  # imports Hydra, which agents do not need

    values = dict(override.partition("=")[::2] for override in CommandLine.parse(arguments).overrides)
    name = values.get("run.name")
    if not name or "," in name or not values.get("run.fork") or values.keys() & {"model", "+model"}:
        return list(arguments)
    root = values.get("run.root") or default_root()
    model = imported_model(RunDirectory(directory_to_fork(root, name)))
    if model is None:
        return list(arguments)
    return [*model_overrides(model), *arguments]


def check_start(config: Config, source: RunDirectory) -> None:
    """Raises UserError if a run of ``config`` cannot start from the imported weights in ``source``.

    Equal shapes are not enough: with another rotary base or number of heads, the weights load, but the model computes
    different results.
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
            f"the weights in {source.path} belong to another model: " + "; ".join(different),
            where="model",
            fix=" ".join(model_overrides(imported)),
        )


def _override_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
