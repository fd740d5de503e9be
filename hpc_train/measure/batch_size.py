"""Micro-batch sizes one after the other: what each brings, which is the knee, when to stop. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
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
