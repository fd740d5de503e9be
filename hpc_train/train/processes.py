"""How a worker joins the others of its attempt, and how it leaves them.

torch's flight recorder: the last collectives of this rank, told to the agent when it asks.

The thread that answers gets on while the main thread waits inside a collective. It costs a look at one word of memory
per half second.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as distributed_c10d

from hpc_train.config.schema import Config, TrainConfig
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.run.agent_worker import SharedBlock, WorkerSpec

LEAVE_S = 10.0  # for the end of the process groups, which can hang


def join(spec: WorkerSpec, config: Config) -> Mesh:
    """Sets threads and device of this process and joins the other ranks through the store at
    ``spec.master_port``. Collective."""
    torch.set_num_threads(_threads(spec, config.train))
    if config.train.reproducible is not None:
        _use_deterministic()
    if config.train.debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # each collective is compared over all ranks before it runs
    device = _device(spec)
    timeout = timedelta(seconds=config.elastic.collective_timeout_s)
    _join(spec, device, timeout)
    return join_mesh(spec.layout, spec.rank, device, timeout)


def _threads(spec: WorkerSpec, train: TrainConfig) -> int:
    """``auto`` shares the cores among the ranks of the node; the bits of a sum depend on how many threads share it."""
    return 1 if train.reproducible is not None and train.threads == "auto" else spec.threads


def _use_deterministic() -> None:
    """Kernels that add in an order of their own, with atomics, give way to slower ones; an op that has no other raises
    an error that names it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it; read at its first call
    torch.use_deterministic_algorithms(True)


def _device(spec: WorkerSpec) -> torch.device:
    if spec.gpus_per_node == 0:
        return torch.device("cpu")
    device = torch.device("cuda", spec.cuda_device)
    torch.cuda.set_device(device)
    return device


def _join(spec: WorkerSpec, device: torch.device, timeout: timedelta) -> None:
    world_size = spec.layout.world_size
    store = dist.TCPStore(
        spec.master_address,
        spec.master_port,
        world_size,
        timeout=timeout,
        wait_for_workers=False,
    )
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.PrefixStore(f"attempt-{spec.attempt}", store),
        rank=spec.rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def leave(mesh: Mesh) -> None:
    """Ends the process groups after all ranks are through, but never waits long: the process ends anyway."""

    def end() -> None:
        dist.barrier(group=mesh.control)
        dist.destroy_process_group()

    thread = threading.Thread(target=end, name="leave", daemon=True)
    thread.start()
    thread.join(LEAVE_S)


POLL_S = 0.5


def answer_questions(descriptor: int | None) -> None:
    """Starts the thread, for the block that the agent has handed over."""
    if descriptor is not None:
        block = SharedBlock(descriptor)
        threading.Thread(target=_answer, args=(block,), name="flight recorder", daemon=True).start()


def _answer(block: SharedBlock) -> None:
    while True:
        if block.asked:
            block.answer(collectives())
        time.sleep(POLL_S)


def collectives() -> bytes:
    """JSON with the last TORCH_FR_BUFFER_SIZE collectives of all groups; ``{}`` where torch cannot tell."""
    dump = getattr(distributed_c10d, "_dump_fr_trace_json", None)
    found: bytes | str = b"{}" if dump is None else dump()
    return found.encode() if isinstance(found, str) else found
