"""Checks of saves during training on a GPU, and of the estimate of memory."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from functools import partial

import psutil
import torch

from gpu_checks.check import Probe
from gpu_checks.commands import TINY, Run, at_once, hpc_train, train
from gpu_checks.steps import Steps, World
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.checkpoint.state import saved_state
from hpc_train.layout.memory import estimate, host_copy_bytes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog

NOISE = 1e-3  # of two runs on a GPU after three steps; a step changes the momentum by far more
STALL_S = 0.5  # the most that a background save may hold up a step
LARGE = ["model=llama_1b", "data.vocab_size=128256", "data.sequence_length=256", "precision=bf16"]  # 14.9 GB of state


def background_saves(probe: Probe) -> None:
    """A save in the background writes what a save in the foreground does, although steps go on meanwhile."""
    model = ["model=gpt_124m", "data.vocab_size=50257", "data.sequence_length=256"] if probe.on_gpu else TINY
    # AdamW would turn the noise of atomic additions in tiny gradients into steps of full size
    model += ["optim=sgd", "optim.lr=0.1"]
    saves = ["checkpoint.every=3", "checkpoint.keep=10", "train.steps=6", "batch.micro_size=4"]
    names = ("foreground", "background")
    given = ([*model, *saves, f"checkpoint.asynchronous={name == 'background'}".lower()] for name in names)
    started = (partial(train, probe, name, *overrides) for name, overrides in zip(names, given, strict=True))
    runs = dict(zip(names, at_once(*started), strict=True))
    weights = {name: _weights(probe, run) for name, run in runs.items()}
    wanted, found = weights["foreground"], weights["background"]
    differing = [name for name, value in wanted.items() if not _alike(found[name], value, NOISE * probe.on_gpu)]
    probe.equal(f"tensors of step 3 that differ, of {len(wanted)}", differing, [])
    for name, run in runs.items():
        verified = hpc_train("checkpoint", "verify", str(run.path))
        probe.equal(f"{name}: bytes and checksums", verified.code, 0)
    for name, run in runs.items():
        saved = run.events("checkpoint_saved")
        probe.note(f"{name}: bytes, seconds until committed", [saved[0]["bytes"], float(saved[0]["seconds"])])


def _alike(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Returns whether the largest difference is at most ``tolerance`` times the largest element."""
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


def _weights(probe: Probe, run: Run) -> dict[str, torch.Tensor]:
    """Returns all tensors of the checkpoint of step 3, weights and optimizer."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = probe.folder / f"{run.path.name}.pt"
    dcp_to_torch_save(run.path / "checkpoints" / "step-00000003", target)
    loaded = torch.load(target, map_location="cpu", weights_only=False)
    target.unlink()
    found: dict[str, torch.Tensor] = {}
    _flatten(loaded, "", found)
    return found


def _flatten(value: object, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}", found)


def large_save(probe: Probe) -> None:
    """A save of 14 GB holds up a step for half a second at most, and takes its own size of pinned host memory."""
    model = LARGE if probe.on_gpu else ["model=gpt_tiny", *TINY]
    world = World(probe)  # its store serves the group of the saves
    steps = world.steps(*model, "batch.global_size=1", "batch.micro_size=1", "checkpoint.asynchronous=true")
    run = RunDirectory(probe.folder / "run")
    run.create()
    store = RunStore(run, steps.config, EventLog.open(run, "rank-0000", 0), steps.mesh.control)
    manager = CheckpointManager(store, steps.engine, steps.optimizer, steps.mesh, 1)
    usual = min(_elapsed(steps) for _ in range(4))
    before, pinned_before = _resident_bytes(), _pinned_by_torch()
    probe.note("a step, s", usual)
    probe.note(
        "the first save holds up a step, which includes pinning, s", _elapsed(steps, manager.save, 4, {}) - usual
    )
    _check_host_memory(probe, manager, steps, _resident_bytes() - before, _pinned_by_torch() - pinned_before)
    manager.wait()
    probe.note("seconds until it was committed", manager.durable_s)
    state = saved_state(steps.engine, steps.optimizer, steps.mesh)
    stall = _elapsed(steps, manager._snapshot, 5, state) - usual  # as in a later save, without writing it
    if probe.on_gpu:
        probe.within("a later save holds up a step", stall, high=STALL_S, unit="s")
    else:
        probe.note("a later save holds up a step, s", stall)
    manager._copies.release()
    steps.close()


def _elapsed(steps: Steps, save: Callable[..., object] | None = None, *arguments: object) -> float:
    """Returns the seconds of a step, and of ``save`` before it, until the GPU has ended both."""
    batch = steps.batch()
    steps.wait()
    begin = time.perf_counter()
    if save is not None:
        save(*arguments)
    steps.step(batch)
    steps.wait()
    return time.perf_counter() - begin


def _check_host_memory(probe: Probe, manager: CheckpointManager, steps: Steps, grown: int, pinned: int) -> None:
    copies = manager._copies
    size = copies.bytes_of(saved_state(steps.engine, steps.optimizer, steps.mesh))
    estimated = host_copy_bytes(steps.config, steps.mesh.layout, 1)
    assert estimated is not None
    probe.note("bytes of the copies", size)
    probe.within("their estimate / bytes", estimated / size, 0.9, 1.1)
    probe.within("bytes of the arena / bytes", copies._arena.size / size, 1.0, 1.0 + mmap.PAGESIZE / size)
    probe.equal("the arena is pinned", bool(copies._arena._pinned), probe.on_gpu)
    if probe.on_gpu:  # the arena of a tiny model is lost in what else the process allocates
        probe.within("growth of the resident memory / bytes", grown / size, 0.9, 1.1)
        probe.within("bytes that torch's allocator has pinned besides, / bytes", pinned / size, high=0.01)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _pinned_by_torch() -> int:
    found: int = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return found


def memory_estimate(probe: Probe) -> None:
    """The estimate of memory is what the allocator measures."""
    world = World(probe)
    gpt = ["model=gpt_124m", "data.vocab_size=50257", "data.sequence_length=1024", "batch.micro_size=8"]
    cases = {
        "bf16": ["precision=bf16"],
        "bf16, checkpointing: full": ["precision=bf16", "train.activation_checkpointing=full"],
        "bf16, checkpointing: ops, loss in chunks": [
            "precision=bf16", "train.activation_checkpointing=ops", "train.loss_chunks=8",
        ],
        "fp32": ["precision=fp32"],
    }  # fmt: skip
    for name, overrides in cases.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        steps = world.steps(*gpt, *overrides)
        ratio = _measured_over_estimated(steps, held)
        probe.within(f"{name}: measured / estimated", ratio, 0.9, 1.1)
        steps.close()
        del steps


def _measured_over_estimated(steps: Steps, held: int) -> float:
    for _ in range(2):
        steps.step()
    steps.wait()
    estimated = estimate(steps.config, steps.mesh.layout)
    assert estimated is not None
    return (torch.cuda.max_memory_allocated() - held) / estimated.total
