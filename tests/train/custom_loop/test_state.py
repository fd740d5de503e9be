"""The state of registered objects: names, values that are no tensors, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.checkpoint.objects import ObjectState
from hpc_train.checkpoint.state import shapes
from hpc_train.errors import UserError


def registered(**objects: Any) -> ObjectState:
    state = ObjectState("context.resume", "run.fork=NEW")
    state.register(objects)
    return state


class Counter:
    """Has a state of all plain types."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mean": torch.ones(2), "by_step": {3: (1, [None, True, 0.5])}, "name": "x"}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_names_are_those_of_the_bare_module() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net.register_buffer("temporary", torch.ones(1), persistent=False)
    compiled = nn.Module()  # as torch.compile wraps it
    compiled.add_module("_orig_mod", net)
    state = registered(net=compiled, scale=torch.ones(3))
    assert sorted(state.named_parameters()) == ["net.0.bias", "net.0.weight", "net.1.bias", "net.1.weight", "scale"]
    assert sorted(state.named_buffers()) == ["net.1.num_batches_tracked", "net.1.running_mean", "net.1.running_var"]


def test_a_parameter_of_two_objects_has_a_name_in_each() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    state = registered(model=net, head=net[1])
    assert [*state.named_parameters()] == ["model.0.weight", "model.1.weight", "head.weight"]


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer of which only the bias has a state."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, betas=(0.5, 0.75))
    net.bias.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_an_optimizer_and_plain_values_are_restored() -> None:
    net, counter = nn.Linear(2, 2), Counter()
    optimizer = stepped(net)
    optimizer.param_groups[0]["lr"] = 0.25
    saved = registered(net=net, optimizer=optimizer, counter=counter)
    assert list(saved.named_state()) == ["optimizer.net.bias"]
    tensors = {f"model.{name}": value.detach().clone() for name, value in saved.named_parameters().items()}
    for name, values in saved.named_state().items():
        tensors |= {f"optim.{name}.{key}": value.clone() for key, value in values.items()}
    values = json.loads(json.dumps(saved.values()))

    other = nn.Linear(2, 2)
    fresh, empty = torch.optim.AdamW(other.parameters()), Counter()
    empty.state = {"mean": torch.zeros(2), "by_step": {}, "name": ""}
    weights = other.weight.detach().clone()
    loaded = registered(net=other, optimizer=fresh, counter=empty)
    loaded.expect(shapes(tensors))
    for name, value in loaded.named_parameters().items():
        value.data.copy_(tensors[f"model.{name}"])
    for name, keys in loaded.named_state().items():
        for key, value in keys.items():
            value.copy_(tensors[f"optim.{name}.{key}"])
    assert loaded.load_values(values, with_optimizers=True, forked=False) == []
    assert not torch.equal(other.weight, weights)
    assert list(fresh.state) == [other.bias], "the others have no state before their first step"
    for key, value in optimizer.state[net.bias].items():
        assert torch.equal(fresh.state[other.bias][key], value), key
    assert {key: fresh.param_groups[0][key] for key in ("lr", "betas")} == {"lr": 0.25, "betas": (0.5, 0.75)}
    assert torch.equal(empty.state.pop("mean"), torch.ones(2))
    assert empty.state == {"by_step": {3: (1, [None, True, 0.5])}, "name": "x"}


def test_what_has_no_state_is_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(UserError, match="steps is a int, which has no state"):
        registered(steps=3)
    with pytest.raises(UserError, match="optimizer has a parameter that is in no registered module"):
        registered(optimizer=torch.optim.SGD(net.parameters(), lr=1))
    counter = Counter()
    counter.state["made"] = {"by": object()}
    with pytest.raises(UserError, match=r"the state of counter has a object at made\.by"):
        registered(counter=counter).values()


def with_others(optimizers: int = 1, schedules: int = 0, groups: int = 1) -> ObjectState:
    """Returns a state with optimizers ``o0``, ... of ``groups`` parameter groups and schedules ``s0``, ..."""
    net = nn.Linear(2, 2)
    parameters = [{"params": [value]} for value in net.parameters()] if groups == 2 else net.parameters()
    made = [torch.optim.SGD(parameters, lr=1)] + [torch.optim.SGD(net.parameters(), lr=1)] * (optimizers - 1)
    others = {f"s{number}": torch.optim.lr_scheduler.StepLR(made[0], 2) for number in range(schedules)}
    return registered(net=net, **{f"o{number}": each for number, each in enumerate(made)}, **others)


@pytest.mark.parametrize(
    ("saved", "now", "change"),
    [
        ({}, {"schedules": 1}, "the checkpoint has no object s0"),
        ({"schedules": 2}, {}, "the checkpoint has an object s0, which is not passed"),
        ({}, {"optimizers": 2}, "the checkpoint has no optimizer o1"),
        ({"optimizers": 2}, {}, "the checkpoint has an optimizer o1, which is not passed"),
        ({}, {"groups": 2}, "the optimizer o0 has 1 parameter groups in the checkpoint and 2 now"),
    ],
)
def test_other_objects_than_those_of_the_checkpoint_need_a_fork(
    saved: dict[str, int], now: dict[str, int], change: str
) -> None:
    values = json.loads(json.dumps(with_others(**saved).values()))
    with pytest.raises(UserError, match=change) as refused:
        with_others(**now).load_values(values, with_optimizers=True, forked=False)
    assert refused.value.where == "context.resume" and "run.fork=NEW" in refused.value.fix
    assert with_others(**now).load_values(values, with_optimizers=True, forked=True)[0].startswith(change)


def test_a_fork_takes_over_what_both_have() -> None:
    before, after = with_others(schedules=1), with_others(optimizers=2, schedules=1)
    values = json.loads(json.dumps(before.values()))
    values["objects"]["s0"]["__dict__"] = [
        [key, 7 if key == "last_epoch" else value] for key, value in values["objects"]["s0"]["__dict__"]
    ]
    after.load_values(values, with_optimizers=True, forked=True)
    assert after._others["s0"].state_dict()["last_epoch"] == 7
