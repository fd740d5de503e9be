"""Reads published weights tensor by tensor, or only the rows that a rank holds, from safetensors files.

Files may name tensors otherwise than the model does: older versions of transformers saved other names, and a file of a
base model lacks its prefix. The table of transformers says how to rename them. It also joins and splits tensors (such
as the experts of a mixture), which needs whole tensors, so such files are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpc_train.config.hf_config import INDEX, WEIGHTS, no_weights
from hpc_train.errors import UserError

_WHERE = "model.name_or_path"


class WeightFiles:
    """Reads the tensors of a directory under the names of the model.

    Args:
        folder: the directory with one safetensors file, or several and an index.
        module: the model, on ``meta``.

    Attributes:
        unused: the names of stored tensors that the model does not have.

    Raises:
        UserError: files are missing or damaged, or their tensors must be joined or split for this model.
    """

    def __init__(self, folder: Path, module: nn.Module) -> None:
        self._folder = folder
        self._file_of = _located(folder)
        self._opened: dict[str, Any] = {}
        wanted = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        self._stored: dict[str, str] = {}
        self.unused: list[str] = []
        for stored, name in _renamed(self._file_of, module, wanted).items():
            if name in wanted:
                self._stored[name] = stored
            else:
                self.unused.append(stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __deepcopy__(self, memo: Any) -> WeightFiles:
        return self  # it does not change, and open files cannot be copied

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of ``name``."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Returns a box of the tensor in its stored dtype; only these bytes are read if it is a range of rows."""
        found = self._slice(name)
        box = tuple(slice(start, start + length) for start, length in zip(begin, size, strict=True))
        tensor: Tensor = found[box] if box else self._open(self._stored[name]).get_tensor(self._stored[name])
        return tensor

    def _slice(self, name: str) -> Any:
        stored = self._stored[name]
        return self._open(stored).get_slice(stored)

    def _open(self, stored: str) -> Any:
        file = self._file_of[stored]
        if file not in self._opened:
            self._opened[file] = _opened(self._folder / file)
        return self._opened[file]


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}", where=_WHERE, fix="download the model again") from error


def _located(folder: Path) -> dict[str, str]:
    """Returns stored name -> file."""
    if (folder / INDEX).exists():
        located: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map", {})
        outside = [file for file in located.values() if Path(file).name != file]
        if outside:
            raise UserError(
                f"the index refers to {outside[0]}, which is outside {folder}",
                where=str(folder / INDEX),
                fix="use only names of files in the same directory",
            )
        return located
    if (folder / WEIGHTS).exists():
        return dict.fromkeys(_opened(folder / WEIGHTS).keys(), WEIGHTS)
    raise no_weights(folder)


def _renamed(stored: Mapping[str, str], module: Any, wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns stored name -> name in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(module)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    names = {}
    for name in stored:
        if name in wanted:
            names[name] = name
            continue
        found, converted = rename_source_key(name, renamings, converters, module.base_model_prefix, dict(wanted))
        if converted is not None:
            raise UserError(
                f"{name} must be joined with other tensors or split for a {type(module).__name__}, which is not "
                "done while reading in pieces",
                where=_WHERE,
                fix="load the model once with transformers, call save_pretrained(DIR, save_original_format=False), and "
                "set model.name_or_path=DIR",
            )
        names[name] = found
    return names
