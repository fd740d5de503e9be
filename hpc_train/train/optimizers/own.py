"""Builds custom optimizers by import path, and converts their state to the form of a checkpoint.

An optimizer creates its state in its first update, in any form. A load therefore takes the names and shapes from the
checkpoint and not from the optimizer: before a load, ``OwnState.expect`` allocates the tensors that are in the
checkpoint.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint.state import TensorShape
from hpc_train.config.import_path import locate, refuse_unknown
from hpc_train.errors import UserError
from hpc_train.layout.optimizers import GIVEN, Target
from hpc_train.train.optimizers.held import Held, HostFlag, local_part


def check_signature(target: Target, of_groups: Collection[str] = ()) -> Callable[..., Any]:
    """Imports ``target`` and returns it.

    Args:
        of_groups: the arguments that parameter groups set.

    Raises:
        UserError: it cannot be imported or does not accept an argument.
    """
    assert target.path is not None
    make = locate(target.path, f"{target.where}._target_")
    parameters = inspect.signature(make).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        accepted = [name for name in list(parameters)[1:] if name not in GIVEN]
        refuse_unknown(target.path, [*target.args, *of_groups], accepted, f"{target.where}.args")
    return make


def build(target: Target, groups: list[dict[str, Any]], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Calls the class or function of ``target`` with ``groups``.

    Args:
        groups: torch's parameter groups, each with the key weight_decay.
        lr: passed to ``target`` if its signature has ``lr``. The same holds for ``weight_decay``, also in the groups.

    Raises:
        UserError: the target cannot be imported or called, or its result cannot be used.
    """
    make = check_signature(target, [key for group in groups for key in group if key not in GIVEN])
    parameters = inspect.signature(make).parameters
    defaults = {"lr": lr, "weight_decay": weight_decay}
    arguments = {name: value for name, value in defaults.items() if name in parameters}
    if "weight_decay" not in arguments:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        built = make(groups, **arguments, **target.args)
    except Exception as error:
        raise UserError(
            f"{target.path} could not be built: {type(error).__name__}: {error}",
            where=f"{target.where}._target_, {target.where}.args",
            fix="change the arguments, or assign the parameters that it does not support to another optimizer with "
            "+optim.groups.NAME.match=REGEX +optim.groups.NAME._target_=torch.optim.AdamW",
        ) from error

    where = f"{target.where}._target_"
    if not isinstance(built, torch.optim.Optimizer):
        raise UserError(
            f"{target.path} returned {type(built).__name__}, not a torch.optim.Optimizer",
            where=where,
            fix="a subclass of torch.optim.Optimizer, or a function that returns one",
        )
    closure = inspect.signature(type(built).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{target.path} calls a closure that computes the loss again, which hpc_train does not provide",
            where=where,
            fix="an optimizer whose step() needs only the gradients",
        )
    given = {id(parameter) for group in groups for parameter in group["params"]}
    if given != {id(parameter) for group in built.param_groups for parameter in group["params"]}:
        raise UserError(
            f"the optimizer that {target.path} returned does not have the parameters that were passed to it",
            where=where,
            fix="pass the first argument on to the optimizer",
        )
    return built


ROWS, COLUMNS, UPDATES = 6, 4, 3  # the size of the parameter and the number of updates in ``check_elementwise``


def check_elementwise(target: Target) -> None:
    """Compares the updates of a small matrix with the updates of its halves, if the config states that they are equal.

    Raises:
        UserError: the updates differ.
    """
    if not target.elementwise or target.torch_name is not None:
        return
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    value = torch.randn(ROWS, COLUMNS, **options)
    gradients = [torch.randn(ROWS, COLUMNS, **options) for _ in range(UPDATES)]
    try:
        updated = _updated(target, value, gradients)
        halves = [
            _updated(target, value[rows], [gradient[rows] for gradient in gradients])
            for rows in (slice(None, ROWS // 2), slice(ROWS // 2, None))
        ]
    except (ImportError, NotImplementedError, RuntimeError):
        return  # for example, kernels that exist only on GPUs
    if not torch.allclose(updated, torch.cat(halves), rtol=1e-6, atol=1e-9):
        raise UserError(
            f"{target.where}.elementwise is true, but {target.path} updates a matrix differently from its halves",
            where=f"{target.where}.elementwise",
            fix=f"{target.where}.elementwise=false; a single rank then updates each full parameter",
        )


def _updated(target: Target, value: Tensor, gradients: list[Tensor]) -> Tensor:
    parameter = torch.nn.Parameter(value.clone())
    optimizer = build(target, [{"params": [parameter], "weight_decay": 0.1}], 0.1, 0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@dataclass(frozen=True)
class _Undoable:
    """Restores the state of a parameter before an update that was not finite.

    Attributes:
        finite: whether the update was finite.
        keys: the names of the tensors in ``flattened``, before the update.
        values: those of them that the device has not restored.
    """

    finite: HostFlag
    keys: Sequence[str]
    values: Mapping[str, Tensor]


@dataclass
class OwnState:
    """Names and loads the state of a custom optimizer.

    Args:
        held: name -> parameter of this rank that the optimizer updates; other ranks may own some of them.
    """

    target: Target
    optimizer: torch.optim.Optimizer | None
    held: Mapping[str, Held]
    _expected: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)
    _values: dict[str, Any] | None = field(default=None, init=False)
    _undoable: dict[Tensor, _Undoable] = field(default_factory=dict, init=False)

    def update(self, parameters: Sequence[Tensor], finite: Tensor) -> None:
        """Calls the optimizer, and undoes on the device what it has changed if ``finite`` is false.

        The host does not wait for ``finite``. Before the next update of a parameter the flag is known. The host then
        reads it, to undo what is not on the device: numbers, tensors on the host, and what the update has created.

        Args:
            parameters: those of the optimizer's parameter groups.
            finite: a bool scalar on the device of the parameters.
        """
        assert self.optimizer is not None
        updated = [parameter for parameter in parameters if parameter.grad is not None]
        self.settle(updated)
        gradients = [parameter.grad for parameter in updated]
        values = [parameter.detach().clone() for parameter in updated]
        states = [{key: value.clone() for key, value in self._flat(parameter).items()} for parameter in updated]
        for parameter in updated:  # a decomposition of NaN would raise an exception
            assert parameter.grad is not None
            parameter.grad = torch.where(finite, parameter.grad, 0.0)
        self.optimizer.step()
        flag: HostFlag | None = None
        for parameter, gradient, value, before in zip(updated, gradients, values, states, strict=True):
            parameter.grad = gradient
            parameter.copy_(torch.where(finite, parameter, value))
            after = self._flat(parameter)
            rest: dict[str, Tensor] = {}
            for key, earlier in before.items():
                tensor = after.get(key)
                is_number = ":" in key
                if is_number or tensor is None or tensor.device != finite.device or tensor.shape != earlier.shape:
                    rest[key] = earlier
                else:
                    tensor.copy_(torch.where(finite, tensor, earlier))
            if rest or after.keys() != before.keys():
                flag = flag or HostFlag(finite)
                self._undoable[parameter] = _Undoable(flag, [*before], rest)

    def _flat(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self.optimizer is not None
        return flattened(self.optimizer.state.get(parameter, {}), f"{self.target.where}._target_")

    def settle(self, parameters: Iterable[Tensor]) -> None:
        """Undoes the rest of the last update of each of ``parameters`` if it was not finite."""
        for parameter in parameters:
            last = self._undoable.pop(parameter, None)
            if last is None or last.finite.value:
                continue
            assert self.optimizer is not None
            tensors = {**self._flat(parameter), **last.values}
            self.optimizer.state[parameter] = restored({key: tensors[key] for key in last.keys}, parameter.dtype)

    def named(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields the name of each parameter and key -> tensor of its state, or the tensors into which the next load
        writes."""
        self.settle([*self._undoable])
        for name, held in self.held.items():
            tensors = self._expected.get(name, {})
            if not self._expected:
                if self.optimizer is None or held.local is None:
                    continue
                tensors = self._flat(held.local)
                for key, tensor in tensors.items():
                    if self.target.elementwise and tensor.ndim and tensor.shape != held.local.shape:
                        raise self._not_elementwise(name, key, tuple(tensor.shape), tuple(held.local.shape))
                    tensors[key] = held.as_saved(tensor)
            yield name, {f"{class_name(self.target)}.{key}": tensor for key, tensor in tensors.items()}

    def _not_elementwise(self, name: str, key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> UserError:
        return UserError(
            f"{self.target.path} keeps {key} of shape {list(shape)} for {name} of shape {list(expected)}, so it does "
            "not compute each element of a parameter alone",
            where=f"{self.target.where}.elementwise",
            fix=f"{self.target.where}.elementwise=false; a single rank then updates each full parameter",
        )

    def expect(self, stored: Mapping[str, TensorShape]) -> None:
        """Discards the state, and allocates tensors for the part of a stored state that belongs to this rank.

        Args:
            stored: name -> tensor of this optimizer in a checkpoint.
        """
        self._expected = {}
        self._undoable = {}
        if self.optimizer is not None:
            self.optimizer.state.clear()
        for full, entry in stored.items():
            name = parameter_name(full, self.target)
            key = full.rpartition(".")[2]
            if name is not None and name in self.held and self.held[name].local is not None:
                self._expected.setdefault(name, {})[key] = self._allocated(name, key, entry, self.held[name])

    def _allocated(self, name: str, key: str, entry: TensorShape, held: Held) -> Tensor:
        assert held.local is not None and self.optimizer is not None
        if not entry.shape:  # as in torch, the step of an optimizer is on the CPU unless a kernel reads it
            read_by_kernel = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
            on_device = ":" not in key and (key != "step" or read_by_kernel)
            return torch.zeros((), dtype=entry.dtype, device=held.local.device if on_device else "cpu")
        shape = entry.shape
        if self.target.elementwise:
            if shape != tuple(held.parameter.shape):
                raise self._not_elementwise(name, key, shape, tuple(held.parameter.shape))
            shape = tuple(held.local.shape)
        if shape == tuple(held.local.shape):  # fused optimizers expect the memory format of the parameter
            return held.as_saved(torch.zeros_like(held.local, dtype=entry.dtype, requires_grad=False))
        return held.as_saved(torch.zeros(shape, dtype=entry.dtype, device=held.local.device))

    def loaded(self) -> None:
        """Builds the state from the values that a load has written."""
        for name, tensors in self._expected.items():
            local = self.held[name].local
            assert self.optimizer is not None and local is not None
            parts = {key: local_part(tensor) for key, tensor in tensors.items()}
            self.optimizer.state[local] = restored(parts, local.dtype)
        self._expected = {}

    def before_update(self) -> None:
        """Records the values that ``check_update`` compares."""
        self._values = self._own_values()

    def check_update(self) -> None:
        """Checks that a checkpoint can contain the values that the update after ``before_update`` has changed.

        Raises:
            UserError: a value cannot be saved.
        """
        assert self._values is not None
        changed = [name for name, value in self._own_values().items() if self._values.get(name, value) != value]
        if changed:
            raise UserError(
                f"{self.target.path} stores {', '.join(changed)} in its parameter groups or attributes, which are not "
                "saved in a checkpoint and may differ between ranks",
                where=f"{self.target.where}._target_",
                fix="store such values in self.state[parameter]",
            )
        for _ in self.named():  # raises for a state that cannot be saved
            pass

    def _own_values(self) -> dict[str, Any]:
        """Returns the numbers and tensors of the optimizer that are not in its state, in a form for comparisons."""
        assert self.optimizer is not None
        values = {key: value for key, value in vars(self.optimizer).items() if key not in _of_every_optimizer()}
        for number, group in enumerate(self.optimizer.param_groups):
            values |= {f"{key} of group {number}": group[key] for key in group if key not in ("lr", "params")}
        comparable = {name: _comparable(value) for name, value in values.items()}
        return {name: value for name, value in comparable.items() if value is not None}


@cache
def _of_every_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.Optimizer([torch.nn.Parameter(torch.zeros(1, device="cpu"))], {})))


_SMALL = 1024  # elements; only the version counter of larger tensors is compared


def _comparable(value: Any) -> Any:
    """Returns a value that changes whenever a number, a tensor, or a container of them changes; None for any other
    value.

    Flags do not count: torch's fused optimizers clear one in their first update.
    """
    match value:
        case bool() | torch.nn.Parameter() | DTensor():
            return None
        case int() | float():
            return value
        case Tensor():
            return str(value.tolist()) if value.numel() <= _SMALL else value._version
        case list() | tuple() | deque():
            return [_comparable(item) for item in value]
        case dict():
            return {key: _comparable(item) for key, item in value.items()}
        case _:
            return None


def parameter_name(full: str, target: Target) -> str | None:
    """Returns NAME if ``full`` is ``optim.NAME.KIND.KEY``, the name of a tensor of the state of ``target`` in a
    checkpoint."""
    match = re.fullmatch(rf"optim\.(.+)\.{re.escape(class_name(target))}\.[^.]+", full)
    return None if match is None else match[1]


def class_name(target: Target) -> str:
    """Returns the last part of the import path, which names the state in a checkpoint."""
    assert target.path is not None
    return target.path.replace(":", ".").rpartition(".")[2]


_KINDS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
_QUANTIZED = ("codes", "scale", "qmap")  # the parts of torchao's OptimState8bit
_ITEM = re.compile(r"(.+)\[(\d+)\]")


def flattened(state: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Returns the state of one parameter as tensors by their names in a checkpoint, which contains only tensors.

    A tensor such as ``square_avg`` keeps its name, an element of a list gets a name such as ``Q[0]``, and a Python
    value becomes a scalar tensor whose name ends with its type, such as ``step:int``. An 8-bit tensor of torchao
    becomes its codes, scales and code book: ``exp_avg@codes``, ``exp_avg@scale`` and ``exp_avg@qmap``.

    Raises:
        UserError: a value is neither a tensor, a number, None nor a list of these.
    """
    return {name: tensor for key, value in state.items() for name, tensor in _flat(str(key), value, where)}


def _flat(key: str, value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
        yield key, value.detach()
    elif isinstance(value, Tensor) and type(value).__name__ == "OptimState8bit":
        for part in _QUANTIZED:
            yield f"{key}@{part}", getattr(value, part)
    elif value is None:
        yield f"{key}:none", torch.zeros((), dtype=torch.bool)
    elif isinstance(value, list) and not value:
        yield f"{key}:list", torch.zeros((), dtype=torch.bool)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _flat(f"{key}[{number}]", item, where)
    elif type(value).__name__ in _KINDS and type(value) is _KINDS[type(value).__name__][0]:
        kind, dtype = _KINDS[type(value).__name__]
        yield f"{key}:{kind.__name__}", torch.tensor(value, dtype=dtype)
    else:
        raise UserError(
            f"the optimizer stores {key!r} for a parameter, which is a {type(value).__name__} and cannot be saved in a "
            "checkpoint",
            where=where,
            fix="store only tensors, numbers, None, and lists of these in the state",
        )


def restored(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns the state whose ``flattened`` form is ``tensors``.

    Args:
        dtype: the dtype of the parameter, which an 8-bit tensor reports as its dtype.
    """
    state: dict[str, Any] = {}
    lists: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        key, _, part = name.partition("@")
        if part:
            if key not in state:
                from torchao.optim.subclass_8bit import OptimState8bit

                codes, scale, qmap = (tensors[f"{key}@{each}"] for each in _QUANTIZED)
                state[key] = OptimState8bit(codes, scale, qmap, bool(qmap[0] < 0), dtype)  # signed if it begins below 0
            continue
        key, _, kind = name.partition(":")
        item = _ITEM.fullmatch(key)
        if item:
            lists.setdefault(item[1], {})[int(item[2])] = (f"0:{kind}" if kind else "0", tensor)
        elif not kind:
            state[key] = tensor
        elif kind in _KINDS:
            state[key] = _KINDS[kind][0](tensor.item())
        else:
            state[key] = [] if kind == "list" else None
    for key, items in lists.items():
        state[key] = [restored(dict([items[number]]))["0"] for number in sorted(items)]
    return state
