"""The optimizer against torch's own, on the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hpc_train.config.schema import OptimConfig
from hpc_train.train.optimizers.optimizer import Optimizer
from tests.ranks import run_ranks


def reference(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()


CONFIGS = (
    OptimConfig(name="adamw", lr=0.01),
    OptimConfig(name="sgd", lr=0.01, momentum=0.9),
    OptimConfig(name="sgd", lr=0.01, momentum=0.0, weight_decay=0.0),
)


def differences(rank: int, world_size: int) -> list[float]:
    return [difference(config, sharded=world_size > 1) for config in CONFIGS]


def difference(config: OptimConfig, sharded: bool) -> float:
    """The largest difference of a parameter after four steps, the second of which is not finite for ours only."""
    ours, theirs = make_model(), make_model()
    if sharded:
        fully_shard(ours)  # 7 and 3 rows over 2 ranks: shards of different sizes
    optimizer, expected = Optimizer(config, dict(ours.named_parameters())), reference(config, theirs)
    for step in range(5):
        inputs = torch.full((2, 5), float(step + 1), dtype=torch.float64)
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        finite = step != 1
        optimizer.step(config.lr * (step + 1), torch.tensor(finite))
        if finite:
            for group in expected.param_groups:
                group["lr"] = config.lr * (step + 1)
            expected.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((whole(one) - other).detach().abs().max()) for one, other in pairs)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_numbers_as_torch_and_a_step_that_is_not_finite_changes_nothing(ranks: int) -> None:
    for found in run_ranks(ranks, differences):
        assert max(found) < 1e-12


def state_shapes(rank: int, world_size: int) -> dict[str, list[int]]:
    model = make_model()
    fully_shard(model)
    optimizer = Optimizer(OptimConfig(), {**dict(model.named_parameters()), "frozen": frozen_parameter()})
    state = optimizer.named_state()
    return {f"{name}.{key}": list(tensor.shape) for name, found in state.items() for key, tensor in found.items()}


def frozen_parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3), requires_grad=False)


def test_all_state_exists_before_the_first_step_under_global_shapes() -> None:
    found = run_ranks(2, state_shapes)[0]
    assert found["0.weight.exp_avg"] == [7, 5]
    assert found["0.weight.step"] == []
    assert found["1.bias.exp_avg_sq"] == [7]
    assert not any(name.startswith("frozen") for name in found)


@pytest.mark.parametrize(
    "optim",
    [
        {},
        {"name": "sgd", "momentum": 0.9},
        {"moments": "bf16"},
        {"name": "custom", "_target_": "torch.optim.NAdam", "args": {"foreach": True}},
        {"name": "custom", "_target_": "tests.train.own_optimizers.Preconditioned"},  # its state has numbers and lists
        {"groups": {"matrices": {"match": "weight", "_target_": "torch.optim.Rprop"}}},
    ],
    ids=str,
)
def test_repeated_updates_change_no_bit(optim: dict[str, Any]) -> None:
    """Of two optimizers, one repeats each update, also the first one, which creates the state, and one without
    effect."""
    results = []
    for repeats in (False, True):
        model = make_model().float()
        optimizer = Optimizer(OptimConfig(**optim), dict(model.named_parameters()))
        for step in range(5):
            model.zero_grad()
            model(torch.full((2, 5), float(step + 1))).square().sum().backward()
            differing = optimizer.step(0.01, torch.tensor(step != 2), turn=step if repeats else None)
            assert differing == {}
        states = [value for state in optimizer.named_state().values() for value in state.values()]
        results.append([*model.parameters(), *states])
    for plain, repeated in zip(*results, strict=True):
        assert torch.equal(plain, repeated)
