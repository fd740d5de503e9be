"""GPU facts and problems from NVIDIA's management library, if nvidia-ml-py is installed (the extra ``nvml``).

It respects the job's control group, fills gaps where ``/sys`` is hidden, and knows MIG slices. It is optional:
``/sys``,
``/proc`` and nvidia-smi provide the rest. No check needs privileges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpc_train.fabric.facts import Gpu


def nvml() -> Any | None:
    """Returns the initialised library; None if it is not installed or finds no driver."""
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
    """Returns the GPUs in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID, without those that do not respond."""
    found = []
    for number in range(library.nvmlDeviceGetCount()):
        with suppress(library.NVMLError):
            found.append(_gpu(library, library.nvmlDeviceGetHandleByIndex(number)))
    ordered = sorted(found, key=lambda gpu: gpu.pci or "")
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(ordered))


def filled(seen: Sequence[Gpu], nvml_facts: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Completes the GPUs ``seen`` in ``/sys`` with NVML's facts on the same PCI addresses; returns NVML's if none was
    seen.
    """
    if not seen:
        return tuple(nvml_facts)
    by_address = {gpu.pci: gpu for gpu in nvml_facts}
    return tuple(_filled(gpu, by_address.get(gpu.pci)) for gpu in seen)


def _filled(seen: Gpu, nvml_facts: Gpu | None) -> Gpu:
    if nvml_facts is None:
        return seen
    model, uuid = seen.model or nvml_facts.model, seen.uuid or nvml_facts.uuid
    return replace(seen, model=model, uuid=uuid, slices=nvml_facts.slices, troubles=nvml_facts.troubles)


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
            with suppress(library.NVMLError):  # an empty slot
                found.append(
                    _text(library.nvmlDeviceGetUUID(library.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
                )
    return found


def _text(value: bytes | str) -> str:
    """Decodes bytes, which older versions of nvidia-ml-py return."""
    return value.decode() if isinstance(value, bytes) else value


# bits of nvmlClocksThrottleReasons that indicate a problem; power caps and application clocks are normal
HELD_DOWN = {
    0x08: "by the hardware",
    0x20: "because it is too warm",
    0x40: "because it is much too warm",
    0x80: "by the power supply",
}


def gpu_troubles(library: Any, handle: Any) -> tuple[str, ...]:
    """Returns a line per problem; () if there is none or the model or driver does not report it."""
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
        yield "memory rows are pending remapping: the GPU needs a reset"
    if failed:
        yield "memory rows could not be remapped: the GPU must be replaced"


def _errors(library: Any, handle: Any) -> Iterator[str]:
    kind, since = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
    if count := library.nvmlDeviceGetTotalEccErrors(handle, kind, since):
        yield f"{count} uncorrected memory errors (ECC) since the driver was loaded"


def _clocks(library: Any, handle: Any) -> Iterator[str]:
    reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    if held := [words for bit, words in HELD_DOWN.items() if reasons & bit]:
        yield f"its clocks are throttled {' and '.join(held)}"


def _width(library: Any, handle: Any) -> Iterator[str]:
    lanes, most = library.nvmlDeviceGetCurrPcieLinkWidth(handle), library.nvmlDeviceGetMaxPcieLinkWidth(handle)
    if lanes < most:
        yield f"its PCIe link has {lanes} of {most} lanes"
