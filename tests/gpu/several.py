"""Checks that need several GPUs: NCCL between ranks, overlap, one context per GPU. CPU ranks can run them as well."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hpc_train.run.exits import Failure
from tests.gpu.check import Place, Probe
from tests.gpu.commands import (
    ROOT,
    SMALL,
    SYNTHETIC,
    TINY,
    Run,
    clean_environment,
    cpu_ranks,
    hpc_train,
    largest_difference,
    train,
)
from tests.gpu.environment import contexts
from tests.gpu.models import disturbed

SAME = 1e-4  # relative difference of losses and gradient norms in fp32
SAME_BF16 = 1e-3  # the same rounding in the same places; sums in another order
COLLECTIVE = "nccl"


def layouts(probe: Probe) -> None:
    """Every way to split a training over all GPUs computes the losses and the gradient norms of one GPU."""
    shape = [*TINY, "model.n_layers=8", "data.vocab_size=256", "batch.global_size=16", "train.steps=4"]
    reference = train(probe, "one", *shape)
    for name, overrides in splits(probe.place.ranks).items():
        run = train(probe, name, *shape, *overrides, ranks=probe.place.ranks)
        worst = max(largest_difference(_series(run, key), _series(reference, key)) for key in ("loss", "grad_norm"))
        probe.within(f"{name}: losses and gradient norms", worst, high=SAME)
        probe.within(f"{name}: validation loss", _validation(run) / _validation(reference), 1 - SAME, 1 + SAME)
    found = [train(probe, f"bf16-{name}", *shape, "precision=bf16", *overrides, ranks=probe.place.ranks).losses()
             for name, overrides in splits(probe.place.ranks).items() if name in ("ddp", "zero2")]  # fmt: skip
    probe.within("bf16: losses of zero2 against ddp", largest_difference(found[1], found[0]), high=SAME_BF16)


def splits(ranks: int) -> dict[str, list[str]]:
    """Returns the strategies that use ``ranks`` ranks, which must be even, by a name for the run."""
    zbv = ["+strategy=pp", "strategy.pp=2", "strategy.dp=fill", "strategy.schedule=zbv", "strategy.stages_per_rank=2"]
    found = {
        "ddp": ["+strategy=dp"],
        "allreduce": ["+strategy=dp", "strategy.data_parallel=allreduce"],
        "zero1": ["+strategy=zero1"],
        "zero2": ["+strategy=zero2"],
        "zero3": ["+strategy=zero3"],
        "tp": ["+strategy=tp", "strategy.tp=2", "strategy.dp=fill"],
        "pp": ["+strategy=pp", "strategy.pp=2", "strategy.dp=fill"],
        "zbv": zbv,
    }
    if ranks >= 4 and ranks % 4 == 0:
        both = ["strategy.dp=fill", "strategy.pp=2", "strategy.tp=2"]
        found["hybrid"] = ["+strategy=dp", *both]
        found["hybrid-zero2"] = ["+strategy=zero2", *both]
        found["hsdp"] = ["+strategy=zero3", "strategy.shard=2"]
    return found


def _series(run: Run, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in run.metrics()}


def _validation(run: Run) -> float:
    return float(next(line["val_loss"] for line in run.metrics() if "val_loss" in line))


def killed_in_a_collective(probe: Probe) -> None:
    """A rank that is killed while the others wait for it in a collective: all end, and the run resumes."""
    once, last = probe.folder / "once", probe.place.ranks - 1
    saves = ["+strategy=dp", "checkpoint.every=2", "train.steps=8"]
    run = train(probe, "run", *disturbed("kill", once, call=6, rank=last), *saves, ranks=probe.place.ranks)
    undisturbed = train(probe, "again", *disturbed("kill", once, call=6), *saves, ranks=probe.place.ranks)
    failed = run.events("worker_failed")
    probe.equal("the first failure", [event["class"] for event in failed[:1]], [Failure.KILLED.value])
    probe.equal("its rank", [event["rank"] for event in failed[:1]], [last])
    difference = largest_difference(run.losses(), undisturbed.losses())
    probe.within("losses, killed against undisturbed", difference, high=1e-5 if probe.on_gpu else 0)
    moment = float(once.read_text())
    resumed = [event["time"] - moment for event in run.events("resumed")]
    probe.within("from the kill to the restored checkpoint", min(resumed, default=float("nan")), high=30, unit="s")


def background_saves(probe: Probe) -> None:
    """All ranks save in the background, and none opens a context on the GPU of another."""
    steps, every = (400, 20) if probe.on_gpu else (40, 4)
    model = ["+strategy=zero2", *TINY, f"train.steps={steps}"]
    model += ["checkpoint.asynchronous=true", f"checkpoint.every={every}"]
    process = _start(probe, "run", *model)
    most = _watch_contexts(process, probe.place)
    output = process.communicate(timeout=200)[0]
    probe.equal("exit code", process.returncode, 0)
    if process.returncode:
        raise RuntimeError(output)
    verified = hpc_train("checkpoint", "verify", str(probe.folder / "run"))
    probe.equal("bytes and checksums of the checkpoints", verified.code, 0)
    saved = Run(probe.folder / "run", 0, output).events("checkpoint_saved")
    probe.within("checkpoints", len(saved), low=5)
    if probe.on_gpu:
        probe.equal("GPUs that nvidia-smi shows in use", len(most), probe.place.gpus)
        probe.within("most contexts on one GPU", max(most.values(), default=0), 1, 1)


def _start(probe: Probe, name: str, *overrides: str) -> subprocess.Popen[str]:
    ranks, gpus = probe.place.ranks, probe.place.gpus
    place = [f"cluster.gpus_per_node={gpus}", *([] if gpus else cpu_ranks(ranks))]
    where = [f"run.root={probe.folder}", f"run.name={name}"]
    command = [sys.executable, "-m", "hpc_train", *SYNTHETIC, *SMALL, *place, *where, *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=clean_environment()
    )


def _watch_contexts(process: subprocess.Popen[str], place: Place) -> dict[str, int]:
    """Returns the largest number of contexts that each GPU had until ``process`` ended."""
    most: dict[str, int] = {}
    until = time.monotonic() + 150
    while process.poll() is None and time.monotonic() < until:
        shown = contexts() if place.gpus else []
        for uuid, _ in shown:
            most[uuid] = max(most.get(uuid, 0), sum(uuid == other for other, _ in shown))
        time.sleep(0.5)
    return most


def overlap(probe: Probe) -> None:
    """Gradients are reduced while the backward pass computes: part of each rank's collectives is hidden."""
    model = ["model=gpt_124m", "data.vocab_size=50257", "data.sequence_length=512"] if probe.on_gpu else TINY
    for name in ("dp", "zero2"):
        run = train(
            probe, name, f"+strategy={name}", *model, "batch.global_size=32", "train.steps=8",
            "telemetry.profile.steps=6-7", ranks=probe.place.ranks,
        )  # fmt: skip
        events = _trace(run)
        sent = [event for event in events if COLLECTIVE in event["name"].lower() or "gloo:" in event["name"]]
        probe.within(f"{name}: collectives in the trace", len(sent), low=1)
        if probe.on_gpu:
            computing = [event for event in events if event not in sent]
            share = hidden_share(_spans(sent), _spans(computing))
            probe.within(f"{name}: share of the collectives that computation hides", share, low=0.3)


def _trace(run: Run) -> list[dict[str, Any]]:
    """Returns the kernels of rank 0, or on the CPU all operations."""
    path = next((run.path / "profile").glob("*.json.gz"))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    return [event for event in complete if event.get("cat") == "kernel"] or complete


def _spans(events: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in events)


def hidden_share(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Returns the share of the time of ``spans`` in which one of ``others``, which are sorted, runs as well."""
    total = hidden = 0.0
    for begin, end in spans:
        total += end - begin
        at = begin
        for start, stop in others:
            if start >= end:
                break
            hidden += max(0.0, min(stop, end) - max(start, at))
            at = max(at, min(stop, end))
    return hidden / total if total else 0.0


def start_up(probe: Probe) -> None:
    """The groups of a mesh with several axes are made in seconds, and without a socket to each rank in each group."""
    once, begin = probe.folder / "facts.json", time.time()
    arguments = disturbed("tell", once, call=3)
    run = train(probe, "run", *arguments, "+strategy=zero2", *_shards(probe.place.ranks), ranks=probe.place.ranks)
    facts = json.loads(once.read_text())
    probe.within("from the command to the first step", run.metrics()[0]["time"] - begin, high=60, unit="s")
    probe.within("sockets of a rank", facts["sockets"], high=20 + 8 * probe.place.ranks)
    probe.equal("descriptors that a rank may open", *facts["descriptors"])


def _shards(ranks: int) -> list[str]:
    return ["strategy.shard=2"] if ranks >= 4 else []


def compiled_replicas(probe: Probe) -> None:
    """Compiled layers under DDP and under ZeRO compute the losses of layers that are not compiled."""
    shape = [*TINY, "train.steps=4", "model.dim=256", "strategy.bucket_cap_mb=1"]
    for strategy in ("dp", "zero3"):
        losses = [
            train(probe, f"{strategy}-{value}", f"+strategy={strategy}", *shape, f"train.compile={value}",
                  ranks=probe.place.ranks).losses()
            for value in ("false", "true")
        ]  # fmt: skip
        probe.within(f"{strategy}: losses, compiled against not", largest_difference(losses[1], losses[0]), high=SAME)
