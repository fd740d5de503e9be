"""Splits, wraps, compiles, shards and initializes a model, in the only order that works.

Each parameter is initialized from its own generator, seeded by (seed, canonical name), so the weights are the same
under every layout. CPUs and GPUs draw different numbers from the same seed. A rank never holds more than one full
parameter besides its own shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpc_train.config.import_path import locate
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.loss_chunks import LossForm, loss_form
from hpc_train.layout.recomputation import parse_activation_offload, recomputation_of
from hpc_train.layout.techniques import CompilerMode, compiler_mode
from hpc_train.models import batch_norm
from hpc_train.models.hf.decoder import HFWhole
from hpc_train.models.linear_head import LinearHead
from hpc_train.models.model import Model, canonical_name, keep_shared
from hpc_train.models.transformer import CrossEntropyHead
from hpc_train.models.wrapped import WrappedModel, begin_training
from hpc_train.parallel.activation_checkpointing import apply_activation_checkpointing
from hpc_train.parallel.activation_offload import offload_activations
from hpc_train.parallel.collectives import broadcast_tensors
from hpc_train.parallel.compile import compile_model, share_memory
from hpc_train.parallel.context import apply_context_parallel
from hpc_train.parallel.experts import apply_expert_parallel
from hpc_train.parallel.gradient_norm import sparse_gradient
from hpc_train.parallel.mesh import Mesh, synchronize
from hpc_train.parallel.precision.dtypes import set_hidden_dtype, set_parameter_dtypes
from hpc_train.parallel.precision.float8 import use_float8
from hpc_train.parallel.precision.masters import local_part, narrow_weights
from hpc_train.parallel.tensor import apply_tensor_parallel

AnyModel = TypeVar("AnyModel", bound=Model | WrappedModel)


def parallelize(config: Config, mesh: Mesh, model: AnyModel, restored: Collection[str] = ()) -> AnyModel:
    """Turns ``model`` (whole or a pipeline stage) in place into the part that this rank trains, without DDP's wrapper.

    Args:
        model: a model on ``meta`` that initializes itself, or a user's module. For a user's module, the values of the
            first rank are used, so the other ranks may have it on ``meta`` if it is sharded.
        restored: the parameters that a checkpoint will be loaded into; those of a model that initializes itself get no
            values before.
    """
    offload = config.strategy.offload == "all"
    home = torch.device("cpu") if offload else mesh.device
    sharder = sharder_of(mesh.layout)
    values = dict[str, Tensor]()
    initializes = isinstance(model, Model | HFWhole) and is_meta(model)
    check_no_complex(model)
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise sparse_gradient(f"{canonical_name(name)}.weight")
    optim = config.optim
    has_compact_moments = optim._target_ is None and optim.name == "adamw" and optim.moments != "fp32"
    if sharder is not None or has_compact_moments:
        # FSDP refuses other memory formats, such as channels_last, and moments in bf16 are those of flat parameters
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
    split_and_wrap(config, mesh, model)
    batch_norm.join(model, mesh.device, mesh.group("dp"))
    batch_norm.keep_weights_fp32(model)
    if not initializes:
        if sharder is None:
            set_parameter_dtypes(model, config.precision, False, mesh.device)
            take_first_replica(model, mesh)
        else:
            set_parameter_dtypes(model, config.precision, True)
            values = _put_aside(model)
    if sharder is not None:
        shard = locate(sharder, f"strategy.data_parallel={mesh.layout.data_parallel}")
        shard(model, mesh, mesh.layout.kind, config.precision.name, offload)
    if initializes:
        assert isinstance(model, Model | HFWhole)
        replicas = mesh.group("dp_cp" if sharder is None else "dp_replicate")
        set_parameter_dtypes(model, config.precision, sharder is not None)
        materialize(model, mesh.device, config.train.seed, None, home, replicas, restored)
    elif sharder is not None:
        _hand_out(model, mesh, values, home)
    if config.precision.weights == "bf16":
        narrow_weights(model)
    begin_training(model)
    return model


def sharder_of(layout: Layout) -> str | None:
    """Returns the import path of the function that shards a model; None if every rank holds all parameters."""
    if layout.dp_cp > 1:
        return layout.kind.sharder
    return None


def _put_aside(model: nn.Module) -> dict[str, Tensor]:
    """Returns the values of a user's module by name and moves the module to ``meta``."""
    with torch.no_grad():
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with keep_shared(model):
            model.to(device="meta")
    return {name: value.detach() for name, value in values.items()}


def _hand_out(model: nn.Module, mesh: Mesh, values: dict[str, Tensor], home: torch.device) -> None:
    """Allocates a sharded module and fills it with the ``values`` of the first rank, one tensor at a time.

    The other ranks hold one full tensor at most, and rank 0 the module in host memory until this function ends.
    """
    with keep_shared(model):
        model.to_empty(device=home)
    group = mesh.group("dp_cp")
    source = dist.get_global_rank(group, 0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, held in tensors.items():
            full = torch.empty(held.shape, dtype=held.dtype, device=mesh.device)
            if mesh.dp_cp_rank == 0:
                full.copy_(values.pop(name))
            dist.broadcast(full, source, group=group)
            if isinstance(held, DTensor):
                held.to_local().copy_(_shard_of(full, held))
            elif held.device == mesh.device:
                held.copy_(full)
            else:  # a buffer, or a parameter that is not sharded, while shards are in host memory
                owner, _, attribute = name.rpartition(".")
                part = model.get_submodule(owner)
                if isinstance(held, nn.Parameter):
                    full = nn.Parameter(full, requires_grad=held.requires_grad)
                setattr(part, attribute, full)


def _shard_of(full: Tensor, held: DTensor) -> Tensor:
    shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start if length else 0, length)
    return full


def split_and_wrap(config: Config, mesh: Mesh, model: Model | WrappedModel) -> None:
    """Applies tensor, context and expert parallelism, the dtype of hidden states, fp8, the form of the loss, activation
    checkpointing, activation offload and compilation in place, without sharding."""
    set_hidden_dtype(model, config.precision)
    if mesh.layout.tp > 1 and isinstance(model, Model):
        apply_tensor_parallel(model, mesh.device_mesh["tp"])
    apply_expert_parallel(model, mesh)
    use_float8(model, config.precision, mesh.device, mesh.layout.splits_backward)
    if mesh.layout.cp > 1 and isinstance(model, Model):
        apply_context_parallel(model, mesh)
    apply_loss_form(model, loss_form(config, mesh.layout))
    # experts that exchange rows are not compiled, so a recomputation would change the buffers of their router again
    compiles_all = config.train.compile and mesh.layout.ep == 1
    apply_activation_checkpointing(model, recomputation_of(config, mesh.layout), compiles_all)
    if config.train.compile:
        mode = compiler_mode(config)
        if mode == CompilerMode.ASYNC_TP:
            share_memory(mesh.group("tp"))
        compile_model(model, mode)
    least_bytes = parse_activation_offload(config.train.activation_offload)
    if least_bytes is not None:
        offload_activations(model, least_bytes, mesh.device)


def check_no_complex(model: nn.Module) -> None:
    """Checks that nothing is complex: the conversion to the dtype of the model would keep only the real part.

    Raises:
        UserError: a parameter or buffer is complex.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise UserError(
                f"{name} is complex, but parameters and buffers must be real",
                where=f"model, {name}",
                fix="store torch.view_as_real(tensor), and call torch.view_as_complex on it in the forward",
            )


def take_first_replica(model: nn.Module, mesh: Mesh) -> None:
    """Broadcasts parameters and buffers of the first rank, since a user's module may differ between ranks."""
    if mesh.layout.dp_cp > 1:
        broadcast_tensors((*model.parameters(), *model.buffers()), 0, mesh.group("dp_cp"), mesh.device)


def is_meta(module: nn.Module) -> bool:
    """Returns whether ``module`` has no memory yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def parameter_seed(seed: int, name: str) -> int:
    """Returns a 63-bit seed for the values of parameter ``name``, which is the same in every process."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def materialize(
    module: Model | HFWhole,
    device: torch.device,
    seed: int,
    dtype: torch.dtype | None,
    home: torch.device | None = None,
    replicas: dist.ProcessGroup | None = None,
    restored: Collection[str] = (),
) -> None:
    """Allocates ``module`` (whole or a stage, sharded or not) and initializes its parameters.

    Args:
        module: a module on ``meta``; a tied copy (``module.tied``) gets the values of its canonical name.
        device: the device that draws the random values.
        seed: the seed of the run.
        dtype: the dtype of the floating-point parameters; None keeps those of ``module``. Values in half precision are
            drawn in fp32 and rounded.
        home: the device of sharded parameters if it is not ``device``.
        replicas: a group whose ranks hold the same parameters. Its first rank reads those that are stored in files or
            drawn on the CPU, and sends them to the others, so that the shared file system is read once and not by each
            replica.
        restored: canonical names of parameters that get no values, because a checkpoint follows.
    """
    with keep_shared(module):
        if dtype is not None:
            module.to(dtype=dtype)
        module.to_empty(device=home or device)
    with torch.no_grad():
        for raw, parameter in module.named_parameters():
            name = canonical_name(raw)
            name = module.tied.get(name, name)
            if name in restored:
                continue
            if replicas is None or replicas.size() == 1 or not module.starts_on_host(name):
                _fill(module, name, parameter, seed, device)
                continue
            if replicas.rank() == 0:
                _fill(module, name, parameter, seed, device)
            broadcast_tensors([local_part(parameter)], 0, replicas, device)
            # otherwise, the timeout of NCCL would begin for all parameters before the first is read
            synchronize(device)
    module.init_buffers(device)


def _fill(model: Model | HFWhole, name: str, parameter: Tensor, seed: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(parameter_seed(seed, name))
    dtype = parameter.dtype
    if dtype.is_floating_point:
        dtype = torch.promote_types(dtype, torch.float32)
    if not isinstance(parameter, DTensor):
        if parameter.dtype == dtype:
            model.init_parameter(name, parameter, generator)
        else:
            full = torch.empty(parameter.shape, dtype=dtype, device=device)
            model.init_parameter(name, full, generator)
            parameter.copy_(full)
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    stored = model.stored_box(name, tuple(offset), tuple(shape)) if all(shape) else None
    if stored is None:
        full = torch.empty(parameter.shape, dtype=dtype, device=device)
        model.init_parameter(name, full, generator)
        stored = _shard_of(full, parameter)
    parameter.to_local().copy_(stored)


def apply_loss_form(model: nn.Module, form: LossForm) -> None:
    """Makes ``model`` (whole or a stage, already split by tensor parallelism) compute its loss in this form.

    The logits of a micro-batch and their gradient each have ``micro x sequence x vocabulary`` elements. N chunks need
    1/N of that memory. Without the fused form the backward pass computes each chunk again, which takes one more product
    with the output matrix.
    """
    head = model.head if isinstance(model, Model) else None
    if not isinstance(model, Model) or not isinstance(head, CrossEntropyHead):
        return
    head.chunks = form.chunks
    head.sequence_shards = model.sequence_shards
    head.z_loss = form.z_loss
    if isinstance(head, LinearHead):
        head.fused = form.fused
