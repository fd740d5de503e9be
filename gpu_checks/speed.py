"""Checks of the speed of training steps, by the benchmarks that users run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from benchmarks.savers import AS_IT_STANDS, ROWS, Row, measured, speed, text_of
from gpu_checks.check import Probe
from gpu_checks.commands import TINY, cpu_ranks, train
from hpc_train.bench.step import LISTED
from hpc_train.bench.step_gap import OPTIMIZER, WAITING

LARGER = "twice the micro-batch"
WANTED = (AS_IT_STANDS, "logits whole", LARGER)
EXPERIMENT = ["+experiment=gpt1b_h200", "cluster.preflight=off"]
SMALL = ["model=gpt_tiny", *TINY, "data=synthetic", "model.dim=32"]
SMALL += ["cluster=local", "cluster.gpus_per_node=0", *cpu_ranks(1)]
MFU, RATIO = 0.6, 0.98  # of the best row; ours / the bare loop


def steps(probe: Probe) -> None:
    """Steps of 1.2 billion parameters as fast as a bare loop, and at 60 % of the peak with the best options."""
    names = [name for name in WANTED if name != LARGER or is_large()] if probe.on_gpu else WANTED[:1]
    given, count = (for_this_gpu(), "3") if probe.on_gpu else (SMALL, "2")
    amount = ["--pairs", count, "--steps", count]
    begin = time.monotonic()
    rows: list[Row] = []
    for row in measured({name: ROWS[name] for name in names}, given, amount, probe.check.limit_s - 10):
        probe.note(str(row)[:34].strip() if isinstance(row, str) else row.name, _told(row))
        rows += [] if isinstance(row, str) else [row]
    probe.note("seconds for all rows", time.monotonic() - begin)
    done = [row for row in rows if row.result is not None]
    probe.equal("rows that failed", [row.name for row in rows if row.result is None and not row.late], [])
    _compare(probe, done)
    _check_gap(probe, done)
    for row in rows:
        if row.result is None:
            print(row.error)


def for_this_gpu() -> list[str]:
    """Returns the experiment of an H200, with smaller micro-batches for a smaller GPU."""
    return EXPERIMENT if is_large() else [*EXPERIMENT, "batch.micro_size=8"]


def is_large() -> bool:
    return torch.cuda.get_device_properties(0).total_memory > 120e9


def _told(row: Row | str) -> str:
    return row if isinstance(row, str) else " ".join(text_of(row, None).split()[len(row.name.split()) :])[:300]


def _compare(probe: Probe, done: Sequence[Row]) -> None:
    """Expects ``RATIO`` and ``MFU``; on the CPU only that speeds were measured."""
    results = [row.result for row in done if row.result is not None]
    against = next((result["against"] for result in results if result["against"]), None)
    if against is not None and probe.on_gpu:
        probe.within("ours / the bare loop with the same products", against["ratio"], low=RATIO)
    best = max((result["mfu"]["value"] for result in results if result["mfu"]), default=0.0)
    if probe.on_gpu:
        probe.within("MFU of the best row", best, low=MFU)
    else:
        probe.within("rows with a speed", sum(speed(result) > 0 for result in results), 1, 1)
        probe.expect("the bare loop", against is not None, "measured", against is not None)


def _check_gap(probe: Probe, done: Sequence[Row]) -> None:
    """Names the largest losses, and expects that the profile has seen the kernels of the whole step."""
    gap = next((row.result["gap"] for row in done if row.result is not None and row.result["gap"]), None)
    if not probe.expect("the losses against the peak rate", gap is not None, "named", gap is not None) or gap is None:
        return
    for loss in gap["losses"][:LISTED]:
        probe.note(f"ms lost to {loss['kind']}", 1e3 * loss["seconds"])
    seconds = {loss["kind"]: loss["seconds"] for loss in gap["losses"]}
    missing = abs(gap["step_s"] - gap["ideal_s"] - sum(seconds.values())) / gap["step_s"]
    probe.within("share of the step that is no loss and not ideal", missing, high=1e-6)
    if probe.on_gpu:
        probe.within(
            "share of the step in which the GPU waits for the host", seconds[WAITING] / gap["step_s"], high=0.03
        )
        probe.within("ms of the optimizer", 1e3 * seconds[OPTIMIZER], low=1.0)  # 40 bytes for each of 1.2e9 parameters


def compile_cache(probe: Probe) -> None:
    """A run that is requeued loads what it has compiled from its directory: the caches of the first node are gone."""
    model = ["model=gpt_tiny", *TINY, "train.compile=true", "precision=bf16"]
    seconds = []
    for steps in (4, 8):
        begin = time.time()
        cache = probe.folder / f"caches-{steps}"
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        run = train(probe, "run", *model, f"train.steps={steps}", environment=variables)
        first = min(line["time"] for line in run.metrics() if line["time"] > begin)
        seconds.append(first - begin)
    probe.note("seconds from the command to the first step: at first, again", seconds)
    probe.note("files of the compiler", sorted(path.name for path in (run.path / "compiled").iterdir()))
    found = run.events("first_step")
    probe.equal("events first_step", len(found), 2)
    for name, event in zip(("at first", "again"), found, strict=False):
        again = name == "again"
        probe.equal(f"{name}: the caches were filled from the run directory", event["cache_loaded"], again)
        probe.within(f"{name}: graphs compiled", event["compiled"], 0 if again else 1, 0 if again else math.inf)
        probe.within(f"{name}: graphs taken from the cache", event["reused"], low=1 if again else 0)
    if len(found) == 2 and probe.on_gpu:  # kernels for the CPU are kept as source code
        probe.within("first step again / at first", found[1]["seconds"] / found[0]["seconds"], high=0.75)
