"""Reads the optimizers, parameter groups and learning rate schedules of a config, without torch.

The import path of a class selects a custom optimizer. For the optimizers of ``torch.optim``, tables in this module
determine how a sharded parameter is updated and how much memory the state takes; for all others, the config states it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.config.import_path import check_call
from hpc_train.config.schema import Config, OptimConfig
from hpc_train.errors import UserError, nearest

SCHEDULES = ("constant", "linear", "cosine", "wsd")
GIVEN = ("params", "lr", "weight_decay")  # arguments that hpc_train passes to an optimizer, so ``args`` must not
EMA = "hpc_train.train.hooks.ema.EMA"
ASSUMED = 2.0  # the assumed number of values per parameter in the state of an unknown optimizer
_TORCH: dict[str, float] = {  # elementwise optimizers of torch.optim, and their values per parameter
    "ASGD": 1, "Adadelta": 2, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1,
    "Rprop": 2, "SGD": 1,
}  # fmt: skip
_WHOLE: dict[str, float] = {"Adafactor": 0, "Muon": 1}  # not elementwise; Adafactor keeps a row and a column


@dataclass(frozen=True)
class Target:
    """Names an optimizer.

    Attributes:
        path: the import path; None means the built-in optimizer that ``optim.name`` names.
        elementwise: whether it computes each element of a parameter from that element, its gradient and its state.
        where: the config key, for messages: ``optim`` or ``optim.groups.NAME``.
    """

    path: str | None
    args: Mapping[str, Any]
    elementwise: bool
    where: str

    @property
    def torch_name(self) -> str | None:
        """Returns the name of the class if it is in ``torch.optim``; None otherwise."""
        path = self.path or ""
        name = path.rpartition(".")[2]
        return name if path.startswith("torch.optim.") and name in _TORCH | _WHOLE else None


@dataclass(frozen=True)
class ParameterGroup:
    """Holds the settings of ``optim.groups.NAME``; see the key for their meaning."""

    name: str
    match: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    _target_: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    elementwise: bool | None = None

    @property
    def where(self) -> str:
        return f"optim.groups.{self.name}"

    def holds(self, name: str) -> bool:
        """Returns whether ``match`` is found in the name of a parameter."""
        return re.search(self.match, name) is not None


def target_of(optim: OptimConfig, group: ParameterGroup | None = None) -> Target:
    """Returns the optimizer of the parameters in ``group``; None stands for the parameters that are in no group."""
    settings: OptimConfig | ParameterGroup = optim
    where = "optim"
    if group is not None and group._target_ is not None:
        settings = group
        where = group.where
    elementwise = settings.elementwise
    target = Target(settings._target_, settings.args, elementwise is not False, where)
    if elementwise is None and target.path is not None and target.torch_name not in _TORCH:
        return replace(target, elementwise=False)
    return target


def own_targets(optim: OptimConfig) -> list[Target]:
    """Returns all optimizers of a config that are not built in."""
    targets: list[Target] = []
    for group in (None, *parameter_groups(optim)):
        target = target_of(optim, group)
        if target.path is not None and target not in targets:
            targets.append(target)
    return targets


def own_code(optim: OptimConfig) -> list[str]:
    """Returns the import paths of custom optimizers and a custom schedule in a config."""
    paths = [target.path for target in own_targets(optim) if target.path is not None]
    schedule = parse_schedule(optim.schedule)
    if schedule.is_own:
        paths.append(schedule.name)
    return paths


def parameter_groups(optim: OptimConfig) -> list[ParameterGroup]:
    """Returns the groups of ``optim.groups`` in their order. Raises UserError if a group has no ``match``, an unknown
    key, or a value of the wrong type.
    """
    return [_group(str(name), values) for name, values in optim.groups.items()]


_TYPES: dict[str, tuple[type, ...]] = {
    "match": (str,), "lr_factor": (int, float), "weight_decay": (int, float, type(None)), "_target_": (str, type(None)),
    "args": (dict,), "elementwise": (bool, type(None)),
}  # fmt: skip


def _group(name: str, values: Any) -> ParameterGroup:
    where = f"optim.groups.{name}"
    if not isinstance(values, Mapping) or not values.get("match"):
        fix = f"+{where}.match=REGEX, such as 'embedding|\\.bias$'"
        raise UserError(f"{where} does not say which parameters it has", where=f"{where}.match", fix=fix)
    for key, value in values.items():
        if key not in _TYPES:
            fix = f"{nearest(str(key), list(_TYPES))}; arguments of the optimizer belong in {where}.args"
            raise UserError(f"{where}.{key} is not a config key", where=f"{where}.{key}", fix=fix)
        must = ""
        if not isinstance(value, _TYPES[key]):
            kinds = ("null" if kind is type(None) else kind.__name__ for kind in _TYPES[key])
            must = f"of type {' or '.join(kinds)}"
        elif key in ("lr_factor", "weight_decay") and isinstance(value, int | float) and value < 0:
            must = "at least 0"
        if must:
            raise UserError(f"{where}.{key} is {value!r}, but must be {must}", where=where, fix=f"{where}.{key}=VALUE")
    try:
        re.compile(values["match"])
    except re.error as error:
        what = f"{where}.match is {values['match']!r}, which is not a regular expression: {error}"
        raise UserError(what, where=f"{where}.match", fix="a regular expression of Python's module re") from error
    return ParameterGroup(name, **values)


def check_optimizers(optim: OptimConfig, in_container: bool = False) -> None:
    """Checks the optimizers, groups and schedule of a config where that is possible without torch.

    Args:
        in_container: whether the user's code may be installed only in a container, so that its source cannot be read.

    Raises:
        UserError: a value is wrong, or the source of the user's code shows that it cannot be used.
    """
    groups = parameter_groups(optim)
    schedule = parse_schedule(optim.schedule)
    _refuse_given("optim", optim.args, "optim.lr")
    for group in groups:
        _refuse_given(group.where, group.args, f"{group.where}.lr_factor")
        if group._target_ is None and group.elementwise is not None:
            what = f"{group.where}.elementwise is set without {group.where}._target_"
            raise UserError(what, where=f"{group.where}.elementwise", fix=f"remove {group.where}.elementwise")
    if optim._target_ is None and optim.name == "custom":
        fix = "optim._target_=package.module.Name"
        raise UserError("optim.name is custom, but optim._target_ names no optimizer", where="optim._target_", fix=fix)
    if optim._target_ is None and (optim.args or optim.elementwise is not None):
        key = "args" if optim.args else "elementwise"
        fix = f"optim._target_=package.module.Name, or remove optim.{key}"
        raise UserError(f"optim.{key} is set without optim._target_", where=f"optim.{key}", fix=fix)
    targets = own_targets(optim)
    for target in targets:
        if target.path in ("torch.optim.SparseAdam", "torch.optim.sparse_adam.SparseAdam"):
            what = "SparseAdam needs sparse gradients, but gradients are summed and clipped as dense tensors"
            fix = "optim=adamw and sparse=False in the embedding, which gives the same gradients"
            raise UserError(what, where=f"{target.where}._target_", fix=fix)
    if in_container:
        return
    calls = [(target.path, target.args, f"{target.where}._target_", target.where) for target in targets]
    if schedule.is_own:
        calls.append((schedule.name, schedule.args, "optim.schedule", "optim.schedule"))
    for path, args, where, head in calls:
        assert path is not None
        # lr and weight_decay are passed as well if the signature has them
        check_call(path, where, positional=1, arguments=args, arguments_key=f"{head}.args", complete=False)


def _refuse_given(where: str, args: Mapping[str, Any], key_of_lr: str) -> None:
    """Raises UserError if ``args`` contain an argument that hpc_train passes itself."""
    for name, key in (("lr", key_of_lr), ("weight_decay", f"{where}.weight_decay")):
        if name in args:
            what = f"{where}.args.{name} is set, but hpc_train passes {name} itself"
            raise UserError(what, where=f"{where}.args.{name}", fix=f"{key}=VALUE")


def check_matches(groups: list[ParameterGroup], names: list[str]) -> None:
    """Checks that each group of parameters matches a parameter.

    Args:
        names: the names of all trained parameters of the model.

    Raises:
        UserError: a group matches no parameter.
    """
    left = names
    for group in groups:
        if not any(group.holds(name) for name in left):
            earlier = " that no earlier group has" if any(group.holds(name) for name in names) else ""
            raise UserError(
                f"{group.where}.match is {group.match!r}, which matches no parameter{earlier}",
                where=f"{group.where}.match",
                fix=f"a regular expression that is found in some of the names: {shortened(left)}",
            )
        left = [name for name in left if not group.holds(name)]


SHOWN = 20  # the most names in a message


def shortened(names: list[str]) -> str:
    """Returns the names with ``*`` in place of layer numbers, each once, such as ``layers.*.norm.weight``."""
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    shown = patterns[:SHOWN]
    if len(patterns) > SHOWN:
        shown.append(f"and {len(patterns) - SHOWN} more")
    return ", ".join(shown)


def values_per_parameter(optim: OptimConfig) -> float:
    """Returns the number of values that the optimizer keeps per parameter; ``describe_values`` states the source of the
    number."""
    if optim._target_ is None:
        return 2.0 if optim.name == "adamw" else float(optim.momentum > 0)
    if optim.state_per_parameter is not None:
        return optim.state_per_parameter
    return (_TORCH | _WHOLE).get(target_of(optim).torch_name or "", ASSUMED)


def averages_of_weights(config: Config) -> int:
    """Returns the number of values that the built-in hooks keep for each trained parameter. Custom hooks are
    unknown."""
    return sum(hook._target_ == EMA for hook in config.hooks.values())


def describe_values(optim: OptimConfig) -> str | None:
    """Describes what the memory estimate assumes about a custom optimizer; None for a built-in optimizer."""
    if optim._target_ is None:
        return None
    number = values_per_parameter(optim)
    values = f"{number:g} value{'s' * (number != 1)} of optimizer state per parameter"
    if optim.state_per_parameter is not None:
        return f"{values}, from optim.state_per_parameter"
    if target_of(optim).torch_name is not None:
        return f"{values}, as {optim._target_} keeps in general"
    return f"{values}, since {optim._target_} is unknown (optim.state_per_parameter=N states the number)"


@dataclass(frozen=True)
class Schedule:
    """Holds the value of ``optim.schedule``: the name of a built-in schedule, or an import path and its arguments."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        return self.name not in SCHEDULES


def parse_schedule(value: Any) -> Schedule:
    """Parses the value of ``optim.schedule``. Raises UserError if ``value`` is neither a built-in schedule nor an
    import path, alone or with arguments.
    """
    where = "optim.schedule"
    if isinstance(value, str) and (value in SCHEDULES or "." in value):
        return Schedule(value)
    if isinstance(value, str):
        fix = f"{nearest(value, SCHEDULES)}, or the import path of a custom schedule: package.module.name"
        raise UserError(f"{where} is {value!r}", where=where, fix=fix)
    if isinstance(value, Mapping) and isinstance(value.get("_target_"), str) and "." in value["_target_"]:
        args = value.get("args") or {}
        if isinstance(args, Mapping) and set(value) <= {"_target_", "args"}:
            return Schedule(value["_target_"], args)
    fix = (
        f"{where}=cosine, {where}=package.module.name, or {where}={{_target_: package.module.name, args: {{N: VALUE}}}}"
    )
    raise UserError(f"{where} is {value!r}", where=where, fix=fix)
