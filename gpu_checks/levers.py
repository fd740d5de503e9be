"""The speed of a GPT of 1.2 billion parameters: in turns with a bare loop, and with one lever changed at a time.

A lever is an option of speed or memory. Each is measured in the process of a check, which begins with an empty GPU.
Steps are timed by events on the GPU, without a synchronization, while the clock, the power and the temperature of the
GPU are read every two seconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.savers import AS_IT_STANDS, SMI, SMI_EVERY_S, gpu_state
from gpu_checks.check import Probe
from gpu_checks.checks import LEVERS
from gpu_checks.commands import TINY
from gpu_checks.speed import SMALL, for_this_gpu, is_large
from gpu_checks.steps import World
from hpc_train.bench.bare_loop import bare_batches, build_bare_loop
from hpc_train.bench.request import Spread, paired_ratio
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.layout.resolve import resolve_layout
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.precision import dtypes
from hpc_train.train.watch.peak_rates import peak_flops
from hpc_train.train.watch.utilization import count_flops, peak_host_memory

WARM_UP = 3  # steps
STEPS = 100  # of each contender
BLOCK = 5  # steps of a contender before the next one takes its turn
LEVER_STEPS = 60  # a minute, on a GPU that the contenders have warmed
FEW = 4  # steps on the CPU
END_S = 8.0  # of the limit of a check, for its end
BARE, APART = "bare loop", "queries, keys and values by three products"
MEMORY = "Peak GiB"
# Llama 2 7B with 32,768 tokens per step. The anchor is KempnerForge's MFU on one H200 for 8.03 billion parameters, also
# with 32,768 tokens in sequences of 4,096, but with full recomputation (benchmarks/mfu_scaling of its repository).
SEVEN_BILLION = (
    "model=llama_7b", "data=synthetic", "data.vocab_size=32000", "data.sequence_length=4096", "precision=bf16",
    "optim.moments=bf16", "train.compile=true", "batch.global_size=8", "batch.micro_size=2", "cluster=local",
    "cluster.preflight=off",
)  # fmt: skip
ANCHOR = 0.578
NARROW = ("model.n_layers=2", "model.dim=32", "model.ffn_dim=64", "model.n_heads=4", "model.n_kv_heads=4", *TINY)
# levers that must take less memory than the experiment as it stands
SMALLER = (
    "moments in bf16", "weights in bf16", "checkpointing: ops", "checkpointing: full",
    "checkpointing: every third layer", "half the micro-batch", "optimizer on the host", "activations on the host",
    "inputs of layers on the host",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """The steps of one training.

    Attributes:
        seconds: of each step.
        mfu: relative to the peak in bf16, also in fp8; NaN on the CPU.
        memory: peak bytes of torch's allocator, or of the process on the CPU; 0 if others share it.
        states: what nvidia-smi showed meanwhile.
    """

    seconds: Sequence[float]
    tokens: int
    mfu: float
    memory: int
    states: Sequence[dict[str, float]]


def turns(probe: Probe) -> None:
    """A training is as fast as a bare loop of the same model, in turns on a GPU that has reached its temperature."""
    until = time.monotonic() + probe.check.limit_s - END_S
    world = World(probe)
    config = world.config(*_experiment(probe))
    contenders = {AS_IT_STANDS: world.of(config).step, BARE: _bare_step(config, world)}
    if not probe.on_gpu or is_large():  # else the states of three trainings do not fit
        contenders[APART] = _apart(config, world)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(WARM_UP):
            step()
    gc.disable()  # as in a training, which collects at chosen steps
    order = list(contenders)
    block = BLOCK if probe.on_gpu else 1
    with watched_gpu() as states:
        while len(seconds[BARE]) < (STEPS if probe.on_gpu else FEW) and time.monotonic() < until:
            for name in order:
                seconds[name] += timed(probe, contenders[name], block)
            order.reverse()
    for name, those in seconds.items():
        _row(probe, name, Measurement(those, _tokens(config), _mfu(probe, config, median(those)), 0, states))
    totals = {name: [sum(those[i : i + block]) for i in range(0, len(those), block)] for name, those in seconds.items()}
    for name in order:
        if name != AS_IT_STANDS:
            ratio = paired_ratio(totals[name], totals[AS_IT_STANDS])
            measured = f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"
            not_slower = ratio.high >= 1 or not probe.on_gpu
            probe.expect(f"speed / {name}, 95 % interval", measured, "not below 1", not_slower)
    probe.within("steps of each", len(seconds[BARE]), low=3 * block)


def lever(probe: Probe) -> None:
    """A lever of speed or memory runs, and one that saves memory takes less than the experiment as it stands."""
    chosen = LEVERS[probe.check.name]
    try:
        measurement = _measured(probe, (*_experiment(probe), *chosen.overrides), chosen.compiler)
    except UserError as error:  # a package or a GPU that this machine lacks
        probe.expect(f"{chosen.title} is refused", error, "a fix", bool(error.fix))
        return
    _row(probe, chosen.title, measurement)
    probe.within("steps", len(measurement.seconds), low=FEW)
    unchanged = probe.rows("lever_as_it_stands")
    if probe.on_gpu and chosen.title in SMALLER and unchanged:
        probe.within("GiB / as it stands", measurement.memory / 2**30 / float(unchanged[0][MEMORY]), high=0.99)


def seven_billion(probe: Probe) -> None:
    """Llama 2 7B on one GPU reaches the MFU that is published for a model of that size on one H200."""
    small = () if probe.on_gpu else (*NARROW, "train.compile=false", "cluster.gpus_per_node=0")
    measurement = _measured(probe, (*SEVEN_BILLION, *small), {})
    _row(probe, "Llama 2 7B", measurement)
    probe.within("steps", len(measurement.seconds), low=FEW)
    if probe.on_gpu:
        probe.within("MFU", measurement.mfu, low=ANCHOR)


def _measured(probe: Probe, overrides: Sequence[str], compiler: Any) -> Measurement:
    """Measures a training of ``overrides`` alone in this process."""
    from torch._inductor import config as inductor_config

    until = time.monotonic() + probe.check.limit_s - END_S
    world = World(probe)
    config = world.config(*overrides)
    with inductor_config.patch(compiler) if compiler else nullcontext():
        step = world.of(config).step
        for _ in range(WARM_UP):
            step()
        gc.disable()
        seconds: list[float] = []
        with watched_gpu() as states:
            while len(seconds) < (LEVER_STEPS if probe.on_gpu else FEW) and time.monotonic() < until:
                seconds += timed(probe, step, FEW)
    memory = torch.cuda.max_memory_allocated() if probe.on_gpu else peak_host_memory()
    return Measurement(seconds, _tokens(config), _mfu(probe, config, median(seconds)), memory, states)


def timed(probe: Probe, step: Callable[[], object], count: int) -> list[float]:
    """Returns the seconds of each of ``count`` steps, on a GPU from the end of the kernels of the step before."""
    if not probe.on_gpu:
        moments = [time.perf_counter()]
        for _ in range(count):
            step()
            moments.append(time.perf_counter())
        return [after - before for before, after in pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [1e-3 * before.elapsed_time(after) for before, after in pairwise(events)]


@contextmanager
def watched_gpu() -> Iterator[list[dict[str, float]]]:
    """Yields a list to which a thread appends the clock, the power and the temperature of the first GPU."""
    states: list[dict[str, float]] = []
    ended = Event()

    def watch() -> None:
        while not ended.wait(SMI_EVERY_S):
            states.append(gpu_state())

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield states
    finally:
        ended.set()
        thread.join()


def _experiment(probe: Probe) -> list[str]:
    return for_this_gpu() if probe.on_gpu else [*SMALL, "precision=bf16"]


def _bare_step(config: Config, world: World) -> Callable[[], object]:
    mesh = world.mesh(config)
    loop = build_bare_loop("single", config, mesh)
    batches = bare_batches(config, mesh)

    def step() -> None:
        batch = next(batches)
        loop.step(batch.micro_batches, batch.target_count)

    return step


def _apart(config: Config, world: World) -> Callable[[], object]:
    """Returns the step of a training that does not compute queries, keys and values as one product."""
    train = world.of(config).step

    def step() -> None:
        with patch.object(dtypes, "can_join", return_value=False):
            train()

    return step


def _tokens(config: Config) -> int:
    return config.batch.global_size * config.data.sequence_length


def _row(probe: Probe, title: str, measurement: Measurement) -> None:
    speed = Spread.of([measurement.tokens / seconds for seconds in measurement.seconds])
    clock, power, temperature = (_typical(measurement.states, name) for name in SMI)
    probe.row(
        {
            "": title,
            "Tokens/s": f"{speed.median:,.0f}",
            "5 % to 95 %": f"{speed.low:,.0f} to {speed.high:,.0f}",
            "Steps": len(measurement.seconds),
            "MFU": f"{100 * measurement.mfu:.1f} %" if math.isfinite(measurement.mfu) else "",
            MEMORY: f"{measurement.memory / 2**30:.1f}" if measurement.memory else "",
            "MHz": clock,
            "W": power,
            "°C": temperature,
        }
    )


def _typical(states: Sequence[dict[str, float]], name: str) -> str:
    values = [state[name] for state in states if name in state]
    return f"{median(values):.0f}" if values else ""


def _mfu(probe: Probe, config: Config, seconds: float) -> float:
    peak = peak_flops(torch.cuda.get_device_name(0), "bf16") if probe.on_gpu else None
    if peak is None:
        return math.nan
    layout = resolve_layout(config, 1, 1)
    model = build_model(config.model, config.train.seed)
    assert isinstance(model, Model)
    inputs = torch.empty((1, config.data.sequence_length), device="meta")
    count = count_flops(model, inputs, recomputation_of(config, layout), loss_form(config, layout))
    return count.model * config.batch.global_size / seconds / peak
