"""Injects wrong numbers into training steps that are verified (``train.verify``), and tells what is found.

``python -m tests.faults.corruption --seed 0 --count 500 --log FILE`` draws kinds, layouts, ranks and steps, and prints
the table of ``docs/measurements/corruption.md``. ``--steps 20000`` instead trains so many steps without a fault, over
all layouts, compiled and not, and models of users. Both continue with what FILE lacks.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
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
from hpc_train.train.guard import is_user_code
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from hpc_train.train.verify import Suspicion, Verification
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world, run_ranks

STEPS = 5
SCHEDULED = 1000  # steps of the learning rate schedule
PLAIN_STEPS = 1000  # of one training without a fault, over all its ranks
LAYOUTS: dict[str, dict[str, Any]] = {  # fields of ``Cell``
    "single": {},
    "dp2": {"strategy": {"dp": 2, "data_parallel": "ddp"}},
    "dp3": {"strategy": {"dp": 3, "data_parallel": "allreduce"}},
    "fp16": {"strategy": {"dp": 2, "data_parallel": "allreduce"}, "precision": "fp16"},
    "zero1": {"strategy": {"dp": 2, "data_parallel": "zero1"}},
    "zero2": {
        "strategy": {"dp": 2, "data_parallel": "zero2"},
        "optim": {"name": "custom", "_target_": "torch.optim.NAdam", "args": {"foreach": True}},
    },
    "zero3": {"strategy": {"dp": 3, "data_parallel": "zero3"}},
    "offload": {"strategy": {"dp": 2, "data_parallel": "zero3", "offload": "optimizer"}},
    "muon": {
        "strategy": {"dp": 2, "data_parallel": "zero3"},
        "optim": {"groups": {"matrices": {"match": r"wq|wk|ffn\.w1", "_target_": "torch.optim.Muon"}}},
    },
    "hsdp": {"strategy": {"dp": 4, "data_parallel": "zero3", "shard": 2}},
    "pp2": {"strategy": {"pp": 2, "schedule": "1f1b"}},
    "pp2dp2": {"strategy": {"dp": 2, "pp": 2, "schedule": "1f1b", "data_parallel": "allreduce"}},
    "tp2dp2": {"strategy": {"dp": 2, "tp": 2, "data_parallel": "allreduce"}},
    "ep2dp4": {"strategy": {"dp": 4, "ep": 2, "data_parallel": "allreduce"}, "model": "gpt-moe"},
}
SHARDED = ("zero1", "zero2", "zero3", "offload", "muon")  # layouts that keep each optimizer state on one rank
OF_USERS: dict[str, dict[str, Any]] = {  # models and optimizers of users, trained without a fault
    "custom": {"strategy": {"dp": 2, "data_parallel": "allreduce"}, "model": "custom"},
    "custom-vae": {"strategy": {"dp": 2, "data_parallel": "zero2"}, "model": "custom-vae"},
    "custom-heads": {"strategy": {"dp": 2, "data_parallel": "zero3"}, "model": "custom-heads"},
    "custom-contrastive": {
        "strategy": {"dp": 2, "data_parallel": "ddp"},
        "model": "custom-contrastive",
        "batch": {"global_size": 12, "micro_batches": 1},
    },
    "gpt-weighted": {"strategy": {"dp": 2, "data_parallel": "zero1"}, "model": "gpt-weighted"},
    "own": {"strategy": {"dp": 2, "data_parallel": "zero3"}, "model": "own"},
    "drawing": {
        "strategy": {"dp": 2, "data_parallel": "zero1"},
        "optim": {"name": "custom", "_target_": "tests.train.own_optimizers.Drawing"},
    },
    "vit": {"strategy": {"dp": 2, "data_parallel": "allreduce"}, "model": "vit"},
}
COMPILED = ("single", "dp3", "zero3", "pp2", "tp2dp2", "vit", "gpt-weighted")  # these are trained compiled, too


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

    @property
    def steps(self) -> int:
        """Returns the number of steps of its training."""
        return 30 if self.kind == "rare product" else STEPS


@dataclass(frozen=True)
class Trial:
    """Tells what a training with an injection has found.

    Attributes:
        ended: the step in which the attempt ended; None if it trained to the end.
        weights: the checksum of the weights of this rank after each step.
        injected: the number of wrong values.
        first: the step of the first wrong value; None without one.
    """

    suspicions: tuple[Suspicion, ...]
    warnings: tuple[str, ...]
    ended: int | None
    weights: tuple[int, ...]
    injected: int
    first: int | None


def world_size(layout: str) -> int:
    strategy = (LAYOUTS | OF_USERS)[layout].get("strategy", {})
    return int(strategy.get("dp", 1) * strategy.get("pp", 1) * strategy.get("tp", 1))


def cell_of(layout: str, every: int | str = 1, **train: Any) -> Cell:
    fields = {"precision": "fp32", "batch": {"global_size": 12, "micro_batches": 2}} | (LAYOUTS | OF_USERS)[layout]
    return Cell(world_size(layout), train={"verify": VerifyConfig(every=every)} | train, **fields)


@dataclass
class Fault:
    """Changes a number on one rank when its turn comes."""

    injection: Injection
    rank: int
    step: int = -1
    at: int = -1
    done: int = 0
    first: int | None = None

    @property
    def due(self) -> bool:
        return self.is_due_at(self.at)

    def is_due_at(self, number: int) -> bool:
        """Returns whether to change a number in the pass ``number`` of this step."""
        wanted = self.injection
        if self.step < wanted.step or (self.rank != wanted.rank and wanted.kind != "sum on all ranks"):
            return False
        if wanted.at_pass is None:
            return True
        return self.step == wanted.step and number == wanted.at_pass and self.done == 0

    def count(self) -> None:
        """Counts a number that was changed."""
        self.done += 1
        if self.first is None:
            self.first = self.step

    def flip(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` in which an upper bit of the mantissa of one element is flipped."""
        changed = local_part(tensor).detach().clone(memory_format=torch.contiguous_format)
        if changed.numel():
            bits = changed.view(-1).view(torch.int32)
            bits[self.injection.place % len(bits)] ^= 1 << 20
            self.count()
        return changed


def linear_layers(engine: Engine) -> list[nn.Linear]:
    """Returns the linear layers whose products a hook does not separate from others."""
    merged = ("wq", "wk", "wv", "w1", "w3")
    named = [pair for part in engine.parts for pair in part.named_modules()]
    return [module for name, module in named if isinstance(module, nn.Linear) and not name.endswith(merged)]


def in_product(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Adds to an element of the output of a linear layer: a wrong product or activation."""
    modules = linear_layers(engine)
    is_rare = fault.injection.kind == "rare product"
    draw = random.Random(fault.injection.place)

    def corrupt(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not fault.due or not torch.is_grad_enabled() or (is_rare and draw.random() > 0.001):
            return None
        wrong = torch.zeros_like(output)
        local_part(wrong).view(-1)[fault.injection.place % local_part(wrong).numel()] = 0.125
        fault.count()
        return output + wrong

    for module in modules if is_rare else [modules[fault.injection.place % len(modules)]]:
        module.register_forward_hook(corrupt)


def noise(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Makes a product of every rank random in every pass, as a kernel that is not deterministic."""
    unseeded = torch.Generator().manual_seed(random.SystemRandom().randrange(2**31))

    def disturb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        fault.count()
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


def in_gather(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of a parameter that ZeRO has gathered for a forward pass."""
    modules = linear_layers(engine)

    def corrupt(module: nn.Module, inputs: Any) -> None:
        if fault.due and torch.is_grad_enabled():
            gathered = module.weight.data
            gathered.copy_(fault.flip(gathered).view_as(gathered))

    modules[fault.injection.place % len(modules)].register_forward_pre_hook(corrupt)


def in_update(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Flips a bit of a value that the optimizer has computed for a parameter."""
    inners = [part.inner for part in optimizer._parts if part.inner is not None]
    places = [(inner, value) for inner in inners for group in inner.param_groups for value in group["params"]]
    places = [(inner, value) for inner, value in places if value.numel()]
    inner, chosen = places[fault.injection.place % len(places)]
    computed: Counter[int] = Counter()  # by step

    def corrupt(updated: torch.optim.Optimizer, *args: Any) -> None:
        if any(chosen is value for group in updated.param_groups for value in group["params"]):
            if fault.is_due_at(computed[fault.step]):
                chosen.data.copy_(fault.flip(chosen).view_as(chosen))
            computed[fault.step] += 1

    inner.register_step_post_hook(corrupt)


def noisy_update(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Makes the updates of every rank random in each computation."""
    unseeded = torch.Generator().manual_seed(random.SystemRandom().randrange(2**31))

    def disturb(inner: torch.optim.Optimizer, *args: Any) -> None:
        fault.count()
        for group in inner.param_groups:
            for value in group["params"]:
                value.data.add_(1e-6 * torch.rand(value.shape, generator=unseeded))

    for part in optimizer._parts:
        if part.inner is not None:
            part.inner.register_step_post_hook(disturb)


Change = Callable[[StepBatch], StepBatch]


def around_passes(
    fault: Fault,
    engine: Engine,
    before: Change | None = None,
    after: Callable[[], None] | None = None,
    scale: float | None = None,
) -> None:
    """Counts the passes, and changes the batch or the loss scale before one, or the state after it."""
    run = engine.train_step

    def corrupted(step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> Any:
        fault.at += 1
        if before is not None and fault.due:
            batch = before(batch)
        if scale is not None and loss_scale is not None and fault.due:
            fault.count()
            loss_scale = scale * loss_scale
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


def in_loss_scale(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    around_passes(fault, engine, scale=0.5)


def in_batch(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    """Changes a token of the batch."""

    def change(batch: StepBatch) -> StepBatch:
        fault.count()

        def other(value: Tensor) -> Tensor:
            changed = value.clone()
            changed.view(-1)[0] = (changed.view(-1)[0] + 1).clamp(0) % 7
            return changed

        first, *rest = batch.micro_batches
        return replace(batch, micro_batches=(first.map(other), *rest))

    around_passes(fault, engine, before=change)


def in_random_state(fault: Fault, engine: Engine, optimizer: Optimizer) -> None:
    def draw(batch: StepBatch) -> StepBatch:
        fault.count()
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
    "rare product": in_product,
    "message": in_message,
    "noise": noise,
    "noisy update": noisy_update,
    "sum": in_sum,
    "sum on all ranks": in_sum,
    "gathered parameter": in_gather,
    "loss scale": in_loss_scale,
    "batch": in_batch,
    "random state": in_random_state,
}
BETWEEN_STEPS: dict[str, Inject] = {
    "gradient": in_gradient,
    "weight": in_weight,
    "moment": in_state,
    "update": in_update,
}


def train(rank: int, world: int, layout: str, injection: Injection | None) -> Trial:
    """Trains ``STEPS`` steps, all of which but the first are verified, or until a fault is found."""
    return train_cell(rank, cell_of(layout), injection or Injection("none", rank=-1))


def train_cell(rank: int, cell: Cell, injection: Injection, steps: int | None = None) -> Trial:
    config = cell.config()
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    optimizer = Optimizer(config.optim, engine.named_parameters(), config.strategy.offload == "optimizer")
    suspicions: list[Suspicion] = []
    warnings: list[str] = []

    def report(suspicion: Suspicion) -> int:
        suspicions.append(suspicion)
        return sum(other.findings for other in suspicions if other.node == suspicion.node)

    def warn(step: int, text: str) -> None:
        warnings.append(text)

    may_write = is_user_code(config, engine)
    verification = Verification(config, mesh, engine, optimizer, report, warn, may_write=may_write)
    take_step = TrainStep(config, mesh, engine, optimizer, SCHEDULED, verification)
    fault = Fault(injection, rank)
    if injection.kind in IN_PASSES:
        IN_PASSES[injection.kind](fault, engine, optimizer)
    if "train_step" not in vars(engine):
        around_passes(fault, engine)
    ended = None
    weights = []
    for step in range(steps or injection.steps):
        fault.step = step
        fault.at = -1
        with torch.no_grad():
            if (rank, step) == (injection.rank, injection.step):
                BETWEEN_STEPS.get(injection.kind, do_nothing)(fault, engine, optimizer)
        try:
            take_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        except Corrupted:
            ended = step
            break
        weights.append(hash(tuple(int(position_checksum(value)) for value in engine.named_parameters().values())))
        if suspicions:
            break
    return Trial(tuple(suspicions), tuple(warnings), ended, tuple(weights), fault.done, fault.first)


def train_all(rank: int, world: int, layout: str, injections: list[Injection | None]) -> list[Trial]:
    return [train(rank, world, layout, injection) for injection in injections]


def train_without_fault(rank: int, world: int, cell: Cell, steps: int) -> Trial:
    return train_cell(rank, cell, Injection("none", rank=-1), steps)


def is_undisturbed(of_ranks: list[Trial], plain: list[Trial]) -> bool:
    """Returns whether a training has the weights of the training without a fault."""
    return all(
        trial.weights == other.weights[: len(trial.weights)] for trial, other in zip(of_ranks, plain, strict=True)
    )


def trials(layout: str, *injections: Injection | None) -> list[list[Trial]]:
    """Returns the trial of each rank for each injection."""
    by_rank = run_on_world(world_size(layout), train_all, layout, list(injections), timeout=3600)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


KINDS: dict[str, list[str]] = {  # kind -> the layouts in which it is drawn
    "product": [*LAYOUTS],
    "lasting product": ["dp2", "dp3", "zero2", "zero3", "hsdp", "pp2dp2", "tp2dp2", "ep2dp4"],
    "rare product": ["single", "dp2", "dp3", "zero1"],
    "gradient": [*LAYOUTS],
    "message": ["pp2", "pp2dp2"],
    "gathered parameter": [*SHARDED, "hsdp"],
    "sum": [*LAYOUTS],
    "sum on all ranks": ["dp2", "dp3"],
    "batch": [*LAYOUTS],
    "random state": [*LAYOUTS],
    "loss scale": ["fp16"],
    "lasting loss scale": ["fp16"],
    "update": [*LAYOUTS],
    "lasting update": ["dp3", "zero1", "zero3"],
    "weight": ["dp2", "dp3", "hsdp", "pp2dp2", "tp2dp2", *SHARDED],
    "moment": ["dp2", "dp3", "hsdp", "pp2dp2", "tp2dp2", "zero1", "zero3"],
}
AT_ONCE = 6  # injections of one call of the ranks


def drawn_injection(seed: int, number: int) -> tuple[str, str, Injection]:
    """Returns the kind, the layout and the injection ``number``."""
    choose = random.Random(f"{seed} {number}")
    kinds = [*KINDS]
    kind = kinds[number % len(kinds)]
    layouts = KINDS[kind]
    layout = layouts[number // len(kinds) % len(layouts)]
    rank = choose.randrange(world_size(layout))
    if kind == "message":
        rank = world_size(layout) // 2 + rank % (world_size(layout) // 2)  # of the second stage
    at_pass = None if kind == "rare product" or kind.startswith("lasting ") else choose.randrange(2)
    name = kind.removeprefix("lasting ")
    return kind, layout, Injection(name, rank, choose.choice((2, 3)), at_pass, choose.randrange(1000))


def outcome_of(of_ranks: list[Trial], plain: list[Trial], rank: int) -> dict[str, Any]:
    """Describes what has been found, as a line of the log."""
    first = min((trial.first for trial in of_ranks if trial.first is not None), default=None)
    outcome: dict[str, Any] = {"injected": first is not None, "found": bool(of_ranks[0].suspicions)}
    if of_ranks[0].suspicions and first is not None:
        suspicion = of_ranks[0].suspicions[0]
        undisturbed = is_undisturbed(of_ranks, plain)
        outcome |= {
            "steps": suspicion.step - first,
            "check": suspicion.check,
            "ranks": suspicion.ranks,
            "named": suspicion.ranks == (rank,),
            "among": rank in suspicion.ranks,
            "corrected": suspicion.corrected,
            "wrong_after": suspicion.corrected and not undisturbed,
        }
    else:
        outcome["harmless"] = is_undisturbed(of_ranks, plain)
    return outcome


def inject(seed: int, count: int, log: Path) -> None:
    """Runs the injections that ``log`` lacks, and appends their outcomes to it."""
    done = {line["number"] for line in lines_of(log)}
    missing: dict[str, list[tuple[int, str, Injection]]] = {}
    for number in range(count):
        kind, layout, injection = drawn_injection(seed, number)
        if number not in done:
            missing.setdefault(layout, []).append((number, kind, injection))
    plain_of: dict[str, list[Trial]] = {}
    batches = [
        (layout, some[first : first + AT_ONCE])
        for layout, some in missing.items()
        for first in range(0, len(some), AT_ONCE)
    ]
    random.Random(seed).shuffle(batches)
    for layout, some in batches:
        if layout not in plain_of:
            longest = Injection("rare product", rank=-1)
            plain_of[layout] = trials(layout, longest if layout in KINDS["rare product"] else None)[0]
        of_each = trials(layout, *(injection for _, _, injection in some))
        with log.open("a") as file:
            for (number, kind, injection), of_ranks in zip(some, of_each, strict=True):
                outcome = outcome_of(of_ranks, plain_of[layout], injection.rank)
                line = {"number": number, "layout": layout} | asdict(injection) | {"kind": kind} | outcome
                file.write(json.dumps(line) + "\n")


def train_plainly(steps: int, log: Path) -> None:
    """Trains without a fault until ``log`` has ``steps`` steps, by turns of the layouts and of N."""
    cells = [(layout, False) for layout in (LAYOUTS | OF_USERS)] + [(layout, True) for layout in COMPILED]
    while True:
        lines = lines_of(log)
        if sum(line["steps"] for line in lines) >= steps:
            return
        layout, is_compiled = cells[len(lines) % len(cells)]
        every = 10 - len(lines) // len(cells) % 9
        length = PLAIN_STEPS // world_size(layout)
        cell = cell_of(layout, every, compile=is_compiled)
        run = run_ranks if is_compiled else run_on_world
        of_ranks: list[Trial] = run(cell.world_size, train_without_fault, cell, length, timeout=3600)
        verified = len({1, *(step for step in range(2, length) if (step + 1) % every == 0)})
        line = {"layout": layout, "compiled": is_compiled, "every": every, "steps": length, "verified": verified}
        line |= {"suspicions": len(of_ranks[0].suspicions), "warnings": of_ranks[0].warnings}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """Returns the table of all injections in a log."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        name = line["kind"]
        if name in ("weight", "moment", "update", "lasting update"):
            name += ", one copy" if line["layout"] in SHARDED else ", replicas"
        rows.setdefault(name, []).append(line)
    columns = ("injected", "found", "steps until found", "rank named", "among suspects", "corrected", "without effect")
    text = ["| Wrong number | " + " | ".join(columns) + " | not found |", "|---|" + "---|" * (len(columns) + 1)]
    for name in sorted(rows):
        injected = [line for line in rows[name] if line["injected"]]
        found = [line for line in injected if line["found"]]
        steps = [line["steps"] for line in found]
        cells = [len(injected), len(found), f"{median(steps):g}, at most {max(steps)}" if steps else "-"]
        cells += [sum(line[key] for line in found) for key in ("named", "among", "corrected")]
        harmless = sum(line.get("harmless", False) for line in injected)
        cells += [harmless, len(injected) - len(found) - harmless]
        text.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    wrong = [line["number"] for line in lines if line.get("wrong_after")]
    return "\n".join([*text, "", f"{len(lines)} injections; other weights after a correction: {wrong or 'none'}"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--steps", type=int, help="train without a fault")
    parser.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.steps is not None:
        train_plainly(arguments.steps, arguments.log)
        lines = lines_of(arguments.log)
        totals = {key: sum(line[key] for line in lines) for key in ("steps", "verified", "suspicions")}
        print(totals, {warning for line in lines for warning in line["warnings"]})
        return
    inject(arguments.seed, arguments.count, arguments.log)
    print(table(lines_of(arguments.log)))


if __name__ == "__main__":
    main()
