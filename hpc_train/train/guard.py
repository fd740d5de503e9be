"""Tries code that is not hpc_train's before the first step, and refuses what would silently give other results.

The results must be the same as in one process, whatever the split. The checks need a few passes over one micro-batch,
so they run once for each code, config, layout and version of torch; ``run.json`` remembers them. What differs between
ranks only with their own samples is found in the first step, by ``CheckedWrites``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.config.evaluation import MAIN
from hpc_train.config.extensions import is_import_path
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


def check_user_code(
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
    while isinstance(engine, WrappedEngine):  # those that observe it would count the passes of the checks
        engine = engine._engine
    if mesh.layout.dp_cp > 1:
        _check_replicated_state(config, mesh, engine)
    if config.train.check == "off" or not is_user_code(config, engine):
        return
    key = _key(config, run, mesh, engine)
    checked = broadcast_plain(run.record().get(CHECKED) if mesh.rank == 0 else None, mesh.control)
    if checked is not None and checked["key"] == broadcast_plain(key, mesh.control):
        engine.read_anew(checked["written"])
        return

    warnings = []
    loss_warning = _check_loss(config, mesh, engine, training, evaluation)
    if loss_warning is not None:
        warnings.append(loss_warning)
    warnings += _warnings_of_targets(training, mesh)
    rehearsal = Rehearsal()
    if config.train.debug:  # which looks at each step and names what is not finite
        rehearsal.not_compared = "train.debug=true"
    elif not mesh.layout.logical_micro_batches and not engine.compressions():
        rehearsal = rehearse(config, mesh, engine, example_micro_batch(training, mesh.layout, mesh.device))
    if rehearsal.attributes:
        warnings.append(
            f"the forward pass changes attributes that are neither parameters nor buffers: "
            f"{join_names(rehearsal.attributes)}. Checkpoints do not contain them, so a resumed run starts with their "
            "first values; register_buffer keeps a tensor"
        )
    if rehearsal.not_compared is not None and mesh.rank == 0:
        print(f"gradients are not compared with those of one process: {rehearsal.not_compared}")
    for warning in warnings:
        report.warning(0, warning)
    if report.metrics is not None:
        record: dict[str, Any] = {CHECKED: {"key": key, "written": rehearsal.written}}
        if warnings:
            record["loss_warning"] = "; ".join(warnings)
        report.events.record(run, **record)


def _check_replicated_state(config: Config, mesh: Mesh, engine: Engine) -> None:
    """Raises UserError if ranks would scale the rows of an embedding that only some of them look up."""
    names = written_in_lookups(engine.parts)
    if names:
        raise UserError(
            f"{join_names(names)} has max_norm, with which a forward pass scales the rows that it looks up: each "
            "rank would scale the rows of its samples, so the replicas would diverge",
            where=f"strategy.data_parallel={mesh.layout.data_parallel}, model",
            fix="strategy=single, or nn.Embedding without max_norm",
        )
    if config.train.buffers != REFUSE and mesh.rank == 0:
        print(_BUFFERS[config.train.buffers])


_BUFFERS = {
    "rank0": "train.buffers=rank0: after each step the buffers of all ranks get the values of rank 0. If the forward "
    "pass changes them, the results are not those of one process",
    "mean": "train.buffers=mean: after each step the buffers are averaged over the ranks. If the forward pass changes "
    "them, the results are not those of one process",
}


def is_user_code(config: Config, engine: Engine) -> bool:
    """Returns whether the model or its loss is not hpc_train's."""
    if isinstance(config.model, CustomModelConfig) or is_import_path(config.model.kind) or engine.check_loss:
        return True
    return any(isinstance(part, WrappedModel) for part in engine.parts)


def _key(config: Config, run: RunDirectory, mesh: Mesh, engine: Engine) -> str:
    """Returns a hash of what the results of the checks depend on, on the first rank."""
    if mesh.rank != 0:
        return ""
    code = frozen_code(run)
    part = engine.parts[0]
    if isinstance(part, WrappedModel):
        part = part.bare
    try:
        source = inspect.getsource(type(part))  # it may lie outside of the copied code
    except (OSError, TypeError):  # a class that was made at run time
        source = ""
    digest = hashlib.sha256(run.config.read_bytes())
    for fact in (torch.__version__, str(mesh.layout), code.snapshot if code is not None else "", source):
        digest.update(fact.encode())
    return digest.hexdigest()


def _check_loss(config: Config, mesh: Mesh, engine: Engine, training: Dataset, evaluation: Evaluation) -> str | None:
    """Returns the warning about a loss that depends on the split of a batch.

    Raises:
        UserError: batches will be padded, and padding enters the loss.
    """
    padded = padding_of_training(config, mesh.layout, training)
    padded = padded or padding_of_evaluation(config, mesh.layout, evaluation.feeds.values())
    if not engine.check_loss and padded is None:
        return None
    check = check_loss(
        engine, training, mesh, config.precision.name, halves=engine.check_loss, padding=padded is not None
    )
    if padded is not None and check.padding is not None:
        raise _padded(padded, check.padding, engine)
    return check.warning


def check_evaluation_padding(config: Config, mesh: Mesh, engine: Engine, evaluation: Evaluation) -> None:
    """Checks an evaluation that belongs to no training. Collective.

    Raises:
        UserError: batches will be padded, and padding enters the loss.
    """
    padded = padding_of_evaluation(config, mesh.layout, evaluation.feeds.values())
    if padded is None or config.train.check == "off" or not is_user_code(config, engine):
        return
    check = check_loss(engine, evaluation.feeds[MAIN].dataset, mesh, config.precision.name, halves=False)
    if check.padding is not None:
        raise _padded(padded, check.padding, engine)


def _padded(padded: str, problem: str, engine: Engine) -> UserError:
    where = "model"
    for part in engine.parts:
        owner: Any = part.head if isinstance(part, Model) else part
        if isinstance(part, Model | WrappedModel) and callable(getattr(owner, "loss", None)):
            where = f"model, {place(owner.loss)}"
            break
    return UserError(
        f"{padded}, and the loss of the model does not leave out padded rows: {problem}",
        where=where,
        fix="leave out of the sum and of the count the rows whose targets are all -100, as in kept = targets != -100; "
        "a forward pass must not mix the rows of a batch. train.check=off trains and evaluates with padding",
    )


def padding_of_training(config: Config, layout: Layout, training: Dataset) -> str | None:
    """Returns which batches of the training have padded rows; None if there are none."""
    size = config.batch.global_size
    places = layout.dp * layout.micro_batches * layout.micro_size
    if size != places:
        return f"{size} samples of a step fill {places} places, of which the rest is padding"
    if isinstance(config.data, StreamDataConfig):
        is_short = not config.data.repeat
    else:
        is_short = not config.batch.drop_last and len(training) % size > 0
    return "the last batch is filled up with padding" if is_short else None


def padding_of_evaluation(config: Config, layout: Layout, feeds: Iterable[EvalFeed]) -> str | None:
    """Returns which evaluation has padded rows; None if there is none."""
    size = config.batch.global_size
    places = layout.dp * layout.micro_batches * layout.micro_size
    for feed in feeds:
        if size != places or feed.samples % size:
            return f"an evaluation of {feed.samples} samples in batches of {size} has padding"
    return None


SCANNED = 64  # samples


def _warnings_of_targets(training: Dataset, mesh: Mesh) -> Iterable[str]:
    """Yields a warning if numbers that are measured may be taken for missing targets."""
    size = min(len(training), SCANNED) if training.loads_cheaply else 2
    batch = example_micro_batch(training, replace(mesh.layout, micro_size=size), torch.device("cpu"))
    if isinstance(batch.inputs, Ragged):  # which has no targets that do not count
        return
    targets = [value for value in leaves(batch.targets) if value.is_floating_point()]
    missing = sum(int((value == IGNORED).sum()) for value in targets)
    if missing:
        total = sum(value.numel() for value in targets)
        yield (
            f"{missing} of {total} targets of the first samples are -100, which marks a target that does not count. If "
            "-100 is a measured value, shift or scale the targets"
        )


SAME = 1e-5  # the difference of equal values, relative to the largest element of a tensor


class CheckedWrites(WrappedEngine):
    """Wraps ``engine`` and compares the state of its replicas after the first training step of the attempt.

    A buffer or parameter that the forward pass changes is a function of the samples of its rank (a codebook, a queue,
    rows of an embedding with ``max_norm``) or not (a counter, a momentum teacher). Only in the latter case the ranks
    agree. ``train_step`` raises UserError on all ranks if the replicas differ in such a tensor.
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
        ranks = dist.get_world_size(self._group)

        buffers = dict(self._buffers())
        changed = [name not in buffers or not _same(before[name], buffers[name]) for name in before]
        differing = self._differing([buffers.get(name) for name in before], changed)
        if any(differing):
            names = join_names([name for name, differs in zip(before, differing, strict=True) if differs])
            raise UserError(
                f"the forward pass changes the buffers {names}, and each of the {ranks} ranks gives them other values, "
                "from its own samples: only those of one rank would be saved, and the results depend on the number of "
                "ranks",
                where="train.buffers=refuse, model",
                fix="train.buffers=rank0 gives all ranks the values of rank 0 after each step, as DDP does; "
                "train.buffers=mean averages them. strategy=single computes with all samples",
            )

        parameters = dict(self._replicated_parameters())
        changed = [checksum(parameters[name]) != value for name, value in sums.items()]
        differing = self._differing([*parameters.values()], changed)
        if any(differing):
            names = join_names([name for name, differs in zip(sums, differing, strict=True) if differs])
            raise UserError(
                f"the forward pass writes to the parameters {names}, and each of the {ranks} ranks writes other "
                "values, from its own samples, so that the replicas come apart",
                where=f"strategy.data_parallel={self._kind}, model",
                fix="strategy=single, or write values that do not depend on the samples, such as a function of other "
                "parameters",
            )
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
        differing = []
        for tensor, has_changed, most, least in zip(tensors, *facts.tolist(), strict=True):
            differs = most != -least
            if has_changed and not differs and tensor is not None and most > 0:
                values = tensor.detach().to(self._device, torch.float64).reshape(-1)
                bounds = torch.stack((values, -values))
                dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
                largest, smallest = bounds[0], -bounds[1]
                scale = torch.maximum(largest.abs(), smallest.abs()).max()
                differs = bool((largest - smallest).max() > SAME * scale)
            differing.append(bool(has_changed and differs))
        return differing


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
