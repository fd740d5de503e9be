"""One line that says whether two trainings ended with the same weights, bit for bit."""

from __future__ import annotations

import hashlib

import torch

from hpc_train.parallel.engine import Engine


def weights_sha256(engine: Engine) -> str:
    """SHA-256 over the names and bytes of all parameters and buffers, by name; on a rank that holds them whole."""
    digest = hashlib.sha256()
    for name, value in sorted([*engine.named_parameters().items(), *engine.named_buffers().items()]):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
