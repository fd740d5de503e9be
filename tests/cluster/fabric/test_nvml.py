"""NVML's answers, from a library with the names and forms that nvidia-ml-py has."""

from __future__ import annotations

from types import SimpleNamespace

from hpc_train.cluster.fabric.facts import Gpu
from hpc_train.cluster.fabric.nvml import filled, gpus_of


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


def test_gpus_are_numbered_as_cuda_does() -> None:
    first, second = gpus_of(Library())
    assert (first.index, first.pci, first.uuid, first.slices) == (0, "0000:01:00.0", "GPU-1", ())
    assert (second.index, second.pci, second.slices) == (1, "0000:81:00.0", ("MIG-0-0", "MIG-0-2"))


def test_what_sys_shows_counts_first() -> None:
    told = gpus_of(Library())
    seen = Gpu(0, "0000:81:00.0", uuid="GPU-seen", cpus=(1, 2))
    (found,) = filled([seen], told)
    assert (found.uuid, found.cpus, found.model) == ("GPU-seen", (1, 2), "NVIDIA A100-SXM4-40GB")
    assert found.slices == ("MIG-0-0", "MIG-0-2")
    assert filled([], told) == told
    other = Gpu(0, "0000:02:00.0")
    assert filled([other], told) == (other,)
