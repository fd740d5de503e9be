"""NVML's answers, from a library with the names and forms that nvidia-ml-py has."""

from __future__ import annotations

from types import SimpleNamespace

from hpc_train.fabric.facts import Gpu, NodeFacts
from hpc_train.fabric.node import filled, gpus_of


class NVMLError(Exception):
    pass


class Library:
    """Two GPUs in another order than PCI's, one of them cut into slices with an empty place, and one that is lost."""

    NVMLError = NVMLError
    addresses = (b"00000000:81:00.0", "00000000:01:00.0", "00000000:FF:00.0")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.addresses)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number == 2:
            raise NVMLError("GPU is lost")
        return number

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.addresses[handle])

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA A100-SXM4-40GB"

    def nvmlDeviceGetUUID(self, handle: int | str) -> str:
        return f"MIG-{handle}" if isinstance(handle, str) else f"GPU-{handle}"

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        if handle == 1:
            raise NVMLError("not supported")
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> str:
        if number == 1:
            raise NVMLError("not found")
        return f"{handle}-{number}"


class Worn(Library):
    """The first GPU is about to fail; the second one's driver tells little."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        if handle == 1:
            raise NVMLError("not supported")
        return (0, 1, 1, 0)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, since: int) -> int:
        assert (kind, since) == (1, 0)
        return 3 if handle == 0 else 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x4 | 0x20 | 0x80 if handle == 0 else 0x1

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8 if handle == 0 else 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16


def test_what_is_wrong_with_a_gpu_is_told() -> None:
    good, worn = gpus_of(Worn())
    assert good.problems == () and [gpu.problems for gpu in gpus_of(Library())] == [(), ()]
    assert worn.problems == (
        "memory rows are pending remapping: the GPU needs a reset",
        "3 uncorrected memory errors (ECC) since the driver was loaded",
        "its clocks are throttled because it is too warm and by the power supply",
        "its PCIe link has 8 of 16 lanes",
    )
    facts = NodeFacts("n1", (worn,), visible=("0",))
    assert NodeFacts.from_json(facts.to_json()) == facts


def test_gpus_are_numbered_as_cuda_does() -> None:
    first, second = gpus_of(Library())
    assert (first.index, first.pci, first.uuid, first.slices) == (0, "0000:01:00.0", "GPU-1", ())
    assert (second.index, second.pci, second.slices) == (1, "0000:81:00.0", ("MIG-0-0", "MIG-0-2"))


def test_what_sys_shows_counts_first() -> None:
    reported = gpus_of(Library())
    seen = Gpu(0, "0000:81:00.0", uuid="GPU-seen", cpus=(1, 2))
    (found,) = filled([seen], reported)
    assert (found.uuid, found.cpus, found.model) == ("GPU-seen", (1, 2), "NVIDIA A100-SXM4-40GB")
    assert found.slices == ("MIG-0-0", "MIG-0-2")
    assert filled([], reported) == reported
    other = Gpu(0, "0000:02:00.0")
    assert filled([other], reported) == (other,)
