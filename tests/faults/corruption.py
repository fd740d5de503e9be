"""Injects wrong numbers into training steps that are verified (``train.verify``), and tells what is found.

``python -m tests.faults.corruption --seed 0 --count 500`` draws kinds, layouts, ranks and steps, and prints the table
of ``docs/howto/corruption.md``.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.schema import VerifyConfig
from hpc_train.data.dataset import StepBatch
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.checksums import position_checksum
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.fsdp import gathered_parameters
from hpc_train.parallel.precision.masters import local_part
from hpc_train.run.exits import Corrupted
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from hpc_train.train.verify import Suspicion, Verification
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world

STEPS = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {"dp": 2, "data_parallel": "ddp"},
    "dp3": {"dp": 3, "data_parallel": "allreduce"},
    "zero3": {"dp": 3, "data_parallel": "zero3"},
    "hsdp": {"dp": 4, "data_parallel": "zero3", "shard": 2},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "pp2dp2": {"dp": 2, "pp": 2, "schedule": "1f1b", "data_parallel": "allreduce"},
    "tp2dp2": {"dp": 2, "tp": 2, "data_parallel": "allreduce"},
}


@dataclass(frozen=True)
class Injection:
    """Describes a fault.

    Attributes:
        kind: a key of ``KINDS``.
        rank: the rank that computes or holds wrong numbers.
        step: the first step in which it does.
        at_pass: the pass of this step, or None for all passes from then on.
        place: chooses the parameter, the module or the element.
    """

    kind: str
    rank: int = 0
    step: int = 3
    at_pass: int | None = 0
    place: int = 5


@dataclass(frozen=True)
class Trial:
    """Tells what a training with an injection has found.

    Attributes:
        ended: the step in which the attempt ended; None if it trained to the end.
        weights: the checksum of the weights of this rank at the end.
        injected: the number of wrong values.
    """

    suspicions: tuple[Suspicion, ...]
    warnings: tuple[str, ...]
    ended: int | None
    weights: int
    injected: int
    passes: int


def world_size(layout: str) -> int:
    strategy = LAYOUTS[layout]
    return int(strategy.get("dp", 1) * strategy.get("pp", 1) * strategy.get("tp", 1))


def cell_of(layout: str, **train: Any) -> Cell:
    verify = {"verify": VerifyConfig(every=1)}
    batch = {"global_size": 12, "micro_batches": 2}
    return Cell(world_size(layout), precision="fp32", strategy=LAYOUTS[layout], batch=batch, train=verify | train)


@dataclass
class Fault:
    """Changes a number on one rank when its turn comes."""

    injection: Injection
    rank: int
    step: int = -1
    at: int = -1
    done: int = 0

    @property
    def due(self) -> bool:
        wanted = self.injection
        if self.rank != wanted.rank or self.step < wanted.step:
            return False
        if wanted.at_pass is None:
            return True
        return self.step == wanted.step and self.at == wanted.at_pass and self.done == 0

    def flip(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` in which an upper bit of the mantissa of one element is flipped."""
        changed = local_part(tensor).detach().clone(memory_format=torch.contiguous_format)
        if changed.numel():
            bits = changed.view(-1).view(torch.int32)
            bits[self.injection.place % len(bits)] ^= 1 << 20
            self.done += 1
        return changed


def in_product(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Adds to an element of the output of a linear layer: a wrong product or activation."""
    modules = [module for part in engine.parts for module in part.modules() if isinstance(module, nn.Linear)]

    def corrupt(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not fault.due or not torch.is_grad_enabled():
            return None
        wrong = torch.zeros_like(output)
        local_part(wrong).view(-1)[fault.injection.place % local_part(wrong).numel()] = 0.125
        fault.done += 1
        return output + wrong

    modules[fault.injection.place % len(modules)].register_forward_hook(corrupt)


def noise(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Makes a product of every rank random in every pass, as a kernel that is not deterministic."""
    unseeded = torch.Generator().manual_seed(random.SystemRandom().randrange(2**31))

    def disturb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        fault.done += 1
        return output + 1e-6 * torch.rand(output.shape, generator=unseeded)

    next(
        module for part in engine.parts for module in part.modules() if isinstance(module, nn.Linear)
    ).register_forward_hook(disturb)


def in_message(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of what arrives at a stage."""

    def corrupt(module: nn.Module, inputs: Any) -> Any:
        if not fault.due or not torch.is_grad_enabled() or not inputs[0].is_floating_point():
            return None
        with torch.no_grad():
            inputs[0].copy_(fault.flip(inputs[0]).view_as(inputs[0]))
        return None

    engine.parts[0].register_forward_pre_hook(corrupt)


def in_gradient(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of a local gradient in the backward pass; called after a step, since ZeRO gathers in the first."""
    part = engine.parts[0]
    leaves = {name: value for name, value in part.named_parameters() if value.requires_grad} | gathered_parameters(part)
    leaf = [*leaves.values()][fault.injection.place % len(leaves)]

    def flip(gradient: Tensor) -> Tensor | None:
        if not fault.due:
            return None
        changed = fault.flip(gradient).view_as(local_part(gradient))
        if gradient is local_part(gradient):
            return changed
        local_part(gradient).copy_(changed)
        return None

    leaf.register_hook(flip)


Change = Callable[[StepBatch], StepBatch]


def around_passes(
    fault: Fault, engine: Engine, before: Change | None = None, after: Callable[[], None] | None = None
) -> None:
    """Counts the passes, and changes the batch before one or the state after it."""
    run = engine.train_step

    def corrupted(step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> Any:
        fault.at += 1
        if before is not None and fault.due:
            batch = before(batch)
        result = run(step, batch, loss_scale)
        if after is not None and fault.due:
            after()
        return result

    engine.train_step = corrupted  # type: ignore[method-assign]


def in_sum(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of a reduced gradient."""

    def flip() -> None:
        gradients = [value.grad for value in engine.named_parameters().values() if value.grad is not None]
        local = local_part(gradients[fault.injection.place % len(gradients)])
        local.copy_(fault.flip(local).view_as(local))

    around_passes(fault, engine, after=flip)


def in_batch(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Changes a token of the batch."""

    def change(batch: StepBatch) -> StepBatch:
        fault.done += 1

        def other(value: Tensor) -> Tensor:
            changed = value.clone()
            changed.view(-1)[0] = (changed.view(-1)[0] + 1).clamp(0) % 7
            return changed

        first, *rest = batch.micro_batches
        return replace(batch, micro_batches=(first.map(other), *rest))

    around_passes(fault, engine, before=change)


def in_random_state(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    def draw(batch: StepBatch) -> StepBatch:
        fault.done += 1
        torch.rand(1)
        return batch

    around_passes(fault, engine, before=draw)


def in_weight(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of a weight before a step; see ``train``."""
    values = [*engine.named_parameters().values()]
    local = local_part(values[fault.injection.place % len(values)].detach())
    local.copy_(fault.flip(local).view_as(local))


def in_state(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of a moment before a step."""
    values = [value for state in optimizer.named_state().values() for key, value in state.items() if "exp" in key]
    local = local_part(values[fault.injection.place % len(values)])
    local.copy_(fault.flip(local).view_as(local))


def do_nothing(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    pass


Inject = Callable[[Fault, Engine, Optimizer], None]
IN_PASSES: dict[str, Inject] = {
    "product": in_product,
    "message": in_message,
    "noise": noise,
    "sum": in_sum,
    "batch": in_batch,
    "random state": in_random_state,
}
BETWEEN_STEPS: dict[str, Inject] = {"gradient": in_gradient, "weight": in_weight, "moment": in_state}


def train(rank: int, world: int, layout: str, injection: Injection | None, compiled: bool = False) -> Trial:
    """Trains ``STEPS`` steps, all of which but the first are verified."""
    cell = cell_of(layout, compile=compiled)
    config = cell.config()
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    optimizer = Optimizer(config.optim, engine.named_parameters())
    suspicions: list[Suspicion] = []
    warnings: list[str] = []

    def report(suspicion: Suspicion) -> int:
        suspicions.append(suspicion)
        return sum(other.findings for other in suspicions if other.node == suspicion.node)

    verification = Verification(config, mesh, engine, optimizer, report, lambda step, text: warnings.append(text))
    take_step = TrainStep(config, mesh, engine, optimizer, STEPS, verification)
    fault = Fault(injection or Injection("none", rank=-1), rank)
    if injection is not None and injection.kind in IN_PASSES:
        IN_PASSES[injection.kind](fault, engine, optimizer)
    if "train_step" not in vars(engine):
        around_passes(fault, engine)
    ended = None
    for step in range(STEPS):
        fault.step = step
        fault.at = -1
        with torch.no_grad():
            if injection is not None and (rank, step) == (injection.rank, injection.step):
                BETWEEN_STEPS.get(injection.kind, do_nothing)(fault, engine, optimizer)
        try:
            take_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        except Corrupted:
            ended = step
            break
    sums = [position_checksum(value) for value in engine.named_parameters().values()]
    return Trial(tuple(suspicions), tuple(warnings), ended, hash(tuple(map(int, sums))), fault.done, fault.at + 1)


def train_all(rank: int, world: int, layout: str, injections: list[Injection | None]) -> list[Trial]:
    return [train(rank, world, layout, injection) for injection in injections]


def is_undisturbed(of_ranks: list[Trial], plain: list[Trial]) -> bool:
    """Returns whether a training has the weights of the training without a fault."""
    return [trial.weights for trial in of_ranks] == [trial.weights for trial in plain]


def trials(layout: str, *injections: Injection | None) -> list[list[Trial]]:
    """Returns the trial of each rank for each injection."""
    by_rank = run_on_world(world_size(layout), train_all, layout, list(injections), timeout=600)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


EXPECTED = {  # kind -> the layouts in which it can be found
    "product": [*LAYOUTS],
    "gradient": [*LAYOUTS],
    "message": ["pp2", "pp2dp2"],
    "sum": [*LAYOUTS],
    "batch": [*LAYOUTS],
    "random state": [*LAYOUTS],
    "weight": ["dp2", "dp3", "hsdp", "pp2dp2", "tp2dp2"],
    "moment": ["dp2", "dp3", "hsdp", "pp2dp2", "tp2dp2"],
    "lasting product": ["dp2", "dp3", "zero3", "hsdp", "pp2dp2", "tp2dp2"],
}


def drawn_injection(choose: random.Random, kind: str, layout: str) -> Injection:
    rank = choose.randrange(world_size(layout))
    if kind == "message":
        rank = world_size(layout) // 2 + rank % (world_size(layout) // 2)  # of the second stage
    lasting = kind.startswith("lasting ")
    at_pass = None if lasting else choose.randrange(2)
    return Injection(kind.removeprefix("lasting "), rank, choose.choice((2, 3)), at_pass, choose.randrange(1000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    arguments = parser.parse_args()
    choose = random.Random(arguments.seed)
    cells = [(kind, layout) for kind, layouts in EXPECTED.items() for layout in layouts]
    drawn: dict[str, list[tuple[str, Injection]]] = {}
    for number in range(arguments.count):
        kind, layout = cells[number % len(cells)]
        drawn.setdefault(layout, []).append((kind, drawn_injection(choose, kind, layout)))
    rows: dict[str, Counter[str]] = {}
    for layout, injections in drawn.items():
        plain, *of_each = trials(layout, None, *(injection for _, injection in injections))
        for (kind, injection), of_ranks in zip(injections, of_each, strict=True):
            row = rows.setdefault(kind, Counter())
            row["injected"] += any(trial.injected for trial in of_ranks)
            if of_ranks[0].suspicions:
                suspicion = of_ranks[0].suspicions[0]
                row["found"] += 1
                row["steps"] += suspicion.step - injection.step
                row["named"] += suspicion.ranks == (injection.rank,)
                row["among suspects"] += injection.rank in suspicion.ranks
                row["corrected"] += suspicion.corrected
                row["wrong after correction"] += suspicion.corrected and not is_undisturbed(of_ranks, plain)
            elif is_undisturbed(of_ranks, plain):
                row["without effect"] += 1
    columns = ("injected", "found", "steps", "named", "among suspects", "corrected", "without effect")
    columns += ("wrong after correction",)
    print("| Wrong number | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for kind, row in rows.items():
        print(f"| {kind} | " + " | ".join(str(row[column]) for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
