"""Updates the parameters of a rank with AdamW, SGD, or custom optimizers.

AdamW and SGD are elementwise, so each rank updates its local shards as plain tensors, with one fused kernel per group
and without DTensor's dispatch. If the gradient norm is not finite, the fused kernels leave parameters and state
unchanged (``found_inf``, the protocol of ``torch.amp.GradScaler``). A custom optimizer that does not support this
protocol is undone on the device (``OwnState.update``). In both cases the host does not read the flag.

With offload, the update runs on the host, and the next forward needs its result. An update that is one step late would
train with other numbers, so the host must wait for gradients in every step. It waits for one group of parameters at a
time: while the gradients of a group arrive, the host updates the group before, whose new values travel back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hpc_train.parallel.checksums import position_checksum
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.kept_state import kept_random_state
from hpc_train.train.optimizers import own
from hpc_train.train.optimizers.compact_adamw import CompactAdamW
from hpc_train.train.optimizers.held import Held, HostFlag, MasterShard, groups_of, hold
from hpc_train.train.optimizers.own import OwnState, check_elementwise, flattened, restored


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
        self._offload = offload
        self._held = hold(trained, {name: self._target(name).elementwise for name in trained}, offload)
        limited = [
            offload or isinstance(held, MasterShard) or self._target(name).path is not None
            for name, held in self._held.items()
        ]
        self._together = groups_of(self._held.values(), limited)
        for group in self._together:
            group.fetch()
        members: dict[str, dict[str, ParameterGroup | None]] = {}  # by the config key of the optimizer
        for name in trained:
            members.setdefault(self._target(name).where, {})[name] = self._group(name)
        self._parts = [_part(config, self._target(next(iter(some))), some, self._held) for some in members.values()]
        # (name, key) -> (tensor of the optimizer, its DTensor view); creating a DTensor would take 0.1 ms in each save
        self._named: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._before_update: list[Callable[[], None]] = []

    @torch.no_grad()
    def step(self, learning_rate: float, finite: Tensor, turn: int | None = None) -> dict[str, bool]:
        """Updates the parameters from their ``.grad`` unless ``finite`` (a scalar bool on the device) is false.

        Args:
            turn: also repeats updates, those of one parameter after another: of all parameters with optimizers of
                ``torch.optim``, and with each other optimizer of the parameter number ``turn`` modulo their number. The
                host waits for each result.

        Returns:
            The parameters whose results have differed, and whether two of three agree. These two stay.
        """
        repeated = self._repeated(turn) if turn is not None else {}
        differing: dict[str, bool] = {}
        self.prepare()
        flag: HostFlag | None = None
        on_device: Tensor | None = finite
        if self._offload:
            flag = HostFlag(finite)
            on_device = None
        for part in self._parts:
            part.begin(learning_rate)
        groups = self._together
        for previous, group, following in zip([None, *groups], groups, [*groups[1:], None], strict=False):
            if previous is None:
                group.begin()
            if following is not None:
                following.begin()
            group.refresh()
            if flag is None or flag.value:  # the flag precedes the gradients, for which the host has waited
                parameters = [held.local for held in group.members if held.local is not None]
                differing |= self._update(parameters, repeated, on_device)
                group.write_back()
            if previous is not None:
                previous.finish()
        for group in groups[-1:]:
            group.finish()
        if flag is None or flag.value:
            for part in self._parts:
                part.end()
        return differing

    def _update(
        self,
        parameters: Sequence[nn.Parameter],
        repeated: Mapping[nn.Parameter, tuple[str, _Part]],
        finite: Tensor | None,
    ) -> dict[str, bool]:
        """Updates ``parameters``, those of ``repeated`` repeatedly; returns what ``step`` does."""
        differing: dict[str, bool] = {}
        rest = []
        for parameter in parameters:
            if parameter not in repeated or parameter.grad is None:
                rest.append(parameter)
                continue
            name, part = repeated[parameter]
            results = part.update_repeatedly(parameter, parameter.grad, finite)
            if len(results) > 2:
                differing[name] = len({*results}) == 2
        for part in self._parts:
            part.update(rest, finite)
        return differing

    def _repeated(self, turn: int) -> dict[nn.Parameter, tuple[str, _Part]]:
        """Returns the parameters whose updates ``step`` repeats, with their names and optimizers."""
        repeated: dict[nn.Parameter, tuple[str, _Part]] = {}
        for part in self._parts:
            pairs = [(self._held[name].local, name) for name in part.names]
            some = [(local, name) for local, name in pairs if local is not None and local.numel()]
            is_of_torch = part.is_fused or (part.user is not None and part.user.target.torch_name is not None)
            if some and not is_of_torch:
                some = [some[turn % len(some)]]
            repeated |= {local: (name, part) for local, name in some}
        return repeated

    @property
    def is_fused(self) -> bool:
        """Returns whether torch's fused AdamW or SGD updates all parameters. It is deterministic, and the result for a
        parameter does not depend on the others."""
        return all(part.is_fused for part in self._parts)

    @torch.no_grad()
    def step_some(self, learning_rate: float, parameters: Sequence[nn.Parameter], finite: Tensor) -> None:
        """Updates ``parameters`` like ``step``. This rank holds the full parameters, in the memory that the engine
        uses."""
        self.prepare()
        for part in self._parts:
            part.begin(learning_rate)
            part.update(parameters, finite)
            part.end()

    def prepare(self) -> None:
        """Calls the actions of ``before_next_update``, before parameters change."""
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

    @property
    def is_built_in(self) -> bool:
        """Returns whether no custom optimizer updates any parameter."""
        return all(part.user is None for part in self._parts)

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
        for group in self._together:
            group.fetch()
        for part in self._parts:
            if part.user is not None:
                part.user.loaded()


@dataclass
class _Part:
    """Holds one optimizer and the parameters of this rank that it updates.

    Attributes:
        inner: the torch optimizer; None if other ranks own all these parameters.
        lr_factors: the factor of the learning rate for each of torch's parameter groups.
        user: names the state of a custom optimizer; None for the built-in optimizers.
        undoes: whether the optimizer cannot skip an update by itself.
        updates: the number of steps so far.
        places: parameter -> number of its torch parameter group; filled by the first call of ``update``.
    """

    names: list[str]
    inner: torch.optim.Optimizer | None
    lr_factors: list[float]
    user: OwnState | None
    undoes: bool
    updates: int = 0
    places: dict[Tensor, int] = field(default_factory=dict)

    @contextmanager
    def _only(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Restricts the optimizer to those of its parameters that are in ``parameters``, and yields them."""
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
            yield some
        finally:
            for group, all_members in zip(groups, members, strict=True):
                group["params"] = all_members

    @property
    def is_fused(self) -> bool:
        """Returns whether this is a fused optimizer of torch that the config names."""
        return self.user is None and not isinstance(self.inner, CompactAdamW)

    def begin(self, learning_rate: float) -> None:
        """Prepares the updates of a step."""
        if self.inner is None:
            return
        for group, factor in zip(self.inner.param_groups, self.lr_factors, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(learning_rate * factor)
            elif "lr" in group:
                group["lr"] = learning_rate * factor
        if self.user is not None and self.updates < 2:  # the first update creates some values
            self.user.before_update()

    def update(self, parameters: Sequence[nn.Parameter], finite: Tensor | None) -> None:
        """Updates those of ``parameters`` that this part has.

        Args:
            finite: whether to update, a bool scalar on the device of the parameters; None if the host knows that it is
                true.
        """
        if self.inner is None:
            return
        with self._only(parameters) as some:
            if not some:
                return
            if self.undoes and finite is not None:
                assert self.user is not None
                self.user.update(some, finite)
                return
            if not self.undoes:
                skips = torch.zeros((), device=some[0].device)
                if finite is not None:
                    skips = (~finite).to(some[0].device, torch.float32)
                self.inner.found_inf = skips  # type: ignore[attr-defined]
            self.inner.step()

    def update_repeatedly(
        self, parameter: nn.Parameter, gradient: Tensor, finite: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Updates ``parameter`` like ``update``, from the same values until two results agree, at most three times.

        Returns:
            The checksums of each result: of the value and its state. The last result stays.
        """
        assert self.inner is not None
        if self.user is not None:
            self.user.settle([parameter])
        value_before = parameter.detach().clone()
        gradient_before = gradient.clone()
        state_before = {key: value.clone() for key, value in self._flat_state(parameter).items()}
        results: list[tuple[int, ...]] = []
        while len({*results}) == len(results) < 3:
            if results:
                parameter.copy_(value_before)
                gradient.copy_(gradient_before)
                self.inner.state[parameter] = restored(
                    {key: value.clone() for key, value in state_before.items()}, parameter.dtype
                )
            with kept_random_state(parameter.device):
                self.update([parameter], finite)
            sums = [position_checksum(value) for value in (parameter, *self._flat_state(parameter).values())]
            results.append(tuple(torch.stack([value.to(parameter.device) for value in sums]).tolist()))
        return results

    def _flat_state(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self.inner is not None
        return flattened(self.inner.state.get(parameter, {}), "optim")

    def end(self) -> None:
        """Counts the step, and checks the first ones."""
        if self.user is not None and self.inner is not None and self.updates < 2:
            self.user.check_update()
        self.updates += 1


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
        return _Part([*members], inner, lr_factors, None, undoes=False)
    state = OwnState(target, inner, {name: held[name] for name in members})
    # torch's fused optimizers skip an update by themselves if found_inf is set
    undoes = not getattr(inner, "_step_supports_amp_scaling", False)
    return _Part([*members], inner, lr_factors, state, undoes)


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
    names = [name for rank in mesh.layout.first_ranks for name in from_rank(rank, trained, mesh.control)]
    check_matches(groups, list(dict.fromkeys(names)))
