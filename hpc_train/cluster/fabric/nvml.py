"""What NVIDIA's management library says of the GPUs, where nvidia-ml-py is installed (the extra ``nvml``).

It sees what the job's control group lets it see, fills gaps where ``/sys`` is hidden, and knows MIG slices. Without it
nothing is missing but these: ``/sys``, ``/proc`` and nvidia-smi tell the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpc_train.cluster.fabric.facts import Gpu
from hpc_train.cluster.fabric.gpu_health import gpu_troubles


def nvml() -> Any | None:
    """The library, initialised; None where it is not installed or finds no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def gpus_of(library: Any) -> tuple[Gpu, ...]:
    """The GPUs in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID; those that do not answer are left out."""
    found = []
    for number in range(library.nvmlDeviceGetCount()):
        with suppress(library.NVMLError):
            found.append(_gpu(library, library.nvmlDeviceGetHandleByIndex(number)))
    ordered = sorted(found, key=lambda gpu: gpu.pci or "")
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(ordered))


def filled(seen: Sequence[Gpu], told: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """``seen`` in ``/sys`` with what NVML ``told`` of the same PCI addresses; all of that where none was seen."""
    if not seen:
        return tuple(told)
    by_address = {gpu.pci: gpu for gpu in told}
    return tuple(_filled(gpu, by_address.get(gpu.pci)) for gpu in seen)


def _filled(seen: Gpu, told: Gpu | None) -> Gpu:
    if told is None:
        return seen
    model, uuid = seen.model or told.model, seen.uuid or told.uuid
    return replace(seen, model=model, uuid=uuid, slices=told.slices, troubles=told.troubles)


def _gpu(library: Any, handle: Any) -> Gpu:
    address = _text(library.nvmlDeviceGetPciInfo(handle).busId).lower()  # 00000000:81:00.0, with 8 digits of domain
    domain, _, rest = address.partition(":")
    return Gpu(
        index=0,
        pci=f"{int(domain, 16):04x}:{rest}",
        model=_text(library.nvmlDeviceGetName(handle)),
        uuid=_text(library.nvmlDeviceGetUUID(handle)),
        slices=tuple(_slices(library, handle)),
        troubles=gpu_troubles(library, handle),
    )


def _slices(library: Any, handle: Any) -> list[str]:
    found: list[str] = []
    with suppress(library.NVMLError):  # no MIG on this model
        for number in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(library.NVMLError):  # a place without a slice
                found.append(
                    _text(library.nvmlDeviceGetUUID(library.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
                )
    return found


def _text(value: bytes | str) -> str:
    """Older versions of nvidia-ml-py give bytes."""
    return value.decode() if isinstance(value, bytes) else value
