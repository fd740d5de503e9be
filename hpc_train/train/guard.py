"""Tries code that is not hpc_train's before the first step, and refuses what would silently give other results.

The promise is that of one process, whatever the split. The checks need a few passes over one micro-batch, so they run
once for each code, config, layout and version of torch; ``run.json`` remembers them. What differs between ranks only
with their own samples is found in the first step (``CheckedWrites``).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.config.evaluation import MAIN
from hpc_train.config.extensions import is_extension
from hpc_train.config.schema import Config, CustomModelConfig, StreamDataConfig
from hpc_train.data.dataset import IGNORED, Dataset, Ragged, StepBatch, leaves
from hpc_train.data.feed import EvalFeed, example_micro_batch
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.models.model import Model, canonical_name
from hpc_train.models.own_loss import place
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.collectives import broadcast_plain
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.writes import REFUSE, checksum, written_in_lookups
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.train.debug import join_names
from hpc_train.train.evaluation import Evaluation
from hpc_train.train.loss_check import check_loss
from hpc_train.train.rehearsal import Rehearsal, rehearse
from hpc_train.train.report import Report

CHECKED = "checked"  # key in run.json: what was checked


def check_own_code(
    config: Config,
    run: RunDirectory,
    mesh: Mesh,
    engine: Engine,
    training: Dataset,
    evaluation: Evaluation,
    report: Report,
) -> None:
    """Checks the model of ``config``, unless that was done before. Collective.

    Raises:
        UserError: the model would be trained or evaluated otherwise than in one process.
    """
    engine = _innermost(engine)
    _check_lookups(engine, mesh)
    if mesh.layout.dp_cp > 1 and config.train.buffers != REFUSE and mesh.rank == 0:
        print(_BUFFERS[config.train.buffers])
    if config.train.check == "off" or not is_own(config, engine):
        return
    key = _key(config, run, mesh, engine)
    known = broadcast_plain(run.record().get(CHECKED) if mesh.rank == 0 else None, mesh.control)
    if known is not None and known["key"] == broadcast_plain(key, mesh.control):
        engine.read_anew(known["written"])
        return
    warnings = [*_check_loss(config, mesh, engine, training, evaluation)]
    warnings += _warnings_of_targets(training, mesh)
    found = Rehearsal()
    if config.train.debug:  # which looks at each step and names what is not finite
        found.not_compared = "train.debug=true"
    elif not mesh.layout.logical_micro_batches and not engine.compressions():
        found = rehearse(config, mesh, engine, example_micro_batch(training, mesh.layout, mesh.device))
        warnings += _warnings_of(found)
    if found.not_compared is not None and mesh.rank == 0:
        print(f"gradients are not compared with those of one process: {found.not_compared}")
    for warning in warnings:
        report.warning(0, warning)
    if report.metrics is not None:
        text = "; ".join(warnings)
        checked = {"key": key, "written": found.written}
        report.events.record(run, **{CHECKED: checked}, **({"loss_warning": text} if text else {}))


_BUFFERS = {
    "rank0": "train.buffers=rank0: after each step the buffers of all ranks get the values of rank 0. If the forward "
    "pass changes them, the results are not those of one process",
    "mean": "train.buffers=mean: after each step the buffers are averaged over the ranks. If the forward pass changes "
    "them, the results are not those of one process",
}


def _innermost(engine: Engine) -> Engine:
    """Returns the engine without those that observe it, which would count the passes of the checks."""
    while isinstance(engine, WrappedEngine):
        engine = engine._engine
    return engine


def is_own(config: Config, engine: Engine) -> bool:
    """Returns whether the model or its loss is not hpc_train's."""
    own = isinstance(config.model, CustomModelConfig) or is_extension(config.model.kind) or engine.check_loss
    return own or any(isinstance(part, WrappedModel) for part in engine.parts)


def _key(config: Config, run: RunDirectory, mesh: Mesh, engine: Engine) -> str:
    """Returns a hash of what the results of the checks depend on, on the first rank."""
    if mesh.rank != 0:
        return ""
    code = frozen_code(run)
    digest = hashlib.sha256(run.config.read_bytes())
    for fact in (torch.__version__, str(mesh.layout), "" if code is None else code.snapshot, _source(engine)):
        digest.update(fact.encode())
    return digest.hexdigest()


def _source(engine: Engine) -> str:
    """Returns the source of the model's class, which may lie outside of the copied code."""
    part = engine.parts[0]
    try:
        return inspect.getsource(type(part.bare if isinstance(part, WrappedModel) else part))
    except (OSError, TypeError):  # a class that was made at run time
        return ""


def _check_lookups(engine: Engine, mesh: Mesh) -> None:
    """Raises UserError if ranks would scale the rows of an embedding that only some of them look up."""
    names = written_in_lookups(engine.parts) if mesh.layout.dp_cp > 1 else []
    if names:
        raise UserError(
            f"{join_names(names)} has max_norm, with which a forward pass scales the rows that it looks up: each rank "
            "would scale those of its own samples, so that the replicas come apart",
            where=f"strategy.data_parallel={mesh.layout.data_parallel}, model",
            fix="strategy=single, or nn.Embedding without max_norm",
        )


def _check_loss(config: Config, mesh: Mesh, engine: Engine, training: Dataset, evaluation: Evaluation) -> Iterable[str]:
    """Yields the warning about a loss that depends on the split of a batch.

    Raises:
        UserError: batches will be padded, and padding enters the loss.
    """
    padded = padding_of_training(config, mesh.layout, training)
    padded = padded or padding_of_evaluation(config, mesh.layout, evaluation.feeds.values())
    if not engine.check_loss and padded is None:
        return
    found = check_loss(
        engine, training, mesh, config.precision.name, halves=engine.check_loss, padding=padded is not None
    )
    if padded is not None and found.padding is not None:
        raise _padded(padded, found.padding, engine)
    if found.warning is not None:
        yield found.warning


def check_evaluation_padding(config: Config, mesh: Mesh, engine: Engine, evaluation: Evaluation) -> None:
    """Checks an evaluation that belongs to no training. Collective.

    Raises:
        UserError: batches will be padded, and padding enters the loss.
    """
    padded = padding_of_evaluation(config, mesh.layout, evaluation.feeds.values())
    if padded is None or config.train.check == "off" or not is_own(config, engine):
        return
    dataset = evaluation.feeds[MAIN].dataset
    found = check_loss(engine, dataset, mesh, config.precision.name, halves=False)
    if found.padding is not None:
        raise _padded(padded, found.padding, engine)


def _padded(padded: str, problem: str, engine: Engine) -> UserError:
    return UserError(
        f"{padded}, and the loss of the model does not leave out padded rows: {problem}",
        where=_loss_of(engine),
        fix="leave out of the sum and of the count the rows whose targets are all -100, as in kept = targets != -100; "
        "a forward pass must not mix the rows of a batch. train.check=off trains and evaluates with padding",
    )


def padding_of_training(config: Config, layout: Layout, training: Dataset) -> str | None:
    """Returns which batches of the training have padded rows; None if there are none."""
    size, places = config.batch.global_size, layout.dp * layout.micro_batches * layout.micro_size
    if size != places:
        return f"{size} samples of a step fill {places} places, of which the rest is padding"
    if isinstance(config.data, StreamDataConfig):
        ends = not config.data.repeat
    else:
        ends = not config.batch.drop_last and len(training) % size > 0
    return "the last batch is filled up with padding" if ends else None


def padding_of_evaluation(config: Config, layout: Layout, feeds: Iterable[EvalFeed]) -> str | None:
    """Returns which evaluation has padded rows; None if there is none."""
    size, places = config.batch.global_size, layout.dp * layout.micro_batches * layout.micro_size
    short = [feed.samples for feed in feeds if size != places or feed.samples % size]
    return f"an evaluation of {short[0]} samples in batches of {size} has padding" if short else None


def _loss_of(engine: Engine) -> str:
    for part in engine.parts:
        owner = part if isinstance(part, WrappedModel) else part.head if isinstance(part, Model) else None
        if owner is not None and callable(getattr(owner, "loss", None)):
            return f"model, {place(owner.loss)}"
    return "model"


SCANNED = 64  # samples


def _warnings_of_targets(training: Dataset, mesh: Mesh) -> Iterable[str]:
    """Yields a warning if numbers that are measured may be taken for missing targets."""
    layout = replace(mesh.layout, micro_size=min(len(training), SCANNED) if training.loads_cheaply else 2)
    batch = example_micro_batch(training, layout, torch.device("cpu"))
    if isinstance(batch.inputs, Ragged):  # which has no targets that do not count
        return
    targets: list[Tensor] = [value for value in leaves(batch.targets) if value.is_floating_point()]
    missing = sum(int((value == IGNORED).sum()) for value in targets)
    if missing:
        total = sum(value.numel() for value in targets)
        yield (
            f"{missing} of {total} targets of the first samples are -100, which marks a target that does not count. If "
            "-100 is a measured value, shift or scale the targets"
        )


def _warnings_of(found: Rehearsal) -> Iterable[str]:
    if found.attributes:
        yield (
            f"the forward pass changes attributes that are neither parameters nor buffers: "
            f"{join_names(found.attributes)}. Checkpoints do not contain them, so a resumed run starts with their "
            "first values; register_buffer keeps a tensor"
        )


SAME = 1e-5  # the difference of equal values, relative to the largest element of a tensor


class CheckedWrites(WrappedEngine):
    """Wraps ``engine`` and compares the state of its replicas after the first training step of the attempt.

    ``train_step`` raises UserError on all ranks if the forward pass has changed buffers or parameters, and they differ
    between replicas.
    """

    def __init__(self, engine: Engine, mesh: Mesh) -> None:
        super().__init__(engine)
        self._group = mesh.group("dp_cp")
        self._device = mesh.device
        self._kind = mesh.layout.data_parallel
        self._pending = mesh.layout.dp_cp > 1

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        if not self._pending:
            return self._engine.train_step(step, batch, loss_scale)
        self._pending = False
        before = {name: tensor.detach().clone() for name, tensor in self._buffers()}
        sums = {name: checksum(tensor) for name, tensor in self._replicated_parameters()}
        result = self._engine.train_step(step, batch, loss_scale)
        buffers = dict(self._buffers())
        changed = [name not in buffers or not _same(before[name], buffers[name]) for name in before]
        differing = self._differing([buffers.get(name) for name in before], changed)
        if any(differing):
            raise self._refused_buffers([name for name, differs in zip(before, differing, strict=True) if differs])
        parameters = dict(self._replicated_parameters())
        changed = [checksum(parameters[name]) != value for name, value in sums.items()]
        differing = self._differing([*parameters.values()], changed)
        if any(differing):
            raise self._refused_parameters([name for name, differs in zip(sums, differing, strict=True) if differs])
        return result

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            for name, buffer in part.named_buffers():
                yield canonical_name(name), buffer

    def _replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that every replica holds whole and only the forward pass may change in a step."""
        if self.updates is None:
            for name, parameter in self.named_parameters().items():
                if not isinstance(parameter, DTensor):
                    yield name, parameter.detach()

    @torch.no_grad()
    def _differing(self, tensors: list[Tensor | None], changed: list[bool]) -> list[bool]:
        """Returns for each of ``tensors``, of which some have ``changed`` on this rank, whether replicas differ in it.
        Collective."""
        sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
        facts = torch.tensor([changed, sizes, [-size for size in sizes]], dtype=torch.int64, device=self._device)
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group)
        anywhere, most, least = facts.tolist()
        found = []
        for tensor, has_changed, largest, smallest in zip(tensors, anywhere, most, least, strict=True):
            differs = largest != -smallest
            if has_changed and not differs and tensor is not None and largest > 0:
                differs = self._differs(tensor)
            found.append(bool(has_changed and differs))
        return found

    def _differs(self, tensor: Tensor) -> bool:
        values = tensor.detach().to(self._device, torch.float64).reshape(-1)
        bounds = torch.stack((values, -values))
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = bounds[0], -bounds[1]
        scale = torch.maximum(largest.abs(), smallest.abs()).max()
        return bool((largest - smallest).max() > SAME * scale)

    def _refused_buffers(self, names: list[str]) -> UserError:
        return UserError(
            f"the forward pass changes the buffers {join_names(names)}, and each of the {self._ranks} ranks gives them "
            "other values, from its own samples: only those of one rank would be saved, and the results depend on the "
            "number of ranks",
            where="train.buffers=refuse, model",
            fix="train.buffers=rank0 gives all ranks the values of rank 0 after each step, as DDP does; "
            "train.buffers=mean averages them. strategy=single computes with all samples",
        )

    def _refused_parameters(self, names: list[str]) -> UserError:
        return UserError(
            f"the forward pass writes to the parameters {join_names(names)}, and each of the {self._ranks} ranks "
            "writes other values, from its own samples, so that the replicas come apart",
            where=f"strategy.data_parallel={self._kind}, model",
            fix="strategy=single, or write values that do not depend on the samples, such as a function of other "
            "parameters",
        )

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self._group)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
