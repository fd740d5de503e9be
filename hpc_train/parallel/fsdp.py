"""Implements ZeRO with FSDP2 (``fully_shard``) over the ``dp_shard`` ranks.

All three kinds shard the optimizer state. They differ in gradients and parameters:

zero1: unsharded gradients accumulate and are reduce-scattered once, after the last micro-batch. Parameters are
    unsharded from the first forward pass of a step to its last backward pass.
zero2: gradients are reduce-scattered after the backward pass of every micro-batch. Parameters are as in zero1.
zero3: gradients are as in zero2. Parameters are gathered for one layer at a time, again for its backward pass, while
    the layer before it in that pass computes. Stem, head and the last layer stay unsharded within a micro-batch: the
    backward pass begins with head and last layer, and needs no parameters of an embedding.

Gradients are summed and not averaged: NCCL implements an average as a multiplication before the sum, and reduces in
the switches of NVLink and InfiniBand (NVLS, SHARP) and in registered buffers only plain sums, minima and maxima.

Scalars, such as the temperature of CLIP, are not sharded; ``Sharded`` sums their gradients.

With fewer ``dp_shard`` than ``dp_cp`` ranks (HSDP) the shard groups are replicas of each other, and gradients are
all-reduced between them once per step. ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.

``strategy.compression=bf16`` sends the gradients of every reduce-scatter in bf16. FSDP's own ``reduce_dtype`` would
also add micro-batches up in that dtype; here only the message and the sum over the ranks are narrow. The all-reduce
between replicas is unchanged, since FSDP does not allow replacing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from hpc_train.errors import UserError
from hpc_train.layout.techniques import DataParallelKind
from hpc_train.models.model import Model, canonical_name
from hpc_train.models.moe import Experts
from hpc_train.models.wrapped import layers_of
from hpc_train.parallel.engine import changed_training
from hpc_train.parallel.gradient_norm import sparse_gradient
from hpc_train.parallel.mesh import Mesh, reduce_scatter_tensor
from hpc_train.parallel.precision.dtypes import compute_dtype, parameter_dtype
from hpc_train.parallel.precision.masters import local_part


def shard(model: nn.Module, mesh: Mesh, kind: DataParallelKind, precision: str, offload: bool = False) -> None:
    """Shards ``model`` in place. Each layer or block is one group, the head another, and the rest of the model a third.

    The gradients are summed over the ``dp_cp`` ranks. With expert parallelism the experts of a layer are a
    separate group.

    Args:
        model: the model or stage before it is materialized, with wrapped and compiled layers or blocks.
        kind: ``zero1``, ``zero2`` or ``zero3``.
        precision: the precision of the config; bf16 and fp16 gather parameters in that dtype, and reduce and accumulate
            gradients in fp32.
        offload: whether to keep shards of parameters and gradients in host memory.
    """
    layout = mesh.layout
    axes = ("dp_shard",) if layout.shard == layout.dp_cp else ("dp_replicate", "dp_shard")
    dtype = compute_dtype(precision)
    # inputs are not cast, since autocast does that where appropriate, and rotary tables stay fp32
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=parameter_dtype(precision) if dtype else None, cast_forward_inputs=False
    )
    home = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
    wrap = partial(
        fully_shard,
        mesh=mesh.device_mesh[axes],
        mp_policy=policy,
        offload_policy=home,
        ignored_params={parameter for parameter in model.parameters() if is_replicated(parameter)},
    )
    layers = layers_of(model)
    in_turn: list[nn.Module] = []
    for layer in layers:
        reshards = "parameters" in kind.shards and layer is not layers[-1]
        groups = [part for part in layer.modules() if isinstance(part, Experts)] if layout.ep > 1 else []
        for experts in groups:
            _shard_experts(experts, mesh, wrap, reshards)
        wrap(layer, reshard_after_forward=reshards)
        for experts in groups:
            _gather_around(layer, experts)
        in_turn += [layer, *groups]
    if isinstance(model, Model):
        in_turn.insert(0, model)
        if model.head is not None and _owns_its_head(model):
            wrap(model.head, reshard_after_forward=False)
            _gather_around_loss(model, model.head)
            in_turn.append(model.head)
    wrap(model, reshard_after_forward=False)
    for part, following in pairwise(in_turn):  # FSDP2 does so by itself only in the backward pass
        part.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _shard_experts(experts: Experts, mesh: Mesh, wrap: Callable[..., Any], reshards: bool) -> None:
    """Makes the experts of this rank a group, which the ranks that hold the same experts share: whole experts if these
    ranks divide their number, otherwise a part of each expert."""
    assert mesh.expert_mesh is not None
    copies, shards, _ = mesh.layout.expert_sizes

    def placement(parameter: nn.Parameter) -> Shard | None:
        shape = local_part(parameter).shape
        return next((Shard(dim) for dim, size in enumerate(shape) if size % shards == 0), None)

    axes = ("expert_shard",) if copies == 1 else ("expert_replicate", "expert_shard")
    wrap(experts, mesh=mesh.expert_mesh[axes], reshard_after_forward=reshards, shard_placement_fn=placement)


def _gather_around(layer: nn.Module, experts: Any) -> None:
    """Makes ``layer`` gather the parameters of its ``experts``, a group, before its forward pass, and reduce them after
    its backward pass.

    FSDP itself does so around ``experts``, inside the graph of a compiled layer and inside of what activation
    checkpointing computes again.
    """
    state = experts._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    layer.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    layer.register_forward_hook(state._post_forward)


def _owns_its_head(model: Model) -> bool:
    """Returns whether only ``Model.run_head`` uses the parameters of the head, which are not tied to others."""
    parameters = [*model.named_parameters(remove_duplicate=False)]
    others = {id(parameter) for name, parameter in parameters if not name.startswith("head.")}
    is_tied = any(id(parameter) in others for name, parameter in parameters if name.startswith("head."))
    return type(model).forward is Model.forward and not is_tied


def _gather_around_loss(model: Any, head: Any) -> None:
    """Makes ``model`` gather the parameters of ``head``, a group, before ``run_head``, and reduce them after its
    backward pass.

    FSDP itself does so at each call of the head's forward pass. A loss may call it several times or never.
    """
    state = head._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    run_head = model.run_head

    def gather_and_run(head: nn.Module, hidden: Tensor, targets: Tensor | None) -> Any:
        inputs, _ = state._pre_forward(head, (hidden, targets), {})
        return state._post_forward(head, inputs, run_head(head, *inputs))

    model.run_head = gather_and_run


def is_replicated(parameter: Tensor) -> bool:
    """Returns whether every rank holds all of ``parameter``: FSDP shards neither scalars nor empty parameters."""
    return not parameter.ndim or not parameter.numel()


class CastReduceScatter:
    """Sums gradients in ``dtype``; replaces FSDP's reduce-scatter, with its methods."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer of FSDP: gradients before and after the sum, in the dtype in which they accumulate."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sums or averages ``input_tensor`` over the ranks of ``group``; FSDP has chosen the stream, and waits for it.

        Args:
            output_tensor: gets this rank's part, 1/N of the elements.
            async_op: not supported; FSDP leaves it out.
        """
        assert not async_op
        received = output_tensor.new_empty(output_tensor.shape, dtype=self._dtype)
        reduce_scatter_tensor(received, input_tensor.to(self._dtype), op=op, group=group)
        output_tensor.copy_(received)


def cast_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the sharded ``model`` reduce its gradients in ``dtype``."""
    collective = CastReduceScatter(dtype)
    for module in sharded_modules(model):
        module.set_custom_reduce_scatter(collective)  # type: ignore[arg-type]


def choose_communication(model: nn.Module, comm: str) -> None:
    """Makes the sharded ``model`` communicate as ``strategy.comm`` says. Collective over all ranks.

    Raises:
        UserError: this version of torch has no separate group for reduce-scatters.
    """
    modules = sharded_modules(model)
    if comm == "user_buffers":
        for module in modules:
            module.set_allocate_memory_from_process_group_for_comm(True)
    if comm == "separate":
        if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
            raise UserError(
                f"torch {torch.__version__} gathers and scatters on one communicator only",
                where="strategy.comm=separate",
                fix="torch 2.13 or later, or strategy.comm=default",
            )
        modules[0].set_separate_reduce_scatter_group()  # the root, with all groups in it


def begin_backward(modules: Iterable[FSDPModule], kind: DataParallelKind, last: bool) -> None:
    """Configures ``modules`` for the micro-batches that follow, which may be the ``last`` of the step."""
    for module in modules:
        module.set_requires_gradient_sync(last or "gradients" in kind.shards, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or "parameters" in kind.shards, recurse=False)


def release(modules: Iterable[FSDPModule]) -> None:
    """Frees unsharded parameters after a forward pass without a backward pass; the next update makes them stale."""
    for module in modules:
        module.reshard()


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Returns the groups of ``model`` that are gathered together, each as its module."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(part: FSDPModule) -> list[Any]:
    """Returns FSDP's records of the groups of ``part``."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def gathered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns canonical name -> the parameter that autograd uses, for the sharded parameters of ``model`` that a pass
    has gathered before; its memory may be freed."""
    parameters = [
        parameter for part in sharded_modules(model) for group in _groups(part) for parameter in group.fsdp_params
    ]
    return {
        canonical_name(parameter._param_fqn): parameter._unsharded_param
        for parameter in parameters
        if hasattr(parameter, "_unsharded_param")
    }


STEADY_STEPS = 20  # equal ones, after which the ranks no longer wait for each other before each collective
END = "ends the step"


class SharedGroups:
    """Keeps the collectives of ZeRO consistent between ranks for a user's ``module``, whose forward pass may depend on
    the data.

    FSDP gathers a group of parameters when its block is called, and reduces the gradients that the block has. Ranks
    that call other blocks, as a mixture of experts or layer drop does, would exchange the parameters of different
    blocks or wait for each other forever. So the ranks compare what they gather and reduce: before each collective
    until many steps were alike, and then once per step before the gradients are used. In a group, a parameter without a
    gradient counts as zero, and a gradient that is missing on all ranks stays None, as in one process.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._control = mesh.control
        self._kind = mesh.layout.data_parallel
        self._steady = 0  # how many steps did the same as the one before them
        self._last: list[int] = []  # by this rank in the last step
        self._texts = [END]  # what a rank can do next; a number stands for each
        self._done: list[int] = []  # by this rank in this step
        self._held: list[Any] = []  # FSDP's record of each parameter
        self._parameters: list[Any] = []  # those that train
        self._used: set[Any] = set()  # those with a gradient on this rank in this step
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                self._watch(canonical_name(name) or "the rest of the model", part)

    def _watch(self, name: str, part: FSDPModule) -> None:
        for group in _groups(part):
            self._held += group.fsdp_params
            self._parameters += [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
            gathers, reduces = len(self._texts), len(self._texts) + 1
            self._texts += [f"gathers {name}", f"reduces {name}"]
            checked = _CheckedAllGather(group._all_gather_comm, partial(self._next, gathers))
            part.set_custom_all_gather(checked)  # type: ignore[arg-type]
            group.post_backward = self._completing(group, group.post_backward, reduces)

    def _completing(self, group: Any, post_backward: Callable[..., None], number: int) -> Callable[..., None]:
        def complete_and_reduce(*unused: Any) -> None:
            trained = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
            if group.reduce_grads and group.is_unsharded and trained:
                self._complete(trained)
                self._next(number)
            post_backward(*unused)

        return complete_and_reduce

    def _complete(self, trained: Sequence[Any]) -> None:
        """Adds zeros for missing gradients, so that all ranks reduce the same parameters."""
        # earlier micro-batches may have added up in another dtype, and all gradients of a message need the same
        is_wide = any(parameter.unsharded_accumulated_grad is not None for parameter in trained)
        for parameter in trained:
            if parameter.unsharded_accumulated_grad is not None:
                self._used.add(parameter)
                continue
            if parameter.unsharded_param.grad is not None and parameter.unsharded_param.grad.is_sparse:
                raise sparse_gradient(canonical_name(parameter._param_fqn))
            if parameter.unsharded_param.grad is None:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            else:
                self._used.add(parameter)
            if is_wide:
                parameter.to_accumulated_grad_if_needed()

    def _next(self, number: int) -> None:
        """Raises UserError if another rank does something else now, unless the steps are steady."""
        self._done.append(number)
        if self._steady < STEADY_STEPS:
            self._agree(number, [])

    def finish(self) -> None:
        """Ends a step: the gradients of parameters that no rank has used become None again. Collective."""
        self._next(0)
        for parameter in self._held:  # the forward pass sees the gathered parameters and not the shards
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.requires_grad is not parameter.sharded_param.requires_grad:
                raise changed_training(canonical_name(parameter._param_fqn), gathered.requires_grad)
        used = [int(parameter in self._used) for parameter in self._parameters]
        for parameter, uses in zip(self._parameters, self._agree(hash(tuple(self._done)) >> 1, used), strict=True):
            if uses == 0:
                parameter.sharded_param.grad = None
        self._used.clear()
        self._steady = self._steady + 1 if self._done == self._last else 0
        self._last = self._done
        self._done = []

    def evaluated(self) -> None:
        """Ends forward passes without a backward pass. Collective."""
        self._next(0)
        self._agree(hash(tuple(self._done)) >> 1, [])
        self._done.clear()

    def _agree(self, number: int, flags: Sequence[int]) -> list[int]:
        """Returns the flags that any rank has set.

        Raises:
            UserError: the ranks have different numbers; raised on all ranks.
        """
        message = torch.tensor([number, -number, *flags])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._control)
        highest, lowest, *result = message.tolist()
        if highest != -lowest:
            self._refuse()
        return result

    def _refuse(self) -> NoReturn:
        done: list[list[int]] = [[] for _ in range(dist.get_world_size(self._control))]
        dist.all_gather_object(done, self._done, group=self._control)
        numbers = next(numbers for numbers in zip_longest(*done, fillvalue=0) if len({*numbers}) > 1)
        rank = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        difference = f"rank 0 {self._texts[numbers[0]]} while rank {rank} {self._texts[numbers[rank]]}"
        raise UserError(
            f"the ranks do not use the same blocks of the model: {difference}",
            where=f"strategy.data_parallel={self._kind}, model.wrap",
            fix="model.wrap=[] shards the model as one group, which may use any of its parts on any rank; or "
            "strategy.data_parallel=allreduce; or name in model.wrap only classes of blocks that every rank calls",
        )


class _CheckedAllGather:
    """Calls ``check`` before each all-gather of a group; replaces ``gather``, FSDP's, with its methods."""

    def __init__(self, gather: Any, check: Callable[[], None]) -> None:
        self.allocate = gather.allocate
        self._gather = gather
        self._check = check

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._check()
        work: dist.Work | None = self._gather(output_tensor, input_tensor, group, async_op)
        return work
