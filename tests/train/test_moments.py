"""Moments in bf16: how far from fp32 they lead, what a step that is not finite does, and checkpoints."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import OptimConfig
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import check_identity
from hpc_train.train.optimizers.optimizer import Optimizer
from tests.checkpoint.training import Training, join_again
from tests.parallel.oracle import whole
from tests.ranks import run_on_world
from tests.train.runs import frozen

STEPS = 200
# Relative to fp32 after STEPS noisy steps: distance of the parameters, of both moments, and the bias of the second.
BOUNDS = (0.01, 0.01, 0.05, 0.002)
State = tuple[Tensor, Tensor, Tensor]


def trained(moments: str, beta2: float) -> State:
    """Parameters and both moments; the gradients fall to a tenth, so the second moment has to fall a hundredfold."""
    noise = torch.Generator().manual_seed(0)
    target = torch.randn(64, 128, generator=noise) / 10
    parameter = nn.Parameter(torch.zeros(64, 128))
    config = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, beta2], moments=moments)
    optimizer = Optimizer(config, {"w": parameter})
    for step in range(STEPS):
        gradient = parameter.detach() - target + 0.3 * torch.randn(64, 128, generator=noise)
        parameter.grad = gradient if step < STEPS / 3 else gradient / 10
        optimizer.step(config.lr, torch.tensor(True))
    state = optimizer.named_state()["w"]
    return parameter.detach(), state["exp_avg"].float(), state["exp_avg_sq"].float()


def distances(rank: int, world_size: int) -> dict[float, tuple[float, ...]]:
    found = {}
    for beta2 in (0.95, 0.999):
        ours, exact = trained("bf16", beta2), trained("fp32", beta2)
        distance = [float((one - other).norm() / other.norm()) for one, other in zip(ours, exact, strict=True)]
        found[beta2] = (*distance, abs(float((ours[2] / exact[2]).mean()) - 1))
    return found


def test_the_distance_from_full_moments_is_bounded() -> None:
    """Also under a beta2 whose steps are smaller than half a digit of bf16."""
    (found,) = run_on_world(1, distances)
    for beta2, values in found.items():
        assert all(0 < value < bound for value, bound in zip(values, BOUNDS, strict=True)), (beta2, values)


def moved_by_one_gradient(moments: str, small: float, through_fp32: bool) -> Tensor:
    """Returns how far each element has moved, in learning rates, after one gradient and 20 steps without one.

    Args:
        small: the gradients of all but one element of each block, relative to that of this element.
        through_fp32: whether the moments of the first step come from fp32, as from a checkpoint of another format.
    """
    gradient = torch.full((64, 256), 0.1 * small)
    gradient[:, 0] = 0.1
    parameter = nn.Parameter(torch.zeros(64, 256))
    config = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95], moments=moments)
    optimizer = Optimizer(config, {"w": parameter})
    for step in range(21):
        parameter.grad = torch.zeros_like(gradient) if step else gradient
        optimizer.step(config.lr, torch.tensor(True))
        if through_fp32 and not step:
            state = optimizer.named_state()["w"]
            state["exp_avg"].copy_(0.1 * gradient)
            state["exp_avg_sq"].copy_(0.05 * gradient.square())
            optimizer.loaded()
    return parameter.detach().abs() / config.lr


def sparse_moves(rank: int, world_size: int) -> list[tuple[Any, float, float]]:
    """Cases, and the longest moves with compact and with full moments."""
    found: list[tuple[Any, float, float]] = []
    for small in (1e-1, 1e-2, 1e-3, 3e-4, 1e-4, 1e-5):
        exact = float(moved_by_one_gradient("fp32", small, False).max())
        for through_fp32 in (False, True):
            ours = float(moved_by_one_gradient("bf16", small, through_fp32).max())
            found.append(((small, through_fp32), ours, exact))
    return found


def test_a_gradient_that_does_not_come_again_moves_nothing_far() -> None:
    """An embedding row gets no gradient while its word does not occur. Its second moment must not become zero first."""
    (found,) = run_on_world(1, sparse_moves)
    for case, ours, exact in found:
        assert 1 < ours < 1.2 * exact, case


def skipped_step(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(torch.randn(64, 128))
    optimizer = Optimizer(OptimConfig(moments="bf16"), {"w": parameter})
    for finite in (True, False):
        before = [parameter.detach().clone(), *(value.clone() for value in optimizer.named_state()["w"].values())]
        parameter.grad = torch.randn(64, 128) if finite else torch.full((64, 128), torch.nan)
        optimizer.step(1e-2, torch.tensor(finite))
        after = [parameter.detach(), *optimizer.named_state()["w"].values()]
        same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert same == [not finite] * 4


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    run_on_world(1, skipped_step)


FORMATS = ("fp32", "bf16")
LARGE = ("model.dim=64", "model.ffn_dim=128", "model.n_layers=2", "train.steps=6", "data.samples=48")


def save_each(rank: int, world_size: int, runs: dict[str, RunDirectory]) -> None:
    from hpc_train.run.freeze import load

    for run in runs.values():
        config = load(run)
        training = Training.of(run, config, join_again(config, rank, world_size))
        training.steps(0, 3)
        training.manager.save(3, {})
        training.manager.close(lambda: False)


def load_each(rank: int, world_size: int, saved: dict[str, RunDirectory], runs: dict[str, RunDirectory]) -> None:
    """Every format's checkpoint into every format, two steps further, and the same without the detour."""
    from hpc_train.run.freeze import load

    for (source, of), (target, run) in product(saved.items(), runs.items()):
        run.update_record(forked_from=str(of.path))
        config = load(run)
        training = Training.of(run, config, join_again(config, rank, world_size))
        restored = training.manager.restore()
        assert restored is not None and restored.with_optimizer and restored.step == 3
        if source == target:
            save = training.manager
            save.save(3, {})
            first, second = read(of), read(run)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first), (source, world_size)
        training.manager.close(lambda: False)
        (loss,) = training.steps(3, 4)
        assert loss == pytest.approx(3.4, abs=0.3)


def read(run: RunDirectory) -> dict[str, Tensor]:
    from tests.checkpoint.tensors import read_tensors

    return dict(read_tensors(run.checkpoints / "step-00000003"))


@pytest.mark.long_form(30)
def test_checkpoints_load_into_every_format_and_layout(tmp_path: Path) -> None:
    def runs(folder: str, strategy: str) -> dict[str, RunDirectory]:
        return {
            moments: frozen(tmp_path / folder / moments, f"+strategy={strategy}", *LARGE, f"optim.moments={moments}")
            for moments in FORMATS
        }

    saved = runs("saved", "zero2")
    run_on_world(2, save_each, saved)
    run_on_world(2, load_each, saved, runs("sharded", "zero3"))
    run_on_world(1, load_each, saved, runs("single", "single"))


def test_the_format_of_moments_is_no_identity(tmp_path: Path) -> None:
    from hpc_train.config.compose import compose, typed

    one, other = (typed(compose(["optim.lr=1", f"optim.moments={name}"])) for name in FORMATS)
    check_identity(one, other)


def offloaded(rank: int, world_size: int, runs: list[tuple[RunDirectory, RunDirectory]]) -> None:
    """Two steps, a checkpoint, two more in a new engine; against four steps that were never offloaded."""
    from hpc_train.run.freeze import load

    for plain, on_host in runs:
        config = load(plain)
        mesh = join_again(config, rank, world_size)
        expected = Training.of(plain, config, mesh)
        losses = expected.steps(0, 4)
        config = load(on_host)
        training = Training.of(on_host, config, mesh)
        found = training.steps(0, 2)
        training.manager.save(2, {})
        training.manager.close(lambda: False)
        training = Training.of(on_host, config, mesh)
        assert training.manager.restore() is not None
        training.manager.close(lambda: False)
        found += training.steps(2, 4)
        assert found == losses, plain.path.name
        theirs = expected.state()
        for name, value in training.state().items():
            assert torch.equal(whole(value), whole(theirs[name])), name


@pytest.mark.parametrize(
    "kinds",
    [
        [("dp", "optimizer"), ("zero2", "optimizer"), ("zero3", "all")],
        pytest.param([("tp", "optimizer"), ("zero2", "all")], marks=pytest.mark.long_form(15)),
    ],
    ids=["short", "more"],
)
@pytest.mark.long_form(10)  # test_own_optimizers.py offloads, too
def test_steps_on_the_host_are_the_same_steps(tmp_path: Path, kinds: list[tuple[str, str]]) -> None:
    """On the CPU the copy is a copy all the same; FSDP's own offload does nothing there but take the same road."""
    runs = []
    for strategy, offload in kinds:
        common = [f"+strategy={strategy}", "train.steps=4", "model.n_layers=2"]
        common += ["strategy.tp=2"] if strategy == "tp" else []
        name = f"{strategy}-{offload}"
        runs.append((
            frozen(tmp_path / "plain" / name, *common),
            frozen(tmp_path / "host" / name, *common, f"strategy.offload={offload}"),
        ))  # fmt: skip
    run_on_world(2, offloaded, runs)
