"""What is wrong with a GPU, as NVIDIA's management library tells without privileges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
