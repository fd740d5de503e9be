"""Reports the memory of every rank, and explains an out-of-memory error with changes that would help in this run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import parse_recomputation
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import IN_BACKWARD, refusals
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import master_of
from hpc_train.run.exits import Failure, classify
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.watch.utilization import device_memory, peak_device_memory, peak_host_memory
from hpc_train.units import format_bytes


@dataclass(frozen=True)
class RankMemory:
    """Holds the bytes on the device of one rank.

    Attributes:
        peak: peak of the GPU's allocator; on the CPU the peak resident set, including the interpreter and libraries.
        activations: the rest of the peak, i.e. activations and temporary buffers.
        device: the memory of the GPU; on the CPU, the memory of the machine, which all processes share.
    """

    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    device: int


WHOLE = ("peak", "device")  # the values of RankMemory that are not parts of the peak


@dataclass(frozen=True)
class MemoryReport:
    """Holds the measured memory of all ranks and the estimate for the rank that needs the most."""

    ranks: tuple[RankMemory, ...]
    estimated: float | None

    def as_json(self) -> dict[str, Any]:
        return {"estimated": self.estimated, "ranks": [asdict(rank) for rank in self.ranks]}

    def __str__(self) -> str:
        rank, most = max(enumerate(self.ranks), key=lambda pair: pair[1].peak)
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in asdict(most).items() if name not in WHOLE)
        text = f"memory: peak {format_bytes(most.peak)} on rank {rank}: {parts} (including temporary buffers)"
        if self.estimated is not None:
            text += f"; the estimate was {format_bytes(self.estimated)}"
        return text


def report_memory(config: Config, mesh: Mesh, engine: Engine, optimizer: Optimizer) -> MemoryReport:
    """Measures the memory of all ranks after a step, before its gradients are freed. Collective."""
    parameters = {id(value): value for part in engine.parts for value in part.parameters()}.values()
    peak = peak_device_memory(mesh.device) or peak_host_memory()
    masters = (master for master in map(master_of, parameters) if master is not None)
    weights = _bytes((*parameters, *masters), mesh)
    gradients = _bytes((parameter.grad for parameter in parameters if parameter.grad is not None), mesh)
    state = _bytes(optimizer.tensors(), mesh)
    rest = max(0, peak - weights - gradients - state)
    measured = RankMemory(peak, weights, gradients, state, rest, device_memory(mesh.device))
    ranks: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(ranks, measured, group=mesh.control)
    needed = estimate(config, mesh.layout)
    return MemoryReport(tuple(ranks), needed.total if needed is not None else None)


def _bytes(tensors: Iterable[Tensor], mesh: Mesh) -> int:
    """Returns the bytes of the local tensors on the device of the rank, without offloaded tensors."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type == mesh.device.type)


SHOWN = 3  # number of suggested changes
WORTH = 0.02  # smallest saving, as a fraction of the estimate, that is worth suggesting


class OutOfMemory(MemoryError):
    """Reports that memory is exhausted; the message suggests changes of the config."""


@contextmanager
def explained(config: Config, mesh: Mesh) -> Iterator[None]:
    """Explains out-of-memory errors of the device or the host that are raised in this context.

    Raises:
        OutOfMemory: replaces the exception of torch or Python.
    """
    try:
        yield
    except Exception as error:
        if classify(error) is not Failure.OUT_OF_MEMORY:
            raise
        used = format_bytes(peak_device_memory(mesh.device) or peak_host_memory())
        kind = "GPU" if mesh.device.type == "cuda" else "host"
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        text = f"out of memory on rank {mesh.rank}, which had used {used} of {kind} memory: {first_line}."
        needed = estimate(config, mesh.layout)
        if needed is not None:
            text += f" Estimated memory per rank: {needed}, mostly {needed.largest}."
        changes = "; ".join(map(str, fixes(config, mesh))) or "use a machine with more memory"
        raise OutOfMemory(f"{text} To reduce memory in this run: {changes}") from error


@dataclass(frozen=True)
class MemorySaving:
    """Describes a change of the config and the bytes per rank that it saves according to the estimate."""

    change: str
    saves: float | None

    def __str__(self) -> str:
        return self.change if self.saves is None else f"{self.change} saves {format_bytes(self.saves)}"


def fixes(config: Config, mesh: Mesh) -> list[MemorySaving]:
    """Returns changes that save memory. Changes that cost the least speed come first.

    Without an estimate (custom models), it returns all changes; otherwise, at most ``SHOWN`` changes that save enough.
    """
    before = estimate(config, mesh.layout)
    if before is None:
        return [MemorySaving(change, None) for change, _ in _candidates(config, mesh)]
    savings = []
    for change, changed in _candidates(config, mesh):
        if changed is None:
            savings.append(MemorySaving(change, None))
            continue
        try:
            after = estimate(changed, resolve_layout(changed, 1, mesh.layout.world_size))
        except UserError:
            continue  # the changed config is invalid
        assert after is not None
        if before.total - after.total > WORTH * before.total:
            savings.append(MemorySaving(change, before.total - after.total))
    return savings[:SHOWN]


def _candidates(config: Config, mesh: Mesh) -> Iterator[tuple[str, Config | None]]:
    """Yields overrides that are not in use yet and the config with them. Those that cost the least speed come first."""
    layout = mesh.layout
    train = config.train
    gpu = mesh.device.type == "cuda"
    if layout.logical_micro_batches and layout.micro_size > 1:
        yield f"batch.logical_micro_batches={2 * layout.logical_micro_batches} in a new run", None
    elif layout.micro_size > 1:
        half = layout.micro_size // 2
        smaller = replace(config, batch=replace(config.batch, micro_size=half, micro_batches="auto"))
        yield f"batch.micro_size={half} (now {layout.micro_size}; the steps stay the same)", smaller
    if config.precision.name == "fp32" and gpu:
        yield "precision=bf16", replace(config, precision=replace(config.precision, name="bf16"))
    recomputes = train.activation_checkpointing not in ("auto", "none")
    ops, full = (replace(config, train=replace(train, activation_checkpointing=mode)) for mode in ("ops", "full"))
    if not recomputes:
        yield "train.activation_checkpointing=ops", ops
    if loss_form(config, layout).chunks == 1 and family_of(config.model).chunks_loss(config.model):
        yield "train.loss_chunks=8", replace(config, train=replace(train, loss_chunks=8))
    if not recomputes:
        yield "train.activation_checkpointing=full", full
    if not config.optim.in_backward and not any(refusals(IN_BACKWARD, config, layout)):
        yield "optim.in_backward=true", replace(config, optim=replace(config.optim, in_backward=True))
    if layout.dp_cp > 1 and "parameters" not in layout.kind.shards and not layout.logical_micro_batches:
        sharded: dict[str, Any] = {"data_parallel": "zero3", "compression": "none"}
        yield "strategy=zero3", replace(config, strategy=replace(config.strategy, **sharded))
    if config.optim._target_ is None and config.optim.name == "adamw" and config.optim.moments == "fp32":
        yield "optim.moments=bf16", replace(config, optim=replace(config.optim, moments="bf16"))
    has_budget = parse_recomputation(train.activation_checkpointing).budget is not None
    if gpu and train.activation_offload == "none" and not has_budget:
        yield "train.activation_offload=1MiB", replace(config, train=replace(train, activation_offload="1MiB"))
    if gpu and config.strategy.offload == "none":
        yield "strategy.offload=optimizer", replace(config, strategy=replace(config.strategy, offload="optimizer"))
    if not gpu and layout.world_size > 1:
        yield "fewer ranks per node (cluster.cpu_workers)", None
