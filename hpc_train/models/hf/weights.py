"""Reads published weights tensor by tensor, or only the rows that a rank holds, from safetensors files.

Files may name tensors otherwise than the model does: older versions of transformers saved other names, and a file of a
base model lacks its prefix. The table of transformers says how to rename them. By the same table a tensor of the model
may be several stored ones, such as the experts of a mixture, or a part of one. Then the rows of a rank are read from
those tensors that have them. Other conversions need whole tensors, so such files are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.hf_config import INDEX, WEIGHTS, no_weights
from hpc_train.errors import UserError

_WHERE = "model.name_or_path"


@dataclass(frozen=True)
class _Source:
    """Says of which stored tensors a tensor of the model is made.

    Attributes:
        grid: stored names. Those of one row are concatenated along ``dim``; rows are stacked along a new first dim.
        dim: counted without the new dim.
        stacked: whether there is a new first dim; otherwise ``grid`` has one row.
        part, parts: of a stored tensor that is several of the model, cut along dim 0: which one this is, of how many.
    """

    grid: tuple[tuple[str, ...], ...]
    dim: int = 0
    stacked: bool = False
    part: int = 0
    parts: int = 1


class WeightFiles:
    """Reads the tensors of a directory under the names of the model.

    Args:
        folder: the directory with one safetensors file, or several and an index.
        module: the model, on ``meta``.

    Attributes:
        unused: the names of stored tensors that the model does not have.

    Raises:
        UserError: files are missing or damaged, or their tensors need a conversion that is not implemented.
    """

    def __init__(self, folder: Path, module: nn.Module) -> None:
        self._folder = folder
        self._file_of = _located(folder)
        self._opened: dict[str, Any] = {}
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        self._stored = _sources(self._file_of, module, tensors)
        used = {stored for source in self._stored.values() for row in source.grid for stored in row}
        self.unused = [stored for stored in self._file_of if stored not in used]

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __deepcopy__(self, memo: Any) -> WeightFiles:
        return self  # it does not change, and open files cannot be copied

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of ``name`` according to the files."""
        source = self._stored[name]
        shapes = [self._shape(stored) for stored in source.grid[0]]
        if not shapes[0]:
            return ()
        joined = list(shapes[0])
        joined[source.dim] = sum(shape[source.dim] for shape in shapes) // source.parts
        if source.stacked:
            return (len(source.grid), *joined)
        return tuple(joined)

    def read(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Returns a box of the tensor in its stored dtype; only these bytes are read if it is a range of rows."""
        source = self._stored[name]
        if 0 in size:
            return self._slice(source.grid[0][0])[0:0].new_empty(size)
        if not source.stacked:
            return self._joined(source, source.grid[0], begin, size)
        rows = source.grid[begin[0] : begin[0] + size[0]]
        return torch.stack([self._joined(source, row, begin[1:], size[1:]) for row in rows])

    def _joined(self, source: _Source, row: tuple[str, ...], begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Returns a box of the concatenation of ``row``."""
        if not begin:
            return self._open(row[0]).get_tensor(row[0])
        dim = source.dim
        pieces = []
        first = begin[dim] + source.part * self._shape(row[0])[0] // source.parts
        last = first + size[dim]
        for stored in row:
            length = self._shape(stored)[dim]
            low, high = max(0, first), min(length, last)
            if low < high:
                box = [slice(start, start + count) for start, count in zip(begin, size, strict=True)]
                box[dim] = slice(low, high)
                pieces.append(self._slice(stored)[tuple(box)])
            first, last = first - length, last - length
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, dim)

    def _shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._slice(stored).get_shape())

    def _slice(self, stored: str) -> Any:
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


def _sources(located: Mapping[str, str], module: Any, tensors: Mapping[str, Tensor]) -> dict[str, _Source]:
    """Returns name in the model -> of which stored tensors it is made."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    table = get_model_conversion_mapping(module)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    sources: dict[str, _Source] = {}
    to_join: dict[str, dict[str, list[str]]] = {}  # name -> pattern -> stored names
    for stored in sorted(located, key=dot_natural_key):
        if stored in tensors:
            sources[stored] = _Source(((stored,),))
            continue
        name, pattern = rename_source_key(stored, renamings, converters, module.base_model_prefix, dict(tensors))
        if pattern is None:
            if name in tensors:
                sources[name] = _Source(((stored,),))
        else:
            to_join.setdefault(name, {}).setdefault(pattern, []).append(stored)
    for name, by_pattern in to_join.items():
        for target, source in _converted(name, by_pattern, converter_of[next(iter(by_pattern))], module):
            if target in tensors:
                sources[target] = source
    return sources


def _converted(
    name: str, by_pattern: Mapping[str, list[str]], converter: Any, module: Any
) -> Iterator[tuple[str, _Source]]:
    """Yields the tensors of the model, the first of which is ``name``, that ``converter`` makes of stored ones."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    columns = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
    even = len({len(column) for column in columns}) == 1
    match converter.operations:
        case [MergeModulelist(dim=0)] if len(columns) == 1:
            yield name, _Source(tuple(zip(*columns, strict=True)), stacked=True)
        case [MergeModulelist(dim=0), Concatenate(dim=dim)] if even and dim > 0:
            yield name, _Source(tuple(zip(*columns, strict=True)), dim - 1, stacked=True)
        case [Concatenate(dim=dim)] if even and len(columns[0]) == 1:
            yield name, _Source((tuple(column[0] for column in columns),), dim)
        case [Chunk(dim=0)] if len(columns) == len(columns[0]) == 1 and converter.target_patterns[0] in name:
            first, *others = converter.target_patterns
            for part, target in enumerate((first, *others)):
                source = _Source((tuple(columns[0]),), part=part, parts=1 + len(others))
                yield name.replace(first, target, 1), source
        case _:
            stored = next(iter(by_pattern.values()))[0]
            raise UserError(
                f"{stored} must be converted for a {type(module).__name__}, which is not done while reading in pieces",
                where=_WHERE,
                fix="load the model once with transformers, call save_pretrained(DIR, save_original_format=False), and "
                "set model.name_or_path=DIR",
            )
