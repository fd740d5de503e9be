"""Predicts the published measurements and prints how far off each source is.

    python -m tests.planning.comparison [SOURCE...]

compares all sources that are not held out (``SOURCES.md``) and whose rows say enough: a GPU with a machine file, bf16,
no offload, a model in ``models.csv``, and fused attention. A gated feed-forward branch of 2/3 of the width stands for
an ungated one. The table gives the median and the mean absolute error of the step time, of the memory, and how many
out-of-memory rows are predicted. ``--held-out`` compares the sources that were set aside instead.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.plan.layout import resolve_layout
from hpc_train.planner.machine import Machine, read_machine
from hpc_train.planner.prediction import Prediction, predict_step

HERE = Path(__file__).parent
MACHINES = {
    "A100-80GB": "a100-80",
    "A800-80GB": "a100-80",
    "A100-40GB": "a100-40",
    "H100-80GB": "h100",
    "H100-96GB": "h100",
    "H200": "h200",
}
KINDS = {"1": "zero1", "2": "zero2", "3": "zero3"}
UNITS = {"GB": 1e9, "GiB": 2.0**30}
Row = dict[str, str]


@dataclass(frozen=True)
class Compared:
    """A published row with its prediction. Errors are predicted / measured - 1; None if the row has no such figure."""

    row: Row
    prediction: Prediction
    time: float | None
    memory: float | None


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    by_source: dict[str, list[Compared]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    for row in rows("published"):
        asked = row["source"] in options.sources or not options.sources
        if asked and (row["held_out"] == "1") == options.held_out:
            found = compared(row)
            if found is None:
                skipped[row["source"]] += 1
            else:
                by_source[row["source"]].append(found)
    print("| source | rows | step time: median, mean | worst | memory: median, mean | OOM predicted | false alarms |")
    print("|---|---|---|---|---|---|---|")
    for source, found_rows in sorted(by_source.items()):
        print(f"| {source} | {' | '.join(summary(found_rows))} |")
    print(f"\nnot comparable: {', '.join(f'{name} {count}' for name, count in sorted(skipped.items()))}")


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """Returns the cells of a row of the table."""
    times = [each.time for each in found if each.time is not None]
    memory = [each.memory for each in found if each.memory is not None]
    oom, ran = ([each.prediction.fits for each in found if each.row["oom"] == value] for value in ("1", "0"))
    yield str(len(found))
    yield _errors(times)
    yield f"{min(times):+.0%} {max(times):+.0%}" if times else ""
    yield _errors(memory)
    yield f"{oom.count(False)} of {len(oom)}" if oom else ""
    yield f"{ran.count(False)} of {len(ran)}" if ran else ""


def _errors(errors: Sequence[float]) -> str:
    return f"{median(errors):+.1%}, {fmean(map(abs, errors)):.1%}" if errors else ""


def compared(row: Row) -> Compared | None:
    """Returns the prediction of a row; None if the row does not say enough or hpc_train does not have the technique."""
    shape = models().get(row["model"])
    fused = row["flash_attention"] == "1" or row["source"] == "llm-foundry"  # which uses it in all rows
    if row["gpu"] not in MACHINES or shape is None or not fused or row["precision"] != "bf16" or row["offload"] == "1":
        return None
    if not all(row[name] for name in ("gpus", "dp", "tp", "pp", "micro_batch")) or row["cp"] not in ("", "1"):
        return None
    per_node, devices = int(row["gpus_per_node"] or 8), int(row["gpus"])
    try:
        config = config_of(row, shape)
        layout = resolve_layout(config, max(1, devices // per_node), min(devices, per_node))
        prediction = predict_step(config, layout, machine(MACHINES[row["gpu"]]))
    except UserError:
        return None
    return Compared(row, prediction, _time_error(row, prediction), _memory_error(row, prediction))


def _time_error(row: Row, prediction: Prediction) -> float | None:
    if row["step_s"]:
        return prediction.step_s / float(row["step_s"]) - 1
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"]) * int(row["gpus"]) / prediction.tokens_per_s - 1
    return None


def _memory_error(row: Row, prediction: Prediction) -> float | None:
    if not row["memory"]:
        return None
    return prediction.needed_bytes / (float(row["memory"]) * UNITS[row["memory_unit"]]) - 1


def config_of(row: Row, shape: Row) -> Config:
    """Returns the config of a row. A missing sequence length is 4096, and a missing batch one micro-batch per rank."""
    config, dp, micro = base(), int(row["dp"]), int(row["micro_batch"])
    whole = dp * int(row["tp"]) * int(row["pp"]) == int(row["gpus"])
    ffn = int(shape["ffn"]) if shape["family"] == "llama" else 2 * int(shape["ffn"]) // 3
    heads, vocabulary = int(shape["heads"]), int(shape["vocab"])
    return replace(
        config,
        model=replace(  # type: ignore[call-arg]
            config.model,
            dim=int(shape["hidden"]),
            n_layers=int(shape["layers"]),
            n_heads=heads,
            n_kv_heads=int(shape["kv_heads"] or heads),
            ffn_dim=ffn,
            vocab_size=vocabulary,
        ),
        data=replace(config.data, sequence_length=int(row["seq"] or 4096), vocab_size=vocabulary),  # type: ignore[call-arg]
        batch=replace(config.batch, global_size=int(float(row["global_batch"] or dp * micro)), micro_size=micro),
        strategy=replace(
            config.strategy,
            dp="fill" if whole else dp,
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            data_parallel=KINDS.get(row["zero_stage"], "zero1" if row["source"].startswith("aleph") else "allreduce"),
            schedule="1f1b",
        ),
        train=replace(config.train, activation_checkpointing=row["recompute"] or "none"),
    )


@cache
def base() -> Config:
    return typed(compose(["+strategy=dp", "data=synthetic", "model=llama_7b", "precision=bf16"]))


@cache
def machine(name: str) -> Machine:
    return read_machine(name)


@cache
def models() -> dict[str, Row]:
    return {row["model"]: row for row in rows("models") if row["family"] in ("gpt", "llama") and row["ffn"]}


def rows(name: str) -> Iterator[Row]:
    with (HERE / f"{name}.csv").open(newline="") as file:
        yield from csv.DictReader(file)


if __name__ == "__main__":
    main()
