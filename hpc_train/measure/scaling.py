"""Strong and weak scaling, from the results of ``bench step`` at several sizes: table, CSV, plot, and prose. No torch.

Strong: the global batch stays, and more ranks share it. Weak: it grows with the ranks. Speed-up is samples per second
against the smallest size of the same kind, efficiency the speed-up over the growth of the ranks.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

STRONG, WEAK = "strong", "weak"
KINDS = (STRONG, WEAK)
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        size: nodes or workers, as the command line names them.
        epoch_s: seconds for all samples of the training data at this speed.
        memory_gib: of the fullest rank, on the GPU where there is one.
        communication_share: of a step, the mean over the ranks; None where nothing is exchanged.
    """

    kind: str
    size: int
    ranks: int
    global_batch: int
    step_s: float
    samples_per_s: float
    speed_up: float
    efficiency: float
    epoch_s: float
    memory_gib: float
    communication_share: float | None


def scaling_rows(kind: str, results: Sequence[tuple[int, dict[str, Any]]]) -> list[Row]:
    """From (size, result of ``bench step``), smallest size first."""
    rows: list[Row] = []
    for size, result in results:
        speed, ranks = result["samples_per_s"]["median"], result["world_size"]
        speed_up = speed / rows[0].samples_per_s if rows else 1.0
        memory = max(result["memory"]["device_peak_bytes"] or result["memory"]["host_peak_bytes"])
        shares = result["communication_share"]
        rows.append(
            Row(
                kind=kind,
                size=size,
                ranks=ranks,
                global_batch=result["global_batch"],
                step_s=result["step_s"]["median"],
                samples_per_s=speed,
                speed_up=speed_up,
                efficiency=speed_up * (rows[0].ranks if rows else ranks) / ranks,
                epoch_s=result["samples"] / speed,
                memory_gib=memory / GIB,
                communication_share=None if shares is None else sum(shares) / len(shares),
            )
        )
    return rows


def table(rows: Sequence[Row], unit: str) -> str:
    lines = [
        f"{'':6} {unit:>7} {'ranks':>5} {'batch':>7} {'step':>9} {'samples/s':>10} {'speed-up':>8} {'efficiency':>10} "
        f"{'epoch':>9} {'GiB/rank':>8} {'comm.':>6}"
    ]
    for row in rows:
        share = "-" if row.communication_share is None else f"{row.communication_share:.1%}"
        lines.append(
            f"{row.kind:6} {row.size:>7} {row.ranks:>5} {row.global_batch:>7} {1e3 * row.step_s:>6.1f} ms "
            f"{row.samples_per_s:>10,.1f} {row.speed_up:>8.2f} {row.efficiency:>10.1%} {_duration(row.epoch_s):>9} "
            f"{row.memory_gib:>8.2f} {share:>6}"
        )
    return "\n".join(lines)


def paragraph(rows: Sequence[Row], result: dict[str, Any], unit: str) -> str:
    """What a proposal for computing time wants to read; ``result``: of any of the measurements."""
    strong, weak = ([row for row in rows if row.kind == kind] for kind in KINDS)
    first, last = strong[0], strong[-1]
    shares = [row.communication_share for row in strong if row.communication_share is not None]
    text = (
        f"We measured the scaling of our training (a model of {result['parameters']:,} parameters in "
        f"{result['precision']}, strategy {result['strategy']}, PyTorch {result['torch']}) on {first.size} to "
        f"{last.size} {unit} with {last.ranks // last.size} x {result['device']} each. With the global batch fixed at "
        f"{first.global_batch} samples (strong scaling) the step falls from {1e3 * first.step_s:.1f} ms to "
        f"{1e3 * last.step_s:.1f} ms: a speed-up of {last.speed_up:.2f} and a parallel efficiency of "
        f"{last.efficiency:.0%} at {last.ranks} ranks. With {weak[0].global_batch // weak[0].size} samples per "
        f"{unit.removesuffix('s')} (weak scaling) the efficiency there is {weak[-1].efficiency:.0%}. "
    )
    if shares:
        text += f"Communication that is not hidden behind computing takes {shares[-1]:.0%} of a step there. "
    device_hours = last.epoch_s * last.ranks / 3600
    text += (
        f"One epoch of {result['samples']:,} samples takes {_duration(last.epoch_s)} on {last.size} {unit}, which is "
        f"{device_hours:.2g} device-hours, and at most {last.memory_gib:.1f} GiB of memory per rank. All figures are "
        f"medians of {result['blocks']} blocks of {result['steps_per_block']} steps."
    )
    return text


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def write_plot(rows: Sequence[Row], unit: str, path: Path) -> None:
    """Speed-up and efficiency over the size; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    for kind in KINDS:
        own = [row for row in rows if row.kind == kind]
        speed.plot([row.size for row in own], [row.speed_up for row in own], marker="o", label=kind)
        efficiency.plot([row.size for row in own], [row.efficiency for row in own], marker="o", label=kind)
    sizes = sorted({row.size for row in rows})
    speed.plot(sizes, [size / sizes[0] for size in sizes], linestyle="--", color="grey", label="ideal")
    efficiency.set_ylim(0, 1.1)
    for axes, name in ((speed, "speed-up"), (efficiency, "efficiency")):
        axes.set_xlabel(unit)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
