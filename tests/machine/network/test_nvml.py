"""The GPUs of a node as NVML describes them, beside what ``/sys`` shows."""

from __future__ import annotations

from hpc_train.machine.health.gpu_health import GpuReading, GpuState
from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.machine.network.node import filled
from hpc_train.run.rows import check_fields

A100 = "NVIDIA A100-SXM4-40GB"
FIRST = GpuState(0, "0000:01:00.0", A100, "GPU-1")
WORN = GpuState(
    1,
    "0000:81:00.0",
    A100,
    "GPU-0",
    rows_pending=True,
    uncorrected=3,
    slowdowns=("the driver finds it too warm", "the power supply requests it"),
    pcie_width=8,
    pcie_max_width=16,
    slices=("MIG-0-0", "MIG-0-2"),
)


def test_what_is_wrong_with_a_gpu_is_told() -> None:
    good, worn = filled([], GpuReading((FIRST, WORN)))
    assert good.problems == ()
    assert worn.problems == (
        "3 uncorrectable memory errors (ECC) since the driver was loaded",
        "memory rows wait to be remapped",
        "its clocks are reduced: the driver finds it too warm and the power supply requests it",
        "its PCIe link has 8 of 16 lanes",
    )
    facts = NodeFacts("n1", (worn,), visible=("0",))
    assert NodeFacts.from_json(facts.to_json()) == facts
    check_fields(facts)  # what the rendezvous server accepts


def test_what_sys_shows_counts_first() -> None:
    reported = GpuReading((FIRST, WORN))
    seen = Gpu(0, "0000:81:00.0", uuid="GPU-seen", cpus=(1, 2))
    (found,) = filled([seen], reported)
    assert (found.uuid, found.cpus, found.model) == ("GPU-seen", (1, 2), A100)
    assert found.slices == ("MIG-0-0", "MIG-0-2")
    other = Gpu(0, "0000:02:00.0")
    assert filled([other], reported) == (other,)
