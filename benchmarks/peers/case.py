"""What all contenders of a case share: strategy, model, samples and their order, and what a step returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Batch
from hpc_train.data.sampler import Order
from hpc_train.layout.layout import Layout
from hpc_train.layout.validate import validate
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import materialize

Turn = Callable[[], Tensor | None]  # one step; its share of the mean loss of the global batch, None if it is not known


@dataclass(frozen=True)
class Case:
    """A strategy with ``overrides``, and the bare loop of ``bare_loop.py`` that goes with it; None: there is none."""

    ranks: int
    strategy: str
    bare: str | None
    overrides: tuple[str, ...] = ()


_INTERLEAVED = ("strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=2")


CASES = {
    "single": Case(1, "single", "single"),
    "dp2": Case(2, "dp", "dp"),
    "dp4": Case(4, "dp", "dp"),
    "zero2": Case(2, "zero2", "zero2"),
    "zero3": Case(2, "zero3", "zero3"),
    "zero3x4": Case(4, "zero3", "zero3"),
    "pp2": Case(2, "pp", "pp"),
    "pp4": Case(4, "pp", "pp"),
    "interleaved2": Case(2, "pp", "pp", _INTERLEAVED),
    "tp2": Case(2, "tp", None),
    "cp2": Case(2, "cp", None),
    "2x2": Case(4, "hybrid", None),
}
MODEL = (
    "model.dim=256", "model.ffn_dim=704", "model.n_layers=4", "data=synthetic", "data.samples=65536",
    "data.sequence_length=128", "batch.global_size=16", "train.steps=1", "optim.warmup_steps=0",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """One step of a contender, and the number of parameters that it trains in all ranks, replicas counted once.

    Attributes:
        in_own_thread: whether the step runs in another thread than ``turn``.
    """

    turn: Turn
    parameters: int
    in_own_thread: bool = False


class NotThereError(Exception):
    """A peer has nothing of the kind, or is not installed; the message says why."""


def config_of(case: Case, precision: str, overrides: tuple[str, ...] = ()) -> tuple[Config, Layout]:
    workers = (f"cluster.cpu_workers={case.ranks}", "cluster=local", "cluster.gpus_per_node=0")
    chosen = (f"+strategy={case.strategy}", *case.overrides, f"precision={precision}")
    config = typed(compose([*chosen, *MODEL, *workers, *overrides]))
    return config, validate(config, 1, case.ranks)


def target_count(config: Config) -> int:
    """Returns the targets of a global batch; the synthetic samples have one at each position."""
    return config.batch.global_size * config.data.sequence_length


def own_model(config: Config) -> Model:
    """Returns our model with the weights with which all contenders begin."""
    model = build_model(config.model, config.train.seed)
    assert isinstance(model, Model)
    materialize(model, torch.device("cpu"), config.train.seed, torch.float32)
    return model.train()


class InOurOrder(TorchDataset[dict[str, Any]]):
    """The samples in the order in which ``StepBench`` trains with them, which keeps the first global batch."""

    def __init__(self, config: Config) -> None:
        self.dataset = build_dataset(config.data, "train", config.train.seed)
        self.order = Order(len(self.dataset), config.batch.global_size, config.batch.drop_last, config.train.seed)

    def __len__(self) -> int:
        return self.order.samples_per_epoch - self.order.global_size

    def __getitem__(self, position: int) -> dict[str, Any]:
        step, within = divmod(position, self.order.global_size)
        (index,) = self.order.slots(1 + step, within, within + 1)
        sample = self.dataset.sample(int(index), 0)
        return {"inputs": sample.inputs, "targets": sample.targets}


class _ShareOfRank(Sampler[int]):
    """The positions of one data-parallel rank: a block of each global batch, again and again."""

    def __init__(self, samples: InOurOrder, dp: int, dp_rank: int) -> None:
        self.samples, self.size, self.rank = samples, samples.order.global_size // dp, dp_rank

    def __iter__(self) -> Iterator[int]:
        while True:
            for first in range(0, len(self.samples), self.samples.order.global_size):
                yield from range(first + self.rank * self.size, first + (self.rank + 1) * self.size)


def batches(config: Config, mesh: Mesh) -> Iterator[tuple[Batch, ...]]:
    """Yields the micro-batches of this rank, one step after another, as torch's ``DataLoader`` reads them."""
    samples, layout = InOurOrder(config), mesh.layout
    loader = DataLoader(samples, layout.micro_size, sampler=_ShareOfRank(samples, layout.dp, mesh.dp_rank))
    micro_batches: list[Batch] = []
    for batch in loader:
        micro_batches.append(Batch(batch["inputs"], batch["targets"], {}))
        if len(micro_batches) == layout.micro_batches:
            yield tuple(micro_batches)
            micro_batches = []
