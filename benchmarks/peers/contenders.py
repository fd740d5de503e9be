"""The contenders that train our model: our trainer, a bare loop, Lightning Fabric, Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.case import Case, Contender, NotThereError, batches, own_model, target_count
from hpc_train.bench.bare_loop import build_bare_loop, decay_groups
from hpc_train.bench.step_worker import StepBench
from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.requests import StopFlag

Step = Callable[[Sequence[Batch]], Tensor]


def build_ours(case: Case, config: Config, mesh: Mesh) -> Contender:
    bench, targets = StepBench(config, mesh, StopFlag()), target_count(config)
    share = (mesh.tp_rank == 0) / targets  # ranks of tensor parallelism have the same sum
    return Contender(lambda: bench.step().result.loss_sum * share, _size(build_model(config.model, 0)))


def build_bare(case: Case, config: Config, mesh: Mesh) -> Contender:
    if case.bare is None:
        raise NotThereError("no bare loop")
    loop, targets = build_bare_loop(case.bare, config, mesh), target_count(config)
    feed = batches(config, mesh)
    sums: list[Tensor] = []
    if mesh.layout.pp == 1:
        loop.model.register_forward_hook(lambda module, inputs, outputs: sums.append(outputs[0].detach()))

    def turn() -> Tensor:
        sums.clear()
        loop.step(next(feed), targets)
        if mesh.layout.pp == 1:
            return torch.stack(sums).sum() / targets
        return torch.stack(loop.losses).sum() if loop.losses else torch.zeros(())

    return Contender(turn, _size(build_model(config.model, 0)))


def build_fabric(case: Case, config: Config, mesh: Mesh) -> Contender:
    refuse_splits(mesh)
    return _own_model_with(_fabric, config, mesh)


def build_accelerate(case: Case, config: Config, mesh: Mesh) -> Contender:
    refuse_sharding(mesh)
    return _own_model_with(_accelerate, config, mesh)


def refuse_splits(mesh: Mesh) -> None:
    """Raises ``NotThereError`` if the layout splits the model."""
    if mesh.layout.pp > 1:
        raise NotThereError("no pipelines")
    if mesh.layout.tp * mesh.layout.cp > 1:
        raise NotThereError("not compared")


def refuse_sharding(mesh: Mesh) -> None:
    """Raises ``NotThereError`` unless the layout is one process or replicas under DDP."""
    refuse_splits(mesh)
    if mesh.layout.data_parallel != "ddp" and mesh.layout.dp > 1:
        raise NotThereError("Accelerate has FSDP for GPUs only")


def installed(module: str) -> Any:
    """Returns the module.

    Raises:
        NotThereError: it, or one that it imports, is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise NotThereError(f"not installed: {error}") from error


def adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    optim, groups = config.optim, decay_groups(model, config.optim.weight_decay)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True)


def _own_model_with(library: Callable[[Model, Config, Mesh], Step], config: Config, mesh: Mesh) -> Contender:
    model, feed, targets = own_model(config), batches(config, mesh), target_count(config)
    size = _size(model)
    step = library(model, config, mesh)
    return Contender(lambda: step(next(feed)) / targets, size)


def _size(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _fabric(model: Model, config: Config, mesh: Mesh) -> Step:
    shards = mesh.layout.data_parallel != "ddp" and mesh.layout.dp > 1
    strategy: Any = _sharding(mesh) if shards else "ddp" if mesh.layout.dp > 1 else "auto"
    precision = "bf16-mixed" if config.precision.name == "bf16" else "32-true"
    fabric = installed("lightning.fabric").Fabric(
        accelerator="cpu", devices=mesh.layout.world_size, strategy=strategy, precision=precision
    )
    fabric.launch()
    module = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(adamw(module, config))  # of the parameters that sharding has made
    scale = mesh.layout.dp / target_count(config)
    waits = mesh.layout.dp > 1 and not shards  # ZeRO-2 and ZeRO-3 reduce the gradients of each micro-batch

    def step(micro_batches: Sequence[Batch]) -> Tensor:
        optimizer.zero_grad()
        sums = []
        for index, batch in enumerate(micro_batches):
            with fabric.no_backward_sync(module, enabled=waits and index < len(micro_batches) - 1):
                loss, _ = module(batch.inputs, batch.context, batch.targets)
                fabric.backward(loss * scale)
            sums.append(loss.detach())
        fabric.clip_gradients(module, optimizer, max_norm=config.optim.clip_norm)
        optimizer.step()
        return torch.stack(sums).sum()

    return step


def _sharding(mesh: Mesh) -> Any:
    """Returns Fabric's strategy for FSDP2, whose ``fully_shard`` the user calls; that for FSDP1 refuses CPUs."""
    frees = "parameters" in mesh.layout.kind.shards

    def shard(model: Model, device_mesh: Any) -> Model:
        for layer in model.layers.values():
            fully_shard(layer, mesh=device_mesh["data_parallel"], reshard_after_forward=frees)
        return fully_shard(model, mesh=device_mesh["data_parallel"], reshard_after_forward=False)  # type: ignore[return-value]

    strategies = installed("lightning.fabric.strategies")
    return strategies.ModelParallelStrategy(shard, data_parallel_size=mesh.layout.dp, tensor_parallel_size=1)


def _accelerate(model: Model, config: Config, mesh: Mesh) -> Step:
    precision = "bf16" if config.precision.name == "bf16" else "no"
    accelerator = installed("accelerate").Accelerator(cpu=True, mixed_precision=precision)
    if accelerator.num_processes != mesh.layout.world_size:
        raise NotThereError(f"sees {accelerator.num_processes} processes")
    module, optimizer = accelerator.prepare(model, adamw(model, config))
    scale = mesh.layout.dp / target_count(config)

    def step(micro_batches: Sequence[Batch]) -> Tensor:
        optimizer.zero_grad()
        sums = []
        for batch in micro_batches:
            loss, _ = module(batch.inputs, batch.context, batch.targets)
            accelerator.backward(loss * scale)
            sums.append(loss.detach())
        accelerator.clip_grad_norm_(module.parameters(), config.optim.clip_norm)
        optimizer.step()
        return torch.stack(sums).sum()

    return step
