"""``python -m hpc_train bench batch``: which micro-batch is fast enough, and which global batch is worth its computing.

Each size is measured by workers of its own, so that running out of memory ends one trial and nothing else.

Micro-batch sizes one after the other: what each brings, which is the knee, when to stop. No torch.

The gradient noise scale: how large a global batch is worth its computing. No torch.

McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.1: a gradient over B samples is the true gradient G
plus noise of variance tr(S) / B, so the squared norms at two batch sizes give both without bias:

    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
    tr(S) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

and the simple noise scale is tr(S) / |G|^2, in samples. At that batch twice the steps of the largest batches and twice
the samples of the smallest ones are needed; it grows while the loss falls.
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

from hpc_train.bench.measuring import config_of, measured
from hpc_train.bench.request import NoiseRequest, StepRequest
from hpc_train.cluster.allocation import workers_per_node
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout
from hpc_train.plan.validate import validate
from hpc_train.preflight.bandwidth import check_plot
from hpc_train.run.exits import Exit
from hpc_train.units import GIB, format_bytes

ENTRY, NOISE_ENTRY = "hpc_train.bench.step_worker:measure", "hpc_train.bench.noise_worker:measure"
WARMUP, TIMES = 2, 8  # steps before a block; how much larger the large batch of the noise scale is
HOST_SHARE = 0.8  # of the free memory of this machine, by default


def main(arguments: list[str]) -> int:
    """Measures on this node and prints; returns an exit code."""
    options, rest = _parser().parse_known_args(arguments)
    if min(options.steps, options.pairs, options.most) < 1 or options.noise < 0:
        raise UserError("nothing to measure", where="--steps, --pairs, --most, --noise", fix="1 or more")
    if options.plot is not None:
        check_plot(options.plot)
    config = config_of(rest)
    gpus, workers = workers_per_node(config.cluster)
    layout = validate(config, 1, workers)
    if config.train.reproducible is not None:
        raise UserError(
            "train.reproducible fixes the micro-batches", where="train.reproducible", fix="train.reproducible=null"
        )
    limit = None if gpus else int(GIB * options.memory) if options.memory else _free_memory() // layout.world_size
    code, trials, unit = _trials(config, layout, options, limit)
    chosen = knee(trials)
    if chosen is None:
        return code or Exit.FAILED
    noise = _noise(_with_micro_size(config, layout, chosen.micro_size), options.noise) if options.noise else None
    if options.plot is not None:
        write_plot(trials, unit, options.plot)
    overrides = _overrides(chosen, layout, noise)
    if options.json:
        found = {"unit": unit, "trials": [asdict(trial) for trial in trials], "knee": chosen.micro_size}
        print(json.dumps(found | {"noise": noise and asdict(noise), "overrides": overrides}))
    else:
        print(_report(layout, trials, unit, noise, overrides))
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench batch",
        usage="python -m hpc_train bench batch [overrides] [--most N] [--memory GIB] [--seconds S] [--noise N]"
        " [--plot FILE] [--json]",
        description="Doubles the micro-batch until memory or time is used up, and measures the gradient noise scale."
        " The overrides are those of a training, which is done under the strategy that they say.",
        epilog="example:\n  python -m hpc_train bench batch +strategy=zero3 model=gpt_124m precision=bf16 --plot b.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--most", type=int, default=1024, metavar="N", help="largest size (default: %(default)s)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="on the CPU: most memory of a rank; default: 80 %% of what is free, shared")  # fmt: skip # noqa: E501
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="no new size after (default: 600)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of a block (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="blocks of a size (default: %(default)s)")
    parser.add_argument(
        "--noise", type=int, default=20, metavar="N", help="estimates of the noise; 0: none (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="speed and memory over the size, as a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _trials(
    config: Config, layout: Layout, options: argparse.Namespace, limit: int | None
) -> tuple[int, list[Trial], str]:
    """The last exit code, the trials, and the unit of their speed.

    Args:
        limit: of the memory of a rank in bytes; None lets a trial find the end of it.
    """
    trials: list[Trial] = []
    code, size, unit, began = 0, 1, "tokens/s", time.monotonic()
    while size <= options.most:
        expected = expected_memory(trials, size)
        if limit is not None and expected is not None and expected > limit:
            trials.append(Trial(size, None, None, f"would take {format_bytes(expected)} of {format_bytes(limit)}"))
            break
        if time.monotonic() - began > options.seconds:
            trials.append(Trial(size, None, None, f"not tried, after {options.seconds:g} s"))
            break
        request = StepRequest(options.steps, options.pairs, WARMUP, None)
        failed: list[str] = []
        code, result = measured(_with_micro_size(config, layout, size), request, ENTRY, failures=failed)
        if result is None:
            trials.append(Trial(size, None, None, failed[-1] if failed else f"ended with {code}"))
            break
        unit = "tokens/s" if result["tokens_per_s"] else "samples/s"
        trials.append(Trial.of(size, result))
        size *= 2
    return code, trials, unit


def _with_micro_size(config: Config, layout: Layout, size: int) -> Config:
    """With micro-batches of ``size``, and as many of them as ``config`` has in a pipeline; one elsewhere."""
    count = layout.micro_batches if layout.pp > 1 else 1
    batch = replace(config.batch, micro_size=size, micro_batches="auto", global_size=size * count * layout.dp)
    return replace(config, batch=batch)


def _noise(config: Config, estimates: int) -> NoiseScale | None:
    _, found = measured(config, NoiseRequest(estimates, TIMES), NOISE_ENTRY)
    return None if found is None else noise_scale(**found)


def _overrides(chosen: Trial, layout: Layout, noise: NoiseScale | None) -> list[str]:
    """The setting to paste; the global batch is whole micro-batches of all ranks."""
    overrides = [f"batch.micro_size={chosen.micro_size}"]
    if noise is not None and noise.samples is not None:
        unit = chosen.micro_size * layout.dp * (layout.stages if layout.pp > 1 else 1)
        overrides.append(f"batch.global_size={unit * max(1, round(noise.samples / unit))}")
    return overrides


def _report(layout: Layout, trials: list[Trial], unit: str, noise: NoiseScale | None, overrides: list[str]) -> str:
    lines = [str(layout).rpartition(",")[0], table(trials, unit)]
    if noise is not None and noise.samples is None:
        lines.append("gradient noise scale: the noise hides the gradient; --noise with a larger number")
    elif noise is not None:
        lines.append(
            f"gradient noise scale: {noise.samples:,.1f} samples, at the beginning of a training (it grows while the "
            "loss falls): a global batch far below takes more steps, one far above more samples (arXiv:1812.06162)"
        )
    return "\n".join([*lines, f"to paste: {' '.join(overrides)}"])


def _free_memory() -> int:
    """Bytes for all ranks, as the kernel says (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return int(HOST_SHARE * 1024 * kilobytes)


KNEE = 0.95  # of the best speed: what a larger micro-batch brings beyond it is not worth its memory


@dataclass(frozen=True)
class Trial:
    """One micro-batch size.

    Attributes:
        speed: tokens (samples, where the inputs are no tokens) per second; None where it failed.
        memory: bytes of the fullest rank.
        problem: the class of the failure, or empty.
    """

    micro_size: int
    speed: float | None
    memory: int | None
    problem: str = ""

    @classmethod
    def of(cls, micro_size: int, result: dict[str, Any]) -> Trial:
        """From the result of ``bench step``."""
        rates = result["tokens_per_s"] or result["samples_per_s"]
        memory = result["memory"]["device_peak_bytes"] or result["memory"]["host_peak_bytes"]
        return cls(micro_size, rates["median"], max(memory))


def knee(trials: Sequence[Trial]) -> Trial | None:
    """The smallest micro-batch within ``KNEE`` of the best speed; None where no trial went well."""
    good = [trial for trial in trials if trial.speed is not None]
    best = max((trial.speed or 0 for trial in good), default=0)
    return min((trial for trial in good if (trial.speed or 0) >= KNEE * best), key=lambda t: t.micro_size, default=None)


def expected_memory(trials: Sequence[Trial], micro_size: int) -> int | None:
    """Bytes at ``micro_size``, on the line through the last two trials; None before there are two."""
    known = [(trial.micro_size, trial.memory) for trial in trials if trial.memory is not None]
    if len(known) < 2:
        return None
    (first, less), (second, more) = known[-2:]
    return more + max(0, more - less) * (micro_size - second) // (second - first)


def table(trials: Sequence[Trial], unit: str) -> str:
    """A line for each trial; the knee is marked."""
    chosen = knee(trials)
    lines = [f"{'micro_size':>10}  {unit:>12}  {'GiB/rank':>8}"]
    for trial in trials:
        if trial.speed is None or trial.memory is None:
            lines.append(f"{trial.micro_size:>10}  {trial.problem.replace('_', ' ')}")
            continue
        mark = f"  <- the knee: {KNEE:.0%} of the best" if trial == chosen else ""
        lines.append(f"{trial.micro_size:>10}  {trial.speed:>12,.0f}  {trial.memory / GIB:>8.2f}{mark}")
    return "\n".join(lines)


def write_plot(trials: Sequence[Trial], unit: str, path: Path) -> None:
    """Speed and memory over the micro-batch size; needs matplotlib."""
    from matplotlib.figure import Figure

    good = [trial for trial in trials if trial.speed is not None and trial.memory is not None]
    sizes, chosen = [trial.micro_size for trial in good], knee(trials)
    figure = Figure(figsize=(8, 5), layout="constrained")
    speed = figure.subplots()
    memory = speed.twinx()
    speed.plot(sizes, [trial.speed or 0 for trial in good], marker="o", label=unit)
    memory.plot(sizes, [(trial.memory or 0) / GIB for trial in good], marker="s", color="grey", label="memory")
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
    """``samples`` is None where the noise hides the gradient: more estimates are needed, or a larger big batch."""

    gradient: float  # |G|^2
    noise: float  # tr(S)
    samples: float | None


def noise_scale(small: Sequence[float], big: Sequence[float], small_size: int, big_size: int) -> NoiseScale:
    """From squared gradient norms at two batch sizes; numerator and denominator are averaged apart.

    Args:
        small: at ``small_size`` samples; any number of them.
    """
    of_small, of_big = fmean(small), fmean(big)
    gradient = (big_size * of_big - small_size * of_small) / (big_size - small_size)
    noise = (of_small - of_big) / (1 / small_size - 1 / big_size)
    return NoiseScale(gradient, noise, noise / gradient if gradient > 0 and noise > 0 else None)
