"""What each lever of speed or memory costs and gains: the same model with one option changed at a time.

Each row is measured in a separate process, so that it begins with an empty GPU and a row that crashes or runs out of
memory ends alone. It is forked from the check's process, which has imported torch and has not started CUDA. The first
and the last row are a bare compiled loop: the table compares with the first, and the difference of the two tells how
far speeds drift. The rows share a cache of compiled kernels.
"""

from __future__ import annotations

import gc
import math
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.savers import AS_IT_STANDS, ROWS
from gpu_checks.check import Probe
from gpu_checks.runner import kill_all
from gpu_checks.speed import MFU, RATIO, SMALL, for_this_gpu
from gpu_checks.steps import World
from hpc_train.bench.bare_loop import bare_batches, build_bare_loop
from hpc_train.config.schema import Config
from hpc_train.layout.layout import Layout
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.layout.resolve import resolve_layout
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.train.watch.peak_rates import peak_flops
from hpc_train.train.watch.utilization import count_flops, peak_host_memory

BARE, BARE_AGAIN = "the bare loop", "the bare loop again"
FP8 = "fp8"  # begins the names of rows whose products are not those of the bare loop
WARM_UP, BLOCKS, STEPS = 3, 3, 2
LEAST_S, MOST_S = 25.0, 90.0  # a row is started with so much time left; one that takes longer is stopped
END_S = 3.0  # from the limit of a row to the end of its process
# what must take less memory than the experiment as it stands
SMALLER = (
    "moments in bf16", "weights in bf16", "checkpointing: ops", "checkpointing: full",
    "checkpointing: every third layer", "half the micro-batch", "optimizer on the host", "activations on the host",
    "inputs of layers on the host",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    tokens_per_s: the median over the blocks.
    mfu: relative to the peak in bf16, also in fp8; 0 on the CPU.
    memory: peak bytes of torch's allocator, or of the process on the CPU.
    begin_s: the seconds from the start of the process to the end of the warm-up, which compiles.
    """

    tokens_per_s: float
    mfu: float
    memory: int
    begin_s: float


def levers(probe: Probe) -> None:
    """Every lever runs, saves the memory that it is there for, and the best row in bf16 reaches 60 % of the peak."""
    found = _measured(probe, _rows(probe))
    bare = fmean(each.tokens_per_s for name, each in found.items() if name in (BARE, BARE_AGAIN))
    own = found[AS_IT_STANDS]
    probe.within("tokens/s as it stands / the bare loop", own.tokens_per_s / bare, low=RATIO if probe.on_gpu else 0)
    if not probe.on_gpu:
        return
    for name in (name for name in SMALLER if name in found):
        probe.within(f"{name}: memory / as it stands", found[name].memory / own.memory, high=0.99)
    best = max(each.mfu for name, each in found.items() if not name.startswith(FP8))
    probe.within("MFU of the best row in bf16", best, low=MFU)


def _rows(probe: Probe) -> Mapping[str, tuple[str, ...]]:
    own = ROWS if probe.on_gpu else {AS_IT_STANDS: ROWS[AS_IT_STANDS]}
    return {BARE: (), **own, BARE_AGAIN: ()}


def _shown(each: Measurement, bare: Measurement) -> str:
    speed = f"{each.tokens_per_s:,.0f} tokens/s, {each.tokens_per_s / bare.tokens_per_s:.3f} of the bare loop"
    return f"{speed}, MFU {each.mfu:.1%}, {each.memory / 2**30:.2f} GiB, begins after {each.begin_s:.0f} s"


def _measured(probe: Probe, rows: Mapping[str, tuple[str, ...]]) -> dict[str, Measurement]:
    """Measures rows until the limit of the check; of the last ones that of the bare loop is kept time for."""
    until = time.monotonic() + probe.check.limit_s - 10
    found = {}
    for name, overrides in rows.items():
        left = until - time.monotonic() - (LEAST_S + END_S if name not in (BARE, BARE_AGAIN) else 0)
        if left < LEAST_S:
            probe.note(name, "not measured: no time is left")
            continue
        result = _in_process(measure, (probe, name, overrides), min(left, MOST_S))
        if isinstance(result, Measurement):
            found[name] = result
            probe.note(name, _shown(result, found.get(BARE, result)))
            continue
        print(f"--- {name}\n{result}", flush=True)
        probe.expect(name, result.strip().rpartition("\n")[2], "a speed", ok=False)
    return found


def _in_process(function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float) -> Any:
    """Returns the result of ``function``, or the text of what went wrong."""
    context = mp.get_context("fork")  # a child of this process, with which the runner kills it
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit_s) else f"it took more than {limit_s:.0f} s"
    except EOFError:
        process.join()
        return f"its process ended with {process.exitcode}"
    finally:
        kill_all(process)


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    try:
        sender.send(function(*arguments))
    except BaseException:
        sender.send(traceback.format_exc())
    os._exit(0)


def measure(probe: Probe, name: str, overrides: tuple[str, ...]) -> Measurement:
    """Measures the steps of one row in this process."""
    began = time.monotonic()
    given = for_this_gpu() if probe.on_gpu else [*SMALL, "precision=bf16"]
    world = World(probe)
    config = world.config(*given, *overrides)
    step = _bare_step(config, world) if name in (BARE, BARE_AGAIN) else world.of(config).step
    for _ in range(WARM_UP):
        step()
    _wait(probe)
    begin_s = time.monotonic() - began
    gc.disable()  # as in a training, which collects at chosen steps
    seconds = median(_block(probe, step) for _ in range(BLOCKS)) / STEPS
    samples_per_s = config.batch.global_size / seconds
    memory = torch.cuda.max_memory_allocated() if probe.on_gpu else peak_host_memory()
    mfu = _mfu(config, resolve_layout(config, 1, 1), samples_per_s) if probe.on_gpu else 0.0
    return Measurement(samples_per_s * config.data.sequence_length, mfu, memory, begin_s)


def _bare_step(config: Config, world: World) -> Callable[[], object]:
    mesh = world.mesh(config)
    loop, batches = build_bare_loop("single", config, mesh), bare_batches(config, mesh)

    def step() -> None:
        batch = next(batches)
        loop.step(batch.micro_batches, batch.target_count)

    return step


def _block(probe: Probe, step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    _wait(probe)
    return time.perf_counter() - begin


def _wait(probe: Probe) -> None:
    if probe.on_gpu:
        torch.cuda.synchronize()


def _mfu(config: Config, layout: Layout, samples_per_s: float) -> float:
    model = build_model(config.model, config.train.seed)
    assert isinstance(model, Model)
    inputs = torch.empty((1, config.data.sequence_length), device="meta")
    count = count_flops(model, inputs, recomputation_of(config, layout), loss_form(config, layout))
    peak = peak_flops(torch.cuda.get_device_name(0), "bf16")
    return math.nan if peak is None else count.model * samples_per_s / peak
