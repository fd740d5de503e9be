"""Checks of a node with several GPUs: a training that loses a rank, ways to communicate, saves in the background."""

from __future__ import annotations

import math
import os
import shutil
from statistics import median
from typing import Any

from benchmarks.savers import SMI, Row, measured, speed
from gpu_checks.check import Probe
from gpu_checks.checkpoints import STALL_S
from gpu_checks.commands import TINY, Run, cpu_ranks, largest_difference, train
from gpu_checks.models import killed
from gpu_checks.several import SAME, SAME_BF16
from gpu_checks.speed import for_this_gpu
from hpc_train.layout.memory import peak_of, ranks_of
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import sizes_of
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Failure
from hpc_train.run.freeze import load

SAMPLES = 32  # of each GPU in a step: 65,536 tokens
APART = 1e-2  # relative difference of the losses of two strategies after 50 steps in bf16
# how ZeRO-3 communicates, and the environment of NCCL
COMMUNICATION: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "zero3": ((), {}),
    "zero3, strategy.comm=separate": (("strategy.comm=separate",), {}),
    "zero3, strategy.comm=user_buffers": (("strategy.comm=user_buffers",), {}),
    "zero3 without NVLink SHARP": ((), {"NCCL_NVLS_ENABLE": "0"}),
    "zero3, strategy.comm=user_buffers, without NVLink SHARP": (
        ("strategy.comm=user_buffers",), {"NCCL_NVLS_ENABLE": "0"},
    ),
}  # fmt: skip


def pretrain(probe: Probe) -> None:
    """A training on all GPUs loses a rank, resumes from its checkpoint, and repeats the losses of the lost steps."""
    strategy = probe.check.name.removeprefix("pretrain_")
    last = probe.place.ranks - 1
    steps, every, at = (50, 20, 30) if probe.on_gpu else (10, 4, 7)
    once = probe.folder / "once"
    run = train(
        probe, "run", *_model(probe), f"+strategy={strategy}", *killed(once, at, last),
        f"train.steps={steps}", f"checkpoint.every={every}", "checkpoint.keep=1", ranks=probe.place.ranks,
    )  # fmt: skip
    shutil.rmtree(run.path / "checkpoints")  # 15 GB of each strategy
    failed = [(event["class"], event["rank"]) for event in run.events("worker_failed")]
    probe.equal("the first failure, its rank", failed[:1], [(Failure.KILLED.value, last)])
    resumed = run.events("resumed")
    probe.equal("steps from which the run resumes", [event["step"] for event in resumed], [every])
    first, again = (_losses(run, attempt) for attempt in (0, 1))
    both = first.keys() & again.keys()
    probe.within("lost steps whose losses are compared", len(both), low=2)
    difference = largest_difference({step: again[step] for step in both}, {step: first[step] for step in both})
    probe.within("their losses, again against at first", difference, high=SAME_BF16 if probe.on_gpu else 0)
    moment = float(once.read_text())
    after = [line["time"] - moment for line in run.metrics() if line["attempt"] == 1]
    restored = min((event["time"] - moment for event in resumed), default=math.nan)
    probe.within("from the kill to the restored checkpoint", restored, high=60, unit="s")
    loss = again[steps]
    times = {"Kill to restored s": f"{restored:.1f}", "Kill to next step s": f"{min(after):.1f}"}
    _row(probe, strategy, run, times | {"Loss": f"{loss:.6f}"})
    reference = probe.rows("pretrain_dp")
    if reference:
        bound = APART if probe.on_gpu else SAME
        probe.within("last loss / that of dp", loss / float(reference[0]["Loss"]), 1 - bound, 1 + bound)


def _model(probe: Probe) -> list[str]:
    if probe.on_gpu:
        return [*for_this_gpu(), f"batch.global_size={SAMPLES * probe.place.ranks}"]
    return [*TINY, "model=gpt_tiny", "model.dim=32"]


def _losses(run: Run, attempt: int) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics() if line["attempt"] == attempt}


def _row(probe: Probe, title: str, run: Run, others: dict[str, str]) -> None:
    """Records the speed of the second half of the steps, and the memory beside its estimate."""
    lines = run.metrics()
    half = lines[len(lines) // 2 :]
    config = load(RunDirectory(run.path))
    layout = resolve_layout(config, 1, probe.place.ranks)
    estimate = peak_of(sizes_of(config, layout), next(iter(ranks_of(config, layout)))).total
    peak = max(line["peak_memory_bytes"] for line in lines)
    saved = run.events("checkpoint_saved")
    probe.row(
        {
            "": title,
            "Tokens/s": f"{median(line['tokens_per_s'] for line in half):,.0f}",
            "Step ms": f"{1e3 * median(line['step_s'] for line in half):.0f}",
            "MFU": f"{100 * median(line['mfu'] for line in half):.1f} %" if half[0].get("mfu") else "",
            "Exposed communication": f"{100 * median(line['comm_share'] or 0.0 for line in half):.1f} %",
            "Peak GiB": f"{peak / 2**30:.1f}",
            "Estimate GiB": f"{estimate / 2**30:.1f}",
            "Save s": f"{median(event['seconds'] for event in saved):.1f}",
            **others,
        }
    )
    if probe.on_gpu:
        probe.within("measured / estimated memory", peak / estimate, 0.8, 1.2)


def communication(probe: Probe) -> None:
    """ZeRO-3 trains with each way to communicate: the table from which ``strategy.comm`` gets its default."""
    gpus = probe.place.gpus
    place = [f"cluster.gpus_per_node={gpus}", *([] if gpus else [*cpu_ranks(probe.place.ranks), "cluster=local"])]
    given = [*_model(probe), "data=synthetic", *place, "+strategy=zero3"]
    amount = ["--pairs", "10", "--steps", "5"] if probe.on_gpu else ["--pairs", "2", "--steps", "2"]
    first = 0.0
    failures = []
    for name, (overrides, environment) in COMMUNICATION.items():
        if not probe.on_gpu and "user_buffers" in name:  # gloo has no such memory
            continue
        os.environ.update(environment)
        for row in measured({name: overrides}, given, amount, probe.check.limit_s / len(COMMUNICATION)):
            if isinstance(row, str) or row.result is None:
                failures.append(row if isinstance(row, str) else f"{name}: {row.error}")
                continue
            first = first or speed(row.result)
            _communication_row(probe, row, row.result, first)
        for variable in environment:
            del os.environ[variable]
    refused = [text for text in failures if "torch 2.13 or later" in text]
    print("\n".join(failures))
    probe.note("ways that this version of torch lacks", len(refused))
    probe.equal("ways that failed", [text[:200] for text in failures if text not in refused], [])
    probe.within("tokens/s of zero3", first, low=1)


def _communication_row(probe: Probe, row: Row, result: dict[str, Any], first: float) -> None:
    share = result["communication_share"]
    peaks = result["memory"]["device_peak_bytes"] or result["memory"]["host_peak_bytes"]
    probe.row(
        {
            "": row.name,
            "Tokens/s": f"{speed(result):,.0f}",
            "Of the first": f"{speed(result) / first:.3f}",
            "MFU": f"{100 * result['mfu']['value']:.1f} %" if result["mfu"] else "",
            "Exposed communication": "" if share is None else f"{100 * max(share):.1f} %",
            "Peak GiB": f"{max(peaks) / 2**30:.1f}",
            **{
                label: f"{row.gpu[name]:.0f}" if name in row.gpu else ""
                for label, name in zip(("MHz", "W", "°C"), SMI, strict=True)
            },
        }
    )


def saves(probe: Probe) -> None:
    """Saves in the background do not hold up the steps, the first one included, which needs pinned memory."""
    steps, every = (40, 10) if probe.on_gpu else (12, 3)
    run = train(
        probe, "run", *_model(probe), "+strategy=zero2", "checkpoint.asynchronous=true",
        f"checkpoint.every={every}", f"train.steps={steps}", "checkpoint.keep=1", ranks=probe.place.ranks,
    )  # fmt: skip
    shutil.rmtree(run.path / "checkpoints")
    held = [line["save_s"] for line in run.metrics() if line["save_s"] > 0]
    committed = [event["seconds"] for event in run.events("checkpoint_saved")]
    probe.within("saves that steps have seen", len(held), low=3)
    for name, seconds in zip(("first save", "second save", "third save"), held, strict=False):
        probe.row({"": name, "Holds up a step, s": seconds})
        if probe.on_gpu:
            probe.within(f"{name}: holds up a step", seconds, high=STALL_S, unit="s")
    probe.note("seconds until they were committed", committed)
