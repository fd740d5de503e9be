"""What ``plan`` predicts for 12 layouts on the CPUs of this machine, against the loop that ``bench step`` times.

    python -m benchmarks.planning_cpu [--out FOLDER] [--machine FILE] [--rounds N] [--models tiny,larger]

It first writes FOLDER/machine.json with ``bench machine``, unless it is there or another file is given. The layouts
of a model take turns in the same processes, so that a change of the machine's speed affects all of them; a measurement
is the median of the rounds. Measurements lie in FOLDER/measured.jsonl: a run that was interrupted goes on with the next
model, and another ``--machine`` compares without measuring again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from benchmarks.in_turns import seconds_in_turns
from hpc_train.config.compose import compose, typed
from hpc_train.layout.resolve import resolve_layout
from hpc_train.planner.machine import Machine, read_machine
from hpc_train.planner.prediction import predict_step
from hpc_train.run.files import append_line, write_text

WORKERS = 2
HERE = ("cluster=local", "cluster.gpus_per_node=0", f"cluster.cpu_workers={WORKERS}", "telemetry.wandb.mode=disabled")
LARGER = ("model.dim=256", "model.n_layers=8", "model.n_heads=4", "model.n_kv_heads=4", "model.ffn_dim=704")
MODELS: dict[str, tuple[str, ...]] = {
    "tiny": ("model=gpt_tiny", "data=synthetic", "data.sequence_length=128", "batch.global_size=16"),
    "larger": ("model=gpt_tiny", *LARGER, "data=synthetic", "data.sequence_length=128", "batch.global_size=16"),
}
FULL = "train.activation_checkpointing=full"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp, 1 x 8": ("+strategy=dp", "batch.micro_size=8"),
    "ddp, 4 x 2": ("+strategy=dp", "batch.micro_size=2"),
    "ddp, 1 x 8, recomputed": ("+strategy=dp", "batch.micro_size=8", FULL),
    "zero1, 1 x 8": ("+strategy=zero1", "batch.micro_size=8"),
    "zero2, 4 x 2": ("+strategy=zero2", "batch.micro_size=2"),
    "zero3, 1 x 8": ("+strategy=zero3", "batch.micro_size=8"),
    "pp 2, 1f1b, 8 x 2": ("+strategy=pp", "batch.micro_size=2"),
    "pp 2, 1f1b, 4 x 4, recomputed": ("+strategy=pp", "batch.micro_size=4", FULL),
    "pp 2, gpipe, 4 x 4": ("+strategy=pp", "batch.micro_size=4", "strategy.schedule=gpipe"),
    "pp 2, interleaved_1f1b, 8 x 2": (
        "+strategy=pp", "batch.micro_size=2", "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=2",
    ),
    "pp 2, zbv, 8 x 2": ("+strategy=pp", "batch.micro_size=2", "strategy.schedule=zbv", "strategy.stages_per_rank=2"),
    "tp 2, 2 x 8": ("+strategy=tp", "batch.micro_size=8"),
}  # fmt: skip
STEPS = 3  # of a measurement


@dataclass(frozen=True)
class Compared:
    """A layout with its seconds per step."""

    model: str
    layout: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("planning_cpu"))
    parser.add_argument("--machine", metavar="FILE", help="a machine file (default: measured into the folder)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.machine or str(measured_machine(given.out / "machine.json"))
    models = given.models.split(",")
    seconds = {model: measure(model, given.rounds, given.out / "measured.jsonl") for model in models}
    machine = read_machine(name)
    found = [
        Compared(model, layout, predicted(model, layout, machine), seconds[model][layout])
        for model in models
        for layout in LAYOUTS
    ]
    text = table(found)
    write_text(given.out / "planning_cpu.md", text + "\n")
    print(text)


def measured_machine(path: Path) -> Path:
    """Returns ``path``, which ``bench machine`` writes unless it is there."""
    if not path.exists():
        call = [sys.executable, "-m", "hpc_train", "bench", "machine", *HERE, "--out", str(path)]
        subprocess.run(call, check=True)
    return path


def measure(model: str, rounds: int, path: Path) -> Mapping[str, float]:
    """Returns the median seconds of a step of each layout over the rounds; those of ``path`` if it has them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if (line["model"], line["rounds"]) == (model, rounds):
            return {layout: median(seconds) for layout, seconds in line["seconds"].items()}
    print(f"{model}: {len(LAYOUTS)} layouts", file=sys.stderr, flush=True)
    overrides = {layout: (*each, *MODELS[model], *HERE) for layout, each in LAYOUTS.items()}
    seconds = seconds_in_turns(overrides, WORKERS, rounds, STEPS)
    append_line(path, {"model": model, "rounds": rounds, "seconds": seconds})
    return {layout: median(values) for layout, values in seconds.items()}


def predicted(model: str, layout: str, machine: Machine) -> float:
    """Returns the predicted seconds of a step."""
    config = typed(compose([*LAYOUTS[layout], *MODELS[model], *HERE]))
    return predict_step(config, resolve_layout(config, 1, WORKERS), machine).step_s


def table(found: Sequence[Compared]) -> str:
    """Returns a Markdown table with a row per layout, and for each model how good the predictions are."""
    lines = ["| model | layout | predicted | measured | error |", "|---|---|---|---|---|"]
    for each in found:
        times = f"{1e3 * each.predicted:.1f} ms | {1e3 * each.measured:.1f} ms"
        lines.append(f"| {each.model} | {each.layout} | {times} | {each.error:+.0%} |")
    lines += ["", "| model | MAPE | worst | rank correlation | pairs in the wrong order |", "|---|---|---|---|---|"]
    for model in dict.fromkeys(each.model for each in found):
        own = [each for each in found if each.model == model]
        errors = [abs(each.error) for each in own]
        wrong, pairs = wrong_pairs(own)
        order = f"{rank_correlation(own):.2f} | {wrong} of {pairs}"
        lines.append(f"| {model} | {fmean(errors):.1%} | {max(errors):.0%} | {order} |")
    return "\n".join(lines)


def wrong_pairs(found: Sequence[Compared]) -> tuple[int, int]:
    """Returns how many pairs of layouts are predicted in the other order than measured, and how many there are."""
    pairs = [*combinations(found, 2)]
    wrong = sum((a.predicted - b.predicted) * (a.measured - b.measured) < 0 for a, b in pairs)
    return wrong, len(pairs)


def rank_correlation(found: Sequence[Compared]) -> float:
    """Returns Spearman's coefficient: 1 - 6 sum(d²) / (n (n² - 1)), where d is the difference of the two ranks."""
    by_prediction = sorted(found, key=lambda each: each.predicted)
    by_measurement = sorted(found, key=lambda each: each.measured)
    squares = sum((by_prediction.index(each) - by_measurement.index(each)) ** 2 for each in found)
    return 1 - 6 * squares / (len(found) * (len(found) ** 2 - 1))


if __name__ == "__main__":
    main()
