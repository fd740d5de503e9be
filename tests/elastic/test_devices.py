"""The GPU of a rank: what the agent lets it see, and the device of a worker's threads."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import hpc_train
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.elastic.agent_loop import Agent
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.addresses import AttemptSpec
from hpc_train.elastic.worker_process import ensure_warm_parent
from hpc_train.elastic.workers import WorkerLog, Workers
from hpc_train.layout.layout import Layout
from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import SharedBlock, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.file_writer import FileWriter
from hpc_train.train import processes
from tests.elastic.entries import LINES

NVIDIA = tuple(Gpu(index, model="NVIDIA H100", uuid=f"GPU-{index}{index}") for index in range(4))
AMD = tuple(Gpu(index, model="AMD Instinct MI300X") for index in range(4))
SLICED = tuple(Gpu(index, model="A100", uuid=f"GPU-{index}", slices=(f"MIG-{index}",)) for index in range(2))
FOUR, TWO = Layout(4, 1, 1, 1, "ddp", "1f1b", 1, 1, 1), Layout(2, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)


def specs_of(
    path: Path, facts: NodeFacts, layout: Layout, visible_gpus: str, gpus: int | None = None
) -> list[WorkerSpec]:
    """Returns what the agent of a node with these GPUs gives to its workers."""
    ranks = layout.world_size
    gpus = ranks if gpus is None else gpus
    config = Config(cluster=ClusterConfig(gpus_per_node=gpus, visible_gpus=visible_gpus))
    node = Node(0, "n1", "127.0.0.1", None, gpus, ranks, facts)
    attempt = AttemptSpec(
        0, "1", None, "n1", 1, 0.0, "127.0.0.1", 1, 1, gpus, ranks, layout, (0,), {"NCCL_DEBUG": "WARN"}, "a", 60, 1
    )
    nothing = cast(Any, None)
    names = ("allocation", "server", "stop", "watch", "gpu_errors", "budget", "output", "deletion")
    others = dict.fromkeys(names, nothing) | {"events": EventLog.open(RunDirectory(path), "agent-n1", 0)}
    agent = Agent(run=RunDirectory(path), config=config, node=node, stores=None, on_tick=print, entry="entry", **others)
    return agent._specs(attempt)


@pytest.mark.parametrize(
    ("gpus", "names", "visible_gpus", "expected"),
    [
        (NVIDIA, ("0", "1", "2", "3"), "own", [(0, "0"), (0, "1"), (0, "2"), (0, "3")]),
        (NVIDIA, ("2", "0", "3", "1"), "own", [(0, "2"), (0, "0"), (0, "3"), (0, "1")]),  # CUDA_VISIBLE_DEVICES=2,0,3,1
        (NVIDIA, ("GPU-33", "GPU-22", "GPU-11", "GPU-00"), "own", [(0, f"GPU-{i}{i}") for i in (3, 2, 1, 0)]),
        (NVIDIA, ("0", "1", "2", "3"), "all", [(0, None), (1, None), (2, None), (3, None)]),
        (AMD, ("4", "5", "6", "7"), "own", [(0, None), (1, None), (2, None), (3, None)]),
        ((), ("0", "1", "2", "3"), "own", [(0, None), (1, None), (2, None), (3, None)]),  # the vendor is unknown
        ((), (), "own", [(0, None), (1, None), (2, None), (3, None)]),  # CPUs
        (SLICED, ("MIG-0", "MIG-1"), "all", [(0, "MIG-0"), (0, "MIG-1")]),
    ],
)
def test_what_a_rank_sees(
    tmp_path: Path,
    gpus: tuple[Gpu, ...],
    names: tuple[str, ...],
    visible_gpus: str,
    expected: list[tuple[int, str | None]],
) -> None:
    layout = FOUR if len(expected) == 4 else TWO
    specs = specs_of(tmp_path, NodeFacts(gpus=gpus, visible=names), layout, visible_gpus, len(names))
    assert [(spec.cuda_device, spec.environment.get("CUDA_VISIBLE_DEVICES")) for spec in specs] == expected
    assert all(spec.environment["NCCL_DEBUG"] == "WARN" for spec in specs)
    alike = len({processes._device(spec) for spec in specs}) == 1  # and so are the keys of compiled graphs
    assert alike == (not names or expected[0][1] is not None)


def test_workers_start_with_their_own_gpu_and_all_of_their_output_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    specs = specs_of(tmp_path, NodeFacts(gpus=NVIDIA, visible=("1", "3")), TWO, "own")
    log = WorkerLog(tmp_path / "log", FileWriter("the output"))
    workers, warm_parent = Workers(log), ensure_warm_parent()
    for spec in specs:
        workers.start(warm_parent, spec, "tests.elastic.entries:records_gpus_and_prints_much")
    try:
        while workers.alive:
            workers.wait(1.0)
    finally:
        workers.kill()
    assert not workers.failures
    assert [(tmp_path / f"mark-{rank}").read_text().split()[1] for rank in range(2)] == ["1", "3"]
    log.close()
    lines = [line.split()[1:] for line in log.path.read_text().splitlines()]
    for rank in range(2):
        *numbered, last = [words for name, *words in lines if name == f"[{rank}]"]
        assert [words[1] for words in numbered] == [str(number) for number in range(LINES)]
        assert last == ["no", "newline", "at", "the", "end"]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records the threads that choose a GPU, on a machine without one."""
    found: list[tuple[str, str]] = []

    def choose(device: torch.device) -> None:
        found.append((threading.current_thread().name, str(device)))

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    return found


def test_the_thread_that_leaves_uses_the_gpu_of_the_rank(
    chosen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda group: order.append(f"barrier after {len(chosen)}"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("destroy"))
    nothing = cast(Any, None)
    processes.leave(Mesh(FOUR, 3, torch.device("cuda", 3), nothing, nothing, nothing))
    assert chosen == [("leave", "cuda:3")] and order == ["barrier after 1", "destroy"]


@pytest.mark.parametrize("gpus", [4, 0])
def test_the_flight_recorder_uses_the_gpu_of_the_rank(
    chosen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    block = SharedBlock.create()
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    spec = WorkerSpec("run", 0, 3, 3, 4, 0, 1, FOUR, "n1", 1, gpus, 1, cuda_device=3, heartbeat=block.descriptor)
    processes.answer_requests(spec)
    number = block.ask()
    until = time.monotonic() + 60
    while block.answer_to(number) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert chosen[:1] == ([("flight recorder", "cuda:3")] if gpus else [])


THREADS = {  # module: whether its threads may call CUDA
    "checkpoint/host_copies.py": "pins memory",
    "checkpoint/manager.py": "copies and saves tensors",
    "checkpoint/store.py": "no",
    "data/build.py": "no",
    "data/dali.py": "decodes images, and copies pixels",
    "bench/doctor/nodes.py": "no",
    "elastic/gpu_errors.py": "no",
    "elastic/agent.py": "no",
    "elastic/attempts.py": "no",
    "elastic/rendezvous/client.py": "no",
    "elastic/rendezvous/server.py": "no",
    "elastic/roles.py": "no",
    "parallel/local_replicas.py": "no",
    "preflight/nccl_log.py": "no",
    "run/file_lock.py": "no",
    "run/file_writer.py": "no",
    "run/files.py": "no",
    "schedulers/slurm/site.py": "no",
    "report/monitoring/exporter.py": "no",
    "report/monitoring/exits.py": "no",
    "telemetry/sinks/follow.py": "no",
    "telemetry/sinks/tracking.py": "no",
    "train/step.py": "no",
    "train/processes.py": "the barrier at the end, and events of the flight recorder",
}


def test_all_threads_are_known() -> None:
    """A new thread uses GPU 0: if it may call CUDA, it must first set the device of its rank."""
    root = Path(hpc_train.__file__).parent
    started = re.compile(r"\b(Thread|ThreadPoolExecutor|Timer)\(")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if started.search(path.read_text())}
    assert found == THREADS.keys()
