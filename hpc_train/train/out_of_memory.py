"""An error of memory, told with what was asked for and what would help in this very run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpc_train.config.schema import Config
from hpc_train.measure.memory import peak_device_memory, peak_host_memory
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.exits import Failure, classify

GIB = 2**30


class OutOfMemory(MemoryError):
    """The message says what to change."""


@contextmanager
def explained(config: Config, mesh: Mesh) -> Iterator[None]:
    """Around what may need more memory than there is, of the device or of the host.

    Raises:
        OutOfMemory: in place of what torch or Python raised.
    """
    try:
        yield
    except Exception as error:
        if classify(error) is not Failure.OUT_OF_MEMORY:
            raise
        raise OutOfMemory(_message(error, config, mesh)) from error


def _message(error: Exception, config: Config, mesh: Mesh) -> str:
    used = peak_device_memory(mesh.device) or peak_host_memory()
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    told = f"out of memory on rank {mesh.rank}, which had used {used / GIB:.2f} GiB of the {_place(mesh.device)}"
    return f"{told}: {first_line}. In this run would help: {'; '.join(remedies(config, mesh)) or 'a larger machine'}"


def remedies(config: Config, mesh: Mesh) -> list[str]:
    """What is not in use yet, the cheapest first."""
    layout, found = mesh.layout, []
    if layout.logical_micro_batches and layout.micro_size > 1:
        found.append(f"batch.logical_micro_batches={2 * layout.logical_micro_batches}, from the first step on")
    elif layout.micro_size > 1:
        found.append(f"batch.micro_size={layout.micro_size // 2} (now {layout.micro_size}; the steps stay the same)")
    if config.precision.name == "fp32" and mesh.device.type == "cuda":
        found.append("precision=bf16")
    if config.train.activation_checkpointing == "none":
        found.append("train.activation_checkpointing=full")
    if layout.dp > 1 and layout.data_parallel != "zero3" and not layout.logical_micro_batches:
        found.append("strategy=zero3")
    if mesh.device.type == "cpu" and layout.world_size > 1:
        found.append("fewer ranks per node (cluster.cpu_workers)")
    return found


def _place(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "host"
