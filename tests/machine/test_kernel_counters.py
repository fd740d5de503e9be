"""Free host memory and the traffic of NICs, read from trees as ``/proc`` and ``/sys`` have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.machine.kernel_counters import GROUP, NODE, FreeMemory, Traffic, free_memory, read_traffic

NO_LIMIT_V1 = 9223372036854771712
NODE_FREE = 4000 * 1024


def free(tmp_path: Path, membership: str | None, files: dict[str, object]) -> FreeMemory:
    processes = tmp_path / "proc"
    (processes / "self").mkdir(parents=True)
    (processes / "meminfo").write_text("MemTotal:  9999 kB\nMemFree:  10 kB\nMemAvailable:  4000 kB\n")
    if membership is not None:
        (processes / "self/cgroup").write_text(membership)
    for name, content in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return free_memory(tmp_path / "groups", processes, tmp_path / "sys")


V1, V2 = "9:cpu:/a\n4:memory:/slurm/job_7/step_0\n0::/\n", "0::/slurm/job_7/step_0\n"
OPEN = {"slurm/job_7/step_0/memory.max": "max", "slurm/job_7/step_0/memory.current": 1}
JOB = {"slurm/job_7/memory.max": 3_000_000, "slurm/job_7/memory.current": 2_500_000}


@pytest.mark.parametrize(
    ("membership", "files", "size", "bound"),
    [
        (None, {}, NODE_FREE, NODE),
        (V2, {}, NODE_FREE, NODE),
        (V2, OPEN, NODE_FREE, NODE),
        (V2, OPEN | JOB, 500_000, GROUP),
        (V2, JOB | {"slurm/job_7/memory.stat": "anon 7\nactive_file 1000\ninactive_file 2000"}, 503_000, GROUP),
        (V2, JOB | {"slurm/job_7/memory.high": 2_600_000}, 100_000, GROUP),
        (V2, JOB | {"slurm/job_7/memory.current": 3_000_001}, 0, GROUP),
        ("0::/\n", {"memory.max": 2_000_000, "memory.current": 500_000}, 1_500_000, GROUP),
        (V2, JOB | {"slurm/job_7/memory.max": 90_000_000}, NODE_FREE, NODE),
        (
            V1,
            {
                "memory/slurm/job_7/step_0/memory.limit_in_bytes": NO_LIMIT_V1,
                "memory/slurm/job_7/step_0/memory.usage_in_bytes": 5,
                "memory/slurm/job_7/memory.limit_in_bytes": 1_000_000,
                "memory/slurm/job_7/memory.usage_in_bytes": 900_000,
                "memory/slurm/job_7/memory.stat": "active_file 1\ntotal_active_file 10\ntotal_inactive_file 20",
            },
            100_030,
            GROUP,
        ),
    ],
)
def test_the_smallest_bound_counts(
    tmp_path: Path, membership: str | None, files: dict[str, object], size: int, bound: str
) -> None:
    assert free(tmp_path, membership, files) == FreeMemory(size, bound)


def test_the_memory_of_a_gpu_is_not_that_of_the_host(tmp_path: Path) -> None:
    """A GH200: node 0 has the CPUs, node 1 is the memory of the GPU."""
    for number, cpus, sizes in ((0, "0-71", (1000, 200, 300)), (1, "", (2000, 0, 0))):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        names = ("MemFree", "Active(file)", "Inactive(file)")
        lines = [f"Node {number} {name}: {size:>12} kB" for name, size in zip(names, sizes, strict=True)]
        (node / "meminfo").write_text("\n".join(lines))
    assert free(tmp_path, None, {}) == FreeMemory(1500 * 1024, NODE)
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("72-143\n")
    assert free_memory(tmp_path / "groups", tmp_path / "proc", tmp_path / "sys").size == NODE_FREE


def test_this_machine_has_memory_left() -> None:
    assert free_memory().size > 0


def write(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_all_cards_of_a_node_count(tmp_path: Path) -> None:
    for card, words in (("mlx5_0", 10), ("mlx5_1", 5)):
        write(tmp_path / f"class/infiniband/{card}/ports/1/counters", port_xmit_data=words, port_rcv_data=2 * words)
    for card in ("eth0", "eth1", "veth7"):
        write(tmp_path / f"class/net/{card}/statistics", tx_bytes=100, rx_bytes=7)
    for card in ("eth0", "eth1"):  # the virtual one has no device
        (tmp_path / f"class/net/{card}/device").mkdir()
    assert read_traffic(tmp_path) == Traffic(60, 120, 200, 14)


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert read_traffic(tmp_path) == Traffic()
    write(tmp_path / "class/infiniband/mlx5_0/ports/1/counters", port_xmit_data=1, port_rcv_data="N/A")
    write(tmp_path / "class/infiniband/mlx5_1/ports/1/counters", port_rcv_data=1)
    assert read_traffic(tmp_path) == Traffic()


def test_traffic_since_and_a_counter_that_was_set_back() -> None:
    assert Traffic(5, 6, None, 10).since(Traffic(1, 1, 1, 11)) == Traffic(4, 5, None, None)
