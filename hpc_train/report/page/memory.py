"""Shows the memory of each rank by part, beside the memory of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.report.page.chart import color_key
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, joined, picture, section, table
from hpc_train.units import format_bytes

PARTS = {"parameters": "c0", "gradients": "c1", "optimizer": "c3", "activations": "c2"}
RANKS = 16  # bars: the ranks with the highest peaks
BAR, GAP, NAMES, WIDTH = 20.0, 10.0, 92.0, 640.0
TIGHT = 0.9  # share of the device's memory


def memory(facts: RunFacts) -> Html:
    """Returns the section about memory."""
    measured = (facts.record.get("memory") or {}).get("ranks") or []
    if not measured:
        return section("Memory", block("paragraph", _without_parts(facts)))
    order = sorted(range(len(measured)), key=lambda rank: -measured[rank]["peak"])[:RANKS]
    words = _words(facts, measured, order[0])
    shown = sorted(order)
    drawn = [measured[rank] for rank in shown]
    full = _full(facts, drawn)
    most = max(full or 0, *(rank["peak"] for rank in drawn))
    bars = picture("Memory by part", words, WIDTH, len(shown) * (BAR + GAP), *_bars(shown, drawn, full, most))
    names = [*PARTS.items(), *([("free memory of the device", "wait")] if full else [])]
    left = f"The {RANKS} of {len(measured)} ranks with the highest peaks" if len(measured) > RANKS else "Peak by rank"
    columns = ("rank", *PARTS, "peak", *(["device"] if full else []))
    rows = [[f"rank {n}", *_cells(rank, bool(full))] for n, rank in zip(shown, drawn, strict=True)]
    return section(
        "Memory",
        block("paragraph", words),
        block("figure", bars, color_key(names)),
        table(left, columns, rows, numbers=len(columns) - 1),
    )


def _on_gpu(facts: RunFacts) -> bool:
    return any(event.get("gpus") for event in facts.of_event("started"))


def _full(facts: RunFacts, ranks: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the memory of a device; None on the CPU, whose memory all processes share, and for older runs."""
    sizes = [rank["device"] for rank in ranks if rank.get("device")]
    return max(sizes) if sizes and _on_gpu(facts) else None


def _without_parts(facts: RunFacts) -> str:
    peaks = [line["peak_memory_bytes"] for line in facts.lines if line.get("peak_memory_bytes")]
    parts = "The parts are measured when a run is done."
    if not peaks:
        return f"No memory was measured. {parts}"
    return f"The highest logged peak of a rank is {format_bytes(max(peaks))}. {parts}"


def _words(facts: RunFacts, measured: Sequence[Mapping[str, Any]], most: int) -> str:
    rank = measured[most]
    text = f"The highest peak is {format_bytes(rank['peak'])}, on rank {most}"
    full = _full(facts, [rank])
    if full:
        share = rank["peak"] / full
        text += f", {share:.0%} of the {format_bytes(full)} of its GPU"
        text += " (little is left)" if share >= TIGHT else ""
    elif rank.get("device"):
        text += f"; the machine has {format_bytes(rank['device'])}, which all its processes share"
    estimated = (facts.record.get("memory") or {}).get("estimated")
    text += f"; the estimate before the run was {format_bytes(estimated)}" if estimated else ""
    note = "" if full else " On a CPU the peak includes the interpreter and the libraries, which count as activations."
    return f"{text}.{note}"


def _cells(rank: Mapping[str, Any], with_device: bool) -> list[str]:
    sizes = [*(rank[part] for part in PARTS), rank["peak"], *([rank["device"]] if with_device else [])]
    return [format_bytes(size) for size in sizes]


def _bars(numbers: Sequence[int], ranks: Sequence[Mapping[str, Any]], full: int | None, most: float) -> list[Html]:
    return [
        _bar(f"rank {number}", rank, row * (BAR + GAP), full, most)
        for row, (number, rank) in enumerate(zip(numbers, ranks, strict=True))
    ]


def _bar(name: str, rank: Mapping[str, Any], top: float, full: int | None, most: float) -> Html:
    unit = (WIDTH - NAMES) / max(most, 1)
    parts = [block("label", name, 0, f"{top + BAR - 5:g}")]
    if full:
        parts.append(_box(NAMES, top, full * unit, "wait", f"device: {format_bytes(full)}"))
    at = NAMES
    for part, color in PARTS.items():
        parts.append(_box(at, top, rank[part] * unit, color, f"{part}: {format_bytes(rank[part])}"))
        at += rank[part] * unit
    return joined(parts)


def _box(at: float, top: float, width: float, color: str, label: str) -> Html:
    shape = f"M{at:.1f} {top:g}h{width:.1f}v{BAR:g}h-{width:.1f}z"
    return block("area", shape, color, label)
