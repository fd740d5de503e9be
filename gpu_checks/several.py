"""Checks that need several GPUs: NCCL between ranks, overlap, one context per GPU. CPU ranks can run them as well."""

from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gpu_checks.check import Place, Probe
from gpu_checks.commands import (
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
from gpu_checks.environment import COLLECTIONS, contexts, smi
from gpu_checks.models import disturbed, told_by
from hpc_train.run.exits import Failure

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
        "cp": ["+strategy=cp", "strategy.dp=fill"],
        "ring": ["+strategy=cp", "strategy.context=ring", "strategy.dp=fill"],
        "pp": ["+strategy=pp", "strategy.pp=2", "strategy.dp=fill"],
        "zbv": zbv,
    }
    if ranks >= 4 and ranks % 4 == 0:
        both = ["strategy.dp=fill", "strategy.pp=2", "strategy.tp=2"]
        found["hybrid"] = ["+strategy=dp", *both]
        found["hybrid-zero2"] = ["+strategy=zero2", *both]
        found["hsdp"] = ["+strategy=zero3", "strategy.shard=2"]
    return found


def local_steps(probe: Probe) -> None:
    """Replicas whose weights are averaged after each step of SGD train as synchronous ones do."""
    plain = ["+strategy=dp", "optim=sgd", "optim.clip_norm=0", *TINY]
    averaged = ["strategy.shard=1", "strategy.local_steps=1", "strategy.outer_lr=1", "strategy.outer_momentum=0"]
    reference = train(probe, "synchronous", *plain, ranks=probe.place.ranks).losses()
    found = train(probe, "local", *plain, *averaged, ranks=probe.place.ranks).losses()
    probe.within("losses, local steps against synchronous", largest_difference(found, reference), high=SAME)


def balance(probe: Probe) -> None:
    """``batch.balance`` changes no loss, whether micro-batches move or not."""
    plain = ["+strategy=dp", *TINY, f"batch.global_size={8 * probe.place.ranks}", "batch.micro_batches=4"]
    plain += ["train.steps=40", "telemetry.log_every=5"]
    reference = train(probe, "even", *plain, ranks=probe.place.ranks).losses()
    run = train(probe, "balanced", *plain, "batch.balance=true", ranks=probe.place.ranks)
    probe.within("losses, with the key against without", largest_difference(run.losses(), reference), high=SAME)
    probe.note("moves", [event["message"] for event in run.events("micro_batches_moved")])


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
    """All ranks save in the background, and each has a context on its own GPU only."""
    steps, every = (400, 20) if probe.on_gpu else (40, 4)
    once = probe.folder / "facts"
    model = [*disturbed("tell", once, call=3, rank=-1), "+strategy=zero2", f"train.steps={steps}"]
    model += ["checkpoint.asynchronous=true", f"checkpoint.every={every}"]
    process = _start(probe, "run", *model)
    seen = _watch_contexts(process, probe.place)
    output = process.communicate(timeout=200)[0]
    probe.equal("exit code", process.returncode, 0)
    if process.returncode:
        raise RuntimeError(output)
    verified = hpc_train("checkpoint", "verify", str(probe.folder / "run"))
    probe.equal("bytes and checksums of the checkpoints", verified.code, 0)
    saved = Run(probe.folder / "run", 0, output).events("checkpoint_saved")
    probe.within("checkpoints", len(saved), low=5)
    _check_contexts(probe, seen, _told(probe, once))


def _told(probe: Probe, once: Path) -> list[dict[str, Any]]:
    """Returns what each rank has told."""
    return [json.loads(told_by(once, rank).read_text()) for rank in range(probe.place.ranks)]


def _check_contexts(probe: Probe, seen: set[tuple[str, str]], facts: Sequence[dict[str, Any]]) -> None:
    """Compares the contexts that were seen, as (UUID of the GPU, pid), with the ranks' own GPUs and pids."""
    own = {(fact["gpu"], str(fact["pid"])) for fact in facts}
    probe.equal("processes of ranks", len({pid for _, pid in own}), probe.place.ranks)
    if not probe.on_gpu:
        return
    probe.equal("GPUs of ranks", len({uuid for uuid, _ in own}), probe.place.gpus)
    probe.equal("GPUs that nvidia-smi shows in use", len({uuid for uuid, _ in seen}), probe.place.gpus)
    if {pid for _, pid in own}.isdisjoint(pid for _, pid in seen):  # nvidia-smi shows the pids of the host
        probe.equal("contexts of another namespace of pids", len(seen), probe.place.gpus)
    else:
        probe.equal("contexts that are not of a rank on its own GPU", sorted(seen - own), [])
        probe.equal("ranks without a context on their own GPU", sorted(own - seen), [])


def _start(probe: Probe, name: str, *overrides: str) -> subprocess.Popen[str]:
    ranks, gpus = probe.place.ranks, probe.place.gpus
    place = [f"cluster.gpus_per_node={gpus}", *([] if gpus else cpu_ranks(ranks))]
    where = [f"run.root={probe.folder}", f"run.name={name}"]
    command = [sys.executable, "-m", "hpc_train", *SYNTHETIC, *SMALL, *place, *where, *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=clean_environment()
    )


def _watch_contexts(process: subprocess.Popen[str], place: Place) -> set[tuple[str, str]]:
    """Returns (UUID of the GPU, pid) of all contexts that there were until ``process`` ended."""
    seen: set[tuple[str, str]] = set()
    until = time.monotonic() + 150
    while process.poll() is None and time.monotonic() < until:
        seen.update(contexts() if place.gpus else ())
        time.sleep(0.5)
    return seen


LEVEL = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}
_CHANNEL = re.compile(r" via (\S+)")
_NVLS = re.compile(r"NVLS multicast support is available")


def transports(probe: Probe) -> None:
    """NCCL connects the GPUs alike whether a rank sees all GPUs of the node or one, and beside NVLink not by memory."""
    found = {}
    for visible in ("all", "own"):
        folder = probe.folder / visible
        folder.mkdir()
        run = train(
            probe, f"run-{visible}", "+strategy=dp", *TINY, "train.steps=3", f"cluster.visible_gpus={visible}",
            ranks=probe.place.ranks, environment=LEVEL | {"NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log")},
        )  # fmt: skip
        probe.equal(f"{visible}: steps", len(run.losses()), 3)
        found[visible] = count_transports(path.read_text(errors="replace") for path in folder.glob("nccl-*"))
    if probe.on_gpu:
        probe.within("channels between GPUs", sum(found["all"].values()), low=1)
        probe.note("channels, and ranks with NVLink SHARP (NVLS)", [f"{name}: {n}" for name, n in found["all"].items()])
    if probe.on_gpu and "GB/s" in smi("nvlink", "--status"):
        for visible, counts in found.items():
            through_host = sum(count for name, count in counts.items() if name.startswith("SHM"))
            probe.equal(f"{visible}: channels through host memory (SHM) beside NVLink", through_host, 0)
    probe.equal("channels by transport with cluster.visible_gpus=own", found["own"], found["all"])


def algorithms(probe: Probe) -> None:
    """NCCL takes the ring that is asked for, computes the same sums, and its own choice is about the fastest."""
    here = ["cluster=local", "cluster.preflight=off", f"cluster.gpus_per_node={probe.place.ranks * probe.on_gpu}"]
    command = hpc_train("bench", "collectives", *here, "--algorithms", "--sizes", "1M,256M", "--json")
    probe.equal("exit code", command.code, 0 if probe.on_gpu else 2)  # gloo has no algorithms
    if not probe.on_gpu:
        return
    result = command.json()
    measured = {name: rates for name, rates in result["algorithms"].items() if rates is not None}
    probe.note("algorithms that NCCL refuses", sorted({*result["algorithms"]} - {*measured}))
    probe.expect("algorithms that NCCL takes", sorted(measured), "Ring among them", "Ring" in measured)
    probe.equal("wrong elements", sum(row["wrong"] for rates in measured.values() for row in rates), 0)
    for index, row in enumerate(result["rates"]):
        fastest = max(rates[index]["bus_gb_per_s"] for rates in measured.values())
        size = f"{row['bytes'] >> 20} MiB in {row['group']}"
        probe.within(f"NCCL's choice against the fastest, {size}", row["bus_gb_per_s"] / fastest, low=0.8)


def count_transports(logs: Iterable[str]) -> dict[str, int]:
    """Counts the channels of NCCL's logs by transport (P2P/CUMEM, SHM/direct/direct …), and the ranks with NVLS."""
    counts: Counter[str] = Counter()
    for log in logs:
        counts.update(name for name in _CHANNEL.findall(log) if name.startswith(("P2P", "SHM", "NET")))
        counts["NVLS"] += bool(_NVLS.search(log))
    return dict(sorted((name, count) for name, count in counts.items() if count))


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
    once, begin = probe.folder / "facts", time.time()
    arguments = disturbed("tell", once, call=9, rank=-1)
    run = train(probe, "run", *arguments, "+strategy=zero2", *_shards(probe.place.ranks), ranks=probe.place.ranks)
    facts, *others = _told(probe, once)
    collections = {tuple(each["collections"]) for each in (facts, *others)}
    probe.equal("steps after which the ranks collect garbage", collections, {tuple(COLLECTIONS)})
    probe.within("from the command to the first step", run.metrics()[0]["time"] - begin, high=60, unit="s")
    probe.within("sockets of a rank", facts["sockets"], high=20 + 8 * probe.place.ranks)
    probe.equal("descriptors that a rank may open", *facts["descriptors"])


def _shards(ranks: int) -> list[str]:
    return ["strategy.shard=2"] if ranks >= 4 else []


def compiled_replicas(probe: Probe) -> None:
    """Compiled layers under DDP and under ZeRO compute the losses of layers that are not compiled."""
    shape = [*TINY, "train.steps=4", "model.dim=256", "strategy.bucket_cap_mb=1"]
    for strategy in ("dp", "zero3"):
        runs = [
            train(probe, f"{strategy}-{value}", f"+strategy={strategy}", *shape, f"train.compile={value}",
                  ranks=probe.place.ranks)
            for value in ("false", "true")
        ]  # fmt: skip
        losses = [run.losses() for run in runs]
        probe.within(f"{strategy}: losses, compiled against not", largest_difference(losses[1], losses[0]), high=SAME)
        for event in runs[1].events("first_step"):  # the forward and the backward of all equal layers
            graphs = event["compiled"] + event["reused"]
            probe.within(f"{strategy}: graphs that rank 0 has compiled or loaded", graphs, 1, 8)


def async_tp(probe: Probe) -> None:
    """Compiled tensor-parallel layers that overlap their collectives compute the same losses, in no more time."""
    shape = ["data.vocab_size=256", "data.sequence_length=2048", "model.dim=2048", "model.n_heads=16",
             "model.n_kv_heads=16", "model.ffn_dim=8192", "batch.global_size=4", "precision=bf16",
             "train.steps=12", "train.compile=true", "cluster.visible_gpus=all"]  # fmt: skip
    found = []
    for value in ("false", "true") if probe.on_gpu else ("false",):  # there is no symmetric memory between CPUs
        options = [f"strategy.tp={probe.place.ranks}", f"strategy.async_tp={value}", *_for_cpus(probe)]
        run = train(probe, f"async-{value}", "+strategy=tp", *shape, *options, ranks=probe.place.ranks)
        seconds = [line["step_s"] for line in run.metrics()[4:]]
        found.append((run.losses(), median(seconds)))
    probe.note("seconds of a step without and with asynchronous tensor parallelism", [each for _, each in found])
    probe.within("steps with a finite loss", sum(map(math.isfinite, found[0][0].values())), low=2)
    if probe.on_gpu:
        (plain, without), (overlapped, with_overlap) = found
        probe.within("losses, asynchronous against not", largest_difference(overlapped, plain), high=2e-2)
        probe.within("seconds of a step, asynchronous / not", with_overlap / without, high=1.02)


def _for_cpus(probe: Probe) -> list[str]:
    small = ["data.sequence_length=32", "model.dim=64", "model.n_heads=4", "model.n_kv_heads=4", "model.ffn_dim=128"]
    return [] if probe.on_gpu else [*small, "train.compile=false", "train.steps=8"]
