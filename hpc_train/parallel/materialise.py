"""Gives memory and values to a model that was built on ``meta``, cut and sharded.

Each parameter is filled from its own generator, seeded by (seed, canonical name), so the weights are the same under
every layout. A rank never holds more than one full parameter beside its own shards.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpc_train.models.model import Model
from hpc_train.parallel.naming import canonical_name
from hpc_train.parallel.sharing import keep_shared


def is_meta(module: nn.Module) -> bool:
    """Whether ``module`` has no memory yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def parameter_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the values of parameter ``name``; the same in every process, unlike ``hash``."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def materialise(
    module: Model, device: torch.device, seed: int, dtype: torch.dtype, home: torch.device | None = None
) -> None:
    """Allocates ``module`` (whole or a stage, plain or sharded) and fills it with values that ``device`` draws.

    Args:
        module: on ``meta``; a tied copy (``module.tied``) gets the values of its canonical name.
        seed: of the run.
        dtype: of the floating-point parameters.
        home: where the parameters are, if not on ``device``; they are sharded then.
    """
    with keep_shared(module):
        module.to_empty(device=home or device)
        module.to(dtype=dtype)
    with torch.no_grad():
        for raw, parameter in module.named_parameters():
            name = canonical_name(raw)
            _fill(module, module.tied.get(name, name), parameter, seed, device)
    module.init_buffers(device)


def _fill(model: Model, name: str, parameter: Tensor, seed: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(parameter_seed(seed, name))
    if not isinstance(parameter, DTensor):
        model.init_parameter(name, parameter, generator)
        return
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    model.init_parameter(name, full, generator)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start if length else 0, length)
    parameter.to_local().copy_(full)
