"""Chooses how ``train.compile`` compiles, and checks the options that need certain devices and layouts.

CUDA graphs (``train.cuda_graphs``) replay the kernels of a layer at fixed addresses. Asynchronous tensor parallelism
(``strategy.async_tp``) cuts the products beside a collective into as many pieces as there are ranks, and exchanges one
piece while another is computed (Wang et al. 2023, doi:10.1145/3567955.3567959). This module imports no torch.
"""

from __future__ import annotations

from enum import StrEnum

from hpc_train.config.schema import Config
from hpc_train.errors import UserError

_GRAPHS, _ASYNC = "train.cuda_graphs", "strategy.async_tp"


class CompilerMode(StrEnum):
    """Lists what compiled code may do besides computing; the layouts of the two options exclude each other."""

    PLAIN = "plain"
    CUDA_GRAPHS = "cuda_graphs"
    ASYNC_TP = "async_tp"


def compiler_mode(config: Config) -> CompilerMode:
    """Returns the mode of what the config compiles."""
    if not config.train.compile:
        return CompilerMode.PLAIN
    if config.train.cuda_graphs:
        return CompilerMode.CUDA_GRAPHS
    return CompilerMode.ASYNC_TP if config.strategy.async_tp else CompilerMode.PLAIN


def check_compiler_device(config: Config, gpus: int) -> None:
    """Checks that the nodes have the GPUs that an option of the compiler needs.

    Args:
        gpus: the GPUs of a node.

    Raises:
        UserError: ``config`` asks for an option that needs GPUs, without a GPU.
    """
    mode = compiler_mode(config)
    if mode != CompilerMode.PLAIN and gpus == 0:
        key = _GRAPHS if mode == CompilerMode.CUDA_GRAPHS else _ASYNC
        raise UserError(
            f"{key} needs GPUs, and this run trains on CPUs",
            where=key,
            fix=f"{key}=false, or train on GPUs (cluster.gpus_per_node)",
        )
