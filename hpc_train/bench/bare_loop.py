"""Bare PyTorch training loops, one per strategy, as baselines for the speed of hpc_train.

The loops have no engines, control messages, checkpoints or telemetry. They make the same torch calls as the engine
(DDP, ``fully_shard``, torch's pipeline schedules, fused AdamW) and read the same samples through torch's
``DataLoader``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import Dataset as TorchDataset

from hpc_train.config.schema import Config
from hpc_train.config.values import bucket_mb
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import IGNORED, Batch, Dataset, StepBatch
from hpc_train.data.device_copy import DeviceCopy
from hpc_train.data.feed import loader_workers
from hpc_train.data.sampler import pad_or_truncate
from hpc_train.errors import UserError
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.activation_checkpointing import apply_activation_checkpointing
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import apply_loss_form, compile_model, is_meta, materialize
from hpc_train.parallel.pipeline.schedules import schedule_class
from hpc_train.parallel.pipeline.split import cut, split_layers
from hpc_train.parallel.precision.dtypes import autocast, compute_dtype, hidden_dtype, parameter_dtype, set_hidden_dtype

Step = Callable[[Sequence[Batch], int], None]  # (micro-batches of this rank, targets in the global batch)


@dataclass(frozen=True)
class BareLoop:
    """Holds a model (or its pipeline stages) and the function that trains it for one step.

    Attributes:
        losses: one loss per micro-batch of the last step; their sum is the mean loss. Empty except on the last rank of
        a pipeline.
    """

    model: nn.Module
    step: Step
    losses: list[Tensor]


def build_bare_loop(kind: str, config: Config, mesh: Mesh, layers: Sequence[range] | None = None) -> BareLoop:
    """Builds a model and the bare loop ``single``, ``dp``, ``zero2``, ``zero3`` or ``pp`` (see ``request.bare_loop``).
    ``layers`` are the layers of each pipeline stage; None splits them by ``strategy.pp_split``."""
    losses: list[Tensor] = []
    model: nn.Module = build_model(config.model, config.train.seed)
    if kind == "pp":
        assert isinstance(model, Model)
        layers = layers or split_layers(len(model.layers), mesh.layout.stages, config.strategy.pp_split)
        model = nn.ModuleList(cut(model, stage, layers) for stage in _stages_of_rank(mesh))
    for part in model if isinstance(model, nn.ModuleList) else (model,):
        set_hidden_dtype(part, config.precision)
        apply_loss_form(part, loss_form(config, mesh.layout))  # or the loops would compute different products
        apply_activation_checkpointing(part, recomputation_of(config, mesh.layout), config.train.compile)
        if config.train.compile:
            compile_model(part)
    if isinstance(model, nn.ModuleList):
        return BareLoop(model, _pipeline(model, config, mesh, losses), losses)
    return BareLoop(model, _replicas(kind, model, config, mesh), losses)


def _stages_of_rank(mesh: Mesh) -> list[int]:
    return [stage for stage, rank in enumerate(mesh.layout.placement) if rank == mesh.pp_rank]


class _Samples(TorchDataset[tuple[Any, Any, Any]]):
    """Adapts a dataset for torch's ``DataLoader``."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        sample = self.dataset.sample(index, 0)
        if self.dataset.lengths is not None:
            sample = pad_or_truncate(sample, int(self.dataset.lengths.max()))
        return sample.inputs, sample.targets, dict(sample.context)


def bare_batches(config: Config, mesh: Mesh) -> Iterator[StepBatch]:
    """Yields the micro-batches of this data-parallel rank for one step after another, without padding."""
    samples = _Samples(build_dataset(config.data, "train", config.train.seed, config.precision.name))
    layout = mesh.layout
    loader = DataLoader(
        samples,
        batch_size=layout.micro_size,
        sampler=DistributedSampler(samples, layout.dp, mesh.dp_rank),
        num_workers=loader_workers(config.batch, samples.dataset, 1),
        pin_memory=mesh.device.type == "cuda",
        drop_last=True,
    )
    copy = DeviceCopy(mesh.device, samples.dataset.scale, samples.dataset.floats)
    micro_batches: list[Batch] = []
    count = 0
    while True:
        for inputs, targets, context in loader:
            count += int((targets != IGNORED).sum())
            micro_batches += copy.send([Batch(inputs, targets, context)]).receive()
            if len(micro_batches) == layout.micro_batches:
                yield StepBatch(tuple(micro_batches), count * layout.dp)
                micro_batches = []
                count = 0


def _replicas(kind: str, model: nn.Module, config: Config, mesh: Mesh) -> Step:
    """Returns the step of one device, of DDP, or of ``fully_shard``; gradients are reduced after the last backward."""
    if kind in ("zero2", "zero3"):
        _shard(model, config, mesh)
    _initialize(model, config, mesh)
    optimizer = _optimizer(model, config)
    replica = model
    ranks = 1
    if kind != "single":
        ranks = dist.get_world_size()
    if kind == "dp":
        replica = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb(config.strategy, mesh.device.type), gradient_as_bucket_view=True
        )

    def step(micro_batches: Sequence[Batch], target_count: int) -> None:
        optimizer.zero_grad()
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            if kind == "zero2" and isinstance(replica, FSDPModule):
                replica.set_reshard_after_backward(is_last)
            accumulates: AbstractContextManager[None] = nullcontext()
            if isinstance(replica, DistributedDataParallel) and not is_last:
                accumulates = replica.no_sync()
            with accumulates:
                with autocast(config.precision.name, mesh.device):
                    loss, _ = replica(batch.inputs, batch.context, batch.targets)
                (loss * (ranks / target_count)).backward()
        if config.optim.clip_norm:
            clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()

    return step


def _shard(model: nn.Module, config: Config, mesh: Mesh) -> None:
    dtype = compute_dtype(config.precision.name)
    reduce_dtype = None
    if dtype is not None:
        reduce_dtype = parameter_dtype(config.precision.name)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    frees = "parameters" in mesh.layout.kind.shards  # after the pass of each layer; otherwise, once per step
    if isinstance(model, Model):
        for layer in model.layers.values():
            fully_shard(layer, reshard_after_forward=frees, mp_policy=policy)
    fully_shard(model, reshard_after_forward=False, mp_policy=policy)


class _StageModule(nn.Module):
    """Wraps one pipeline stage with one input and one output tensor, as torch's schedules expect."""

    def __init__(self, part: nn.Module, config: Config, mesh: Mesh, is_last: bool) -> None:
        super().__init__()
        self.part = part
        self.precision = config.precision.name
        self.device = mesh.device
        self.is_last = is_last
        self.dtype = hidden_dtype(config.precision)

    def forward(self, hidden: Tensor) -> Tensor:
        with autocast(self.precision, self.device):
            output = self.part(hidden, {})
        if self.is_last and output.dtype.itemsize < 4:
            return output.float()
        return output.to(self.dtype)


def _pipeline(parts: nn.Module, config: Config, mesh: Mesh, losses: list[Tensor]) -> Step:
    assert isinstance(parts, nn.ModuleList)
    for part in parts:
        _initialize(part, config, mesh)
    optimizer = _optimizer(parts, config)
    targets_of_step = 1

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2)
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum") / targets_of_step

    count = mesh.layout.stages
    stages = [
        PipelineStage(_StageModule(part, config, mesh, stage == count - 1), stage, count, mesh.device)
        for part, stage in zip(parts, _stages_of_rank(mesh), strict=True)
    ]
    kind = schedule_class(mesh.layout)
    of_rank = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(of_rank, mesh.layout.micro_batches, loss_fn=loss, scale_grads=False)

    def step(micro_batches: Sequence[Batch], target_count: int) -> None:
        nonlocal targets_of_step
        targets_of_step = target_count
        optimizer.zero_grad()
        inputs = torch.cat([batch.inputs for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        first = [inputs] if stages[0].is_first else []
        last = {"target": targets, "losses": losses} if stages[-1].is_last else {}
        schedule.step(*first, **last, return_outputs=False)
        if config.optim.clip_norm:
            squared = get_total_norm([p.grad for p in parts.parameters() if p.grad is not None]).square()
            dist.all_reduce(squared)
            clip_grads_with_norm_(parts.parameters(), config.optim.clip_norm, squared.sqrt())
        optimizer.step()

    return step


def _initialize(model: nn.Module, config: Config, mesh: Mesh) -> None:
    dtype = parameter_dtype(config.precision.name)
    if isinstance(model, Model) and is_meta(model):
        materialize(model, mesh.device, config.train.seed, dtype)
    else:
        model.to(device=mesh.device, dtype=dtype)
    model.train()


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    optim = config.optim
    if optim._target_ is not None or optim.groups:
        raise UserError(
            "the bare PyTorch loop supports only adamw and sgd, without parameter groups",
            where="optim._target_, optim.groups",
            fix="optim=adamw or optim=sgd",
        )
    groups = decay_groups(model, optim.weight_decay)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns torch's parameter groups of ``model`` with the weight decay of ``Optimizer``."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = ({"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
