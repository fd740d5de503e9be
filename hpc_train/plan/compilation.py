"""Checks the options of ``train.compile`` that need certain devices and layouts: CUDA graphs. Imports no torch."""

from __future__ import annotations

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.plan.activation_offload import parse_activation_offload
from hpc_train.plan.layout import Layout

_GRAPHS = "train.cuda_graphs"


def uses_cuda_graphs(config: Config) -> bool:
    """Returns whether compiled code runs as CUDA graphs."""
    return config.train.compile and config.train.cuda_graphs


def check_compilation(config: Config, layout: Layout) -> None:
    """
    Raises:
        UserError: the layout does not support CUDA graphs.
    """
    reason = _why_no_graphs(config, layout) if uses_cuda_graphs(config) else ""
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
    return ""


def check_compiler_device(config: Config, gpus: int) -> None:
    """
    Args:
        gpus: the GPUs of a node.

    Raises:
        UserError: ``config`` asks for CUDA graphs without a GPU.
    """
    if uses_cuda_graphs(config) and gpus == 0:
        raise UserError(
            "train.cuda_graphs needs GPUs, and this run trains on CPUs",
            where=_GRAPHS,
            fix="train.cuda_graphs=false, or train on GPUs (cluster.gpus_per_node)",
        )
