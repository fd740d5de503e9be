"""Which GPU each local rank gets, by the names that CUDA_VISIBLE_DEVICES takes: numbers, UUIDs, MIG slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.cluster.fabric.facts import Gpu, NodeFacts
from hpc_train.config.errors import ConfigError

_SLICE = "MIG-"


@dataclass(frozen=True)
class Device:
    """The device of a local rank; ``gpu`` is None where it cannot be told which one it is or is a part of."""

    name: str
    gpu: Gpu | None

    @property
    def is_slice(self) -> bool:
        return self.name.startswith(_SLICE)


def devices(facts: NodeFacts) -> tuple[Device, ...]:
    """The visible devices of a node in the order of local rank."""
    return tuple(Device(name, _gpu(facts.gpus, name)) for name in facts.visible)


def refuse_slices_of_one_gpu(facts: NodeFacts, ranks: int) -> None:
    """Two ranks on one GPU cannot be connected by NCCL, whatever slices they have.

    Raises:
        ConfigError: that would be so for the first ``ranks`` devices.
    """
    slices = [device for device in devices(facts)[:ranks] if device.is_slice and device.gpu is not None]
    counts = Counter(device.gpu.name for device in slices if device.gpu is not None)
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"{count} ranks would run on MIG slices of {name} of {facts.node}, and NCCL connects no two ranks on "
                "one GPU",
                where="CUDA_VISIBLE_DEVICES",
                mend="cluster.gpus_per_node=1 trains on one slice; slices of different GPUs, or whole GPUs, train "
                "together",
            )


def _gpu(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if name.isdigit():
        return gpus[int(name)] if int(name) < len(gpus) else None
    uuid = name.removeprefix(_SLICE).partition("/")[0]  # MIG-GPU-<uuid>/7/0 of drivers before 470
    found = [gpu for gpu in gpus if (gpu.uuid or "").startswith(uuid) or name in gpu.slices]
    return found[0] if len(found) == 1 else None
