"""Checks of saves during training on a GPU, and of the estimate of memory."""

from __future__ import annotations

import gc

import torch

from hpc_train.plan.memory import estimate
from tests.gpu.check import Probe
from tests.gpu.commands import TINY, Run, hpc_train, train
from tests.gpu.steps import Steps, World

NOISE = 1e-3  # of two runs on a GPU after three steps; a step changes the momentum by far more
STALL_S = 0.5  # the most that a background save may hold up a step


def background_saves(probe: Probe) -> None:
    """A save in the background writes what a save in the foreground does, although steps go on meanwhile."""
    model = ["model=gpt_124m", "data.vocab_size=50257", "data.sequence_length=256"] if probe.on_gpu else TINY
    # AdamW would turn the noise of atomic additions in tiny gradients into steps of full size
    model += ["optim=sgd", "optim.lr=0.1"]
    saves = ["checkpoint.every=3", "checkpoint.keep=10", "train.steps=6", "batch.micro_size=4"]
    runs = {
        name: train(probe, name, *model, *saves, f"checkpoint.asynchronous={name == 'background'}".lower())
        for name in ("foreground", "background")
    }
    weights = {name: _weights(probe, run) for name, run in runs.items()}
    wanted, found = weights["foreground"], weights["background"]
    differing = [name for name, value in wanted.items() if not _alike(found[name], value, NOISE * probe.on_gpu)]
    probe.equal(f"tensors of step 3 that differ, of {len(wanted)}", differing, [])
    for name, run in runs.items():
        verified = hpc_train("checkpoint", "verify", str(run.path))
        probe.equal(f"{name}: bytes and checksums", verified.code, 0)
    _report_stalls(probe, runs)


def _alike(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Returns whether the largest difference is at most ``tolerance`` times the largest element."""
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


def _report_stalls(probe: Probe, runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        saved = run.events("checkpoint_saved")
        probe.note(f"{name}: bytes, seconds until committed", [saved[0]["bytes"], float(saved[0]["seconds"])])
        stalls = [float(line["save_s"]) for line in run.metrics() if line.get("save_s")]
        if name == "background" and probe.on_gpu:
            probe.within("background: longest stall of a step", max(stalls, default=0.0), high=STALL_S, unit="s")
        else:
            probe.note(f"{name}: stalls", stalls)


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
