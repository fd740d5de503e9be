"""Chooses how ``train.compile`` compiles, and checks the options that need certain devices and layouts.

CUDA graphs (``train.cuda_graphs``) replay the kernels of a layer at fixed addresses. Asynchronous tensor parallelism
(``strategy.async_tp``) cuts the products beside a collective into as many pieces as there are ranks, and exchanges one
piece while another is computed (Wang et al. 2023, doi:10.1145/3567955.3567959). This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, check_all
from hpc_train.layout.activation_offload import parse_activation_offload
from hpc_train.layout.layout import Layout

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


def check_compilation(config: Config, layout: Layout) -> None:
    """Checks what CUDA graphs and ``strategy.async_tp`` need.

    Raises:
        UserError: the layout does not support CUDA graphs, or something that ``strategy.async_tp`` needs is missing.
    """
    check_all(lambda: _check_graphs(config, layout), lambda: _check_async(config, layout))


def _check_graphs(config: Config, layout: Layout) -> None:
    reason = _why_no_graphs(config, layout) if compiler_mode(config) == CompilerMode.CUDA_GRAPHS else ""
    if reason:
        raise UserError(
            f"train.cuda_graphs does not support {reason}",
            where=_GRAPHS,
            fix="train.cuda_graphs=false, or strategy=single or dp",
        )


def _why_no_graphs(config: Config, layout: Layout) -> str:
    """Returns what of ``layout`` a CUDA graph cannot replay, with the reason; an empty string if nothing."""
    if layout.pp > 1:
        return "pipelines: a graph has memory for the activations of one micro-batch, and a stage keeps several"
    if layout.shards_state:
        return f"{layout.kind.name}: a graph replays fixed addresses, and ZeRO gathers parameters into other memory"
    if layout.tp * layout.cp > 1:
        return "tensor or context parallelism, whose collectives are inside the compiled layers"
    if parse_activation_offload(config.train.activation_offload) is not None:
        return "train.activation_offload: the memory of a graph stays allocated, so a copy in host memory saves nothing"
    if config.optim.in_backward:
        return "optim.in_backward: gradients stay in the memory of a graph, so freeing them saves nothing"
    return ""


def _check_async(config: Config, layout: Layout) -> None:
    missing = [*_missing_for_async(config, layout)] if config.strategy.async_tp else []
    if missing:
        raise UserError(
            f"strategy.async_tp needs {'; '.join(missing)}",
            where=_ASYNC,
            fix="strategy.async_tp=false, or set what it needs",
        )


def _missing_for_async(config: Config, layout: Layout) -> Iterator[str]:
    """Yields what asynchronous tensor parallelism needs and does not have."""
    if not config.train.compile:
        yield "train.compile=true, since the compiler changes the products"
    if layout.tp == 1:
        yield "strategy.tp=2 or more"
    plan = family_of(config.model).tensor_parallel
    if plan is not None and not plan.shards_sequence:
        yield "a model whose ranks hold shards of the sequence, such as a gpt"
    if config.cluster.gpus_per_node == 0:
        yield "GPUs"
    elif config.cluster.visible_gpus == "own":
        yield "cluster.visible_gpus=all, since ranks write to the memory of each other's GPUs"


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
