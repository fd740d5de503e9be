"""Runs the workers that measure training steps: ``bench step`` times them, ``bench batch`` takes their gradient norms.

``bench step`` alternates blocks of the trainer's steps with a bare loop. A timed step includes everything that the
trainer does in each step (the agreement of all ranks, the next batch, forward, backward, clipping and update) but not
saves, evaluation and logging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train.bench.advice import advice
from hpc_train.bench.bare_loop import bare_batches, build_bare_loop
from hpc_train.bench.request import NoiseRequest, Spread, StepRequest, paired_ratio, write_progress, write_result
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.data.feed import LocalBatch, TrainFeed
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.mesh import Mesh, synchronize_ranks
from hpc_train.parallel.pipeline.balance import plan_split
from hpc_train.parallel.precision.dtypes import compute_dtype, parameter_dtype
from hpc_train.preflight.measure import measured_gemm_flops
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.processes import join, leave
from hpc_train.train.step import Control, StepOutcome, TrainStep
from hpc_train.train.watch import step_gap
from hpc_train.train.watch.measures import Measures
from hpc_train.train.watch.pipeline_watch import bubble_share
from hpc_train.train.watch.profiler import communication_share
from hpc_train.train.watch.step_gap import losses, mean_of_ranks, profiled
from hpc_train.train.watch.utilization import (
    count_flops,
    describe_utilization,
    device_peak,
    peak_device_memory,
    peak_host_memory,
)

HORIZON = 1_000_000  # steps of the learning rate's schedule

Loop = Callable[[], object]


def measure(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Runs what ``bench-request.json`` asks for; rank 0 writes ``bench-result.json``."""
    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    request = StepRequest.read(run)
    mesh = join(spec, config)
    bench = StepBench(config, mesh, stop)
    result = _measure(bench, request, run)
    bench.close()
    if result is not None:
        layers = bench.layers
        example = bench.example
        del bench  # the advice builds engines of its own, which need its memory
        result["advice"] = advice(config, mesh, layers, example)
    if result is not None and mesh.rank == 0:
        write_result(run, result)
    leave(mesh)
    if result is None:
        return Exit.STOPPED
    return Exit.DONE


class StepBench:
    """Provides the trainer's loop as a function of one step, and its parts for the other measurements.

    Attributes:
        stopped: whether a stop was requested; it changes at the same step on all ranks.
    """

    def __init__(self, config: Config, mesh: Mesh, stop: StopFlag) -> None:
        self.config = config
        self.mesh = mesh
        dataset = build_dataset(config.data, "train", config.train.seed, config.precision.name)
        plan = plan_split(config, mesh, dataset)
        self.layers = None if plan is None else plan.layers
        self.engine = build_engine(config, mesh, self.layers)
        optimizer = Optimizer(config.optim, self.engine.named_parameters(), config.strategy.offload == "optimizer")
        self._take_step = TrainStep(config, mesh, self.engine, optimizer, HORIZON)
        self._feed = TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, config.train.seed, mesh.device, 0)
        self.samples = len(dataset)
        self._dataset = dataset
        self._control = Control(mesh)
        self._stop = stop
        self.example = self._with_target_count(next(self._feed))
        self._following = next(self._feed)
        self._control.post(False, self._following.local_count)
        self._step = 0
        self.stopped = False

    def inputs_shape(self) -> tuple[int, ...] | None:
        """Returns the shape of a sample's inputs; None if ``data.collate`` gives the model several."""
        if getattr(self.config.data, "collate", None) is None:
            return self._dataset.inputs_shape()
        inputs = self.example.micro_batches[0].inputs
        if isinstance(inputs, Tensor):
            return tuple(inputs.shape[1:])
        return None

    def step(self) -> StepOutcome:
        """Runs one iteration of the loop in ``Trainer.run``."""
        agreement = self._control.read()
        self.stopped = self.stopped or agreement.stop
        current = self._following
        self._following = next(self._feed)
        self._control.post(self._stop.requested, self._following.local_count)
        outcome = self._take_step(self._step, StepBatch(current.micro_batches, agreement.target_count))
        self._step += 1
        return outcome

    def gradients(self) -> None:
        """Runs only forward, backward and gradient reduction, always with the same batch.

        Gradients that an update inside the backward would free are freed.
        """
        if self.engine.updates is not None:
            self.engine.updates.begin(lambda parameters, finite: None)
        self.engine.train_step(self._step, self.example)

    def close(self) -> None:
        self._control.read()  # completes the last all-reduce before any rank exits
        self._feed.close()

    def _with_target_count(self, batch: LocalBatch) -> StepBatch:
        self._control.post(False, batch.local_count)
        return StepBatch(batch.micro_batches, self._control.read().target_count)


def _measure(bench: StepBench, request: StepRequest, run: RunDirectory) -> dict[str, Any] | None:
    """Measures all blocks and returns the result; None if a stop was requested before the last block."""
    config = bench.config
    mesh = bench.mesh
    loops: list[Loop] = [bench.step]
    _repeat(bench.step, request.warmup)
    memory = peak_host_memory(), peak_device_memory(mesh.device)
    if request.raw is not None:
        bare = build_bare_loop(request.raw, config, mesh, bench.layers)
        loops.append(_loop_over(bare.step, bare_batches(config, mesh)))
        _repeat(loops[1], request.warmup)
    seconds: list[list[float]] = [[] for _ in loops]
    for block in range(request.pairs * len(loops)):
        if mesh.rank == 0:
            write_progress(run, block, request.pairs * len(loops))
        turn = block % len(loops)
        seconds[turn].append(_timed(loops[turn], request.steps, mesh) / request.steps)
        if bench.stopped:
            return None
    speeds = [[config.batch.global_size / value for value in values] for values in seconds]
    ratio = paired_ratio(speeds[0], speeds[1]) if request.raw is not None else None
    utilization = _utilization(bench, Spread.of(speeds[0]).median)
    return {
        **_setting(config, mesh),
        "samples": bench.samples,
        "blocks": request.pairs,
        "steps_per_block": request.steps,
        **_rates(seconds[0], bench),
        "memory": _memory(memory, mesh),
        "bubble_share": _gather(bubble_share(bench.gradients, mesh.device), mesh) if mesh.layout.pp > 1 else None,
        "ideal_bubble_share": mesh.layout.bubble_share if mesh.layout.pp > 1 else None,
        "communication_share": _communication(bench),
        "measurement": _measurement_cost(bench, Spread.of(seconds[0]).median),
        "mfu": utilization,
        "gap": _gap(bench, Spread.of(seconds[0]).median, utilization) if request.profile_gap else None,
        "against": ratio and {"loop": request.raw, **_ratio(ratio), **_rates(seconds[1], bench)},
    }


def _loop_over(step: Callable[[Sequence[Batch], int], None], batches: Iterator[StepBatch]) -> Loop:
    def loop() -> None:
        batch = next(batches)
        step(batch.micro_batches, batch.target_count)

    return loop


def _repeat(loop: Loop, times: int) -> None:
    for _ in range(times):
        loop()


def _timed(loop: Loop, steps: int, mesh: Mesh) -> float:
    """Returns the seconds from the moment all ranks are ready until the slowest has finished."""
    synchronize_ranks(mesh)
    begin = time.perf_counter()
    _repeat(loop, steps)
    synchronize_ranks(mesh)
    return time.perf_counter() - begin


def _setting(config: Config, mesh: Mesh) -> dict[str, Any]:
    cuda = mesh.device.type == "cuda"
    return {
        "strategy": config.strategy.name,
        "layout": str(mesh.layout),
        "world_size": mesh.layout.world_size,
        "device": torch.cuda.get_device_name(mesh.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": config.precision.name,
        "compression": config.strategy.compression,
        "compile": config.train.compile,
        "parameters": sum(p.numel() for p in build_model(config.model, config.train.seed).parameters()),
        "global_batch": config.batch.global_size,
    }


def _rates(seconds: Sequence[float], bench: StepBench) -> dict[str, Any]:
    """Returns time and throughput; ``tokens_per_s`` counts targets and is None for inputs other than tokens."""
    samples = bench.config.batch.global_size
    first = bench.example
    inputs = first.micro_batches[0].inputs
    has_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    tokens = first.target_count if has_tokens else None
    return {
        "step_s": _spread([*seconds]),
        "samples_per_s": _spread([samples / value for value in seconds]),
        "tokens_per_s": tokens and _spread([tokens / value for value in seconds]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    spread = Spread.of(values)
    return {"median": spread.median, "p05": spread.low, "p95": spread.high}


def _ratio(ratio: Spread) -> dict[str, float]:
    return {"ratio": ratio.median, "ci95_low": ratio.low, "ci95_high": ratio.high}


def _memory(peaks: tuple[int, int | None], mesh: Mesh) -> dict[str, Any]:
    host, device = zip(*_gather(peaks, mesh), strict=True)
    return {"host_peak_bytes": [*host], "device_peak_bytes": None if device[0] is None else [*device]}


def _communication(bench: StepBench) -> list[float] | None:
    layout = bench.mesh.layout
    if layout.stage_ranks == 1:
        return None
    return _gather(communication_share(bench.gradients, bench.mesh.device, layout.pp > 1), bench.mesh)


def _measurement_cost(bench: StepBench, step_s: float) -> dict[str, float]:
    """Returns the cost of the measurements during training on the rank where it is largest."""
    measures = Measures(bench.config, bench.mesh, first_of_node=bench.mesh.rank == 0)
    local_cost = measures.cost(3, bench.step, bench.config.telemetry.log_every)
    worst: dict[str, float] = max(_gather(local_cost, bench.mesh), key=lambda cost: cost["seconds_per_step"])
    return {**worst, "share": worst["seconds_per_step"] / step_s}


def _utilization(bench: StepBench, samples_per_s: float) -> dict[str, Any] | None:
    """Returns the model FLOPs utilization; None if the model does not define its operations per sample."""
    config = bench.config
    mesh = bench.mesh
    model = build_model(config.model, config.train.seed)
    precision = config.precision.name
    cuda = mesh.device.type == "cuda"
    peak = device_peak(mesh.device, precision, config.precision.tf32) if cuda else None
    source = "data sheet"
    if peak is None:
        synchronize_ranks(mesh)
        dtype = compute_dtype(precision) or parameter_dtype(precision)
        peak = measured_gemm_flops(mesh.device, dtype, 8192 if cuda else 1024)
        source = "measured matrix product"
    peaks: list[float] = _gather(peak, mesh)
    shape = bench.inputs_shape() if isinstance(model, Model) else None
    if not isinstance(model, Model) or shape is None:
        return None
    inputs = torch.empty((1, *shape), device="meta")
    count = count_flops(model, inputs, recomputation_of(config, mesh.layout), loss_form(config, mesh.layout))
    figures = count.utilization(samples_per_s, sum(peaks))
    return {"value": figures["mfu"], **figures, **describe_utilization(count, sum(peaks), source)}


def _gap(bench: StepBench, step_s: float, utilization: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns what a step loses to each kind of work, the largest first; None if the FLOPs are not known."""
    if utilization is None:
        return None
    ideal_s = utilization["value"] * step_s
    recomputed_s = max(0.0, utilization.get("hfu", utilization["value"]) * step_s - ideal_s)
    own = profiled(bench.step, bench.mesh.device, bench.mesh.layout.pp > 1)
    found = losses(mean_of_ranks(_gather(own, bench.mesh)), step_s, ideal_s, recomputed_s)
    rows = [
        {"kind": kind, "seconds": value, "advice": step_gap.advice(kind, bench.config)} for kind, value in found.items()
    ]
    return {"step_s": step_s, "ideal_s": step_s - sum(found.values()), "losses": rows}


def _gather(value: Any, mesh: Mesh) -> list[Any]:
    """Gathers ``value`` from all ranks in order. Collective."""
    return gather_plain(value, mesh.control)


def measure_noise(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Measures the gradient norms that the noise scale needs; rank 0 writes their squares to ``bench-result.json``.

    Each estimate takes the gradient norms of some global batches and of their union, as the engine computes them. A
    training step on the union follows, so the estimates cover the first steps of a training.
    """
    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    request = NoiseRequest.read(run)
    config = replace(config, optim=replace(config.optim, in_backward=False))  # gradients add up over several batches
    mesh = join(spec, config)
    dataset = build_dataset(config.data, "train", config.train.seed, config.precision.name)
    plan = plan_split(config, mesh, dataset)
    engine = build_engine(config, mesh, None if plan is None else plan.layers)
    optimizer = Optimizer(config.optim, engine.named_parameters(), config.strategy.offload == "optimizer")
    take_step = TrainStep(config, mesh, engine, optimizer, request.estimates)
    feed = TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, config.train.seed, mesh.device, 0)
    control = Control(mesh)
    stopped = False

    def next_batch() -> StepBatch:
        nonlocal stopped
        local = next(feed)
        control.post(stop.requested, local.local_count)
        agreement = control.read()
        stopped = stopped or agreement.stop
        return StepBatch(local.micro_batches, agreement.target_count)

    def squared_norm(step: int, batch: StepBatch) -> float:
        scale = None if take_step.loss_scale is None else take_step.loss_scale.value
        engine.train_step(step, batch, scale)
        return float(engine.clip_grad_norm_(0.0, scale)) ** 2

    small, big = [], []
    for step in range(request.estimates):
        if mesh.rank == 0:
            write_progress(run, step, request.estimates)
        batches = [next_batch() for _ in range(request.times)]
        if stopped:
            break
        small += [squared_norm(step, batch) for batch in batches]
        union = tuple(micro for batch in batches for micro in batch.micro_batches)
        outcome = take_step(step, StepBatch(union, sum(batch.target_count for batch in batches)))
        big.append(float(outcome.grad_norm) ** 2)
    feed.close()
    if not stopped and mesh.rank == 0:
        sizes = {"small_size": config.batch.global_size, "big_size": config.batch.global_size * request.times}
        write_result(run, {"small": small, "big": big, **sizes})
    leave(mesh)
    if stopped:
        return Exit.STOPPED
    return Exit.DONE
