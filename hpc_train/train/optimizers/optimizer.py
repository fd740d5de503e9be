"""Updates the parameters of a rank with AdamW, SGD, or custom optimizers.

AdamW and SGD are elementwise, so each rank updates its local shards as plain tensors, with one fused kernel per group
and without DTensor's dispatch. If the gradient norm is not finite, the fused kernels leave parameters and state
unchanged (``found_inf``, the protocol of ``torch.amp.GradScaler``); the host does not read the flag. With a custom
optimizer that does not support this protocol, the host reads the flag in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.checkpoint.agreement import from_rank
from hpc_train.checkpoint.state import TensorShape
from hpc_train.config.import_path import refuse_unknown
from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError
from hpc_train.layout.optimizers import ParameterGroup, Target, check_matches, own_targets, parameter_groups, target_of
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.optimizers import own
from hpc_train.train.optimizers.compact_adamw import CompactAdamW
from hpc_train.train.optimizers.held import Held, MasterShard, hold
from hpc_train.train.optimizers.own import OwnState, check_elementwise, flattened

WIDENED = 2**26  # elements; the gradients of so many masters (256 MiB), or of one larger master, are in fp32 at a time


class Optimizer:
    """Updates ``parameters`` (canonical name -> parameter of this rank).

    Weight decay applies to parameters with two or more dimensions, not to biases and norms, unless a group of
    ``optim.groups`` sets it. The state of AdamW and SGD is allocated in the constructor, so that a checkpoint can be
    loaded into it before the first step. The constructor, ``step`` and ``loaded`` are collective over the ranks that
    share parameters.

    Args:
        offload: whether to keep the state in host memory and take the steps there.
    """

    def __init__(self, config: OptimConfig, parameters: Mapping[str, nn.Parameter], offload: bool = False) -> None:
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._config = config
        self._groups = parameter_groups(config)
        self._held = hold(trained, {name: self._target(name).elementwise for name in trained}, offload)
        self._together = [*_updated_together(self._held.values())]
        members: dict[str, dict[str, ParameterGroup | None]] = {}  # by the config key of the optimizer
        for name in trained:
            members.setdefault(self._target(name).where, {})[name] = self._group(name)
        self._parts = [_part(config, self._target(next(iter(some))), some, self._held) for some in members.values()]
        # (name, key) -> (tensor of the optimizer, its DTensor view); creating a DTensor would take 0.1 ms in each save
        self._named: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._before_update: list[Callable[[], None]] = []

    @torch.no_grad()
    def step(self, learning_rate: float, finite: Tensor) -> None:
        """Updates the parameters from their ``.grad`` unless ``finite`` (a scalar bool on the device) is false."""
        self._prepare()
        waits = any(part.waits for part in self._parts)
        for together in self._together:
            for held in together:
                held.refresh()
            # with offload, this also waits for the copies of the gradients
            if waits and not finite.item():
                return
            for part in self._parts:
                part.update(learning_rate, finite)
            for held in together:
                held.write_back()

    @torch.no_grad()
    def step_some(self, learning_rate: float, parameters: Sequence[nn.Parameter], finite: Tensor) -> None:
        """Updates ``parameters`` like ``step``. This rank holds the full parameters, in the memory that the engine
        uses."""
        self._prepare()
        for part in self._parts:
            with part.only(parameters) as some:
                if some and not (part.waits and not finite.item()):
                    part.update(learning_rate, finite)

    def _prepare(self) -> None:
        while self._before_update:
            self._before_update.pop()()

    def before_next_update(self, action: Callable[[], None]) -> None:
        """Calls ``action`` once, before the next update changes a parameter or the state."""
        self._before_update.append(action)

    def expect(self, stored: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
        """Allocates the state of custom optimizers, into which the following load writes.

        Args:
            stored: all tensors of a checkpoint; an empty mapping discards this state.

        Returns: The tensors that are state of custom optimizers, on any rank.
        """
        states: dict[str, dict[str, TensorShape]] = {}
        for target in own_targets(self._config):
            states[target.where] = {}
            for full, shape in stored.items():
                name = own.parameter_name(full, target)
                if name is not None and self._target(name) == target:
                    states[target.where][full] = shape
        for part in self._parts:
            if part.user is not None:
                part.user.expect(states[part.user.target.where])
        return {full: shape for state in states.values() for full, shape in state.items()}

    def _group(self, name: str) -> ParameterGroup | None:
        return next((group for group in self._groups if group.holds(name)), None)

    def _target(self, name: str) -> Target:
        return target_of(self._config, self._group(name))

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns canonical name -> key -> tensor, sharded like the parameter if the optimizer is elementwise.

        The tensors share memory with the optimizer. ``loaded`` must be called after a load into them.
        """
        states: dict[str, dict[str, Tensor]] = {}
        for part in self._parts:
            if part.user is not None:
                states.update(part.user.named())
                continue
            for name in part.names if part.inner is not None else ():
                local = self._held[name].local
                assert local is not None and part.inner is not None, "the built-in optimizers are elementwise"
                states[name] = {}
                for key, value in part.inner.state[local].items():
                    if (name, key) not in self._named or self._named[name, key][0] is not value:
                        self._named[name, key] = value, self._held[name].as_saved(value)
                    states[name][key] = self._named[name, key][1]
        return states

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors of the state."""
        for part in self._parts:
            if part.inner is not None:
                for state in part.inner.state.values():
                    yield from (state if part.user is None else flattened(state, "optim")).values()

    @torch.no_grad()
    def loaded(self) -> None:
        """Applies values that a checkpoint load has written to the parameters and to ``named_state``."""
        for held in self._held.values():
            held.fetch()
        for part in self._parts:
            if part.user is not None:
                part.user.loaded()


def _updated_together(held: Iterable[Held]) -> Iterator[list[Held]]:
    """Yields groups of parameters that are updated together: all parameters, except masters on the device. Masters need
    gradients in fp32, so a group has only a few of them, to limit the size of the copies. Optimizers skip parameters
    without a gradient.
    """
    together: list[Held] = []
    elements = 0
    for shard in held:
        if isinstance(shard, MasterShard) and not shard.offloaded:
            elements += shard.local.numel()
            if together and elements > WIDENED:
                yield together
                together = []
                elements = shard.local.numel()
        together.append(shard)
    yield together


@dataclass
class _Part:
    """Holds one optimizer and the parameters of this rank that it updates.

    Attributes:
        inner: the torch optimizer; None if other ranks own all these parameters.
        lr_factors: the factor of the learning rate for each of torch's parameter groups.
        user: names the state of a custom optimizer; None for the built-in optimizers.
        waits: whether the host reads whether the gradients are finite. It is the same on all ranks that share them.
        updates: the number of updates so far.
        places: parameter -> number of its torch parameter group; filled by the first call of ``only``.
    """

    names: list[str]
    inner: torch.optim.Optimizer | None
    lr_factors: list[float]
    user: OwnState | None
    waits: bool
    updates: int = 0
    places: dict[Tensor, int] = field(default_factory=dict)

    @contextmanager
    def only(self, parameters: Sequence[nn.Parameter]) -> Iterator[bool]:
        """Restricts the optimizer to those of its parameters that are in ``parameters``. Yields whether there are
        any."""
        groups = self.inner.param_groups if self.inner is not None else []
        members = [group["params"] for group in groups]
        if not self.places:
            self.places |= {parameter: place for place, some in enumerate(members) for parameter in some}
        for group in groups:
            group["params"] = []
        some = [parameter for parameter in parameters if parameter in self.places]
        for parameter in some:
            groups[self.places[parameter]]["params"].append(parameter)
        try:
            yield bool(some)
        finally:
            for group, all_members in zip(groups, members, strict=True):
                group["params"] = all_members

    def update(self, learning_rate: float, finite: Tensor) -> None:
        if self.inner is None:
            return
        for group, factor in zip(self.inner.param_groups, self.lr_factors, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(learning_rate * factor)
            elif "lr" in group:
                group["lr"] = learning_rate * factor
        if not self.waits:
            # with offload this copy waits for the device and thereby for the copies of the gradients
            device = next(group["params"][0].device for group in self.inner.param_groups if group["params"])
            self.inner.found_inf = (~finite).to(device, torch.float32)  # type: ignore[attr-defined]
        self.updates += 1
        if self.user is None or self.updates > 2:  # the first update creates some values
            self.inner.step()
            return
        self.user.before_update()
        self.inner.step()
        self.user.check_update()


def _part(
    config: OptimConfig, target: Target, members: Mapping[str, ParameterGroup | None], held: Mapping[str, Held]
) -> _Part:
    """Builds the optimizer of the parameters that ``target`` updates on this rank.

    Args:
        members: name -> group, for the parameters of ``target`` on this rank.
    """
    groups: dict[tuple[str, bool], dict[str, Any]] = {}  # torch's parameter groups
    factors: dict[int, float] = {}
    for decays in (True, False):
        for name, group in members.items():
            local = held[name].local
            if local is None or (held[name].parameter.ndim >= 2) is not decays:
                continue
            settings: dict[str, Any] = {"params": [], "weight_decay": config.weight_decay if decays else 0.0}
            if group is not None and group.weight_decay is not None:
                settings["weight_decay"] = group.weight_decay
            if group is not None and group._target_ is None:
                settings |= group.args
            key = (group.name if group is not None else "", decays)
            groups.setdefault(key, settings)["params"].append(local)
            factors[id(local)] = group.lr_factor if group is not None else 1.0

    inner: torch.optim.Optimizer | None = None
    lr_factors: list[float] = []
    if groups:
        if target.path is not None:
            inner = own.build(target, [*groups.values()], config.lr, config.weight_decay)
        else:
            inner = _built_in(config, [*groups.values()])
            for group in members.values():
                if group is not None:
                    allowed = [str(key) for key in ("betas", "eps", "momentum") if key in inner.defaults]
                    refuse_unknown(f"the optimizer {config.name}", [*group.args], allowed, f"{group.where}.args")
        lr_factors = [factors[id(group["params"][0])] for group in inner.param_groups]
    if target.path is None:
        return _Part([*members], inner, lr_factors, None, waits=False)
    state = OwnState(target, inner, {name: held[name] for name in members})
    # torch's fused optimizers skip an update by themselves if found_inf is set
    waits = not target.elementwise or not getattr(inner, "_step_supports_amp_scaling", False)
    return _Part([*members], inner, lr_factors, state, waits)


def _built_in(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Builds AdamW or SGD with the initial state of all parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if config.name == "adamw":
        first, second = config.betas
        if config.moments == "bf16":
            compact = CompactAdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps)
            for parameter in parameters:
                compact.state[parameter] = compact.initial_state(parameter)
            return compact
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
        for parameter in parameters:
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return adamw
    if config.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        # the first step from zeros gives the same result: momentum x 0 + gradient
        has_momentum = any(group["momentum"] for group in sgd.param_groups)
        for parameter in parameters:
            sgd.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)} if has_momentum else {}
        return sgd
    raise UserError(f"unknown optimizer {config.name!r}", where="optim.name", fix="use adamw or sgd")


def check_groups(optim: OptimConfig, engine: Engine, mesh: Mesh) -> None:
    """Checks ``optim.groups`` and the elementwise optimizers. Collective over all ranks.

    Raises:
        UserError: a group of ``optim.groups`` matches no trained parameter of any stage, or an optimizer is not
            elementwise as the config states; raised on every rank.
    """
    for target in own_targets(optim):
        check_elementwise(target)
    groups = parameter_groups(optim)
    if not groups:
        return
    trained = [name for name, parameter in engine.named_parameters().items() if parameter.requires_grad]
    first_ranks = range(0, mesh.layout.world_size, mesh.layout.stage_ranks)
    names = [name for rank in first_ranks for name in from_rank(rank, trained, mesh.control)]
    check_matches(groups, list(dict.fromkeys(names)))
