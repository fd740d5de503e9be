"""Maps the state of a run to one flat dict of global names, which is the same under every layout.

``model.NAME`` is a parameter or persistent buffer, ``optim.NAME.KEY`` a tensor of its optimizer state. NAME is the
canonical name in the unsplit model. A rank holds a part of the names, and of each DTensor its shard.

``compression.NAME.residual.SLOT`` is the error-feedback residual of one replica for parameter NAME. Only the sum over
the slots matters: under another layout the old slot s is added to the new slot (s modulo their number), so no gradient
is lost or counted twice. ``compression.NAME.basis`` is shared by all replicas.

With ``strategy.local_steps`` the state of one of the replicas is under ``replica.RANK.NAME``, and the momentum of the
outer steps under ``outer.NAME``; see ``train/optimizers/outer.py``.

``hooks.HOOK.KEY`` is a tensor of a hook's state. ``extra.KEY`` and ``extra_tensor.KEY.PATH`` are further entries of the
model's state dict; see ``extra_state.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpc_train.checkpoint.agreement import Group, from_rank
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.parallel.engine import Compression
from hpc_train.parallel.precision.dtypes import COMPUTE_DTYPES
from hpc_train.parallel.precision.masters import saved_value

SHOWN = 8  # names listed per problem in a message
ALIASES = "aliases"  # key in the manifest: further names of tied tensors -> their names in the checkpoint


class ModelState(Protocol):
    """Interface of a model whose state is saved in checkpoints; an ``Engine`` implements it."""

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the modules that this rank holds, whose state dicts may have more than parameters and buffers."""

    def named_parameters(self) -> Mapping[str, Tensor]:
        """Returns canonical global name -> parameter of this rank."""

    def named_buffers(self) -> Mapping[str, Tensor]:
        """Returns canonical global name -> persistent buffer of this rank."""

    def compressions(self) -> Sequence[Compression]:
        """Returns the gradient compression of each part of this rank."""


class OptimizerState(Protocol):
    """Interface of an optimizer whose state is saved in checkpoints."""

    def expect(self, stored: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
        """Allocates tensors for a checkpoint before a load; returns those whose shapes only the optimizer knows."""

    def named_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns canonical parameter name -> key -> tensor; a load writes into these tensors."""

    def loaded(self) -> None:
        """Applies loaded values; called after a load into the parameters and possibly into ``named_state``."""

    def before_next_update(self, action: Callable[[], None]) -> None:
        """Calls ``action`` once, before the next update changes a parameter or the state."""


class OuterState(Protocol):
    """Interface of the outer steps of ``strategy.local_steps``, whose replicas have different weights."""

    def begin(self) -> None:
        """Gives all replicas the initial values of the first. Collective."""

    def saved(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that this rank saves for its ``state``, by their names in a checkpoint."""

    def targets(self, state: Mapping[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
        """Returns the tensors into which a checkpoint with the names ``stored`` is loaded instead of ``state``."""

    def loaded(self, stored: Collection[str]) -> None:
        """Applies loaded values; called after a load into ``targets``."""


class Ranks(Protocol):
    """Interface of the ranks that save and load together; a ``Mesh`` implements it.

    Attributes:
        control: a group of all ranks for collectives on the CPU; None without ``torch.distributed``.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def control(self) -> Group: ...

    @property
    def pp_rank(self) -> int: ...

    @property
    def dp_cp_rank(self) -> int: ...

    @property
    def tp_rank(self) -> int: ...

    def group(self, axis: str) -> Group:
        """Returns the group of this rank along ``dp_cp`` or ``dp_replicate``."""


def model_state(engine: ModelState) -> dict[str, Tensor]:
    """Returns the parameters and buffers that this rank holds; for bf16 parameters, the master weights."""
    state = {f"model.{name}": saved_value(parameter) for name, parameter in engine.named_parameters().items()}
    return state | {f"model.{name}": buffer for name, buffer in engine.named_buffers().items()}


def training_state(engine: ModelState, optimizer: OptimizerState) -> dict[str, Tensor]:
    """Returns all tensors that this rank holds; loading into them restores the rank."""
    state = model_state(engine)
    for name, tensors in optimizer.named_state().items():
        state |= {f"optim.{name}.{key}": tensor for key, tensor in tensors.items()}
    return state


def saved_state(
    engine: ModelState, optimizer: OptimizerState, mesh: Ranks, outer: OuterState | None = None
) -> dict[str, Tensor]:
    """Returns the tensors that this rank saves. Buffers may differ between data-parallel ranks, so one of them saves
    them."""
    state = training_state(engine, optimizer) | compression_state(engine)
    if mesh.dp_cp_rank % mesh.layout.replica.dp_cp != 0 or mesh.tp_rank != 0:
        buffers = {f"model.{name}" for name in engine.named_buffers()}
        state = {name: tensor for name, tensor in state.items() if name not in buffers}
    return state if outer is None else outer.saved(state)


def kept_until_update(engine: ModelState, state: Iterable[str]) -> set[str]:
    """Returns the names of the tensors that only the optimizer changes, not a forward or backward pass."""
    parameters = {f"model.{name}" for name in engine.named_parameters()}
    return {name for name in state if name in parameters or name.startswith("optim.")}


@dataclass(frozen=True)
class TensorShape:
    """Holds the global shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def shapes(state: Mapping[str, Tensor]) -> dict[str, TensorShape]:
    return {name: TensorShape(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def stored_shapes(metadata: Metadata) -> dict[str, TensorShape]:
    """Returns the shapes of the tensors in a checkpoint."""
    return {
        name: TensorShape(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def gather_shapes(local_shapes: Mapping[str, TensorShape], mesh: Ranks, group: Group) -> dict[str, TensorShape]:
    """Collects the shapes from one rank per stage, since replicas and tensor-parallel ranks hold the same names."""
    gathered: dict[str, TensorShape] = {}
    for first in mesh.layout.first_ranks:
        gathered |= from_rank(first, local_shapes, group)
    return gathered


def model_part(state: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
    return {name: shape for name, shape in state.items() if name.startswith("model.")}


def optimizer_part(state: Mapping[str, TensorShape]) -> set[str]:
    return {name for name in state if name.startswith("optim.")}


def check_match(stored: Mapping[str, TensorShape], needed: Mapping[str, TensorShape], where: str) -> None:
    """Compares a checkpoint with the state of all ranks before anything is loaded.

    Raises:
        UserError: names or shapes differ; the message lists all kinds of difference.
    """
    different = [
        f"{name}: {stored[name]} in the checkpoint, {needed[name]} in the run"
        for name in needed
        if name in stored and not _loads_into(stored[name], needed[name], converts=name.startswith("optim."))
    ]
    differences = {
        "missing in the checkpoint": [name for name in needed if name not in stored],
        "only in the checkpoint": [name for name in stored if name not in needed],
        "different shape or dtype": different,
    }
    problems = []
    for kind, names in differences.items():
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        if names:
            problems.append(f"{kind} ({len(names)}): {', '.join(sorted(names)[:SHOWN])}{more}")
    if problems:
        raise UserError(
            "the checkpoint does not match the model or optimizer:\n  " + "\n  ".join(problems),
            where=where,
            fix="use the model and optimizer that it was saved with, or another run.name to start at step 0",
        )


def _loads_into(stored: TensorShape, needed: TensorShape, converts: bool) -> bool:
    """Returns whether a tensor can be loaded; optimizer state may change its dtype, and frozen parameters, which may be
    in fp32 or in a compute dtype."""
    numbers = stored.dtype.is_floating_point and needed.dtype.is_floating_point
    frozen = stored.dtype != needed.dtype and {stored.dtype, needed.dtype} <= {torch.float32, *COMPUTE_DTYPES.values()}
    return stored == needed or ((converts or frozen) and numbers and stored.shape == needed.shape)


PREFIX = "compression."
HOOKS = "hooks."
LOCAL = "replica."
OUTER = "outer."
EXTRA = ("extra.", "extra_tensor.")
_SLOT = re.compile(r"(compression\..+)\.(\d+)")
_Value = TypeVar("_Value")


def compression_state(engine: ModelState) -> dict[str, Tensor]:
    """Returns this rank's state of gradient compression under its names in a checkpoint."""
    state = {}
    for compression in engine.compressions():
        for residual in compression.local_state():
            state[f"{PREFIX}{residual.name}.residual.{residual.slot}"] = residual.tensor
        state |= {f"{PREFIX}{name}": tensor for name, tensor in compression.shared_state()}
    return state


def required(stored: Mapping[str, _Value]) -> dict[str, _Value]:
    """Returns what a run with this model and optimizer must load; compression, hooks, replicas and extra state may have
    changed."""
    optional = (PREFIX, HOOKS, LOCAL, OUTER, *EXTRA)
    return {name: value for name, value in stored.items() if not name.startswith(optional)}


def weights_of_hook(stored: Mapping[str, object], hook: str) -> dict[str, str]:
    """Returns the names of the model's tensors in a checkpoint -> the names of the tensors of ``hook`` for them.

    Raises:
        UserError: the hook has no tensors in the checkpoint.
    """
    prefix = f"{HOOKS}{hook}."
    hook_names = {f"model.{name.removeprefix(prefix)}": name for name in stored if name.startswith(prefix)}
    present = {name: hook_name for name, hook_name in hook_names.items() if name in stored}
    if not present:
        hooks = sorted({name.split(".")[1] for name in stored if name.startswith(HOOKS)})
        alternatives = f"it has weights of {', '.join(hooks)}" if hooks else "it has no tensors of hooks"
        raise UserError(
            f"the checkpoint has no weights of the hook {hook}; {alternatives}",
            where="--weights",
            fix="omit --weights to use the weights of the model",
        )
    return present


def missing_in(stored: Mapping[str, TensorShape], needed: Mapping[str, TensorShape]) -> str | None:
    """Returns why the tensors ``needed`` by a hook cannot be loaded, or None."""
    for name, shape in needed.items():
        if name not in stored:
            return f"{name} is not in the checkpoint"
        if not _loads_into(stored[name], shape, converts=True):
            return f"{name} is {stored[name]} in the checkpoint, {shape} in the run"
    return None


class CompressionLoad:
    """Redistributes the compression state of a checkpoint over the ranks of the current layout.

    Args:
        stored: the tensors of the checkpoint. Without compression state among them the residuals become zero.

    Attributes:
        targets: name -> tensor to load into. Call ``finish`` after the load.
        drops: whether the checkpoint has residuals that this rank drops, since it has none.
    """

    def __init__(self, engine: ModelState, stored: Mapping[str, TensorShape]) -> None:
        self.targets: dict[str, Tensor] = {}
        self._sums: list[tuple[Tensor, list[Tensor]]] = []
        slots: dict[str, list[int]] = {}  # compression.NAME.residual -> its slots in the checkpoint
        for name in stored:
            if match := _SLOT.fullmatch(name):
                slots.setdefault(match[1], []).append(int(match[2]))
        for compression in engine.compressions():
            for residual in compression.local_state():
                head = f"{PREFIX}{residual.name}.residual"
                present = sorted(slots.get(head, ()))
                names = [f"{head}.{slot}" for slot in present if slot % residual.slots == residual.slot]
                parts = [torch.empty_like(residual.tensor) for _ in names]
                self.targets |= zip(names, parts, strict=True)
                self._sums.append((residual.tensor, parts))
            for name, tensor in compression.shared_state():
                stored_shape = stored.get(f"{PREFIX}{name}")
                if stored_shape is not None and stored_shape.shape == tuple(tensor.shape):
                    self.targets[f"{PREFIX}{name}"] = tensor
        self.drops = bool(slots) and not self._sums

    def finish(self) -> None:
        for tensor, parts in self._sums:
            tensor.zero_()
            for part in parts:
                tensor.add_(part)
