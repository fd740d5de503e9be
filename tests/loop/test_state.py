"""The state of registered objects: names, values that are no tensors, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.checkpoint.state import shapes
from hpc_train.errors import UserError
from hpc_train.loop.state import LoopState


def registered(**objects: Any) -> LoopState:
    state = LoopState()
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
    loaded.load_values(values, with_optimizers=True)
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
    with pytest.raises(UserError, match="optimizer has a parameter of no registered module"):
        registered(optimizer=torch.optim.SGD(net.parameters(), lr=1))
    counter = Counter()
    counter.state["made"] = {"by": object()}
    with pytest.raises(UserError, match=r"the state of counter has a object at made\.by"):
        registered(counter=counter).values()
