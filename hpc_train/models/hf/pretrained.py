"""Reads a model of transformers (its config, its class, its weights), and initializes parameters.

Weights are read from safetensors files tensor by tensor, or only the rows that a rank holds. Files may name tensors
differently from the model: older versions of transformers saved other names, and a file of a base model lacks its
prefix. A table in transformers defines the renaming, and the tensors of the model that combine several stored tensors,
such as the experts of a mixture, or are a part of one. Other conversions need full tensors, so such files are refused.

The initializer of the model draws a parameter that is in no file, on a copy of the module that owns it and from the
seed of the parameter. Thus the values are the same under every layout, and a rank never holds more than one full
parameter in addition to its shards. The same initializer computes buffers that are not in files, such as the
frequencies of rotary positions, as ``from_pretrained`` does.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.hf_config import INDEX, SMOOTHING, WEIGHTS, no_weights
from hpc_train.config.schema import HFModelConfig
from hpc_train.errors import UserError
from hpc_train.models.model import aliases, canonical_name

_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


def hf_config(config: HFModelConfig) -> Any:
    """Returns the config object of transformers; raises UserError if config.json cannot be read or has unknown values,
    or a key of ``model.config`` is unknown."""
    from transformers import AutoConfig

    try:
        hf, unknown = AutoConfig.from_pretrained(
            config.name_or_path,
            revision=config.revision,
            dtype=torch.float32,
            return_unused_kwargs=True,
            **config.config,
        )
    except Exception as error:
        raise UserError(
            f"the config of {config.name_or_path} cannot be read: {type(error).__name__}: {error}",
            where="model.name_or_path, model.config",
            fix="a directory with config.json, or a name on the hub; on nodes without internet download the model "
            "first with: hf download NAME",
        ) from error
    if SMOOTHING in unknown:  # of no config class, but ``models/hf/loss.py`` reads it
        setattr(hf, SMOOTHING, unknown.pop(SMOOTHING))
    if unknown:
        raise UserError(
            f"model.config has the key {next(iter(unknown))}, which a {type(hf).__name__} does not have",
            where=f"model.config.{next(iter(unknown))}",
            fix=f"a key of {type(hf).__name__} in the documentation of transformers",
        )
    return hf


def architecture(config: HFModelConfig) -> str:
    """Returns the name of the class in transformers. It is read from a table if possible, since building a model is
    slow."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"MODEL_FOR_{config.task.upper()}_MAPPING_NAMES")
    name = names.get(hf_config(config).model_type)
    if isinstance(name, str):
        return name
    return type(skeleton(config)).__name__


def skeleton(config: HFModelConfig) -> Any:
    """Returns the model of transformers on ``meta``, without adapters."""
    import transformers

    with torch.device("meta"):
        hf = hf_config(config)
        try:
            return getattr(transformers, _CLASSES[config.task]).from_config(hf)
        except Exception as error:
            raise UserError(
                f"transformers cannot build {config.name_or_path} for {config.task}: {type(error).__name__}: {error}",
                where="model.task, model.config",
                fix="a task that this kind of model supports",
            ) from error


def weights_folder(config: HFModelConfig) -> Path:
    """Returns the directory with the weights, which are downloaded if they are on the hub."""
    folder = Path(config.name_or_path).expanduser()
    if folder.is_dir():
        return folder
    return _downloaded(config.name_or_path, config.revision)


@cache
def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise UserError(
            f"{name} is not a directory, and it cannot be downloaded: {type(error).__name__}: {error}",
            where="model.name_or_path",
            fix=f"on a machine with internet and the same HF_HOME: hf download {name}",
        ) from error


_WHERE = "model.name_or_path"


@dataclass(frozen=True)
class _Source:
    """Describes the stored tensors from which a tensor of the model is made.

    Attributes:
        grid: stored names. The tensors of a row are concatenated along ``dim``; rows are stacked along a new first dim.
        dim: the number of the dim, without the new dim.
        stacked: whether there is a new first dim; otherwise ``grid`` has one row.
        part, parts: if a stored tensor contains several tensors of the model along dim 0, the number of this tensor and
            how many there are.
    """

    grid: tuple[tuple[str, ...], ...]
    dim: int = 0
    stacked: bool = False
    part: int = 0
    parts: int = 1


class WeightFiles:
    """Reads the tensors of the directory ``folder`` under the names of ``module``, a model on ``meta``.

    The directory has one safetensors file, or several and an index. ``unused`` holds the names of stored tensors that
    the model lacks. Raises UserError if files are missing or damaged, or their tensors need a conversion that is not
    implemented.
    """

    def __init__(self, folder: Path, module: Any) -> None:
        self._folder = folder
        self._file_of = _located(folder)
        self._opened: dict[str, Any] = {}
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
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
        for stored in sorted(self._file_of, key=dot_natural_key):
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
        self._stored = sources
        used = {stored for source in self._stored.values() for row in source.grid for stored in row}
        self.unused = [stored for stored in self._file_of if stored not in used]

    @property
    def by_file(self) -> dict[str, list[str]]:
        """Returns file -> the names of its stored tensors."""
        files: dict[str, list[str]] = {}
        for stored, file in self._file_of.items():
            files.setdefault(file, []).append(stored)
        return files

    def stored_whole(self, name: str) -> Tensor:
        """Returns the stored tensor ``name`` as it is in its file."""
        whole: Tensor = self._open(name).get_tensor(name)
        return whole

    def stored_name(self, name: str) -> str | None:
        """Returns the name of the stored tensor that is the tensor ``name`` of the model; None if there is none.

        Raises:
            UserError: the files contain it as a part of another tensor, or in several tensors.
        """
        source = self._stored.get(name)
        if source is None:
            return None
        if source.stacked or source.parts > 1 or len(source.grid[0]) > 1:
            raise UserError(
                f"the files of the model do not contain {name} as one tensor",
                where="--format merged",
                fix="--format hf, which exports the adapters, and merge_and_unload of peft",
            )
        return source.grid[0][0]

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __deepcopy__(self, memo: Any) -> WeightFiles:
        return self  # it does not change, and open files cannot be copied

    def shape(self, name: str) -> tuple[int, ...]:
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
        """Returns a box of the tensor in its stored dtype. If the box is a range of rows, only these bytes are read."""
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


def _converted(
    name: str, by_pattern: Mapping[str, list[str]], converter: Any, module: Any
) -> Iterator[tuple[str, _Source]]:
    """Yields the tensors of the model, beginning with ``name``, that ``converter`` creates from stored tensors."""
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


class FirstValues:
    """Provides the initial values of a model.

    Args:
        module: the full model on ``meta`` with tied weights; it is copied.
        files: the weights to read; None draws all values.

    Attributes:
        tied: alias -> canonical name of tied parameters, in the names of transformers.

    Raises:
        UserError: a stored tensor does not have the shape of the parameter.
    """

    def __init__(self, module: nn.Module, files: WeightFiles | None) -> None:
        self._skeleton: Any = copy.deepcopy(module)
        self._files = files
        self.tied = aliases(module.named_parameters(remove_duplicate=False))
        others: dict[str, list[str]] = {}
        for alias, name in self.tied.items():
            others.setdefault(name, []).append(alias)
        self._stored: dict[str, str] = {}  # parameter -> the name under which the files have it
        names = [name for name, _ in module.named_parameters()]
        for name in [*names, *(name for name, _ in module.named_buffers())] if files is not None else ():
            stored_name = next((candidate for candidate in (name, *others.get(name, ())) if candidate in files), None)  # type: ignore[operator]
            if stored_name is not None:
                self._stored[name] = stored_name
        if files is not None:
            assert self._files is not None
            body = f"{self._skeleton.base_model_prefix}."
            for name in names:
                expected = tuple(self._skeleton.get_parameter(name).shape)
                stored_shape = self._files.shape(self._stored[name]) if name in self._stored else expected
                if stored_shape != expected and name.startswith(body):
                    raise UserError(
                        f"{name} has the shape {list(stored_shape)} in the files, but {list(expected)} in the model",
                        where="model.name_or_path, model.config",
                        fix="remove the values of model.config that change sizes, or set model.pretrained=false",
                    )
                if stored_shape != expected:
                    del self._stored[name]
            if not any(name in self._stored for name in names):
                raise UserError(
                    f"the files have no parameter of {type(self._skeleton).__name__}",
                    where="model.name_or_path, model.task",
                    fix="the directory of such a model, or model.pretrained=false",
                )
            new = [name for name in names if name not in self._stored]
            if new and (not dist.is_initialized() or dist.get_rank() == 0):
                warnings.warn(
                    f"the files have no values for {', '.join(new[:4])}{' and others' if len(new) > 4 else ''}; they "
                    "are drawn at random",
                    stacklevel=2,
                )

    def __deepcopy__(self, memo: Any) -> FirstValues:
        return self  # it does not change, and pipeline stages share it

    def read(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        """Returns a box of a parameter in its stored dtype; None if the files do not have the parameter."""
        if self._files is None or name not in self._stored:
            return None
        return self._files.read(self._stored[name], begin, size)

    def fill(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills the full parameter ``name`` in place."""
        stored = self.read(name, (0,) * value.ndim, tuple(value.shape))
        value.copy_(self._drawn(name, generator.initial_seed()) if stored is None else stored)

    def _drawn(self, name: str, seed: int) -> Tensor:
        path, _, attribute = name.rpartition(".")
        shell = _shell(self._skeleton.get_submodule(path), parameters=True)
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(seed)
            self._initialize(path, shell)
            drawn = shell._parameters[attribute]
            assert drawn is not None
            is_drawn = not drawn.isnan().any()
            if not is_drawn and hasattr(shell, "reset_parameters"):
                torch.manual_seed(seed)
                shell.reset_parameters()  # type: ignore[operator]
                is_drawn = not drawn.isnan().any()
        if not is_drawn:
            raise UserError(
                f"{type(self._skeleton).__name__} does not define the initial values of {name}",
                where="model",
                fix="files that contain this parameter, with model.pretrained=true",
            )
        return drawn.detach()

    def _initialize(self, path: str, shell: nn.Module) -> None:
        """Calls the initializer of the innermost model of transformers that contains the module ``path``."""
        owner: Any = self._skeleton
        walk = self._skeleton
        for part in path.split(".") if path else ():
            walk = walk.get_submodule(part)
            owner = walk if hasattr(walk, "_init_weights") else owner
        owner._init_weights(shell)

    def fill_buffers(self, module: nn.Module, path: str, device: torch.device) -> None:
        """Moves the buffers of ``module`` and its submodules to ``device`` and fills them. The full model names the
        module ``path``."""
        for name, part in module.named_modules():
            if not part._buffers:
                continue
            where = canonical_name(".".join(filter(None, (path, name))))
            shell = _shell(self._skeleton.get_submodule(where), parameters=False)
            with torch.random.fork_rng(devices=()), torch.no_grad():
                self._initialize(where, shell)
            for key, buffer in part._buffers.items():
                if buffer is None:
                    continue
                full_name = ".".join(filter(None, (where, key)))
                stored = self.read(full_name, (0,) * buffer.ndim, tuple(buffer.shape))
                computed = shell._buffers[key] if stored is None else stored
                assert computed is not None
                part._buffers[key] = computed.to(device, buffer.dtype if buffer.is_floating_point() else None)


def _shell(module: nn.Module, parameters: bool) -> nn.Module:
    """Returns a copy of ``module`` without memory for submodules, with its direct buffers on the CPU. With
    ``parameters``, its direct parameters also get memory; initializers do not change the others."""
    shell = copy.copy(module)
    device = torch.device("cpu" if parameters else "meta")
    shell._parameters = {
        name: None
        if value is None
        else nn.Parameter(torch.full(value.shape, torch.nan, dtype=torch.float32, device=device))
        for name, value in module._parameters.items()
    }
    shell._buffers = {
        name: None if value is None else torch.zeros(value.shape, dtype=value.dtype)
        for name, value in module._buffers.items()
    }
    return shell
