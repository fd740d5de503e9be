"""Runs the ranks of a case: all contenders in turns for their speed, each in processes of its own for its memory."""

from __future__ import annotations

import cProfile
import ctypes
import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.case import CASES, Case, Contender, NotThereError, Turn, config_of
from benchmarks.peers.contenders import adamw, build_accelerate, build_bare, build_fabric, build_ours
from benchmarks.peers.hf_trainer import build_trainer, build_trainer_llama
from benchmarks.peers.titan import build_titan
from hpc_train.config.schema import Config
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.train.watch.utilization import peak_host_memory

OURS = "hpc_train"
BUILDERS: Mapping[str, Callable[[Case, Config, Mesh], Contender]] = {
    OURS: build_ours,
    "bare loop": build_bare,
    "Fabric": build_fabric,
    "Accelerate": build_accelerate,
    "Trainer": build_trainer,
    "Trainer, its Llama": build_trainer_llama,
    "torchtitan": build_titan,
}
FIRST = 5  # steps of each contender before the turns, whose losses are compared
THREADS = 1  # of each rank
PATIENCE_S = 1800.0
LIBRARY_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": str(THREADS),
    "TORCHELASTIC_RUN_ID": "peers",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}
LIBRARIES = "benchmarks.peers.libraries"
# glibc's mallopt, by which the resident set follows the blocks in use: each of 128 KiB or more is a mapping of its own
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX = -3, -1, -8
MALLOC = {M_MMAP_THRESHOLD: 2**17, M_TRIM_THRESHOLD: 2**17, M_ARENA_MAX: 1}


@dataclass(frozen=True)
class Work:
    """What the ranks of a case do.

    Attributes:
        case: a key of ``CASES``.
        names: keys of ``BUILDERS``, whose turns follow each other in this order.
        turns: how often each has its turn of ``steps`` steps; None measures the memory of ``steps`` steps.
        overrides: of the config that all cases share.
    """

    case: str
    precision: str
    names: tuple[str, ...]
    steps: int
    turns: int | None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What was found of a contender.

    Attributes:
        losses: the mean losses of the first global batches; empty if it does not report them.
        seconds: of a step in each turn.
        cpu_seconds: the same of the processors, summed over the ranks; other programs hardly change it.
        peak: bytes by which the resident set of the largest rank grew at most; None unless memory was measured.
        calls: functions of Python and of C that the first rank calls in a step; None if they are in another thread.
    """

    parameters: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    peak: int | None = None
    calls: int | None = None


Results = dict[str, Found | str]  # a string says why there is nothing


def run_case(work: Work) -> Results:
    """Returns what ranks of ``work.case`` find, in new processes.

    Raises:
        RuntimeError: a rank has failed.
    """
    context = multiprocessing.get_context("forkserver")  # imports the libraries once for all ranks
    context.set_forkserver_preload([LIBRARIES])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    results = context.Queue()
    before = dict(os.environ)
    os.environ |= LIBRARY_ENVIRONMENT
    start = partial(context.Process, target=_run_rank)
    ranks = [start(args=(work, rank, port, results)) for rank in range(CASES[work.case].ranks)]
    try:
        for process in ranks:
            process.start()
        return dict(_result(results, ranks))
    finally:
        os.environ.clear()
        os.environ.update(before)
        for process in ranks:
            process.kill()
            process.join()


def _result(results: Any, ranks: Sequence[Any]) -> Results:
    end = time.monotonic() + PATIENCE_S
    while results.empty() and time.monotonic() < end:
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank has failed")
        time.sleep(0.2)
    return dict(results.get(timeout=1))


def _run_rank(work: Work, rank: int, port: int, results: Any) -> None:
    case = CASES[work.case]
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
    os.environ |= LIBRARY_ENVIRONMENT | {key: str(value) for key, value in (own | {"MASTER_PORT": port}).items()}
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo", rank=rank, world_size=case.ranks)
    config, layout = config_of(case, work.precision, work.overrides)
    mesh = join_mesh(layout, rank, torch.device("cpu"))
    found = _memory(work, case, config, mesh) if work.turns is None else _speed(work, case, config, mesh)
    dist.barrier()  # rank 0's result ends the other processes
    if rank == 0:
        results.put(found)
        results.close()
        results.join_thread()
    os._exit(0)


def _begin(name: str, case: Case, config: Config, mesh: Mesh, steps: int) -> tuple[Contender, tuple[float, ...]] | str:
    """Returns a contender and its losses of ``steps`` steps, or why it is not there."""
    try:
        contender = BUILDERS[name](case, config, mesh)
        return contender, _losses(contender, steps)
    except NotThereError as reason:
        return str(reason)
    except Exception as error:  # the row of this contender says it
        return f"fails: {type(error).__name__}: {error}"


def _losses(contender: Contender, steps: int) -> tuple[float, ...]:
    shares = [contender.turn() for _ in range(steps)]
    losses = []
    for share in shares:
        if share is not None:
            total: Tensor = share.detach().to(torch.float64)
            dist.all_reduce(total)
            losses.append(total.item())
    return tuple(losses)


def _speed(work: Work, case: Case, config: Config, mesh: Mesh) -> Results:
    begun = {name: _begin(name, case, config, mesh, FIRST) for name in work.names}
    turns = {name: each[0].turn for name, each in begun.items() if not isinstance(each, str)}
    torch.set_num_threads(THREADS)  # whatever a peer has set
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    assert work.turns is not None
    for _ in range(work.turns):
        for name, turn in turns.items():
            spent[name].append(_spent(turn, work.steps, mesh))
    calls = {name: _calls(turn) for name, turn in turns.items()}
    results: Results = {}
    for name, each in begun.items():
        if isinstance(each, str):
            results[name] = each
        else:
            wall, cpu = zip(*spent[name], strict=True)
            counted = None if each[0].in_own_thread else calls[name]
            results[name] = Found(each[0].parameters, each[1], wall, _summed(cpu), calls=counted)
    return results


def _spent(turn: Turn, steps: int, mesh: Mesh) -> tuple[float, float]:
    """Returns the seconds of one of ``steps`` steps, and the seconds of processors that this rank took for it."""
    dist.barrier(group=mesh.control)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(steps):
        turn()
    cpu = time.process_time() - cpu_begin
    dist.barrier(group=mesh.control)
    return (time.perf_counter() - begin) / steps, cpu / steps


def _calls(turn: Turn) -> int:
    """Returns the number of calls of functions in one step, including those of the backward pass on a CPU."""
    profile = cProfile.Profile()
    profile.runcall(turn)
    return sum(entry.callcount for entry in profile.getstats())


def _summed(values: Sequence[float]) -> tuple[float, ...]:
    """Returns the sums over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return tuple(total.tolist())


def _memory(work: Work, case: Case, config: Config, mesh: Mesh) -> Results:
    (name,) = work.names
    for option, value in MALLOC.items():
        ctypes.CDLL(None).mallopt(option, value)
    _load_code(config)
    before = _resident()
    begun = _begin(name, case, config, mesh, work.steps)
    grown = torch.tensor(peak_host_memory() - before)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    if isinstance(begun, str):
        return {name: begun}
    return {name: Found(begun[0].parameters, begun[1], peak=int(grown))}


def _load_code(config: Config) -> None:
    """Loads the code of all libraries and of torch's operations, so that it is not counted as that of one contender."""
    import_module(LIBRARIES)  # unless the process from which this one was forked has imported it
    layer = torch.nn.Linear(64, 64)
    optimizer = adamw(layer, config)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            heads = layer(torch.randn(1, 2, 64, 64))
            out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            F.cross_entropy(out.flatten(0, 2).float(), torch.zeros(128, dtype=torch.int64)).backward()
        optimizer.step()


def _resident() -> int:
    """Returns the resident set in bytes, from which the peak counts again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_host_memory()
