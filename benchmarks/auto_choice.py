"""The layout that ``strategy=auto`` chooses, against the best of some measured layouts, for ten models on two cores.

    python -m benchmarks.auto_choice [--machine NAME|FILE] [--out FOLDER] [--rounds 20] [--models A,B]

The layouts of a model take turns in the same processes, so that a change of the machine's speed affects all of them. A
pair is the chosen layout and another one in the same round. Measurements lie in FOLDER/measured.jsonl, and a run that
was interrupted goes on with the next model. The table is printed and written to FOLDER/auto_choice.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.in_turns import seconds_in_turns
from hpc_train.bench.request import Spread, paired_ratio
from hpc_train.config.compose import compose, typed
from hpc_train.config.values import parse_recomputation
from hpc_train.errors import UserError
from hpc_train.layout.layout import JobShape, Layout
from hpc_train.layout.validate import validate
from hpc_train.planner.auto import choose
from hpc_train.planner.machine import machine_of_job
from hpc_train.run.files import append_line, write_text

WORKERS = 2
STEPS = 5  # of a measurement
LEAST = 1.1  # a choice that is slower than the best by at most this factor is good
CHOSEN = "auto"
HERE = ("cluster=local", "cluster.gpus_per_node=0", f"cluster.cpu_workers={WORKERS}", "telemetry.wandb.mode=disabled")
TEXT = ("data=synthetic", "batch.global_size=16")
IMAGES = ("data=synthetic", "data.task=images", "data.image_size=64", "data.n_classes=10", "batch.global_size=16")
SMALL = ("model.vocab_size=2048", "data.vocab_size=2048", "model.n_layers=4", "model.dim=128", "model.n_heads=4",
         "model.n_kv_heads=2", "model.ffn_dim=352")  # fmt: skip
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt-1m": ("model=gpt_tiny", *TEXT, "data.sequence_length=128"),
    "gpt-7m": ("model=gpt_tiny", *TEXT, "data.sequence_length=128", "model.dim=256", "model.n_layers=8",
                 "model.n_heads=8", "model.n_kv_heads=4", "model.ffn_dim=704"),
    "gpt-26m": ("model=gpt_tiny", *TEXT, "data.sequence_length=64", "model.dim=512", "model.n_layers=8",
                  "model.n_heads=8", "model.n_kv_heads=8", "model.ffn_dim=1408"),
    "gpt-long": ("model=gpt_tiny", *TEXT, "data.sequence_length=512"),
    "gpt-vocabulary": ("model=gpt_tiny", *TEXT, "data.sequence_length=64", "data.vocab_size=16384"),
    "llama": ("model=llama_1b", *TEXT, *SMALL, "data.sequence_length=128"),
    "qwen3": ("model=qwen3_8b", *TEXT, *SMALL, "model.head_dim=32", "data.sequence_length=128"),
    "gemma3": ("model=gemma3_1b", *TEXT, *SMALL, "model.head_dim=32", "data.sequence_length=128"),
    "vit-5m": ("model=vit_tiny", *IMAGES),
    "vit-2m": ("model=vit_tiny", *IMAGES, "model.dim=128", "model.n_heads=4", "model.n_layers=8",
                 "model.mlp_dim=512", "model.patch_size=8"),
}  # fmt: skip
OTHERS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("+strategy=dp",),
    "ddp, micro-batches of 2": ("+strategy=dp", "batch.micro_size=2"),
    "zero1": ("+strategy=zero1",),
    "zero3": ("+strategy=zero3",),
    "pp 2, 1f1b": ("+strategy=pp",),
    "tp 2": ("+strategy=tp",),
}


@dataclass(frozen=True)
class Result:
    """A model with its chosen layout and the best other one.

    Attributes:
        ratio: the chosen layout's time by that of the best, in pairs; 1 if the chosen one is the best.
    """

    model: str
    chosen: str
    best: str
    seconds: Mapping[str, float]
    ratio: Spread

    @property
    def is_good(self) -> bool:
        """Returns whether the chosen layout is as fast as the best, up to 10 % or the noise."""
        return self.ratio.median <= LEAST or self.ratio.low <= 1


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="auto", metavar="NAME|FILE", help="default: the file of CPUs")
    parser.add_argument("--out", type=Path, default=Path("auto_choice"))
    parser.add_argument("--rounds", type=int, default=20, help="pairs of measurements (default: %(default)s)")
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*MODELS])
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    for model in given.models:
        layouts = layouts_of(model, given.machine)
        seconds = measure(model, layouts, given.rounds, given.out / "measured.jsonl")
        results.append(result(model, str(layout_of(model, layouts[CHOSEN])[0]), seconds))
    text = table(results)
    write_text(given.out / "auto_choice.md", text + "\n")
    print(text)


def layouts_of(model: str, machine: str) -> dict[str, tuple[str, ...]]:
    """Returns the overrides of the chosen layout, and of the other layouts that the model supports."""
    found = {CHOSEN: chosen_by_planner(model, machine)}
    chosen = layout_of(model, found[CHOSEN])
    for name, overrides in OTHERS.items():
        with suppress(UserError):
            if layout_of(model, overrides) != chosen:
                found[name] = overrides
    return found


def layout_of(model: str, overrides: Sequence[str]) -> tuple[Layout, int]:
    """Returns the layout, and every how many layers one is recomputed.

    Raises:
        UserError: the model does not support it.
    """
    config = typed(compose([*overrides, *MODELS[model], *HERE]))
    layout = replace(validate(config, 1, WORKERS), notes=())
    return layout, parse_recomputation(config.train.activation_checkpointing).every


def chosen_by_planner(model: str, machine: str) -> tuple[str, ...]:
    """Returns the choice as overrides of a strategy with fixed values."""
    config = typed(compose(["+strategy=auto", *MODELS[model], *HERE]))
    choice = choose(config, JobShape(1, 1, 0, WORKERS), machine_of_job(machine, 0, ()))
    return ("+strategy=dp", *(f"{key}={value}" for key, value in choice.content["settings"].items()))


def measure(model: str, layouts: Mapping[str, tuple[str, ...]], rounds: int, path: Path) -> dict[str, list[float]]:
    """Returns the seconds of a step of each layout in each round; those of ``path`` if it has them."""
    asked = {"model": model, "layouts": {name: [*each] for name, each in layouts.items()}, "rounds": rounds}
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if all(line[key] == value for key, value in asked.items()):
            return dict(line["seconds"])
    print(f"{model}: {len(layouts)} layouts", file=sys.stderr, flush=True)
    overrides = {name: (*each, *MODELS[model], *HERE) for name, each in layouts.items()}
    seconds = seconds_in_turns(overrides, WORKERS, rounds, STEPS)
    append_line(path, {**asked, "seconds": seconds})
    return seconds


def result(model: str, chosen: str, seconds: Mapping[str, Sequence[float]]) -> Result:
    """Compares the rounds of the chosen layout with those of the layout whose median is the least."""
    best = min(seconds, key=lambda name: median(seconds[name]))
    ratio = Spread(1.0, 1.0, 1.0) if best == CHOSEN else paired_ratio(seconds[CHOSEN], seconds[best])
    medians = {name: median(values) for name, values in seconds.items()}
    return Result(model, chosen, best, medians, ratio)


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table with a row per model, and how many choices are good."""
    lines = [
        "| model | chosen | step | best measured | step | ratio (95 % interval) | good |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        own, least = 1e3 * each.seconds[CHOSEN], 1e3 * each.seconds[each.best]
        ratio = f"{each.ratio.median:.3f} ({each.ratio.low:.3f} to {each.ratio.high:.3f})"
        verdict = "yes" if each.is_good else "no"
        lines.append(
            f"| {each.model} | {each.chosen} | {own:.1f} ms | {each.best} | {least:.1f} ms | {ratio} | {verdict} |"
        )
    good = sum(each.is_good for each in results)
    lines += [
        "",
        f"{good} of {len(results)} choices are within {LEAST - 1:.0%} of the best measured layout, or the noise.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
