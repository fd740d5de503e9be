"""Joins and leaves the process groups of an attempt, and sends the flight recorder to the agent on request.

A thread answers requests for the last collectives even while a collective blocks the main thread.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as distributed_c10d

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.machine.environment import rejected_variable
from hpc_train.machine.network.decision import ALLOCATOR_SETTINGS, GROWING_SEGMENTS
from hpc_train.machine.network.nccl_settings import read_versions, too_old_driver
from hpc_train.models.attention import choose_kernel
from hpc_train.parallel.mesh import Mesh, join_mesh, use_device
from hpc_train.parallel.precision.dtypes import choose_tf32
from hpc_train.run.agent_worker import SharedBlock, WorkerSpec

LEAVE_S = 10.0  # the time limit for destroying the process groups, which can hang


def join(spec: WorkerSpec, config: Config) -> Mesh:
    """Sets the threads and the device of this process and joins the other ranks through the store at
    ``spec.master_port``. Collective."""
    threads = spec.threads
    if config.train.reproducible is not None:  # operators without a deterministic kernel then raise an error
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs this and reads it at its first call
        torch.use_deterministic_algorithms(True)
        if config.train.threads == "auto":
            threads = 1  # the number of threads changes the rounding of sums
    torch.set_num_threads(threads)
    if config.train.debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # checks each collective for consistency across ranks
    device = prepare_device(spec)
    if device.type == "cuda":
        check_architecture(device)
    choose_tf32(config.precision, device)
    chosen = choose_kernel(config.train.attention, device)
    if chosen is not None and spec.rank == 0:
        print(f"attention: {chosen}")
    if device.type == "cuda" and config.train.reproducible is None and config.data.collate is None:  # fixed shapes
        torch.backends.cudnn.benchmark = True  # times the algorithms of each convolution in the first step
    timeout = timedelta(seconds=config.elastic.collective_timeout_s)
    try:
        _join(spec, device, timeout)
    except ValueError as error:  # other exceptions of torch name variables only as hints
        raise rejected_variable(error, os.environ) or error from error
    return join_mesh(spec.layout, spec.rank, device, timeout)


def prepare_device(spec: WorkerSpec) -> torch.device:
    """Selects the device of this rank, and applies the allocator settings from the environment to it.

    Torch reads the variable when it is loaded. The parent of this process has loaded torch before the variable was set.
    """
    device = _device(spec)
    if device.type == "cuda" and os.environ.get(ALLOCATOR_SETTINGS) == GROWING_SEGMENTS:
        torch._C._accelerator_setAllocatorSettings(GROWING_SEGMENTS)
    try:
        use_device(device)  # starts CUDA
    except RuntimeError as error:
        versions = dict(read_versions())
        if "driver" not in str(error) or not {"driver", "cuda_of_torch"} <= {*versions}:
            raise
        raise too_old_driver(versions["driver"], versions["cuda_of_torch"]) or error from error
    return device


def check_architecture(device: torch.device) -> None:
    """Raises UserError if this build of torch has no kernels for a GPU, before the first kernel fails with CUDA's error
    209.

    A kernel for sm_XY runs on GPUs of compute capability X.Z with Z >= Y, and the intermediate code compute_XY on all
    later ones; names that end in ``a`` or ``f`` are for one architecture or family (CUDA C++ Programming Guide,
    "Compute Capabilities"). AMD's names must be equal.
    """
    built = torch.cuda.get_arch_list()
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        has_kernels = name in built
    else:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sm_{major}{minor}"
        has_kernels = False
        for kind, number, suffix in re.findall(r"(sm|compute)_(\d+)([af]?)", " ".join(built)):
            of_major, of_minor = divmod(int(number), 10)
            same_major = of_major == major and of_minor <= minor
            if suffix:
                has_kernels |= same_major and (suffix == "f" or of_minor == minor)
            else:
                has_kernels |= same_major or (kind == "compute" and (of_major, of_minor) <= (major, minor))
    if built and not has_kernels:
        raise UserError(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} ({name}); it is built "
            f"for {', '.join(built)}",
            where="the installed torch",
            fix="install a build of torch for this GPU, or request another type with cluster.gpu_type",
        )


def _device(spec: WorkerSpec) -> torch.device:
    return torch.device("cuda", spec.cuda_device) if spec.gpus_per_node else torch.device("cpu")


# From this number of ranks on, gloo connects two ranks when they first communicate. In smaller worlds, a group connects
# all pairs when it is created, with one query of the store for each pair and direction.
ON_DEMAND_FROM = 512


def _join(spec: WorkerSpec, device: torch.device, timeout: timedelta) -> None:
    world_size = spec.layout.world_size
    store = dist.TCPStore(spec.master_address, spec.master_port, world_size, timeout=timeout, wait_for_workers=False)
    is_cuda = device.type == "cuda"
    if world_size >= ON_DEMAND_FROM:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # read when a group is created
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.PrefixStore(spec.store_prefix, store),
        rank=spec.rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if is_cuda else None,
    )


def leave(mesh: Mesh) -> None:
    """Destroys the process groups after a barrier; gives up after ``LEAVE_S``, since the process exits anyway."""

    def end() -> None:
        use_device(mesh.device)
        dist.barrier(group=mesh.control)
        dist.destroy_process_group()

    thread = threading.Thread(target=end, name="leave", daemon=True)
    thread.start()
    thread.join(LEAVE_S)


POLL_S = 0.5


def answer_requests(spec: WorkerSpec) -> None:
    """Starts the thread that answers the agent's requests through the worker's shared block."""
    if spec.heartbeat is None:
        return
    block = SharedBlock(spec.heartbeat)

    def answer() -> None:
        while True:
            if block.asked:
                use_device(_device(spec))  # NCCL's recorder queries CUDA events
                block.answer(collectives())
            time.sleep(POLL_S)

    threading.Thread(target=answer, name="flight recorder", daemon=True).start()


# torch's functions for its two recorders; builds without CUDA lack the first, and some versions put NCCL into both
RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}


def collectives() -> bytes:
    """Returns a JSON object: name of a flight recorder -> its last TORCH_FR_BUFFER_SIZE collectives of all groups."""
    dumps = []
    for name, function in RECORDERS.items():
        dump = getattr(distributed_c10d, function, None)
        if dump is not None:
            with suppress(RuntimeError):  # a broken GPU, or a field that JSON cannot hold; the other recorder remains
                text: bytes | str = dump(includeCollectives=True, onlyActive=False)
                dumps.append(f'"{name}": {text if isinstance(text, str) else text.decode()}')
    return f"{{{', '.join(dumps)}}}".encode()
