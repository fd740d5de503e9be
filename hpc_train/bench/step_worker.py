"""Runs the workers that measure training steps: ``bench step`` times them, ``bench batch`` takes their gradient norms.

``bench step`` alternates blocks of the trainer's steps with a bare loop. A timed step includes everything that the
trainer does in each step (the agreement of all ranks, the next batch, forward, backward, clipping and update), but not
saves, evaluation and logging. Afterwards, it measures which bucket size and which gradient compression are fastest.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.bench import step_gap
from hpc_train.bench.bare_loop import bare_batches, build_bare_loop
from hpc_train.bench.request import NoiseRequest, Spread, StepRequest, paired_ratio
from hpc_train.bench.worker import BenchRank, Training, measure_on_ranks
from hpc_train.config.schema import Config
from hpc_train.config.values import bucket_mb
from hpc_train.data.dataset import Dataset, StepBatch
from hpc_train.data.feed import TrainFeed
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import OF_LAYOUT, OF_RUN, check_compatibility
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.layout.sizes import active_count
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.compression import make_exchange
from hpc_train.parallel.mesh import Mesh, largest, synchronize, synchronize_ranks
from hpc_train.parallel.precision.dtypes import compute_dtype, parameter_dtype
from hpc_train.parallel.reduction import GradientReduction
from hpc_train.preflight.measure import measured_gemm_flops
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from hpc_train.train.guard import is_user_code
from hpc_train.train.step import Control, StepOutcome, TrainStep
from hpc_train.train.verify import Suspicion, Verification
from hpc_train.train.watch.measures import Measures
from hpc_train.train.watch.pipeline_watch import bubble_share
from hpc_train.train.watch.profiler import communication_share
from hpc_train.train.watch.utilization import (
    Peak,
    count_mean_flops,
    describe_utilization,
    device_peak,
    peak_device_memory,
    peak_host_memory,
)

HORIZON = 1_000_000  # steps of the learning rate's schedule
SIZES_MB = (1.0, 5.0, 25.0, 100.0)
WARM_UP = 2  # untimed steps with each bucket size, since DDP rebuilds its buckets after the first
COUNTED = 3  # timed steps with each bucket size
TECHNIQUES = ("none", "bf16", "powersgd", "topk")  # from the largest to the smallest message
PAYS = 2 / 3  # a technique is advised if it takes less than this share of the time of the previous choice
SAMPLE_BYTES = 16 * 2**20  # bytes of gradients that are compressed, which take 1.3 s at 100 Mbit/s
ROUNDS = 3  # measured sums with each technique, of which the first is not counted

Loop = Callable[[], object]


def measure(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Runs what ``bench-request.json`` requests; rank 0 writes ``bench-result.json``."""
    return measure_on_ranks(spec, stop, StepRequest, _measure_steps)


def _measure_steps(rank: BenchRank, request: StepRequest) -> dict[str, Any] | None:
    bench = StepBench(rank.config, rank.mesh, rank.stop)
    result = _measure_blocks(bench, request, rank)
    bench.close()
    if result is None:
        return None
    layers = bench.layers
    example = bench.example
    del bench  # the advice builds other engines, which need its memory
    return result | {"advice": advice(rank.config, rank.mesh, layers, example)}


def _report(suspicion: Suspicion) -> int:
    print(suspicion.words)
    return suspicion.findings


def _warn(step: int, message: str) -> None:
    print(f"step {step}: {message}")


class StepBench:
    """Provides the trainer's loop as a function of one step, and its parts for the other measurements. ``stopped``
    states whether a stop was requested; it changes at the same step on all ranks."""

    def __init__(self, config: Config, mesh: Mesh, stop: StopFlag) -> None:
        self.config = config
        self.mesh = mesh
        training = Training.build(config, mesh)
        self.layers = training.layers
        self.engine = training.engine
        verification = None
        if config.train.verify.every is not None and not config.optim.in_backward:
            may_write = is_user_code(config, self.engine)
            verification = Verification(
                config, mesh, self.engine, training.optimizer, _report, _warn, may_write=may_write
            )
        self._take_step = TrainStep(config, mesh, self.engine, training.optimizer, HORIZON, verification)
        self._feed = _feed_of(training.dataset, config, mesh)
        self.dataset = training.dataset
        self._control = Control(mesh)
        self._stop = stop
        first = next(self._feed)
        self._control.post(False, first.local_count)
        self.example = StepBatch(first.micro_batches, self._control.read().target_count)
        self._following = next(self._feed)
        self._control.post(False, self._following.local_count)
        self._step = 0
        self.stopped = False

    def inputs_shape(self) -> tuple[int, ...] | None:
        """Returns the shape of a sample's inputs; None if ``data.collate`` gives the model several."""
        if getattr(self.config.data, "collate", None) is None:
            return self.dataset.inputs_shape()
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

        Gradients that an update inside the backward would free are freed here too.
        """
        if self.engine.updates is not None:
            self.engine.updates.begin(lambda parameters, finite: None)
        self.engine.train_step(self._step, self.example)

    def close(self) -> None:
        self._control.read()  # completes the last all-reduce before any rank exits
        self._feed.close()


def _feed_of(dataset: Dataset, config: Config, mesh: Mesh) -> TrainFeed:
    return TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, config.train.seed, mesh.device, 0)


def _measure_blocks(bench: StepBench, request: StepRequest, rank: BenchRank) -> dict[str, Any] | None:
    """Measures all blocks and returns the result; None if a stop was requested before the last block."""
    config = bench.config
    mesh = bench.mesh
    layout = mesh.layout
    loops: list[Loop] = [bench.step]
    for _ in range(request.warmup):
        bench.step()
    peaks = peak_host_memory(), peak_device_memory(mesh.device)
    if request.raw is not None:
        bare = build_bare_loop(request.raw, config, mesh, bench.layers)
        batches = bare_batches(config, mesh)

        def bare_step() -> None:
            batch = next(batches)
            bare.step(batch.micro_batches, batch.target_count)

        loops.append(bare_step)
        for _ in range(request.warmup):
            bare_step()
    seconds: list[list[float]] = [[] for _ in loops]  # from all ranks ready until the slowest rank has finished
    for block in range(request.pairs * len(loops)):
        rank.write_progress(block, request.pairs * len(loops))
        turn = block % len(loops)
        synchronize_ranks(mesh)
        began = time.perf_counter()
        for _ in range(request.steps):
            loops[turn]()
        synchronize_ranks(mesh)
        seconds[turn].append((time.perf_counter() - began) / request.steps)
        if bench.stopped:
            return None
    step_s = Spread.of(seconds[0]).median
    against = None
    if request.raw is not None:
        speeds = [[config.batch.global_size / value for value in values] for values in seconds]
        ratio = paired_ratio(speeds[0], speeds[1])
        against = {
            "loop": request.raw,
            "ratio": ratio.median,
            "ci95_low": ratio.low,
            "ci95_high": ratio.high,
            **_rates(seconds[1], bench),
        }
    rates = _rates(seconds[0], bench)
    utilization = _utilization(bench, rates["samples_per_s"]["median"])
    host, device = zip(*_gather(peaks, mesh), strict=True)
    bubble = None
    if layout.pp > 1:
        bubble = _gather(bubble_share(bench.gradients, mesh.device), mesh)
    communication = None
    if layout.stage_ranks > 1:
        communication = _gather(communication_share(bench.gradients, mesh.device, layout.pp > 1), mesh)
    return {
        **rank.setting(),
        "strategy": config.strategy.name,
        "layout": str(layout),
        "threads": torch.get_num_threads(),
        "precision": config.precision.name,
        "compression": config.strategy.compression,
        "compile": config.train.compile,
        "parameters": sum(p.numel() for p in build_model(config.model, config.train.seed).parameters()),
        "active_parameters": active_count(config.model),
        "global_batch": config.batch.global_size,
        "samples": len(bench.dataset),
        "blocks": request.pairs,
        "steps_per_block": request.steps,
        **rates,
        "memory": {"host_peak_bytes": [*host], "device_peak_bytes": None if device[0] is None else [*device]},
        "bubble_share": bubble,
        "ideal_bubble_share": layout.bubble_share if layout.pp > 1 else None,
        "communication_share": communication,
        "measurement": _measurement_cost(bench, step_s),
        "mfu": utilization,
        "gap": _gap(bench, step_s, utilization) if request.profile_gap else None,
        "against": against,
    }


def _rates(seconds: Sequence[float], bench: StepBench) -> dict[str, Any]:
    """Returns time and throughput; ``tokens_per_s`` counts targets and is None for inputs other than tokens."""
    samples = bench.config.batch.global_size
    rates: dict[str, Any] = {
        "step_s": Spread.of(seconds).as_quantiles(),
        "samples_per_s": Spread.of([samples / value for value in seconds]).as_quantiles(),
        "tokens_per_s": None,
    }
    inputs = bench.example.micro_batches[0].inputs
    tokens = bench.example.target_count
    if isinstance(inputs, Tensor) and not inputs.is_floating_point() and tokens:
        rates["tokens_per_s"] = Spread.of([tokens / value for value in seconds]).as_quantiles()
    return rates


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
    size = 1024
    peak = None
    if mesh.device.type == "cuda":
        size = 8192
        peak = device_peak(mesh.device, precision, config.precision.tf32)
    source = "data sheet"
    if peak is None:
        synchronize_ranks(mesh)
        measured = measured_gemm_flops(mesh.device, compute_dtype(precision) or parameter_dtype(precision), size)
        peak = Peak(measured, measured)
        source = "measured matrix product"
    peaks: list[list[float]] = _gather([peak.flops, peak.of_precision], mesh)
    total = Peak(sum(flops for flops, _ in peaks), sum(of_precision for _, of_precision in peaks))
    if not isinstance(model, Model):
        return None
    shape = bench.inputs_shape()
    if shape is None:
        return None
    recomputation = recomputation_of(config, mesh.layout)
    count = count_mean_flops(model, bench.dataset, shape, recomputation, loss_form(config, mesh.layout))
    figures = count.utilization(samples_per_s, total)
    return {"value": figures["mfu"], **figures, **describe_utilization(count, total, source)}


def _gap(bench: StepBench, step_s: float, utilization: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns what a step loses to each kind of work, the largest first; or None if the FLOPs are unknown."""
    if utilization is None:
        return None
    ideal_s = utilization["mfu_of_precision"] * step_s
    recomputed_s = max(0.0, utilization.get("hfu", utilization["mfu"]) / utilization["mfu"] - 1.0) * ideal_s
    profile = step_gap.profiled(bench.step, bench.mesh.device, bench.mesh.layout.pp > 1)
    profiles = _gather(profile, bench.mesh)
    mean = {kind: fmean(rank[kind] for rank in profiles) for kind in profile}
    losses = step_gap.losses(mean, step_s, ideal_s, recomputed_s)
    rows = [
        {"kind": kind, "seconds": value, "advice": step_gap.advice(kind, bench.config)}
        for kind, value in losses.items()
    ]
    return {"step_s": step_s, "ideal_s": step_s - sum(losses.values()), "losses": rows}


def _gather(value: Any, mesh: Mesh) -> list[Any]:
    """Gathers ``value`` from all ranks in order. Collective."""
    return gather_plain(value, mesh.control)


def measure_noise(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Measures the gradient norms that the noise scale needs; rank 0 writes their squares to ``bench-result.json``.

    Each estimate takes the gradient norms of some global batches and of their union, as the engine computes them. A
    training step on the union follows, so the estimates cover the first steps of a training.
    """
    return measure_on_ranks(spec, stop, NoiseRequest, _measure_noise)


def _measure_noise(rank: BenchRank, request: NoiseRequest) -> dict[str, Any] | None:
    mesh = rank.mesh
    # gradients add up over several batches
    config = replace(rank.config, optim=replace(rank.config.optim, in_backward=False))
    training = Training.build(config, mesh)
    engine = training.engine
    take_step = TrainStep(config, mesh, engine, training.optimizer, request.estimates)
    control = Control(mesh)
    small: list[float] = []
    big: list[float] = []
    with closing(_feed_of(training.dataset, config, mesh)) as feed:
        for step in range(request.estimates):
            rank.write_progress(step, request.estimates)
            batches = []
            stopped = False
            for local in islice(feed, request.times):
                control.post(rank.stop.requested, local.local_count)
                agreement = control.read()
                stopped = stopped or agreement.stop
                batches.append(StepBatch(local.micro_batches, agreement.target_count))
            if stopped:
                return None
            for batch in batches:
                scale = None if take_step.loss_scale is None else take_step.loss_scale.value
                engine.train_step(step, batch, scale)
                small.append(float(engine.clip_grad_norm_(0.0, scale)) ** 2)
            union = tuple(micro for batch in batches for micro in batch.micro_batches)
            outcome = take_step(step, StepBatch(union, sum(batch.target_count for batch in batches)))
            big.append(float(outcome.grad_norm) ** 2)
    sizes = {"small_size": config.batch.global_size, "big_size": config.batch.global_size * request.times}
    return {"small": small, "big": big, **sizes}


def bucket_seconds(
    config: Config, mesh: Mesh, layers: Sequence[range] | None, batch: StepBatch
) -> dict[float, float] | None:
    """Measures forward, backward and reduction of ``batch`` with several bucket sizes. Collective.

    Args:
        layers: the layers of each pipeline stage, as for ``build_engine``.

    Returns:
        Size in MB -> median seconds on the slowest rank; None if this layout does not reduce gradients in buckets.
    """
    if mesh.layout.dp_cp == 1 or not mesh.layout.kind.buckets:
        return None
    seconds: dict[float, float] = {}
    for size in SIZES_MB:
        strategy = replace(config.strategy, bucket_cap_mb=size)
        engine = build_engine(replace(config, strategy=strategy), mesh, layers)
        steps: list[float] = []
        for step in range(WARM_UP + COUNTED):
            synchronize_ranks(mesh)
            began = time.perf_counter()
            if engine.updates is not None:
                engine.updates.begin(lambda parameters, finite: None)
            engine.train_step(step, batch)
            synchronize(mesh.device)
            steps.append(time.perf_counter() - began)
        seconds[size] = largest(median(steps[WARM_UP:]), mesh)
        gradients = sum(p.numel() * p.element_size() for p in engine.named_parameters().values() if p.requires_grad)
        if size * 2**20 >= largest(gradients / mesh.layout.tp, mesh):
            break  # all gradients are in one bucket
        del engine
        gc.collect()  # DDP is in reference cycles
    return seconds


def compression_seconds(config: Config, mesh: Mesh) -> dict[str, float] | None:
    """Measures the sum of one step's gradients with each technique of ``strategy.compression``. Collective.

    The sum is measured by itself, though in training it overlaps with the backward pass.

    Returns:
        Technique -> seconds on the slowest rank; None if this layout does not compress gradients before they are sent.
    """
    if mesh.layout.dp_cp == 1 or not mesh.layout.kind.buckets:
        return None
    parameters, share = _sample(config, mesh)
    seconds: dict[str, float] = {}
    for name in TECHNIQUES:
        compressed = replace(config, strategy=replace(config.strategy, compression=name))
        try:
            check_compatibility((*OF_LAYOUT, *OF_RUN), compressed, mesh.layout)
        except UserError:
            continue
        seconds[name] = largest(_seconds_of_sum(name, config, mesh, parameters) / share, mesh)
    return seconds


def advised(seconds: Mapping[str, float]) -> str:
    """Returns the technique to advise. A lossy technique must be faster by a margin. ``seconds`` holds the seconds of
    each technique, the least lossy technique first."""
    chosen, *others = seconds
    for technique in others:
        if seconds[technique] < PAYS * seconds[chosen]:
            chosen = technique
    return chosen


def advice(config: Config, mesh: Mesh, layers: Sequence[range] | None, batch: StepBatch) -> dict[str, Any]:
    """Returns the best value of each key and the measured seconds by value; empty if the layout has no such key.
    Collective."""
    result: dict[str, Any] = {}
    sizes = bucket_seconds(config, mesh, layers, batch)
    if sizes is not None:
        best = min(sizes, key=lambda size: sizes[size])
        result["strategy.bucket_cap_mb"] = {"best": best, "seconds": {f"{size:g}": sizes[size] for size in sizes}}
    techniques = compression_seconds(config, mesh)
    if techniques is not None:
        result["strategy.compression"] = {"best": advised(techniques), "seconds": techniques}
    return result


def _sample(config: Config, mesh: Mesh) -> tuple[dict[str, nn.Parameter], float]:
    """Returns parameters with the shapes of the model's parameters, and their share of the parameters of one rank."""
    dtype = parameter_dtype(config.precision.name)
    capacity = SAMPLE_BYTES // dtype.itemsize
    model = build_model(config.model, config.train.seed, values=False)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    total = sum(map(math.prod, shapes.values())) / mesh.layout.pp
    sample: dict[str, nn.Parameter] = {}
    taken = 0
    for name, (length, *rest) in reversed([(name, shape) for name, shape in shapes.items() if shape]):
        rows = min(length, max(1, (capacity - taken) // math.prod(rest)))
        sample[name] = nn.Parameter(torch.zeros(rows, *rest, dtype=dtype, device=mesh.device))
        taken += rows * math.prod(rest)
        if taken >= min(capacity, total):
            break
    return sample, min(1.0, taken / total)


def _seconds_of_sum(technique: str, config: Config, mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> float:
    """Returns the shortest time of a few sums over the data-parallel ranks, as measured on this rank."""
    group = mesh.group("dp_cp")
    exchange = make_exchange(technique, config.strategy, parameters, group)
    reduction = GradientReduction(
        dict.fromkeys(parameters.values(), group), bucket_mb(config.strategy, mesh.device.type)
    )
    rounds: list[float] = []
    for _ in range(ROUNDS):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        synchronize_ranks(mesh)
        began = time.perf_counter()
        reduction.begin(1, exchange)
        reduction.reduce()
        exchange.commit(torch.ones((), dtype=torch.bool, device=mesh.device))
        synchronize(mesh.device)
        rounds.append(time.perf_counter() - began)
    return min(rounds[1:])
