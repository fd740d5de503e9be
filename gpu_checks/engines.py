"""Checks of what wraps a model: DDP and FSDP2 on NCCL with one rank, and one rank of a layout of many.

The other ranks of such a layout are not there: torch's backend ``fake`` returns from each collective at once, and what
a rank would receive is undefined. Losses mean nothing then, but memory, streams and the time of a step are those of the
rank without its communication.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_checks.check import Probe
from gpu_checks.commands import SMALL, SYNTHETIC
from gpu_checks.kernels import spin, timed
from gpu_checks.steps import TINIER, TINY_GPT, Steps, World
from gpu_checks.training import SAME, differing
from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.elastic.hangs import read_collectives
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import peak_of, ranks_of
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import sizes_of
from hpc_train.models.model import Model
from hpc_train.parallel import fsdp, replica_engine
from hpc_train.parallel.mesh import AXES, Mesh, all_gather_tensor
from hpc_train.parallel.parallelize import materialize, split_and_wrap
from hpc_train.parallel.precision.dtypes import parameter_dtype
from hpc_train.parallel.replicas import Sharded
from hpc_train.train.watch.step_clock import StepClock

RANKS = 8
LARGE = ["model=llama_1b", "data.vocab_size=128256", "data.sequence_length=2048", "precision=bf16"]
LAYOUTS: dict[str, tuple[str, ...]] = {
    "zero1": ("+strategy=zero1",),
    "zero3": ("+strategy=zero3",),
    "hsdp": ("+strategy=zero3", "strategy.shard=4"),
    "allreduce": ("+strategy=dp", "strategy.data_parallel=allreduce"),  # DDP needs what a collective returns
    "tp": ("+strategy=tp", "strategy.tp=2", "strategy.dp=fill"),
    "pp": (
        "+strategy=pp", "strategy.pp=4", "strategy.dp=fill", "strategy.schedule=1f1b",
        "strategy.data_parallel=allreduce",
    ),
    "hybrid": ("+strategy=zero2", "strategy.dp=fill", "strategy.pp=2", "strategy.tp=2"),
    "cp": ("+strategy=cp", "strategy.cp=2", "strategy.dp=fill"),
    "ring": ("+strategy=cp", "strategy.context=ring", "strategy.cp=8"),
    "dualpipev": (
        "+strategy=pp", "strategy.pp=2", "strategy.dp=fill", "strategy.schedule=dualpipev",
        "strategy.stages_per_rank=2", "strategy.data_parallel=allreduce",
    ),
}  # fmt: skip
ONE_SHARD: dict[str, tuple[str, ...]] = {
    "zero1": ("+strategy=zero1",),
    "zero2": ("+strategy=zero2",),
    "zero3": ("+strategy=zero3",),
    "zero2, all on the host": ("+strategy=zero2", "strategy.offload=all"),
}
LOSSES = 4
LATE_S = 0.02  # of each all-gather of the check of the clock


class FakeWorld:
    """Rank 0 of ``RANKS`` ranks of which the others do not exist; the default group of this process."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.device = torch.device(probe.device, 0) if probe.on_gpu else torch.device("cpu")
        if not probe.on_gpu:
            torch.set_num_threads(1)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)

    def steps(self, *overrides: str, large: bool = False) -> Steps:
        """Returns the training of this rank under the layout of ``overrides``, of a large model or a tiny one."""
        model = LARGE if large else [*TINY_GPT, *TINIER]
        place = [f"cluster.gpus_per_node={RANKS if self.probe.on_gpu else 0}", f"cluster.cpu_workers={RANKS}"]
        batch = ["batch.global_size=16", "batch.micro_size=1"]
        config = typed(compose([*SYNTHETIC, *SMALL, *place, *model, *batch, *overrides]))
        return Steps(config, self.mesh(resolve_layout(config, 1, RANKS)))

    def mesh(self, layout: Layout) -> Mesh:
        ranks = torch.arange(RANKS).view(layout.pp, layout.dp_cp // layout.shard, layout.shard, layout.tp)
        apart = ranks.view(layout.pp, layout.dp, layout.cp, layout.tp)
        groups = {axis: _group(ranks, dim) for dim, axis in enumerate(AXES)}
        device_mesh = DeviceMesh.from_group([*groups.values()], self.device.type, mesh=ranks, mesh_dim_names=AXES)
        groups |= {"dp": _group(apart, 1), "cp": _group(apart, 2), "dp_cp": _group(apart.flatten(1, 2), 1)}
        groups["replica"] = everyone = _group(ranks.view(1, -1), 1)
        return Mesh(layout, 0, self.device, device_mesh, groups, everyone)


def _group(ranks: Tensor, dim: int) -> dist.ProcessGroup:
    """Returns the group of rank 0 along ``dim``."""
    own = ranks.movedim(dim, -1).flatten(0, -2)[0].tolist()
    group: dist.ProcessGroup = dist.new_group(own, backend="fake", use_local_synchronization=True)
    return group


@contextmanager
def _agreeing_neighbors() -> Iterator[None]:
    """Answers the vote of neighboring stages, before the first step, that all know the shapes of their messages."""
    receive = dist.recv
    dist.recv = lambda tensor, *_, **__: tensor.fill_(1)
    try:
        yield
    finally:
        dist.recv = receive


def one_rank(probe: Probe) -> None:
    """One rank of each layout takes its steps in the memory that the estimate says, and its clock counts the waits."""
    world = FakeWorld(probe)
    for name, overrides in LAYOUTS.items():
        _free_memory(probe)
        held = torch.cuda.memory_allocated() if probe.on_gpu else 0
        with _agreeing_neighbors():
            steps = world.steps(*overrides, large=probe.on_gpu)
            seconds = [_seconds(steps) for _ in range(3)]
        layout = steps.mesh.layout
        probe.equal(f"{name}: ranks of the layout", layout.world_size, RANKS)
        probe.note(f"{name}: seconds of a step, without communication", seconds[-1])
        if probe.on_gpu:
            ratio = (torch.cuda.max_memory_allocated() - held) / _estimated(steps.config, layout)
            probe.within(f"{name}: measured / estimated memory", ratio, 0.8, 1.2)
        steps.close()
        del steps
    _check_clock(probe, world)


def _free_memory(probe: Probe) -> None:
    gc.collect()
    if probe.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _seconds(steps: Steps) -> float:
    begin = time.perf_counter()
    steps.step()
    steps.wait()
    return time.perf_counter() - begin


def _estimated(config: Config, layout: Layout) -> float:
    """Returns the estimate for this rank, which is that of the first stage."""
    return peak_of(sizes_of(config, layout), next(iter(ranks_of(config, layout)))).total


class LateGather:
    """An all-gather of FSDP2 that takes ``LATE_S`` longer on its stream. It has the methods that FSDP2 calls."""

    def __init__(self, device: torch.device) -> None:
        self.calls = 0
        self._device = device

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        if self._device.type == "cuda":
            spin(LATE_S)
        return all_gather_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def _check_clock(probe: Probe, world: FakeWorld) -> None:
    """The communication that a step under zero3 reports is the time for which computation waited for all-gathers."""
    steps = world.steps("+strategy=zero3")
    gather, clock = LateGather(world.device), StepClock(world.device)
    layers = [module for module in steps.engine.parts[0].modules() if isinstance(module, FSDPModule)]
    for layer in layers:
        layer.set_custom_all_gather(gather)  # type: ignore[arg-type]
    for _ in range(2):
        steps.step()
    steps.wait()
    gather.calls, before = 0, clock.stretches
    batch = steps.batch()
    with clock.watching(steps.engine.parts), clock.step():
        steps.step(batch)
    waited = clock.read().communication_s
    probe.within("all-gathers of a step with two micro-batches", gather.calls, low=2 * len(layers))
    probe.within("waits that are counted", clock.stretches - before, low=gather.calls if probe.on_gpu else 1)
    if probe.on_gpu:
        exact = gather.calls * timed(lambda: spin(LATE_S))  # at the clock rate that the step has reached
        probe.within("reported / exact", waited / exact, 0.9, 1.1)
    steps.close()


def one_shard(probe: Probe) -> None:
    """FSDP2 with one rank computes the losses of a model without it: each kind of ZeRO, and all state on the host."""
    world = World(probe)
    plain = world.tiny_gpt("batch.micro_size=4")
    reference = plain.losses(LOSSES)
    plain.close()
    for name, overrides in ONE_SHARD.items():
        steps = _sharded_steps(world, *overrides)
        parameters = steps.engine.named_parameters().values()
        probe.equal(f"{name}: all parameters are sharded", {isinstance(one, DTensor) for one in parameters}, {True})
        homes = {one.device.type for one in parameters}
        probe.equal(f"{name}: where they are", homes, {"cpu" if "all" in name else probe.device})
        probe.within(f"{name}: losses", differing(steps.losses(LOSSES), reference), high=SAME)
        steps.close()


def _sharded_steps(world: World, *overrides: str) -> Steps:
    """Returns a training whose model is sharded over one rank, which a run of one rank would not do."""
    with patch.object(replica_engine, "parallelize", _shard_over_one):
        steps = world.tiny_gpt("batch.micro_size=4", *overrides)
    engine: Any = steps.engine
    engine._replicas = Sharded(engine.parts[0], steps.mesh, steps.config.strategy)
    return steps


def _shard_over_one(config: Config, mesh: Mesh, model: Model, restored: Collection[str] = ()) -> Model:
    """Has the signature of ``parallelize``."""
    offload = config.strategy.offload == "all"
    dtype = parameter_dtype(config.precision.name)
    split_and_wrap(config, mesh, model)
    fsdp.shard(model, mesh, mesh.layout.kind, config.precision.name, offload)
    materialize(model, mesh.device, config.train.seed, dtype, torch.device("cpu") if offload else mesh.device)
    return model.train()


def collectives_alone(probe: Probe) -> None:
    """The backend works on this device under each wrapper of torch with one rank, and its recorder lists it all."""
    from hpc_train.train.processes import collectives  # what a worker answers to its agent

    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # as in a worker
    World(probe).tiny_gpt().close()
    device = probe.device
    tensor = torch.arange(8.0, device=device)
    dist.all_reduce(tensor)
    probe.equal("all-reduce of one rank", tensor.tolist(), [float(value) for value in range(8)])
    gathered = [torch.empty_like(tensor)]
    dist.all_gather(gathered, tensor)
    probe.equal("all-gather of one rank", gathered[0].tolist(), tensor.tolist())
    inputs = torch.randn(4, 8, device=device)
    plain = _gradient(torch.nn.Linear(8, 8).to(device), inputs)
    for name, wrap in (("DDP", DistributedDataParallel), ("fully_shard", _sharded)):
        found = _gradient(wrap(torch.nn.Linear(8, 8).to(device)), inputs)
        probe.within(f"gradient under {name}, difference", float((found - plain).abs().max()), high=1e-5)
    for _ in range(8):
        dist.all_reduce(tensor)
    if probe.on_gpu:
        torch.cuda.synchronize()
    recorded = [one for one in read_collectives(collectives()) if "all_reduce" in one.operation]
    own = [one for one in recorded if one.is_on_host != probe.on_gpu]
    probe.within(f"all-reduces in the dump of {'NCCL' if probe.on_gpu else 'gloo'}'s recorder", len(own), low=8)
    if probe.on_gpu:
        probe.note("seconds of the last one on the GPU", own[-1].duration_s if own else None)


def _sharded(module: Any) -> Any:
    kind = next(module.parameters()).device.type
    return fully_shard(module, mesh=dist.init_device_mesh(kind, (1,)))


def _gradient(module: Any, inputs: Tensor) -> Tensor:
    """Returns the gradient of the weights, which are the same in each call."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1)
    module(inputs).square().sum().backward()
    gradient = next(module.parameters()).grad
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full
