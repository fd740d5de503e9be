"""Random numbers of the training step (dropout) as a function of where and when, not of what came before.

Seeded anew before each step, so a resumed run draws what it would have drawn, and no generator state is saved.
"""

from __future__ import annotations

import hashlib

import torch

from hpc_train.parallel.mesh import Mesh


def stream_seed(*place: object) -> int:
    """A 63-bit seed of a place in a run, the same in every process and version of Python."""
    digest = hashlib.blake2b(":".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds the default generators of the CPU and of this rank's device for ``step``.

    Tensor-parallel ranks share one stream: what is whole on each of them must be dropped alike.
    """
    _seed_all(stream_seed("step", seed, step, mesh.dp_rank, mesh.pp_rank), mesh.device)


def seed_micro_batch(seed: int, step: int, logical: int, device: torch.device) -> None:
    """The same for a logical micro-batch, whichever rank computes it."""
    _seed_all(stream_seed("micro-batch", seed, step, logical), device)


def _seed_all(value: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
