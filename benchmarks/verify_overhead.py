"""The time of training with ``train.verify.every=N``, against training without it, for several N on two cores.

    python -m benchmarks.verify_overhead [--out FOLDER] [--rounds 5] [--layouts dp,zero3] [--values 100,20,5,1]

The values of N take turns in the same processes, so that a change of the machine's speed affects all of them. A pair is
N and no verification in the same round. A measurement has as many steps as the largest N. The seconds lie in
FOLDER/measured.jsonl, and the table is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.auto_choice import HERE, TEXT, WORKERS
from benchmarks.in_turns import seconds_in_turns
from hpc_train.bench.request import paired_ratio
from hpc_train.run.files import append_line

OFF = "off"
LEAST_STEPS = 5  # of a measurement
MODEL = ("model=gpt_tiny", *TEXT, "data.sequence_length=128", *HERE)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("verify_overhead"))
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=["dp", "zero3"])
    parser.add_argument("--values", type=lambda text: text.split(","), default=["100", "20", "5", "1"])
    given = parser.parse_args(argv)
    steps = max(LEAST_STEPS, *map(int, given.values))
    given.out.mkdir(parents=True, exist_ok=True)
    for layout in given.layouts:
        overrides = {OFF: (f"+strategy={layout}", *MODEL)}
        overrides |= {every: (*overrides[OFF], f"train.verify.every={every}") for every in given.values}
        seconds = seconds_in_turns(overrides, WORKERS, given.rounds, steps)
        append_line(given.out / "measured.jsonl", {"layout": layout, "seconds": seconds})
        print(table(layout, seconds), flush=True)


def table(layout: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns a Markdown table with a row per N."""
    lines = [f"| {layout}: N | step, median | ratio to no verification (95 % interval) |", "|---|---|---|"]
    for every, values in seconds.items():
        ratio = paired_ratio(values, seconds[OFF])
        interval = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        lines.append(f"| {every} | {1e3 * median(values):.1f} ms | {interval} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
