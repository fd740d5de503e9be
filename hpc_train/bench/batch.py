"""``python -m hpc_train bench batch`` finds a good micro-batch size and estimates the gradient noise scale.

Each micro-batch size is measured by new workers, so that running out of memory ends only one trial.

The noise scale estimates a useful size of the global batch (McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162,
appendix A.1). A gradient over B samples is the true gradient G plus noise of variance tr(S) / B, so the squared norms
at two batch sizes give unbiased estimates of both:

    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
    tr(S) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

The simple noise scale is tr(S) / |G|^2, in samples. A run with this batch size needs twice the steps of a run with very
large batches and twice the samples of a run with very small ones. The noise scale grows while the loss falls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hpc_train.bench.measuring import add_blocks, bench_parser, check_here, config_of, refuse_below_one, run_benchmark
from hpc_train.bench.request import NoiseRequest, StepRequest
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.validate import validate
from hpc_train.machine.allocation import workers_per_node
from hpc_train.machine.kernel_counters import free_memory
from hpc_train.report.plots import check_plot
from hpc_train.run.exits import Exit
from hpc_train.units import GIB, format_bytes

ENTRY = "hpc_train.bench.step_worker:measure"
NOISE_ENTRY = "hpc_train.bench.step_worker:measure_noise"
WARMUP = 2  # steps before a block
NOISE_BATCH_RATIO = 8  # of the two batch sizes for the noise scale
KNEE = 0.95  # share of the best speed beyond which a larger micro-batch is not worth its memory
HOST_SHARE = 0.8  # default share of this machine's free memory that trials may use


def main(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    refuse_below_one(options, "steps", "pairs", "most")
    if options.noise < 0:
        raise UserError("--noise must be at least 0", where="--noise", fix="--noise 20, or omit the option")
    if options.plot is not None:
        check_plot(options.plot, "--plot")
    config = config_of(rest)
    gpus, _ = workers_per_node(config.cluster)
    layout = check_here(config)
    if config.train.reproducible is not None:
        raise UserError(
            "bench batch varies the micro-batch size, which train.reproducible fixes",
            where="train.reproducible",
            fix="train.reproducible=null",
        )
    limit = None  # a GPU reports by itself that its memory is full
    if not gpus:
        limit = int(GIB * (options.memory or 0)) or int(HOST_SHARE * free_memory().size) // layout.world_size
    code, trials, unit = _trials(config, layout, options, limit)
    chosen = knee(trials)
    if chosen is None:
        return code or Exit.FAILED
    noise = None
    if options.noise:
        sized = _with_micro_size(config, layout, chosen.micro_size)
        _, norms = run_benchmark(sized, NoiseRequest(options.noise, NOISE_BATCH_RATIO), NOISE_ENTRY)
        if norms is not None:
            noise = noise_scale(**norms)
    if options.plot is not None:
        write_plot(trials, unit, options.plot)
    overrides = [f"batch.micro_size={chosen.micro_size}"]
    if noise is not None and noise.samples is not None:
        multiple = chosen.micro_size * layout.dp  # divides the samples of a step
        if layout.pp > 1:
            multiple *= layout.stages
        overrides.append(f"batch.global_size={multiple * max(1, round(noise.samples / multiple))}")
    if options.json:
        summary = {"unit": unit, "trials": [asdict(trial) for trial in trials], "knee": chosen.micro_size}
        print(json.dumps(summary | {"noise": noise and asdict(noise), "overrides": overrides}))
        return Exit.DONE
    print(str(layout).rpartition(",")[0])
    print(table(trials, unit))
    if noise is not None:
        print(f"gradient noise scale: {noise}")
    print(f"suggested overrides: {' '.join(overrides)}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "batch",
        "[overrides] [--most N] [--memory GIB] [--seconds S] [--steps N] [--pairs N] [--noise N] [--plot FILE]",
        "Doubles the micro-batch size until memory or time runs out, and estimates the noise scale of the gradient.",
        ["python -m hpc_train bench batch +strategy=zero3 model=gpt_124m precision=bf16 --plot b.png"],
    )
    parser.add_argument("--most", type=int, default=1024, metavar="N", help="largest size (default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="largest memory of a rank on the CPU (default: 80 %% of the free memory, divided by the ranks)",
    )
    parser.add_argument(
        "--seconds", type=float, default=600, metavar="S", help="start no other size after this time (default: 600)"
    )
    add_blocks(parser, 5, 3)
    parser.add_argument(
        "--noise",
        type=int,
        default=20,
        metavar="N",
        help="number of noise-scale estimates; 0 skips them (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot speed and memory over the size")
    return parser


def _trials(
    config: Config, layout: Layout, options: argparse.Namespace, limit: int | None
) -> tuple[int, list[Trial], str]:
    """Measures all sizes; returns the last exit code, the trials, and the unit of their speed. ``limit`` is the memory
    per rank in bytes; None continues until a trial runs out of memory."""
    trials: list[Trial] = []
    code = 0
    size = 1
    unit = "tokens/s"
    began = time.monotonic()
    while size <= options.most:
        expected = expected_memory(trials, size)
        if limit is not None and expected is not None and expected > limit:
            trials.append(Trial(size, None, None, f"would take {format_bytes(expected)} of {format_bytes(limit)}"))
            break
        if time.monotonic() - began > options.seconds:
            trials.append(Trial(size, None, None, f"skipped, the time limit of {options.seconds:g} s is over"))
            break
        request = StepRequest(options.steps, options.pairs, WARMUP, None)
        sized = _with_micro_size(config, layout, size)
        try:
            validate(sized, 1, layout.world_size)
        except UserError as error:  # such as a budget of activations
            if not trials:
                raise
            trials.append(Trial(size, None, None, error.what))
            break
        failures: list[str] = []
        code, result = run_benchmark(sized, request, ENTRY, failures=failures)
        if result is None:
            reason = [f"failed with exit code {code}", *failures][-1]
            trials.append(Trial(size, None, None, reason))
            break
        if not result["tokens_per_s"]:
            unit = "samples/s"
        trials.append(Trial.of(size, result))
        size *= 2
    return code, trials, unit


def _with_micro_size(config: Config, layout: Layout, size: int) -> Config:
    """Sets micro-batches of ``size``; their number comes from ``config`` with a pipeline, otherwise it is one."""
    count = layout.micro_batches if layout.pp > 1 else 1
    batch = replace(config.batch, micro_size=size, micro_batches="auto", global_size=size * count * layout.dp)
    return replace(config, batch=batch)


@dataclass(frozen=True)
class Trial:
    """Holds the measurement of one micro-batch size.

    Attributes:
        speed: tokens per second, or samples per second for inputs other than tokens; None if the trial failed.
        memory: peak bytes of the rank that needs most.
        problem: the class of the failure, or empty.
    """

    micro_size: int
    speed: float | None
    memory: int | None
    problem: str = ""

    @classmethod
    def of(cls, micro_size: int, result: dict[str, Any]) -> Trial:
        """Returns the trial for a result of ``bench step``."""
        rates = result["tokens_per_s"] or result["samples_per_s"]
        memory = result["memory"]["device_peak_bytes"] or result["memory"]["host_peak_bytes"]
        return cls(micro_size, rates["median"], max(memory))


def knee(trials: Sequence[Trial]) -> Trial | None:
    """Returns the smallest micro-batch that reaches ``KNEE`` of the best speed; or None if all trials failed."""
    speeds = {trial: trial.speed for trial in trials if trial.speed is not None}
    best = max(speeds.values(), default=0.0)
    fast = [trial for trial, speed in speeds.items() if speed >= KNEE * best]
    return min(fast, key=lambda trial: trial.micro_size, default=None)


def expected_memory(trials: Sequence[Trial], micro_size: int) -> int | None:
    """Extrapolates the bytes at ``micro_size`` linearly from the last two trials; or None if there are fewer than
    two."""
    measured = [(trial.micro_size, trial.memory) for trial in trials if trial.memory is not None]
    if len(measured) < 2:
        return None
    (first, less), (second, more) = measured[-2:]
    return more + max(0, more - less) * (micro_size - second) // (second - first)


def table(trials: Sequence[Trial], unit: str) -> str:
    chosen = knee(trials)
    lines = [f"{'micro_size':>10}  {unit:>12}  {'GiB/rank':>8}"]
    for trial in trials:
        if trial.speed is None or trial.memory is None:
            problem = trial.problem
            if problem.isidentifier():  # a class of failures, such as out_of_memory
                problem = problem.replace("_", " ")
            lines.append(f"{trial.micro_size:>10}  {problem}")
            continue
        mark = ""
        if trial == chosen:
            mark = f"  <- knee: smallest with {KNEE:.0%} of the best speed"
        lines.append(f"{trial.micro_size:>10}  {trial.speed:>12,.0f}  {trial.memory / GIB:>8.2f}{mark}")
    return "\n".join(lines)


def write_plot(trials: Sequence[Trial], unit: str, path: Path) -> None:
    """Plots speed and memory over the micro-batch size; needs matplotlib."""
    from matplotlib.figure import Figure

    points = [
        (trial.micro_size, trial.speed, trial.memory / GIB)
        for trial in trials
        if trial.speed is not None and trial.memory is not None
    ]
    sizes, speeds, gib = zip(*points, strict=True)
    chosen = knee(trials)
    figure = Figure(figsize=(8, 5), layout="constrained")
    speed = figure.subplots()
    memory = speed.twinx()
    speed.plot(sizes, speeds, marker="o", label=unit)
    memory.plot(sizes, gib, marker="s", color="gray", label="memory")
    if chosen is not None:
        speed.axvline(chosen.micro_size, linestyle="--", color="black", label="knee")
    speed.set_xscale("log", base=2)
    speed.set_xlabel("samples per micro-batch and rank")
    speed.set_ylabel(unit)
    memory.set_ylabel("GiB of the fullest rank")
    speed.legend()
    figure.savefig(path)


@dataclass(frozen=True)
class NoiseScale:
    """Holds the gradient noise scale.

    Attributes:
        gradient: |G|^2.
        noise: tr(S).
        samples: the noise scale; None if the estimates are too noisy, so that more of them are needed.
    """

    gradient: float
    noise: float
    samples: float | None

    def __str__(self) -> str:
        if self.samples is None:
            return "unknown, the estimates are too noisy; increase --noise"
        return (
            f"{self.samples:,.1f} samples at the start of training; it grows while the loss falls. A much smaller "
            "global batch needs more steps, a much larger one more samples (arXiv:1812.06162)"
        )


def noise_scale(small: Sequence[float], big: Sequence[float], small_size: int, big_size: int) -> NoiseScale:
    """Estimates the noise scale from squared gradient norms at two batch sizes.

    Args:
        small: squared norms at ``small_size`` samples.
        big: squared norms at ``big_size`` samples; there may be fewer of them.
    """
    mean_small = fmean(small)
    mean_big = fmean(big)
    gradient = (big_size * mean_big - small_size * mean_small) / (big_size - small_size)
    noise = (mean_small - mean_big) / (1 / small_size - 1 / big_size)
    samples = None
    if gradient > 0 and noise > 0:
        samples = noise / gradient
    return NoiseScale(gradient, noise, samples)
