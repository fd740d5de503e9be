"""Which CPUs and which device each rank of a node gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.machine.gpus import Machine as GpuMachine
from hpc_train.machine.gpus import job_gpus, visible_devices
from hpc_train.machine.network.discovery import read_tree
from hpc_train.machine.network.facts import NodeFacts, Setting, format_cpu_list
from hpc_train.machine.network.rank_binding import bindings, devices, refuse_slices_of_same_gpu
from hpc_train.run.rows import check_fields
from tests.machine.network.machines import Machine, hgx, switch


def with_slices(facts: NodeFacts) -> NodeFacts:
    first, second = facts.gpus
    return replace(facts, gpus=(replace(first, slices=("MIG-aaaa", "MIG-bbbb")), replace(second, slices=("MIG-cccc",))))


def masks(facts: NodeFacts, ranks: int) -> list[str | None]:
    return [None if found.cpus is None else format_cpu_list(found.cpus) for found in bindings(facts, ranks)]


def facts_of(machine: Machine, **more: object) -> NodeFacts:
    return replace(read_tree(machine.root / "sys", machine.root / "proc"), node="n1", **more)  # type: ignore[arg-type]


def test_ranks_share_the_cores_near_their_gpus(tmp_path: Path) -> None:
    facts = facts_of(hgx(tmp_path), visible=tuple("01234567"))
    assert masks(facts, 8)[:2] == ["0-11,96-107", "12-23,108-119"]
    assert masks(facts, 8)[4] == "48-59,144-155"
    two = replace(facts, visible=("5", "2"))
    assert masks(two, 2) == ["48-95,144-191", "0-47,96-143"]
    assert [found.cores for found in bindings(two, 2)] == [48, 48]
    cpuset = replace(two, allowed=(0, 1, 96, 97, 50))
    assert masks(cpuset, 2) == ["50", "0-1,96-97"]


def test_who_binds_threads_himself_is_left_alone(tmp_path: Path) -> None:
    setting = Setting("GOMP_CPU_AFFINITY", "0-3", "the environment")
    facts = facts_of(hgx(tmp_path), visible=tuple("01"), settings=(setting,))
    assert masks(facts, 2) == [None, None]
    assert "GOMP_CPU_AFFINITY is set by the environment" in bindings(facts, 2)[0].reason


def test_without_gpus_only_cores_that_are_the_jobs_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.numa({0: "0,2,4,6", 1: "1,3,5,7"})  # as on many Intel machines
    machine.cores([str(cpu) for cpu in range(8)])
    facts = facts_of(machine, allowed=tuple(range(8)), allocated_cpus=8)
    assert masks(facts, 2) == ["0,2,4,6", "1,3,5,7"]
    assert masks(facts, 3) == ["0,2", "1,4,6", "3,5,7"]
    assert masks(facts, 9) == [None] * 9
    assert masks(replace(facts, allocated_cpus=4), 2) == [None, None]  # the site does not hold jobs to their CPUs
    assert masks(replace(facts, allocated_cpus=None), 2) == [None, None]
    assert masks(replace(facts, cores=()), 2) == [None, None]


def test_devices_by_number_uuid_and_slice(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for slot in (1, 2):
        machine.gpu(switch(1, slot, 1), 0)
    facts = facts_of(
        machine, visible=("1", "GPU-0001:1", "GPU-0001:11:01", "MIG-cccc", "MIG-GPU-0001:12:01.0/7/0", "9")
    )
    facts = with_slices(facts)
    found = [device.gpu.index if device.gpu else None for device in devices(facts)]
    assert found == [1, None, 0, 1, 1, None]  # a prefix of several UUIDs names none


def test_ranks_on_slices_of_one_gpu_are_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for slot in (1, 2):
        machine.gpu(switch(1, slot, 1), 0)
    facts = facts_of(machine, visible=("MIG-aaaa", "MIG-bbbb"))
    facts = with_slices(facts)
    with pytest.raises(UserError, match="2 ranks would run on MIG slices of GPU0 of n1"):
        refuse_slices_of_same_gpu(facts, 2)
    refuse_slices_of_same_gpu(facts, 1)
    refuse_slices_of_same_gpu(replace(facts, visible=("MIG-aaaa", "MIG-cccc")), 2)
    refuse_slices_of_same_gpu(replace(facts, visible=("MIG-unheard", "MIG-of")), 2)


def test_gpus_that_the_control_group_closes_are_not_counted(tmp_path: Path) -> None:
    driver, devices_there = tmp_path / "gpus", tmp_path / "dev"
    devices_there.mkdir()
    for minor in range(3):
        (driver / f"0000:0{minor}:00.0").mkdir(parents=True)
        (driver / f"0000:0{minor}:00.0/information").write_text(f"Model: \t\t H100\nDevice Minor: \t {minor}\n")
        (devices_there / f"nvidia{minor}").touch()
    assert len(job_gpus(driver, devices_there)) == 3
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2,0,3"}, GpuMachine(driver)) == ("2", "0")


def test_facts_go_through_json(tmp_path: Path) -> None:
    setting = Setting("NCCL_DEBUG", "INFO", "/etc/nccl.conf")
    facts = facts_of(
        hgx(tmp_path), visible=("0", "1"), settings=(setting,), versions=(("nccl", "2.27.5"),), route="eth0",
        allowed=(1, 2), allocated_cpus=2, automatic="lo", topology_file="/x",
    )  # fmt: skip
    assert NodeFacts.from_json(facts.to_json()) == facts
    check_fields(facts)  # what the rendezvous server accepts
