"""Wraps the layers that recompute a part of their forward in the backward pass.

Activation checkpointing ``full`` keeps only the input of every layer and recomputes the rest in the backward pass.
``selective:N`` does so in every N-th layer, which saves 1/N of the memory and costs 1/N of an extra forward pass (Chen
et al. 2016, arXiv:1604.06174). ``ops`` keeps the results of matrix products, attention, and the collectives of tensor
and context parallelism in every layer and recomputes only cheap operations: norms, rotations and activation functions.
Korthikanti et al. (2022, arXiv:2205.05198) recompute attention instead, but fused attention leaves little memory to
save. Under a budget ``plan.recomputation`` has chosen one of the two, or neither, for each layer.

A product whose partial sums a collective adds up is not kept, since the result of the collective is and both are as
wide. Code that is not compiled computes one such product of a layer again, that of attention, which takes about a tenth
of the time of the collectives that are not repeated (7 billion parameters on 8 H100s, computed, not measured).

A forward pass may change buffers: for example, the running statistics of BatchNorm or the vectors of spectral norm. If
it is computed again in the backward pass, it would change them twice, and read values that later micro-batches have
left. The recomputation therefore works on copies of the values from before the forward pass. The buffers of modules
that no forward pass changes are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpc_train.config.values import Recomputation
from hpc_train.errors import UserError
from hpc_train.models import moe, packed_attention
from hpc_train.models.model import Model
from hpc_train.models.wrapped import replace_block

_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_scaled_mm_v2", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable", "_grouped_mm",
)  # fmt: skip
PRODUCTS = frozenset((*(f"aten::{name}" for name in _NAMES), *packed_attention.OPERATORS, moe.OPERATOR))
# Without torch.compile, the result of a collective is kept, and a wait for it returns at once. A compiled graph keeps
# the result of the wait, since what a collective returns cannot be passed on before the wait.
COLLECTIVES = frozenset(
    f"_c10d_functional::{name}"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce")
)
WAIT = "_c10d_functional::wait_tensor"
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]  # of the forward, the recomputation


def apply_activation_checkpointing(model: nn.Module, recomputation: Recomputation, compiled: bool = False) -> None:
    """Wraps the layers or blocks of ``model`` (whole or a stage) in place.

    ``canonical_name`` removes the wrappers from names.

    Args:
        compiled: whether the layers will be compiled as a whole.

    Raises:
        UserError: the model has neither ``layers`` nor blocks.
    """
    if not recomputation.recomputes:
        return
    if isinstance(model, Model):
        names = [f"layers.{key}" for key in model.layers]
    else:
        names = list(getattr(model, "block_names", ()))
    if not names and not isinstance(model, Model):  # a stage may have no layer of the model
        raise UserError(
            "activation checkpointing wraps the layers of the model, but no repeated blocks were found in this model",
            where="train.activation_checkpointing",
            fix="use none, or name the classes of the blocks: model.wrap=[Block]",
        )
    for position, name in enumerate(names):
        number = int(name.rpartition(".")[2]) if isinstance(model, Model) else position
        mode = recomputation.mode(number)
        if mode != "none":
            block = model.get_submodule(name)
            contexts: Callable[[], Contexts] | None = None
            if mode == "ops":
                saved = PRODUCTS | ({WAIT} if compiled else COLLECTIVES)
                contexts = partial(create_selective_checkpoint_contexts, partial(_policy, saved))
            if not compiled and any(True for _ in block.buffers()):  # compiled code changes buffers once
                contexts = with_buffers(block, contexts)
            extra = {} if contexts is None else {"context_fn": contexts}
            wrapper = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **extra)
            replace_block(model, name, wrapper)


def _policy(saved: frozenset[str], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name()
    if name not in saved or (name in PRODUCTS and _is_partial(name, args)):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _is_partial(product: str, args: Sequence[Any]) -> bool:
    """Returns whether each rank multiplies a part of the inner dimension, so that the results must be summed."""
    left = args[product in ("aten::addmm", "aten::baddbmm")]
    return isinstance(left, DTensor) and any(placement.is_shard(left.ndim - 1) for placement in left.placements)


class ChangedBuffers:
    """Finds the buffers of ``layer`` that its forward passes change, in the first forward pass in training."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.names: set[str] | None = None  # None before that forward pass

    def contexts(self) -> Contexts:
        """Returns the contexts for ``torch.utils.checkpoint``; the second one can be entered several times."""
        before: dict[str, Tensor] = {}
        return _Forward(self, before), _Recomputation(self.layer, before)

    def record(self, earlier: dict[str, tuple[Tensor, int]]) -> None:
        """Records which buffers a forward pass in training has changed.

        torch does not count what the kernels of BatchNorm write as a change of its statistics, but its counter changes
        with them. Therefore all buffers of a module count as changed if one of them is.

        Args:
            earlier: the buffers before the forward pass, with their versions.
        """
        now = dict(self.layer.named_buffers())
        owners = {
            _owner(name)
            for name, (buffer, version) in earlier.items()
            if now.get(name) is not buffer or buffer._version != version
        }
        self.names = {name for name in now if _owner(name) in owners} | (self.names or set())


class _Forward:
    def __init__(self, changed: ChangedBuffers, before: dict[str, Tensor]) -> None:
        self._changed = changed
        self._before = before
        self._earlier: dict[str, tuple[Tensor, int]] = {}

    def __enter__(self) -> None:
        names = self._changed.names
        for name, buffer in self._changed.layer.named_buffers():
            self._earlier[name] = buffer, buffer._version
            if names is None or name in names:
                self._before[name] = buffer.clone()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._changed.layer.training:
            self._changed.record(self._earlier)
        self._earlier.clear()
        for name in self._before.keys() - (self._changed.names or set()):
            del self._before[name]


class _Recomputation:
    def __init__(self, layer: nn.Module, before: dict[str, Tensor]) -> None:
        self._layer = layer
        self._before = before
        self._present: dict[str, Tensor | None] = {}

    def __enter__(self) -> None:
        for name, value in self._before.items():
            holder = self._layer.get_submodule(_owner(name))
            attribute = name.rpartition(".")[2]
            self._present[name] = holder._buffers[attribute]
            holder._buffers[attribute] = value.clone()  # the backward pass may recompute once more

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for name, buffer in self._present.items():
            self._layer.get_submodule(_owner(name))._buffers[name.rpartition(".")[2]] = buffer
        self._present = {}


class _Both:
    """Enters two contexts."""

    def __init__(self, *contexts: AbstractContextManager[object]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def with_buffers(layer: nn.Module, contexts: Callable[[], Contexts] | None) -> Callable[[], Contexts]:
    """Returns a ``context_fn`` for ``torch.utils.checkpoint`` that also does what ``contexts`` does."""
    changed = ChangedBuffers(layer)

    def both() -> Contexts:
        pair = changed.contexts()
        if contexts is None:
            return pair
        others = contexts()
        return _Both(pair[0], others[0]), _Both(pair[1], others[1])

    return both


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
