"""Rehearses a step with a custom model before the first step, and compares it with one process.

All ranks compute forward and backward of the same micro-batch of the first samples with the same random numbers. The
mean over the ranks is then the gradient of this micro-batch. The first rank computes the gradient again with a plain
copy of the model, without sharding, recomputation or compilation. To measure the effect of rounding, if the gradients
differ, the plain copy computes them again from parameters that are changed by one unit in the last place.

The rehearsal has no effect on the training: random state, buffers and plain attributes are restored, and gradients are
freed before an optimizer could use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.checkpoint.agreement import lowest
from hpc_train.checkpoint.extra_state import copy_extra_state
from hpc_train.config.schema import Config
from hpc_train.data.custom import target_count
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.machine.kernel_counters import free_memory
from hpc_train.models import batch_norm
from hpc_train.models.build import build_model
from hpc_train.models.model import Model, canonical_name, keep_shared, named_parameters
from hpc_train.models.wrapped import WrappedModel, begin_training
from hpc_train.parallel.collectives import broadcast_plain
from hpc_train.parallel.engine import Engine, seed_micro_batch
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import is_meta
from hpc_train.parallel.precision.dtypes import autocast, compute_dtype, parameter_dtype, set_hidden_dtype
from hpc_train.parallel.writes import watching_writes
from hpc_train.train.debug import join_names
from hpc_train.train.kept_state import (
    changed_attributes,
    kept_parameters,
    kept_random_state,
    kept_state,
    plain_attributes,
)
from hpc_train.units import format_bytes

EXACT = 1e-3  # gradients with a smaller relative difference count as equal
LARGE = 0.02  # a larger relative difference is reported, unless rounding explains it
NOISE = 10.0  # a difference is reported only if it exceeds the measured rounding this many times
NEGLIGIBLE = 1e-3  # a gradient with a smaller norm, relative to the largest norm, is not compared
SCALE = 1024.0  # the loss scale in fp16, where gradients would otherwise underflow


@dataclass
class Rehearsal:
    """Holds the results of the rehearsal.

    Attributes:
        attributes: plain attributes of modules that the forward pass changes.
        written: parameters to which the forward pass writes.
        not_compared: why the gradients were not compared with one process; None if they were, or need not be.
    """

    attributes: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    not_compared: str | None = None


def rehearse(config: Config, mesh: Mesh, engine: Engine, batch: Batch) -> Rehearsal:
    """Runs the rehearsal with ``batch``, which is the same on every rank. Collective.

    Raises:
        UserError: the forward pass writes to sharded parameters, or the gradients differ from those of one process.
    """
    rehearsal = Rehearsal()
    with kept_random_state(mesh.device), torch.compiler.set_stance("force_eager"):
        with kept_parameters(engine.named_parameters().values()), kept_state(engine.parts):
            before = plain_attributes(engine.parts)
            allocated = peak = 0
            if mesh.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(mesh.device)
                allocated = torch.cuda.memory_allocated(mesh.device)
            with watching_writes(engine.parts) as written:
                _train(config, mesh, engine, batch)
            if mesh.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(mesh.device)
            changed = changed_attributes(before, plain_attributes(engine.parts))
        changes_attributes = lowest(changed or None, mesh.control) is not None
        rehearsal.written = lowest(sorted(written) or None, mesh.control) or []
        if rehearsal.written:
            if mesh.layout.kind.sharder is not None and mesh.layout.dp_cp > 1:
                kind = mesh.layout.data_parallel
                raise UserError(
                    f"the forward pass writes to the parameters {join_names(rehearsal.written)}, but {kind} computes "
                    "with copies of them, so the written values are lost",
                    where=f"strategy.data_parallel={kind}, model",
                    fix="strategy=dp or single, which keep the written values",
                )
            engine.read_anew(rehearsal.written)
            with kept_parameters(engine.named_parameters().values()), kept_state(engine.parts):
                _train(config, mesh, engine, batch)
        try:
            rehearsal.not_compared = _compare(config, mesh, engine, batch, peak - allocated)
        finally:
            _clear(engine)
        if changes_attributes:
            # values from the last call, such as stored outputs, are the same after a second call and are not reported
            after = []
            with kept_state(engine.parts):
                for _ in range(2):
                    with (
                        kept_parameters(engine.named_parameters().values()),
                        kept_state(engine.parts, attributes=False),
                    ):
                        _train(config, mesh, engine, batch)
                    after.append(plain_attributes(engine.parts))
                _clear(engine)
            rehearsal.attributes = changed_attributes(*after)
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(mesh.device)
    return rehearsal


def _train(config: Config, mesh: Mesh, engine: Engine, batch: Batch) -> None:
    """Computes the gradients of ``batch`` on all ranks."""
    micro_batches = mesh.layout.micro_batches if mesh.layout.pp > 1 else 1
    seed_micro_batch(config.train.seed, 0, 0, mesh.device)
    count = target_count(batch.targets) * mesh.layout.dp * micro_batches
    engine.train_step(0, StepBatch((batch,) * micro_batches, count), _scale(config, mesh))


def _scale(config: Config, mesh: Mesh) -> Tensor | None:
    return torch.tensor(SCALE, device=mesh.device) if config.precision.name == "fp16" else None


def _clear(engine: Engine) -> None:
    for part in engine.parts:
        for parameter in part.parameters():
            parameter.grad = None


def _compare(config: Config, mesh: Mesh, engine: Engine, batch: Batch, activations: int) -> str | None:
    """Compares the gradients of ``engine`` with the gradients of a plain copy. Collective.

    Args:
        activations: the bytes that a micro-batch needs on the device in addition to parameters.

    Returns:
        The reason why they were not compared; None if they were, or if a single rank has computed them.

    Raises:
        UserError: the gradients differ.
    """
    if mesh.layout.dp_cp == 1:
        return None
    reason = broadcast_plain(_hindrance(config, mesh, engine, activations), mesh.control)
    if reason is not None:
        return str(reason)
    plain = _PlainModel(config, mesh, batch) if mesh.rank == 0 else None
    problem = lowest(plain.problem if plain is not None else None, mesh.control)
    if problem is None:
        _take_values(engine, plain.model if plain is not None else None)
        problem = lowest(_differences(engine, plain, mesh), mesh.control)
    if problem is None or isinstance(problem, str):
        return problem
    worst = sorted(problem, key=lambda name: -problem[name])
    listed = join_names([f"{name} (by {problem[name]:.2g} of its norm)" for name in worst])
    kind = mesh.layout.data_parallel
    raise UserError(
        f"under {kind} the gradients of these parameters differ from those of one process: {listed}",
        where=f"strategy.data_parallel={kind}, model",
        fix="strategy=dp or single; train.check=off trains with these gradients",
    )


def _hindrance(config: Config, mesh: Mesh, engine: Engine, activations: int) -> str | None:
    """Returns the reason why no rank can compute the gradients of the full model alone; None if the first rank can."""
    layout = mesh.layout
    if layout.pp > 1 or layout.tp > 1 or layout.cp > 1:
        return "no rank computes all of the model"
    if any(isinstance(part, Model | WrappedModel) and part.mixes_samples for part in engine.parts):
        return "the loss compares the samples of all ranks"
    if config.strategy.offload == "all":
        return "strategy.offload=all keeps the parameters in host memory"
    if config.precision.fp8 is not None:
        return "the gradients of precision.fp8 are too coarse"
    parameters = sum(value.numel() * value.element_size() for part in engine.parts for value in part.parameters())
    needed = 3 * parameters + max(0, activations)  # parameters and two sets of gradients
    if mesh.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(mesh.device)
        free += torch.cuda.memory_reserved(mesh.device) - torch.cuda.memory_allocated(mesh.device)
    else:
        free = free_memory().size
    if needed < 0.9 * free:
        return None
    return f"the comparison needs {format_bytes(needed)}, but {format_bytes(free)} are free"


class _PlainModel:
    """Computes with an unsharded copy of the model, like a single process.

    Attributes:
        problem: the reason why there is no copy; None if there is one.
    """

    def __init__(self, config: Config, mesh: Mesh, batch: Batch) -> None:
        self._config = config
        self._mesh = mesh
        self._batch = batch
        self.problem: str | None = None
        self.model: Model | WrappedModel | None = None
        try:
            model = build_model(config.model, config.train.seed)
            set_hidden_dtype(model, config.precision)
            batch_norm.keep_weights_fp32(model)
            if is_meta(model):
                with keep_shared(model):
                    model.to_empty(device=mesh.device)
            model.to(device=mesh.device, dtype=parameter_dtype(config.precision.name))
            begin_training(model)
            self.model = model
        except Exception as error:
            self.problem = f"a second copy of the model cannot be built: {type(error).__name__}: {error}"

    def gradients(self, noise: float = 0.0) -> dict[str, Tensor | None]:
        """Returns the gradients by name.

        Args:
            noise: the relative size of a random change of all parameters.
        """
        model = self.model
        assert model is not None
        parameters = named_parameters([model], getattr(model, "tied", {}))
        for parameter in parameters.values():
            parameter.grad = None
        if noise:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in parameters.values():
                    signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
                    parameter.mul_(1 + noise * signs.to(parameter.device, parameter.dtype))
        seed_micro_batch(self._config.train.seed, 0, 0, self._mesh.device)
        with kept_state([model]), _Alone():
            with autocast(self._config.precision.name, self._mesh.device):
                total, count, *_ = model(self._batch.inputs, self._batch.context, self._batch.targets)
            loss = total / torch.where(count == 0, 1.0, count).to(total.dtype)
            scale = _scale(self._config, self._mesh)
            (loss if scale is None else loss * scale).backward()
        return {name: parameter.grad for name, parameter in parameters.items()}


class _Alone(TorchDispatchMode):
    """Refuses collectives, in which the first rank would wait forever, since the other ranks do not compute."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("the model communicates with other ranks")
        return func(*args, **(kwargs or {}))


def _take_values(engine: Engine, model: nn.Module | None) -> None:
    """Copies parameters, buffers and extra state of the engine to the plain copy of the first rank. Collective."""
    with torch.no_grad():
        for part in engine.parts:
            copies = dict(_named_tensors(model)) if model is not None else {}
            for name, value in _named_tensors(part):
                full = value.full_tensor() if isinstance(value, DTensor) else value
                if name in copies:
                    copies[name].copy_(full)
            if model is not None:
                copy_extra_state(part, model)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield canonical_name(name), tensor


def _differences(engine: Engine, plain: _PlainModel | None, mesh: Mesh) -> Any:
    """Returns, on the first rank, name -> relative difference of the gradients that differ, or the reason why they
    cannot be compared. Returns None if they are equal, and on other ranks. Collective."""
    expected: dict[str, Tensor | None] = {}
    problem = None
    if plain is not None:
        try:
            expected = plain.gradients()
        except Exception as error:
            problem = f"a second copy of the model cannot be computed: {type(error).__name__}: {error}"
    problem = lowest(problem, mesh.control)
    if problem is not None:
        return problem if plain is not None else None

    distances: dict[str, float] = {}
    parameters = engine.named_parameters()
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if name in expected:
            distances[name] = _distance(gradient, expected[name])
    if plain is None:
        return None
    norms = {name: _distance(gradient, None) for name, gradient in expected.items()}
    if not all(map(math.isfinite, (*norms.values(), *distances.values()))):
        return "the gradients are not finite"
    floor = NEGLIGIBLE * max(norms.values(), default=0.0)
    if all(distance <= EXACT * norms[name] + floor * EXACT for name, distance in distances.items()):
        return None
    unused = [name for name in distances if expected[name] is None and parameters[name].requires_grad]
    if unused and mesh.layout.data_parallel == "ddp":  # DDP refuses unused parameters in its next forward pass
        return f"the forward pass does not use {join_names(unused)}"

    # measures the change of the gradients if every parameter changes by one unit in the last place
    precision = plain._config.precision.name
    dtype = compute_dtype(precision) or parameter_dtype(precision)
    disturbed = plain.gradients(torch.finfo(dtype).eps)
    rounding = {name: _distance(gradient, disturbed[name], otherwise=math.inf) for name, gradient in expected.items()}
    differences = {
        name: distance / max(norms[name], floor)
        for name, distance in distances.items()
        if distance > max(LARGE * norms[name], floor, NOISE * rounding[name])
    }
    return differences or None


def _distance(first: Tensor | None, second: Tensor | None, otherwise: float | None = None) -> float:
    """Returns the norm of the difference of two gradients. If only one of them exists, returns ``otherwise``, by
    default its norm."""
    if first is not None and second is not None:
        first = first.detach().double() - second.detach().double()
    elif otherwise is not None and first is not second:
        return otherwise
    present = first if first is not None else second
    if present is None:
        return 0.0
    return float(torch.linalg.vector_norm(present.detach(), dtype=torch.float64))
