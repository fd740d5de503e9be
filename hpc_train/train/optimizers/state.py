"""Names the state that an optimizer of the user keeps for a parameter, so that a checkpoint can hold it.

A checkpoint holds tensors. A tensor of the state ``square_avg`` keeps its name, an element of a list gets the name
``Q[0]``, and a Python value becomes a scalar tensor whose name ends with its kind, such as ``step:int``. A tensor of
torchao in 8 bits becomes its codes, scales and code book: ``exp_avg@codes``, ``exp_avg@scale`` and ``exp_avg@qmap``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError

_KINDS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
_QUANTIZED = ("codes", "scale", "qmap")  # the parts of torchao's OptimState8bit
_ITEM = re.compile(r"(.+)\[(\d+)\]")


def flattened(state: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Returns the tensors of the state of one parameter by their names in a checkpoint.

    Raises:
        UserError: a value is neither a tensor, a number, None nor a list of these.
    """
    return {name: tensor for key, value in state.items() for name, tensor in _flat(str(key), value, where)}


def _flat(key: str, value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
        yield key, value.detach()
        return
    if isinstance(value, Tensor) and type(value).__name__ == "OptimState8bit":
        for part in _QUANTIZED:
            yield f"{key}@{part}", getattr(value, part)
        return
    if value is None or (isinstance(value, list) and not value):
        yield f"{key}:{'none' if value is None else 'list'}", torch.zeros((), dtype=torch.bool)
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _flat(f"{key}[{number}]", item, where)
        return
    for name, (kind, dtype) in _KINDS.items():
        if type(value) is kind:
            yield f"{key}:{name}", torch.tensor(value, dtype=dtype)
            return
    raise UserError(
        f"the optimizer keeps {key!r} for a parameter, which is a {type(value).__name__} and cannot be saved in a "
        "checkpoint",
        where=where,
        fix="keep tensors, numbers, None, and lists of these in the state",
    )


def restored(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns the state whose ``flattened`` form is ``tensors``.

    Args:
        dtype: of the parameter, which a tensor in 8 bits has outwardly.
    """
    state: dict[str, Any] = {}
    lists: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        key, _, part = name.partition("@")
        if part:
            if key not in state:
                state[key] = _quantized({each: tensors[f"{key}@{each}"] for each in _QUANTIZED}, dtype)
            continue
        key, _, kind = name.partition(":")
        item = _ITEM.fullmatch(key)
        if item:
            lists.setdefault(item[1], {})[int(item[2])] = (f"0:{kind}" if kind else "0", tensor)
        else:
            state[key] = _value(tensor, kind)
    for key, items in lists.items():
        state[key] = [restored(dict([items[number]]))["0"] for number in sorted(items)]
    return state


def _quantized(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    from torchao.optim.subclass_8bit import OptimState8bit

    is_signed = bool(parts["qmap"][0] < 0)
    return OptimState8bit(parts["codes"], parts["scale"], parts["qmap"], is_signed, dtype)


def _value(tensor: Tensor, kind: str) -> Any:
    if not kind:
        return tensor
    if kind in _KINDS:
        return _KINDS[kind][0](tensor.item())
    return [] if kind == "list" else None
