"""Habits of models that others have written: each trains as in a plain loop, or is refused before the first update."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.compose import typed
from hpc_train.config.schema import CustomModelConfig
from hpc_train.config.schema.data import OwnKeys
from hpc_train.data.custom import CustomDataset
from hpc_train.data.feed import EvalFeed, example_micro_batch
from hpc_train.errors import UserError
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.writes import MEAN, SharedBuffers, written_in_lookups
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import freeze
from hpc_train.train.guard import CheckedWrites, check_loss, padding_of_evaluation, padding_of_training
from hpc_train.train.rehearsal import Rehearsal, rehearse
from tests.config.composing import compose
from tests.parallel.cells import CLASSES, Cell, Form, covering, in_two_forms
from tests.parallel.module import Tiny
from tests.parallel.oracle import error, global_batch, mesh_of, relative, train_engine, train_plainly
from tests.ranks import run_on_world
from tests.train.runs import run_attempt


class Teacher(Tiny):
    """Follows itself with a momentum teacher, in the forward pass."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.teacher = copy.deepcopy(self.last)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for teacher, student in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
                    teacher.lerp_(student, 0.1)
        features = self.norm(self.first(inputs)).relu().mean((2, 3))
        return self.last(features) + 0.5 * self.teacher(features)


class Clipped(Tiny):
    """Clips a weight as the critic of a Wasserstein GAN does, through ``data``, which has a version of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-0.05, 0.05)
        outputs: Tensor = super().forward(inputs)
        return outputs


class Prototypes(Tiny):
    """Normalizes prototypes before they are used."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.copy_(F.normalize(self.last.weight, dim=1))
        outputs: Tensor = super().forward(inputs)
        return outputs


class Centers(Tiny):
    """Follows the mean of its outputs in a buffer, as DINO does, and counts its calls in another one."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("center", torch.zeros(classes))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        if self.training:
            self.calls += 1
            self.center.lerp_(outputs.detach().mean(0), 0.1)
        return outputs - self.center.clone()


class Scaling(Tiny):
    """Divides its weights by the largest output of the samples that it sees."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        if self.training:
            self.norm.weight.data.mul_(1 / outputs.detach().abs().max())
        return outputs


class Habits(Tiny):
    """Keeps its last outputs and a cache, counts in a buffer, normalizes weights by hooks, and has fixed parts."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.first = nn.utils.spectral_norm(self.first)  # which changes buffers and an attribute
        self.last = nn.utils.parametrizations.weight_norm(self.last)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: Tensor | None = None
        self.dropout = nn.Dropout(0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.dropout(super().forward(inputs))
        self.seen = outputs.detach()
        return outputs


class Annealed(Tiny):
    """Counts its calls, and smooths its outputs, in attributes that no checkpoint contains."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.rate, self.mean = 1.0, torch.zeros(classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        self.rate *= 0.9
        self.mean = self.mean.to(outputs).lerp(outputs.detach().mean(0), 0.1)
        return outputs


class Extra(Tiny):
    """Saves the number of its calls as torch documents it."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = super().forward(inputs)
        return outputs

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Diary(Tiny):
    """Counts its calls in containers, of which one is new in the first call."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.calls: list[int] = []
        self.longer: list[int] = []
        self.sums: dict[str, Any] = {"calls": torch.zeros(()), "nested": [set()]}
        self.recent: deque[int] = deque(maxlen=4)

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late: list[int] = []
        self.longer = [*self.longer, 1]
        for each in (self.calls, self.recent, self.late):
            each.append(1)
        self.sums["calls"] += 1
        self.sums["nested"][0].add(len(self.sums["nested"][0]))
        counts = [self.calls, self.recent, self.late, self.longer, self.sums["nested"][0]]
        outputs: Tensor = super().forward(inputs)
        return outputs * (1 + float(self.sums["calls"]) + sum(map(len, counts)))


class Clock:
    """Counts, and has an attribute only after the first call."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner, self.calls = owner, 0

    def tick(self) -> int:
        self.calls += 1
        self.late = getattr(self, "late", 0) + 1
        return self.calls + self.late


class Numbers(list[int]):
    """A user's subclass of a container."""


class Noisy(Tiny):
    """Draws from its generators, and counts in objects, an array and a subclass of a container."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.clock = Clock(self)
        self.namespace = SimpleNamespace(calls=torch.zeros(()))
        self.numbers = Numbers()
        self.array = np.zeros(2)
        self.generators = (torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3))
        self.legacy = np.random.RandomState(4)

    def forward(self, inputs: Tensor) -> Tensor:
        self.namespace.calls += 1
        self.numbers.append(1)
        self.array += 1
        counts = self.clock.tick() + float(self.namespace.calls) + len(self.numbers) + self.array.sum()
        first, second, third = self.generators
        drawn = float(torch.rand((), generator=first)) + second.random() + third.random() + self.legacy.rand()
        outputs: Tensor = super().forward(inputs)
        return outputs * (1 + float(counts + drawn))


class Hidden(Tiny):
    """Hides a momentum teacher from its state dict."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.hidden = [copy.deepcopy(self.last).requires_grad_(False)]

    def forward(self, inputs: Tensor) -> Tensor:
        teacher = self.hidden[0].to(inputs.dtype)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.9)
        features = self.norm(self.first(inputs)).relu().mean((2, 3))
        return self.last(features) + 0.5 * teacher(features)


class RankAware(Tiny):
    """Computes something else on each rank."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        return outputs * (1 + dist.get_rank())


class Sinkhorn(Tiny):
    """Subtracts the mean over all ranks, as DINO, SwAV and torch's SyncBatchNorm do."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        center = outputs.detach().mean(0)
        dist.all_reduce(center)
        return outputs - center / dist.get_world_size()


class Variational(Tiny):
    """Draws noise in training and in evaluation, and adds a term to a correct loss."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        return outputs + 1e-3 * torch.randn_like(outputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        kept = targets != -100
        return F.cross_entropy(outputs[kept], targets[kept], reduction="sum"), int(kept.sum())


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=1.0)


@dataclass(frozen=True)
class OwnCell(Cell):
    """Trains the class of this module that ``target`` names."""

    target: str = ""

    def _model(self) -> CustomModelConfig:
        return CustomModelConfig(_target_=f"{__name__}.{self.target}", args={"classes": CLASSES})


def of(target: str, kind: str = "ddp", dp: int = 2, **fields: Any) -> OwnCell:
    strategy = {"dp": dp, "data_parallel": kind} if dp > 1 else {}
    return OwnCell(dp, "custom", strategy=strategy, target=target, batch={"global_size": 8}, **fields)


def dataset_of(cell: Cell) -> CustomDataset:
    dataset = CustomDataset(list(zip(*global_batch(cell, 0), strict=True)), OwnKeys(kind="samples"), 0)
    dataset.floats = "float64" if cell.precision == "fp64" else "float32"
    return dataset


def rehearsed(cell: Cell, mesh: Mesh) -> tuple[Engine, Rehearsal]:
    engine = build_engine(cell.config(), mesh)
    batch = example_micro_batch(dataset_of(cell), mesh.layout, mesh.device)
    return engine, rehearse(cell.config(), mesh, engine, batch)


def outcomes(rank: int, world_size: int, cells: list[OwnCell]) -> list[str | float]:
    """The refusal of each cell, or its largest difference from a plain loop in one process."""
    found: list[str | float] = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        try:
            engine, rehearsal = rehearsed(cell, mesh)
            assert replace(rehearsal, written=[], attributes=[]) == Rehearsal(), (cell, rehearsal)
            assert bool(rehearsal.attributes) == (cell.target in ("Diary", "Noisy")), (cell, rehearsal)
            record = train_engine(cell, mesh, CheckedWrites(engine, mesh))
        except UserError as problem:
            found.append(str(problem))
            continue
        expected = train_plainly(replace(cell, world_size=1, strategy={}))
        found.append(max(error(record.parameters, expected.parameters), relative(record.losses, expected.losses)))
    return found


KINDS = ("ddp", "allreduce", "zero1", "zero2", "zero3")
WRITES = ("Teacher", "Clipped", "Prototypes")
WRITTEN = {"Teacher": "teacher.bias, teacher.weight", "Clipped": "last.weight", "Prototypes": "last.weight"}


@in_two_forms(20)
def test_parameters_that_the_forward_pass_writes_are_kept_or_refused(form: Form) -> None:
    cells = [of("Teacher", kind) for kind in KINDS]
    cells += [of(target, kind) for target in WRITES[1:] for kind in ("ddp", "zero3")]
    if form is covering:
        cells = [of("Clipped"), of("Teacher", "zero3")]
    found, other = run_on_world(2, outcomes, cells)
    for cell, first, second in zip(cells, found, other, strict=True):
        if cell.strategy["data_parallel"].startswith("zero"):
            assert f"writes to the parameters {WRITTEN[cell.target]}, but zero" in str(first), cell
            assert first == second
            assert "strategy=dp or single" in str(first)
        else:
            assert isinstance(first, float) and first < 1e-10, (cell, first)


@pytest.mark.long_form(10)  # with two replicas above and below
def test_one_process_accepts_every_habit() -> None:
    targets = (*WRITES, "Centers", "Scaling", "Habits", "Extra", "Diary", "Noisy", "Hidden")
    (differences,) = run_on_world(1, outcomes, [of(target, dp=1) for target in targets])
    assert max(differences) < 1e-10


def test_state_that_differs_between_replicas_is_refused_before_the_first_update() -> None:
    cells = [of("Centers", "zero3"), of("Scaling"), of("RankAware", "zero2")]
    found, other = run_on_world(2, outcomes, cells)
    assert found == other
    buffers, parameters, ranks = map(str, found)
    assert "changes the buffers center, and each of the 2 ranks" in buffers
    assert "train.buffers=rank0" in buffers and "calls" not in buffers
    assert "writes to the parameters norm.weight" in parameters and "strategy=single" in parameters
    assert "differ from those of one process: " in ranks and "train.check=off" in ranks


@in_two_forms(20)
def test_habits_that_change_no_results_are_accepted(form: Form) -> None:
    cells = [of("Habits", kind) for kind in KINDS]
    cells += [of("Tiny", kind, precision="fp32") for kind in ("ddp", "zero3")]
    cells += [of(target, kind) for target in ("Diary", "Noisy", "Hidden") for kind in ("ddp", "zero3")]
    if form is covering:
        cells = [of("Habits", "zero3"), of("Tiny", precision="fp32"), of("Noisy")]
    found, _ = run_on_world(2, outcomes, cells)
    assert [(cell.strategy, value) for cell, value in zip(cells, found, strict=True) if not float(value) < 1e-5] == []


def half_precision(rank: int, world_size: int, cells: list[OwnCell]) -> list[Rehearsal]:
    return [rehearsed(cell, mesh_of(cell, rank))[1] for cell in cells]


@in_two_forms(20)
def test_rounding_is_no_difference(form: Form) -> None:
    cells = [
        of(target, kind, precision=precision)
        for target in ("Tiny", "Variational", "Normed")
        for kind in ("ddp", "zero3")
        for precision in ("bf16", "fp32")
    ]
    cells = form(cells, "target", "data_parallel", "precision")
    # casts that are kept for a step would hide what the forward pass writes
    found, _ = run_on_world(2, half_precision, [*cells, of("Clipped", precision="bf16")])
    assert found == [*[Rehearsal()] * len(cells), Rehearsal(written=["last.weight"])]


def test_a_model_that_communicates_is_not_compared() -> None:
    for (rehearsal,) in run_on_world(2, half_precision, [of("Sinkhorn", "zero3")], timeout=60):
        assert "the model communicates with other ranks" in str(rehearsal.not_compared)


class Normed(Tiny):
    def __init__(self, classes: int) -> None:
        super().__init__(classes, batch_norm=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.dropout(super().forward(inputs))
        return outputs


def attributes(rank: int, world_size: int) -> list[list[str]]:
    cells = [of(target, dp=1) for target in ("Annealed", "Noisy", "Habits")]
    return [rehearsed(cell, mesh_of(cell, rank))[1].attributes for cell in cells]


def test_attributes_that_the_forward_pass_changes_are_named() -> None:
    noisy = ["clock", "namespace", "numbers", "array", "generators", "legacy"]
    assert run_on_world(1, attributes) == [[["rate", "mean"], noisy, []]]


def test_an_embedding_with_max_norm_is_found() -> None:
    assert written_in_lookups([Looking()]) == ["table.weight"]


def shared(rank: int, world_size: int) -> list[tuple[list[float], int]]:
    """Returns the buffers after two steps under each policy."""
    found = []
    for policy, kind in (("rank0", "ddp"), ("mean", "zero3")):
        cell = of("Centers", kind)
        mesh = mesh_of(cell, rank)
        config = cell.config()
        config.train.buffers = policy
        engine = build_engine(config, mesh)
        train_engine(cell, mesh, CheckedWrites(engine, mesh))
        buffers = engine.named_buffers()
        found.append((buffers["center"].tolist(), int(buffers["calls"])))
    return found


def test_buffers_are_shared() -> None:
    first, second = run_on_world(2, shared)
    assert first == second
    for centers, calls in first:
        assert any(centers)
        assert calls == 2


def shared_in_8_bits(rank: int, world_size: int) -> list[float]:
    module = nn.Module()
    module.register_buffer("scales", torch.tensor([1.0 + rank, 4.0]).to(torch.float8_e4m3fn))
    SharedBuffers([module], MEAN, dist.group.WORLD).share()  # type: ignore[arg-type]
    scales: list[float] = module.get_buffer("scales").float().tolist()
    return scales


def test_buffers_of_8_bits_are_averaged() -> None:
    assert run_on_world(2, shared_in_8_bits) == [[1.5, 4.0], [1.5, 4.0]]


class Squares(Tiny):
    """Has a loss that does not leave out padded rows."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs.sum(1) - targets).square().sum(), int((targets != -100).sum())


class Counting(Tiny):
    """Leaves them out of the sum, and not of the count."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)


class Masking(Tiny):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        kept = targets != -100
        return (outputs.sum(1) - targets)[kept].square().sum(), int(kept.sum())


class Mixing(Masking):
    """Attends to the other rows of the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return (5 * outputs @ outputs.T).softmax(1) @ outputs


def paddings(rank: int, world_size: int, cells: list[OwnCell]) -> list[str | None]:
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        found.append(check_loss(engine, dataset_of(cell), mesh, cell.precision, halves=False).padding)
    return found


RELATES = "depending on the inputs of a row without targets"
COUNTS = "its count is 4 with and without the targets of a row"
PADDED = [
    ("Squares", "fp64", RELATES),
    ("Squares", "fp32", RELATES),
    ("Squares", "bf16", "with a row without targets and"),  # the errors are rounded
    *(("Counting", precision, COUNTS) for precision in ("fp64", "fp32", "bf16")),
    *(("Mixing", precision, RELATES) for precision in ("fp64", "fp32", "bf16")),
]


@in_two_forms(25)
def test_padding_in_a_loss_is_found(form: Form) -> None:
    sound = product(("Masking", "Tiny", "Variational", "Normed"), ("fp64", "fp32", "bf16"))
    cases = [*PADDED, *((target, precision, None) for target, precision in sound)]
    if form is covering:
        sparse = [("Masking", "fp64", None), ("Variational", "bf16", None)]
        cases = [PADDED[1], PADDED[2], PADDED[3], PADDED[8], *sparse]
    cells = [of(target, precision=precision) for target, precision, _ in cases]
    found, other = run_on_world(2, paddings, cells)
    assert found == other
    for case, message in zip(cases, found, strict=True):
        if case[2] is None:
            assert message is None, case
        else:
            assert case[2] in str(message), case


RUN = [
    "model=custom",
    "data=synthetic",
    "data.task=images",
    "data.image_size=8",
    f"data.n_classes={CLASSES}",
    "data.samples=64",
    f"+model.args={{classes: {CLASSES}}}",
    "batch.global_size=8",
    "optim.warmup_steps=2",
    "train.steps=2",
    "telemetry.wandb.mode=disabled",
    "+strategy=dp",
    "elastic.collective_timeout_s=60",
]


def run_of(path: Path, target: str, *overrides: str) -> RunDirectory:
    run = RunDirectory(path)
    freeze(typed(compose([*RUN, f"model._target_={__name__}.{target}", *overrides])), run)
    return run


def test_a_run_is_checked_once(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "Annealed", "data.validation_samples=7")
    assert run_attempt(run, workers=2) == [Exit.DONE] * 2
    record = run.record()
    assert "rate, mean. Checkpoints do not contain them" in record["loss_warning"]
    assert run_attempt(run, workers=2) == [Exit.DONE] * 2
    assert run.record()["checked"] == record["checked"] and record["checked"]["written"] == []
    log = (run.path / "logs" / "rank-0-001.log").read_text()
    assert "Checkpoints do not contain them" not in log


@pytest.mark.parametrize(
    ("samples", "size", "drop_last", "validation", "found"),
    [
        (16, 8, True, 16, None),
        (16, 7, True, 14, "the 7 samples of a step are padded to 8 rows"),
        (17, 8, True, 8, None),
        (17, 8, False, 8, "the last batch is filled up"),
        (16, 8, False, 8, None),
        (16, 8, True, 7, "an evaluation of 7 samples in batches of 8 has padding"),
    ],
)
def test_padding_is_foreseen(samples: int, size: int, drop_last: bool, validation: int, found: str | None) -> None:
    cell = replace(of("Tiny"), batch={"global_size": size, "drop_last": drop_last})
    items = [(torch.zeros(3, 8, 8), 0)] * max(samples, validation)
    data = CustomDataset(items[:samples], OwnKeys(kind="samples"), 0)
    held_out = CustomDataset(items[:validation], OwnKeys(kind="samples"), 0)
    feed = EvalFeed(held_out, cell.config().batch, cell.layout(), 0, torch.device("cpu"))
    config, layout = cell.config(), cell.layout()
    padded = padding_of_training(config, layout, data) or padding_of_evaluation(config, layout, [feed])
    assert padded == found if found is None else (padded or "").startswith(found)
