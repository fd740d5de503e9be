"""Random numbers of the training step (dropout) as a function of where and when, not of what came before.

Seeded anew before each step, so a resumed run draws what it would have drawn, and no generator state is saved.
"""

from __future__ import annotations

import hashlib

import torch

from hpc_train.parallel.mesh import Mesh


def stream_seed(seed: int, step: int, dp_rank: int, pp_rank: int) -> int:
    """A 63-bit seed, the same in every process and version of Python."""
    digest = hashlib.blake2b(f"step:{seed}:{step}:{dp_rank}:{pp_rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds the default generators of the CPU and of this rank's device for ``step``.

    Tensor-parallel ranks share one stream: what is whole on each of them must be dropped alike.
    """
    value = stream_seed(seed, step, mesh.dp_rank, mesh.pp_rank)
    torch.default_generator.manual_seed(value)
    if mesh.device.type == "cuda":
        torch.cuda.manual_seed(value)
