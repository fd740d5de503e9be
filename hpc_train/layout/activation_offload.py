"""Parses and checks ``train.activation_offload``, and computes what it leaves on a device and adds to host memory.

It imports no torch; ``parallel.activations.offload`` moves the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode, parse_recomputation
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.recomputation import layer_bytes, layers_of_rank, recomputation_of
from hpc_train.units import parse_bytes

_WHERE = "train.activation_offload"


def parse_activation_offload(text: str) -> int | None:
    """Returns the size in bytes from which saved tensors are kept in host memory; None if none are.

    Raises:
        UserError: ``text`` is neither none nor a size.
    """
    size = None if text == "none" else parse_bytes(text)
    if text == "none" or size:
        return size
    raise UserError(
        f"{_WHERE} is {text!r}, which is not a size", where=_WHERE, fix=f"{_WHERE}=1MiB, or none to offload nothing"
    )


def check_activation_offload(config: Config) -> None:
    """Checks that the other options support ``train.activation_offload``.

    Raises:
        UserError: another option does not support activation offload.
    """
    if parse_activation_offload(config.train.activation_offload) is None:
        return
    asked = config.train.activation_checkpointing
    if parse_recomputation(asked).budget is not None:
        raise UserError(
            f"train.activation_checkpointing={asked} is a budget for what stays on a device, but {_WHERE} moves it",
            where=f"train.activation_checkpointing, {_WHERE}",
            fix=f"train.activation_checkpointing=none or full, or {_WHERE}=none",
        )


def kept_if_less(config: Config, layout: Layout) -> float | None:
    """Returns the bytes that a layer keeps for a micro-batch if they are less than the size from which tensors are
    moved, so that none is; None otherwise, and for a model whose activations are unknown."""
    least = parse_activation_offload(config.train.activation_offload)
    if least is None or family_of(config.model).activations is None:
        return None
    kept = layer_bytes(config, layout)["none"]
    return kept if kept < least else None


def offloaded_bytes(config: Config, layout: Layout, pp_rank: int) -> float:
    """Returns the bytes in host memory that a rank's layers need between forward and backward."""
    layers = layers_of_rank(config, layout, pp_rank)
    return sum(layer.in_flight * moved_bytes(config, layout, layer.number) for layer in layers)


def moved_bytes(config: Config, layout: Layout, layer: int) -> float:
    """Returns the bytes that ``layer``, by global number, moves to host memory and back for one micro-batch.

    Of ``ops`` it is the input, like ``full``. The input is the smallest of a layer's large tensors; if it is too small,
    nothing is moved. The last layer stays on the device, since its backward pass comes next.
    """
    if config.train.activation_offload == "none" or layer == config.model.n_layers - 1:
        return 0.0
    return moved_by_mode(config, layout)[recomputation_of(config, layout).mode(layer)]


def moved_by_mode(config: Config, layout: Layout) -> Mapping[LayerMode, float]:
    """Returns ``moved_bytes`` of a layer that is not the last, by what it recomputes."""
    least, sizes = parse_activation_offload(config.train.activation_offload), layer_bytes(config, layout)
    if least is None or sizes["full"] < least:
        return {"none": 0.0, "ops": 0.0, "full": 0.0}
    return {"none": sizes["none"], "ops": sizes["full"], "full": sizes["full"]}


def node_bytes(config: Config, layout: Layout, nodes: int) -> float | None:
    """Returns the host memory that the activations of a node's ranks take; None if it is unknown or none is taken."""
    family = family_of(config.model)
    known = family.parameters is not None and family.parameters(config.model) is not None
    if not known or family.activations is None:
        return None
    of_ranks = sum(offloaded_bytes(config, layout, rank) for rank in range(layout.pp))
    return of_ranks * layout.stage_ranks / nodes or None
