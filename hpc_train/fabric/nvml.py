"""What NVIDIA's management library says of the GPUs, where nvidia-ml-py is installed (the extra ``nvml``).

It sees what the job's control group lets it see, fills gaps where ``/sys`` is hidden, and knows MIG slices. Without it
nothing is missing but these: ``/sys``, ``/proc`` and nvidia-smi tell the rest.

What is wrong with a GPU, as NVIDIA's management library tells without privileges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpc_train.fabric.facts import Gpu


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


# bits of nvmlClocksThrottleReasons that hold clocks down against the user's will; power caps and set clocks are usual
HELD_DOWN = {
    0x08: "by its hardware",
    0x20: "as it is too warm",
    0x40: "as it is much too warm",
    0x80: "by the power supply",
}


def gpu_troubles(library: Any, handle: Any) -> tuple[str, ...]:
    """A line for each; () where all is well, or where the model or the driver does not tell."""
    checks: tuple[Callable[[Any, Any], Iterator[str]], ...] = (_rows, _errors, _clocks, _width)
    found: list[str] = []
    for check in checks:
        try:
            found += check(library, handle)
        except (library.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
            continue
    return tuple(found)


def _rows(library: Any, handle: Any) -> Iterator[str]:
    _, _, pending, failed = library.nvmlDeviceGetRemappedRows(handle)
    if pending:
        yield "rows of its memory are to be remapped: it needs a reset"
    if failed:
        yield "rows of its memory could not be remapped: it needs to be replaced"


def _errors(library: Any, handle: Any) -> Iterator[str]:
    kind, since = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
    if count := library.nvmlDeviceGetTotalEccErrors(handle, kind, since):
        yield f"{count} uncorrected memory errors (ECC) since its driver was loaded"


def _clocks(library: Any, handle: Any) -> Iterator[str]:
    reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    if held := [words for bit, words in HELD_DOWN.items() if reasons & bit]:
        yield f"its clocks are held down {' and '.join(held)}"


def _width(library: Any, handle: Any) -> Iterator[str]:
    lanes, most = library.nvmlDeviceGetCurrPcieLinkWidth(handle), library.nvmlDeviceGetMaxPcieLinkWidth(handle)
    if lanes < most:
        yield f"its PCIe link has {lanes} of {most} lanes"
