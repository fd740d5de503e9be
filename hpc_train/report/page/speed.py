"""Draws throughput and model FLOPs utilization over the steps."""

from __future__ import annotations

from statistics import median

from hpc_train.report.page.chart import Series, line_chart, short
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, joined, section
from hpc_train.telemetry.progress import speed
from hpc_train.units import milliseconds


def throughput(of_run: RunFacts) -> Html:
    """Returns the section about throughput and MFU."""
    single = bool(of_run.shown) and not any("tokens" in part for part in speed(of_run.shown[-1]))
    unit, key = ("samples", "samples_per_s") if single else ("tokens", "tokens_per_s")
    points = of_run.values(key) or of_run.values("tokens_per_s")
    if not points:
        return section("Throughput", block("paragraph", "No rate was logged."), *_utilization(of_run))
    rates = [value for _, value in points]
    middle = median(rates)
    words = (
        f"The median of the logged rates is {short(middle)} {unit}/s, from {short(min(rates))} to {short(max(rates))}."
    )
    seconds = [value for _, value in of_run.values("step_s")]
    words += f" A step took {milliseconds(median(seconds))} in the median." if seconds else ""
    series = [Series(f"{unit} per second", points, "c2")]
    chart = line_chart("Throughput over steps", words, series, "step", from_zero=True)
    return section("Throughput", block("paragraph", words), chart, *_utilization(of_run))


def _utilization(of_run: RunFacts) -> list[Html]:
    terms = of_run.record.get("utilization") or {}
    points, hardware = of_run.values("mfu"), of_run.values("hfu")
    if not points:
        reason = (
            "The MFU is known on GPUs whose peak is on record, for models that count their operations. It is not known "
            "for this run."
        )
        return [block("heading", "Model FLOPs utilization (MFU)"), block("paragraph", reason)]
    middle = median(value for _, value in points)
    words = f"The median MFU is {middle:.1%}."
    series = [Series("MFU", points, "c0")]
    if hardware != points:
        series.append(Series("HFU", hardware, "c1", dashed=True))
    chart = line_chart("MFU over steps", words, series, "step", from_zero=True, percent=True, height=190)
    return [
        block("heading", "Model FLOPs utilization (MFU)"),
        block("paragraph", words),
        chart,
        _formula(of_run, terms),
    ]


def _formula(of_run: RunFacts, terms: dict[str, object]) -> Html:
    """Returns the formula with the numbers of the run."""
    flops, peak = terms.get("flops_per_sample"), terms.get("peak_flops")
    rates = [value for _, value in of_run.values("samples_per_s")]
    if not isinstance(flops, int | float) or not isinstance(peak, int | float) or not rates or not peak:
        return joined([])
    rate = median(rates)
    filled = f"MFU = {short(flops)} FLOP x {short(rate)}/s / {short(peak)} FLOP/s = {flops * rate / peak:.1%}"
    world = of_run.shown[-1].get("world_size") if of_run.shown else None
    shown = (
        ("FLOP per sample", short(flops)),
        ("samples/s (median)", short(rate)),
        (f"peak of {world} GPUs, FLOP/s" if world else "peak, FLOP/s", short(peak)),
        ("source of the peak", terms.get("peak_source")),
    )
    formula = terms.get("formula", "MFU = FLOP per sample x samples/s / peak")
    return joined(
        [block("paragraph", formula, "soft"), block("paragraph", block("code", filled)), block("facts", shown)]
    )
