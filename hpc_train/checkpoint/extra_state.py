"""Saves the entries of a module's state dict beyond parameters and buffers.

A module defines such state with ``get_extra_state`` and ``set_extra_state``, with overrides of
``_save_to_state_dict`` and ``_load_from_state_dict``, or with hooks. In a checkpoint, ``extra.KEY`` is the entry KEY of
the state dict as JSON, and ``extra_tensor.KEY.PATH`` is a tensor in it, so loading runs no code. The size of an entry
may change with each save. Entries may differ between replicas; the first replica saves its own.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint.state import SHOWN, Ranks, TensorShape
from hpc_train.errors import UserError
from hpc_train.models.model import Model, canonical_name


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the dotted path of each tensor in nested dicts, lists and tuples."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        items = ()
    for key, item in items:
        inner = f"{path}.{key}".lstrip(".")
        if isinstance(item, Tensor):
            yield inner, item
        else:
            yield from tensors_in(item, inner)


# JSON supports neither tuples nor dicts whose keys are not strings; they are stored as objects with one of these keys.
_DICT, _TUPLE, _TENSOR = "__dict__", "__tuple__", "__tensor__"


def encoded(value: Any, owner: str, where: str, path: str = "") -> Any:
    """Returns ``value`` as JSON; each tensor is replaced with the path under which the checkpoint stores it.

    Args:
        owner, where: the owner of the value and its source, for messages.

    Raises:
        UserError: a part of the value is not of a plain type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if path:
            return {_TENSOR: path}
    elif isinstance(value, Mapping):
        return {_DICT: [[key, encoded(item, owner, where, f"{path}.{key}".lstrip("."))] for key, item in value.items()]}
    elif isinstance(value, list | tuple):
        items = [encoded(item, owner, where, f"{path}.{number}".lstrip(".")) for number, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {_TUPLE: items}
    raise UserError(
        f"the state of {owner} has a {type(value).__name__}{f' at {path}' if path else ''}, "
        "which checkpoints cannot store",
        where=where,
        fix="numbers, text, tensors, and lists, tuples and dicts of them",
    )


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value of the JSON that ``encoded`` returned, with ``tensors`` by their paths."""
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decoded(item, tensors) for item in value[_TUPLE])
    return {key: decoded(item, tensors) for key, item in value[_DICT]}


ENTRY, TENSOR = "extra.", "extra_tensor."
_WHERE = "the state dict of the model"
_BLOCK = 256  # bytes; JSON is padded to a multiple of this, so that the plan of a save rarely changes
_SPLIT = ("stem", "layers", "head")  # parts of a ``Model`` that only one pipeline stage has


@dataclass(frozen=True)
class _Entries:
    """Holds the state of one module, except for its parameters and buffers.

    Attributes:
        values: canonical key -> value.
        keys: canonical key -> key in the module's state dict.
        renamed: names of parameters and buffers -> the keys under which the state dict has them instead.
        metadata: the metadata of the state dict.
        error: why there is no state dict; empty if there is one.
    """

    root: nn.Module
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    renamed: Mapping[str, str]
    metadata: Any = None
    error: str = ""


def _entries(part: nn.Module) -> _Entries:
    root: nn.Module = getattr(part, "bare", part)  # a wrapper shares parameters with the module that has the state
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    name_of = {id(tensor): canonical_name(name) for name, tensor in tensors}
    names = {canonical_name(name) for name, _ in tensors}
    try:
        state = root.state_dict(keep_vars=True)
    except Exception as error:
        return _Entries(root, {}, {}, {}, error=f"{type(error).__name__}: {error}")
    others = {key: value for key, value in state.items() if canonical_name(key) not in names}
    extra = {key: value for key, value in others.items() if id(value) not in name_of}
    return _Entries(
        root,
        {canonical_name(key): value for key, value in extra.items()},
        {canonical_name(key): key for key in extra},
        {name_of[id(value)]: key for key, value in others.items() if id(value) in name_of},
        getattr(state, "_metadata", None),
    )


def check_extra_state(parts: Sequence[nn.Module]) -> list[str]:
    """Checks that checkpoints can hold the state dicts of ``parts``.

    Returns:
        Warnings about state that checkpoints cannot restore.

    Raises:
        UserError: an entry has a type that a checkpoint cannot store.
    """
    warnings = []
    for entries in map(_entries, parts):
        for key, value in entries.values.items():
            _encoded(key, value)
        if entries.error:
            warnings.append(
                f"state_dict of {type(entries.root).__name__} fails ({entries.error}); checkpoints store only its "
                "parameters and buffers"
            )
        if entries.renamed:
            shown = ", ".join(f"{name} as {key}" for name, key in [*entries.renamed.items()][:SHOWN])
            warnings.append(
                f"{type(entries.root).__name__} renames tensors in its state dict ({shown}); checkpoints and exports "
                "store them under the names of the parameters and buffers"
            )
    return warnings


def extra_state(parts: Sequence[nn.Module], mesh: Ranks) -> dict[str, Tensor]:
    """Returns the entries that this rank saves, by their names in a checkpoint.

    Parts that all pipeline stages have are saved by the first one.
    """
    entries: dict[str, Tensor] = {}
    for part in parts:
        for key, value in _entries(part).values.items():
            if mesh.pp_rank > 0 and isinstance(part, Model) and key.partition(".")[0] not in _SPLIT:
                continue
            text, tensors = _encoded(key, value)
            entries[f"{ENTRY}{key}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            entries |= {f"{TENSOR}{key}.{path}": tensor.detach() for path, tensor in tensors.items()}
    return entries


def digests(parts: Sequence[nn.Module]) -> dict[str, str]:
    """Returns canonical key -> a hash of the entry, to compare ranks. Waits for the device."""
    hashes = {}
    for entries in map(_entries, parts):
        for key, value in entries.values.items():
            text, tensors = _encoded(key, value)
            hashes[key] = digest(text, tensors.values())
    return hashes


def digest(text: bytes, tensors: Iterable[Tensor]) -> str:
    """Returns a hash of encoded values and of the elements of ``tensors``. Waits for the device."""
    value = hashlib.blake2b(text, digest_size=16)
    for tensor in tensors:
        value.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return value.hexdigest()


def _encoded(key: str, value: Any) -> tuple[bytes, dict[str, Tensor]]:
    """Returns the JSON of an entry, and its tensors by their paths."""
    wrapped = {"state": value}
    tensors = dict(tensors_in(wrapped))
    if any(tensor.is_meta for tensor in tensors.values()):
        raise UserError(
            f"the entry {key} of the state dict of the model has a tensor without values, since a model with parts is "
            "built on the meta device",
            where=_WHERE,
            fix="create the tensor with device='cpu', or as a buffer that init_buffers fills",
        )
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise UserError(
            f"the entry {key} of the state dict of the model is computed from sharded parameters",
            where=_WHERE,
            fix="a buffer or get_extra_state that holds the value, or a strategy without ZeRO",
        )
    text = json.dumps(encoded(wrapped, f"the model, {key},", _WHERE)).encode()
    return text + b" " * (-len(text) % _BLOCK), tensors


class ExtraLoad:
    """Loads the entries of ``parts`` from a checkpoint.

    Attributes:
        targets: name -> tensor to load into. Call ``finish`` after the load.
        missing: the keys of the entries that the checkpoint lacks.
    """

    def __init__(self, parts: Sequence[nn.Module], stored: Mapping[str, TensorShape]) -> None:
        self.targets: dict[str, Tensor] = {}
        self.missing: list[str] = []
        self._entries = [entries for part in parts if (entries := _entries(part)).values]
        for entries in self._entries:
            for key, value in entries.values.items():
                if f"{ENTRY}{key}" not in stored:
                    self.missing.append(key)
                    continue
                device = next((tensor.device for _, tensor in tensors_in({"state": value})), torch.device("cpu"))
                for name in names_of(key, stored):
                    place = torch.device("cpu") if name.startswith(ENTRY) else device
                    self.targets[name] = torch.empty(stored[name].shape, dtype=stored[name].dtype, device=place)

    def finish(self) -> None:
        """Loads the entries into the modules.

        Raises:
            UserError: an entry is not what ``extra_state`` writes.
        """
        for entries in self._entries:
            present = [key for key in entries.keys if key not in self.missing]
            tensors = {key: {name: self.targets[name] for name in names_of(key, self.targets)} for key in present}
            _give(entries, {key: read_entry(key, tensors[key]) for key in present})


def _give(entries: _Entries, values: Mapping[str, Any]) -> None:
    """Loads ``values`` into the module, by the keys of its state dict."""
    state: OrderedDict[str, Any] = OrderedDict((entries.keys[key], value) for key, value in values.items())
    state._metadata = entries.metadata  # type: ignore[attr-defined]
    entries.root.load_state_dict(state, strict=False)


@contextmanager
def kept_extra_state(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restores the entries of ``parts`` at the end of the ``with`` block.

    Raises:
        UserError: an entry has a type that a checkpoint cannot store.
    """
    saved = [(entries, _copies(entries)) for part in parts if (entries := _entries(part)).values]
    try:
        yield
    finally:
        for entries, copies in saved:
            _give(entries, copies)


def copy_extra_state(part: nn.Module, other: nn.Module) -> None:
    """Copies the entries of ``part`` to ``other``, a model of the same class."""
    source, target = _entries(part), _entries(other)
    if source.values:
        _give(target, {key: value for key, value in _copies(source).items() if key in target.keys})


def _copies(entries: _Entries) -> dict[str, Any]:
    states = {}
    for key, value in entries.values.items():
        text, tensors = _encoded(key, value)
        copies = {path: tensor.detach().clone() for path, tensor in tensors.items()}
        states[key] = decoded(json.loads(text), copies)["state"]
    return states


def keys(stored: Mapping[str, object]) -> list[str]:
    """Returns the keys of the entries in a checkpoint."""
    return [name.removeprefix(ENTRY) for name in stored if name.startswith(ENTRY)]


def read_entry(key: str, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value of an entry from its tensors in a checkpoint.

    Raises:
        UserError: they are not what ``extra_state`` writes.
    """
    prefix = f"{TENSOR}{key}."
    inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    try:
        return decoded(json.loads(tensors[f"{ENTRY}{key}"].numpy().tobytes()), inner)["state"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"refusing to load the checkpoint: {ENTRY}{key} is not readable ({type(error).__name__}: {error})",
            where=_WHERE,
            fix="load one that hpc_train saved",
        ) from None


def names_of(key: str, stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the tensors of an entry among ``stored``."""
    yield f"{ENTRY}{key}"
    yield from (name for name in stored if name.startswith(f"{TENSOR}{key}."))
