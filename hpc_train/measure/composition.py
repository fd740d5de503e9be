"""What steps are made of, by a profile of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpc_train.measure.shares import Interval, cpu_intervals, gpu_intervals, uncovered

MICRO = 1e-6  # torch.profiler counts microseconds


@dataclass(frozen=True)
class Composition:
    """Seconds of one rank; they add up to ``elapsed_s``.

    Attributes:
        compute_s: something was computed: kernels on a GPU, torch's operators on the CPU.
        communication_s: a collective was under way, and nothing computed.
        bubble_s: only messages between pipeline stages were under way.
        data_s: waiting for the next batch.
        host_s: the rest: Python and launching kernels.
    """

    elapsed_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    data_s: float

    @property
    def host_s(self) -> float:
        return self.elapsed_s - self.compute_s - self.communication_s - self.bubble_s - self.data_s

    def shares(self) -> dict[str, float]:
        """Of the time."""
        seconds = {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "bubble": self.bubble_s,
            "data": self.data_s,
            "host": self.host_s,
        }
        return {name: value / self.elapsed_s for name, value in seconds.items()}


def composition(events: Iterable[Any], elapsed_s: float, data_s: float, device: torch.device) -> Composition:
    """From the events of torch.profiler; the waits for data are the host's and known to it alone."""
    intervals = gpu_intervals(events) if device.type == "cuda" else cpu_intervals(events)
    nothing: list[Interval] = []
    compute = uncovered(intervals.computation, nothing) * MICRO
    communication = uncovered(intervals.communication, intervals.computation) * MICRO
    bubble = uncovered(intervals.messages, [*intervals.computation, *intervals.communication]) * MICRO
    parts, left = [], elapsed_s
    for seconds in (compute, communication, bubble, data_s):  # a wait for data may cover a message
        parts.append(min(seconds, left))
        left -= parts[-1]
    return Composition(elapsed_s, *parts)


def summary(of_ranks: Mapping[int, Composition], steps: int) -> str:
    """A table: a line for each profiled rank, with milliseconds per step and shares."""
    names = ("compute", "communication", "bubble", "data", "host")
    lines = ["rank   ms/step" + "".join(f"{name:>15}" for name in names)]
    for rank, made_of in sorted(of_ranks.items()):
        shares = made_of.shares()
        cells = "".join(f"{shares[name]:>15.1%}" for name in names)
        lines.append(f"{rank:>4} {1e3 * made_of.elapsed_s / steps:>9.1f}{cells}")
    return "\n".join(lines)
