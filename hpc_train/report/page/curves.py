"""Builds the sections with curves over the steps: losses and other metrics, throughput and MFU, shares of waiting."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, Point, Series, block, heat_map, joined, line_chart, section, short, table
from hpc_train.run.rows import mfu_name
from hpc_train.telemetry.progress import speed
from hpc_train.units import counted, format_metric, milliseconds

LOST = "lost work, which was or must be repeated"
CHARTS = 8  # the largest number of charts of metrics; the table has all metrics
EVALUATED = "val_"  # the prefix of the metrics of evaluations


def losses(facts: RunFacts) -> Html:
    """Returns the section with the loss curves of all attempts; lost work is gray."""
    skipped = sum(line.loss is None for line in facts.lines)
    if skipped == len(facts.lines):
        words = "No step was logged, so there is no loss to show."
        if facts.record.get("own_code") == "command":
            words = "The command of the run has not reported a loss."
        return section("Loss", block("paragraph", words))
    points = _kept(facts, "loss")
    validation = _kept(facts, "val_loss")

    words = "No step was kept."
    if points:
        (first, begin), (last, end) = points[0], points[-1]
        words = (
            f"The training loss went from {format_metric(begin)} at step {first} to {format_metric(end)} at step {last}"
        )
        if validation:
            step, lowest = min(validation, key=lambda point: point[1])
            words += f"; the lowest validation loss is {format_metric(lowest)}, at step {step}"
        words += "."
    lost = sum(facts.lost)
    if lost:
        steps = f"{counted(lost, 'logged step', 'logged steps')} {'was' if lost == 1 else 'were'}"
        words += f" {steps} lost, after the last checkpoint before a failure or a rollback."
    if skipped:
        words += f" {skipped} of {len(facts.lines)} logged losses are missing or not finite, and are not drawn."
    series = [
        *(Series(LOST, part, "lost", wide=True) for part in _lost_parts(facts)),
        Series("training loss", points, "c0"),
        Series("validation loss", validation, "c1", dots=True),
    ]
    return section("Loss", block("paragraph", words), line_chart("Loss over steps", words, series))


def _kept(facts: RunFacts, key: str) -> list[Point]:
    return facts.values(key) if facts.kept else []


def _lost_parts(facts: RunFacts) -> Iterator[list[Point]]:
    """Yields the lost parts of the curve, each preceded by the point from which it continued."""
    part: list[Point] = []
    before: Point | None = None
    for line, is_lost in zip(facts.lines, facts.lost, strict=True):
        point = None if line.loss is None else (line.step, line.loss)
        goes_on = before is None or point is None or point[0] > before[0]
        if part and not (is_lost and goes_on):
            yield part
            part = []
        if is_lost and point is not None:
            if not part and before is not None and goes_on:
                part.append(before)
            part.append(point)
        before = point or before
    if part:
        yield part


def evaluated(facts: RunFacts) -> Iterator[tuple[str, list[Point]]]:
    """Yields the name of each metric of the evaluations except the loss, without ``val_``, and its points by step."""
    names = dict.fromkeys(key for line in facts.kept for key in line if key.startswith(EVALUATED))
    for key in names:
        points = _kept(facts, key)
        if key != "val_loss" and points:
            yield key.removeprefix(EVALUATED), points


def metrics(facts: RunFacts) -> Html | None:
    """Returns the section with the metrics of the evaluations besides the loss; None without any."""
    rows: list[list[str]] = []
    charts: list[Html] = []
    for name, points in evaluated(facts):
        values = [value for _, value in points]
        last_step, last = points[-1]
        rows.append([name, f"{last:.4g}", f"{last_step:,}", f"{min(values):.4g}", f"{max(values):.4g}"])
        if len(points) > 1 and len(charts) < CHARTS:
            words = f"{name} of the validation data went from {values[0]:.4g} to {last:.4g}."
            charts.append(line_chart(f"{name} over steps", words, [Series(name, points, "c1", dots=True)]))
    if not rows:
        return None
    columns = ("metric", "last value", "at step", "lowest", "highest")
    return section("Metrics", table("Validation metrics", columns, rows, numbers=4), *charts)


COLUMNS = 80  # the largest number of columns of a heat map over the steps


def experts(facts: RunFacts) -> Html | None:
    """Returns the section about the load of experts; None if none was logged."""
    lines = [line for line in facts.kept if line.get("expert_load")]
    if not lines:
        return None
    columns = min(COLUMNS, len(lines))
    parts = [lines[part * len(lines) // columns : (part + 1) * len(lines) // columns] for part in range(columns)]
    last = lines[-1]["expert_load"]
    moe = (facts.config.get("model") or {}).get("moe") or {}
    first = int(moe.get("dense_layers") or 0)  # these have no experts
    names = [f"layer {number + first}" for number in range(len(last))]
    largest = [
        (name, [median(max(line["expert_load"][place]) for line in part) for part in parts])
        for place, name in enumerate(names)
    ]
    steps = f"{lines[0].step:,}", f"{lines[-1].step:,}"
    numbers = "0", str(len(last[0]) - 1)
    idle = sum(load == 0 for loads in last for load in loads)
    fullest = max(max(loads) for loads in last)
    words = (
        f"At step {lines[-1].step:,} the fullest expert has {fullest:.2f} times the mean load of its layer, and "
        f"{counted(idle, 'expert has', 'experts have')} no token."
    )
    advice = dict.fromkeys(event.message for event in facts.of_event("advice") if event.get("limit") == "experts")
    return section(
        "Experts",
        block("paragraph", words),
        heat_map("Load of the fullest expert over steps", words, largest, "step", steps),
        heat_map("Load of each expert at the last step", words, [*zip(names, last, strict=True)], "expert", numbers),
        block("bullets", list(advice)),
    )


def throughput(facts: RunFacts) -> Html | None:
    """Returns the section about throughput and model FLOPs utilization (MFU); None if no rate was logged."""
    unit = "tokens"
    if facts.shown and not any("tokens" in part for part in speed(facts.shown[-1])):
        unit = "samples"
    points = facts.values(f"{unit}_per_s") or facts.values("tokens_per_s")
    if not points:
        return None
    rates = [value for _, value in points]
    words = (
        f"The median of the logged rates is {short(median(rates))} {unit}/s, from {short(min(rates))} to "
        f"{short(max(rates))}."
    )
    seconds = [value for _, value in facts.values("step_s")]
    if seconds:
        words += f" A step took {milliseconds(median(seconds))} in the median."
    series = [Series(f"{unit} per second", points, "c2")]
    chart = line_chart("Throughput over steps", words, series, from_zero=True)
    return section("Throughput", block("paragraph", words), chart, *_utilization(facts))


def _utilization(facts: RunFacts) -> list[Html | None]:
    heading = block("heading", "Model FLOPs utilization (MFU)")
    points = facts.values("mfu")
    if not points:
        return []
    name = mfu_name(next(line for line in reversed(facts.lines) if line.get("mfu") is not None))
    words = f"The median {name} is {median(value for _, value in points):.1%}."
    series = [Series(name, points, "c0")]
    hardware = facts.values("hfu")
    if hardware != points:
        series.append(Series("HFU", hardware, "c1", dashed=True))
    chart = line_chart("MFU over steps", words, series, from_zero=True, percent=True, height=190)
    return [heading, block("paragraph", words), chart, _formula(facts)]


def _formula(facts: RunFacts) -> Html | None:
    """Returns the formula of the MFU with the numbers of the run; None if the record lacks one."""
    terms = facts.record.get("utilization") or {}
    flops = terms.get("flops_per_sample")
    peak = terms.get("peak_flops")
    rates = [value for _, value in facts.values("samples_per_s")]
    if not isinstance(flops, int | float) or not isinstance(peak, int | float) or not rates or not peak:
        return None
    rate = median(rates)
    filled = f"MFU = {short(flops)} FLOP x {short(rate)}/s / {short(peak)} FLOP/s = {flops * rate / peak:.1%}"
    world = facts.shown[-1].world_size
    peak_of = f"peak of {world} GPUs, FLOP/s" if world else "peak, FLOP/s"
    numbers = (
        ("FLOP per sample", short(flops)),
        ("samples/s (median)", short(rate)),
        (peak_of, short(peak)),
        ("source of the peak", terms.get("peak_source")),
    )
    formula = terms.get("formula", "MFU = FLOP per sample x samples/s / peak")
    return joined(
        [block("paragraph", formula, "soft"), block("paragraph", block("code", filled)), block("facts", numbers)]
    )


SHARES = {  # metric -> (name, color)
    "comm_share": ("communication", "c0"),
    "bubble_share": ("pipeline bubble", "c1"),
    "data_wait_share": ("data", "c2"),
    "host_share": ("the host (the GPU ran no kernel)", "c3"),
}


def waits(facts: RunFacts) -> Html | None:
    """Returns the section about what the ranks waited for: communication, the pipeline's bubble, data and the host.
    None if no share was logged.
    """
    title = "What the ranks waited for"
    series = [Series(name, facts.values(key), color) for key, (name, color) in SHARES.items() if facts.values(key)]
    if not series:
        return None
    medians = {line.name: median(value for _, value in line.points) for line in series}
    largest = max(medians, key=lambda name: medians[name])
    words = (
        f"Mean over the ranks, median over the logged steps. The largest share is {largest}: {medians[largest]:.1%} of "
        "the time."
    )
    rows = [
        [line.name, f"{medians[line.name]:.1%}", f"{max(value for _, value in line.points):.1%}"] for line in series
    ]
    advice = dict.fromkeys(event.message for event in facts.of_event("advice") if event.get("limit") != "experts")
    return section(
        title,
        block("paragraph", words),
        line_chart(title, words, series, from_zero=True, percent=True),
        table("Shares of the time", ("waiting for", "median", "highest"), rows, numbers=2),
        block("bullets", list(advice)),
    )
