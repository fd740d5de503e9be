"""Predicts the published measurements and prints how far off each source is.

    python -m tests.planner.published.comparison [SOURCE...]

compares all sources that are not held out (``SOURCES.md``) and whose rows say enough: a GPU with a machine file, bf16
or fp16, no offload, and a model in ``models.csv``. Attention is fused, or the source is one of ``UNFUSED``. A gated
feed-forward branch of 2/3 of the width stands for an ungated one; it computes the same but keeps a third more, so the
memory of such rows is compared only where the program of the source (``programs.py``) states what a layer keeps. The
table gives the median and the mean absolute error of the step time, of the memory, and how many out-of-memory rows are
predicted; then it lists which layout wins, measured and predicted (``rankings.csv``). ``--held-out`` compares the
sources that were set aside instead.

Rows that use a technique which hpc_train does not have are a group of their own (``group``). Where a source says which
network its nodes have, the machine gets that network.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations
from statistics import fmean, median
from unittest.mock import patch

from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.memory import ALLOCATOR_SHARE, Memory, needed_bytes, reserved_bytes
from hpc_train.layout.resolve import resolve_layout
from hpc_train.planner.machine import Figure, Machine, read_machine
from hpc_train.planner.passes import Passes
from hpc_train.planner.prediction import Demand, Prediction, predict_step
from tests.planner.published.programs import peak
from tests.planner.published.tables import Row, completed, models, rows, split_of

MACHINES = {
    "A100-80GB": "a100-80",
    "A800-80GB": "a100-80",
    "A100-40GB": "a100-40",
    "H100-80GB": "h100",
    "H100-96GB": "h100",
    "H200": "h200",
    "B200": "b200",
    "V100-32GB": "v100",
}
# Gbit/s per node, as SOURCES.md quotes the sources, where it differs from the machine file
NETWORKS = {
    ("internevo", "A100-80GB"): 400, ("fms-fsdp", "A100-80GB"): 400, ("fms-fsdp", "H100-80GB"): 800,
    ("bloom", "A100-80GB"): 400,
}  # fmt: skip
MEMORY = {"H100-96GB": 102e9}  # bytes that the driver leaves of a GPU with more memory than its machine file states
# in the notes of rows whose shards lie on the ranks of a node
OF_A_NODE = ("HSDP", "zero1=8", "zero1=4", "zero1 over 8 ranks")
NOISE, EQUAL = 0.02, 1e-3  # by which measurements of one layout differ, and predictions of one layout by rounding
EFFICIENCY = 0.9  # of a network, as in the machine files
# Their attention keeps its scores, like that of a model with a soft cap, whose counts it gets.
UNFUSED = ("bloom", "korthikanti-2022")
UNGATED = UNFUSED  # whose programs state what a layer keeps
TIED = ("bloom", "torchtune")
# The update is computed on the CPU, so that only the memory of the GPU is compared.
UPDATED_ON_CPU = ("ml-engineering-h200-b200",)
# Other kernels than those of the operations as written: neither Thunder's nor Inductor's memory is compared.
FUSED_BY_COMPILERS = ("litgpt-thunder", "torchtune")
# Their selective recompute is that of the scores, and the backward of attention computes its scores again.
OF_SCORES = ("korthikanti-2022",)
_IN_FP32 = Passes.accumulated
# their sheets are named bfloat16, and their trainer sums gradients in it, which moves half the bytes
GRADIENTS = {"aleph-alpha-layouts": lambda passes, block: _IN_FP32(passes, block) / 2}
KINDS = {"1": "zero1", "2": "zero2", "3": "zero3"}
UNITS = {"GB": 1e9, "GiB": 2.0**30}


@dataclass(frozen=True, eq=False)
class OfProgram(Demand):
    """What the program of a source needs for a row."""

    row: Row = field(default_factory=dict)

    @cached_property
    def memory(self) -> Memory | None:
        return peak(self.row, self.config, self.layout)

    @property
    def needed_bytes(self) -> float:
        assert self.memory is not None
        return needed_bytes(self.memory.total, reserved_bytes(self.layout))

    def fits(self, factor: float, share: float = 1.0) -> bool:
        return factor * self.needed_bytes <= share * self.rates.memory_bytes


@dataclass(frozen=True)
class Ranking:
    """A case of ``rankings.csv``: the best candidate as measured and as predicted.

    Attributes:
        missing: why nothing is predicted; empty if all candidates are.
        pairs: how many pairs of candidates with different predictions differ by more than 2 % as measured.
        right: in how many of them the better one is predicted to be better.
    """

    case: str
    measured: str
    predicted: str = ""
    missing: str = ""
    pairs: int = 0
    right: int = 0

    @property
    def holds(self) -> bool:
        return self.measured == self.predicted


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
                by_source[group(found.row)].append(found)
    print("| source | rows | step time: median, mean | worst | memory: median, mean | OOM predicted | false alarms |")
    print("|---|---|---|---|---|---|---|")
    for source, found_rows in sorted(by_source.items()):
        print(f"| {source} | {' | '.join(summary(found_rows))} |")
    if not options.sources:
        print_rankings(options.held_out)
    print(f"\nnot comparable: {', '.join(f'{name} {count}' for name, count in sorted(skipped.items()))}")


def print_rankings(held_out: bool) -> None:
    print("\n| case | best as measured | best as predicted | pairs in order |\n|---|---|---|---|")
    for row in rows("rankings"):
        if (row["held_out"] == "1") == held_out:
            found = ranking(row)
            best = found.predicted or found.missing
            print(f"| {found.case} | {found.measured} | {best} | {found.right} of {found.pairs} |")


def ranking(row: Row) -> Ranking:
    """Returns what wins a case of ``rankings.csv``, predicted from the rows of ``published.csv`` that it sums up.

    Candidates that hpc_train does not tell apart, such as two kernels for one layout, have equal predictions, and any
    of them may win.
    """
    candidates: dict[str, float] = json.loads(row["candidates"])
    found = {name: _row_of(row, value) for name, value in candidates.items()}
    if any(each is None or each.time is None for each in found.values()):
        return Ranking(row["case"], row["winner"], missing="the rows do not say enough")
    sign = -1 if row["better"] == "lower" else 1
    # the metric is proportional to the speed, or to the time if lower is better
    speeds = {name: value**sign for name, value in candidates.items()}
    predicted = {name: speeds[name] / (1 + each.time) for name, each in found.items() if each and each.time is not None}
    best = max(predicted, key=lambda name: predicted[name])
    winner = best if _differ(predicted, best, row["winner"], EQUAL) else row["winner"]
    pairs = [
        (speeds[a] > speeds[b]) == (predicted[a] > predicted[b])
        for a, b in combinations(candidates, 2)
        if _differ(speeds, a, b, NOISE) and _differ(predicted, a, b, EQUAL)
    ]
    return Ranking(row["case"], row["winner"], winner, "", len(pairs), pairs.count(True))


def _differ(values: dict[str, float], a: str, b: str, least: float) -> bool:
    return abs(values[a] / values[b] - 1) > least


def _row_of(case: Row, value: float) -> Compared | None:
    """Returns the first row of the case's source, model and GPUs that has measured ``value``."""
    names = ("source", "gpu", "gpus", "model")
    for row in rows("published"):
        if (
            all(row[name] == case[name] for name in names)
            and row[case["metric"]]
            and float(row[case["metric"]]) == value
        ):
            return compared(row)
    return None


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """Returns the cells of a row of the table."""
    times = [each.time for each in found if each.time is not None]
    memory = [each.memory for each in found if each.memory is not None]
    told = [each for each in found if memory_is_told(each.row)]
    oom, ran = ([each.prediction.fits for each in told if each.row["oom"] == value] for value in ("1", "0"))
    yield str(len(found))
    yield _errors(times)
    yield f"{min(times):+.0%} {max(times):+.0%}" if times else ""
    yield _errors(memory)
    yield f"{oom.count(False)} of {len(oom)}" if oom else ""
    yield f"{ran.count(False)} of {len(ran)}" if ran else ""


def memory_is_told(row: Row) -> bool:
    """Returns whether a row's model has the gated branch of hpc_train's models, or its program knows the other one."""
    shape = models().get(row["model"])
    return shape is None or shape["family"] == "llama" or row["source"] in UNGATED


def _errors(errors: Sequence[float]) -> str:
    return f"{median(errors):+.1%}, {fmean(map(abs, errors)):.1%}" if errors else ""


def group(row: Row) -> str:
    """Returns the source of a row, with a mark if the row uses a technique that hpc_train does not have.

    Aleph Alpha's rows without the kernel for RMSNorm compute it in several kernels, those without sequence parallelism
    compute norms on every tensor-parallel rank, like those of bloom and the rows with full recompute of
    korthikanti-2022; those of bigscience-v100 keep attention scores; and torchtitan computes in fp8 with tensor
    parallelism, and then also gathers in fp8.
    """
    source, notes = row["source"], row["notes"]
    if source == "aleph-alpha-layouts":
        other = "RMS kernel" not in notes or (row["tp"] != "1" and "sequence parallel" not in notes)
    else:
        other = (
            source in ("bigscience-v100", "bloom")
            or "no sequence parallelism" in notes
            or (scaling_of(row) is not None and row["tp"] != "1")
        )
    return f"{source}, other techniques" if other else source


def compared(row: Row) -> Compared | None:
    """Returns the prediction of a row; None if the row does not say enough or hpc_train does not have the technique."""
    row = completed(row)
    prediction = predicted(row)
    if prediction is None:
        return None
    return Compared(row, prediction, _time_error(row, prediction), _memory_error(row, prediction))


def predicted(row: Row) -> Prediction | None:
    """Returns the prediction of a row that states all it needs; None otherwise."""
    shape = row if row["layers"] and row["hidden"] else models().get(row["model"])
    known = row["flash_attention"] == "1" or row["source"] in UNFUSED
    known = known and (row["precision"] in ("bf16", "fp16") or scaling_of(row) is not None)
    known = known and "shorter sequences" not in row["notes"]
    known = known and (row["offload"] != "1" or row["source"] in UPDATED_ON_CPU)
    if row["gpu"] not in MACHINES or shape is None or not known:
        return None
    if not all(row[name] for name in ("gpus", "dp", "tp", "pp", "micro_batch")) or row["cp"] not in ("", "1"):
        return None
    per_node, devices = int(row["gpus_per_node"] or 8), int(row["gpus"])
    try:
        config = config_of(row, shape)
        layout = resolve_layout(config, max(1, devices // per_node), min(devices, per_node))
        with patch.object(Passes, "accumulated", GRADIENTS.get(row["source"], Passes.accumulated)):
            prediction = predict_step(config, layout, machine_of(row))
    except UserError:
        return None
    return replace(prediction, demand=OfProgram(config, layout, prediction.demand.rates, row))


def scaling_of(row: Row) -> str | None:
    """Returns ``precision.fp8`` of a row of torchtitan, which uses torchao as hpc_train does; None for other rows, and
    for those that state no recompute."""
    if row["precision"] != "fp8" or not row["recompute"] or not row["source"].startswith("torchtitan"):
        return None
    return "rowwise" if "rowwise" in row["notes"] else "tensorwise"


def overlaps(row: Row) -> bool:
    """Returns whether the tensor parallelism of a row is asynchronous, which torch's compiler makes it."""
    return any(mark in row["notes"] for mark in ("async TP", "Async TP", "AsyncTP"))


def machine_of(row: Row) -> Machine:
    """Returns the machine of a row, with the GPUs per node and the network that its source states."""
    found, per_node = machine(MACHINES[row["gpu"]]), int(row["gpus_per_node"] or 8)
    figures = {**found.figures, "devices_per_node": Figure(per_node, "table", "the row")}
    figures["tp_launches"] = Figure(1.0, "table", "the layers of their ranks are Megatron's, or compiled")
    if row["gpu"] in MEMORY:
        figures["memory_bytes"] = Figure(MEMORY[row["gpu"]], "table", "the row")
    network = NETWORKS.get((row["source"], row["gpu"]))
    if network is not None:
        rate = network * 1e9 / 8 / per_node * EFFICIENCY
        figures["fabric_bytes_per_s"] = Figure(rate, "table", "SOURCES.md")
    return replace(found, figures=figures)


def _time_error(row: Row, prediction: Prediction) -> float | None:
    if row["offload"] == "1":
        return None
    if row["step_s"]:
        return prediction.step_s / float(row["step_s"]) - 1
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"]) * int(row["gpus"]) / prediction.tokens_per_s - 1
    return None


def _memory_error(row: Row, prediction: Prediction) -> float | None:
    if not row["memory"] or not memory_is_told(row) or not row["memory_kind"]:
        return None
    if row["source"] in FUSED_BY_COMPILERS and row["compile"] == "1":
        return None
    assert prediction.memory is not None
    held, unit = prediction.memory.total, row["memory_unit"]
    unit = "GiB" if row["memory_kind"] == "nvidia-smi" else unit  # which prints MiB
    of_torch = {"allocated": held, "reserved": held * (1 + ALLOCATOR_SHARE)}
    read = of_torch.get(row["memory_kind"], prediction.needed_bytes)
    return read / (float(row["memory"]) * UNITS[unit]) - 1


def config_of(row: Row, shape: Row) -> Config:
    """Returns the config of a row. A missing sequence length is 4096, and a missing batch one micro-batch per rank."""
    config, dp, micro = base(), int(row["dp"]), int(row["micro_batch"])
    whole = dp * int(row["tp"]) * int(row["pp"]) == int(row["gpus"])
    ffn = int(shape["ffn"]) if shape["family"] == "llama" else 2 * int(shape["ffn"]) // 3
    heads, vocabulary = int(shape["heads"]), int(shape["vocab"])
    recompute = "none" if row["source"] in OF_SCORES and row["recompute"] == "selective" else row["recompute"] or "none"
    compiled = row["compile"] == "1" or overlaps(row)
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
            tied_embeddings=row["source"] in TIED,
            attention_softcap=1.0 if row["source"] in UNFUSED else None,
        ),
        data=replace(config.data, sequence_length=int(row["seq"] or 4096), vocab_size=vocabulary),  # type: ignore[call-arg]
        batch=replace(config.batch, global_size=int(float(row["global_batch"] or dp * micro)), micro_size=micro),
        precision=replace(config.precision, name="bf16" if scaling_of(row) else row["precision"], fp8=scaling_of(row)),
        strategy=replace(
            config.strategy,
            dp="fill" if whole else dp,
            shard="node" if any(mark in row["notes"] for mark in OF_A_NODE) else "fill",
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            data_parallel=KINDS.get(row["zero_stage"], "zero1" if row["source"].startswith("aleph") else "allreduce"),
            schedule="interleaved_1f1b" if row["virtual_stages"] else "1f1b",
            stages_per_rank=int(row["virtual_stages"] or 1),
            pp_split=split_of(row, int(shape["layers"])),
            async_tp=overlaps(row),
        ),
        train=replace(config.train, activation_checkpointing=recompute, compile=compiled),
    )


@cache
def base() -> Config:
    return typed(compose(["+strategy=dp", "data=synthetic", "model=llama_7b", "precision=bf16"]))


@cache
def machine(name: str) -> Machine:
    return read_machine(name)


if __name__ == "__main__":
    main()
