"""Checks that training on a GPU computes what it computes on the CPU, under every option that changes the kernels."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_checks.check import Probe
from gpu_checks.commands import TINY, at_once, largest_difference, train
from gpu_checks.steps import Steps, World
from hpc_train.config.import_path import module_spec
from hpc_train.config.schema import BatchConfig, ImagesDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Batch
from hpc_train.data.device_copy import DeviceCopy
from hpc_train.data.feed import TrainFeed
from hpc_train.data.images import MEAN, STD, pixel_scale
from hpc_train.layout.layout import Layout
from hpc_train.parallel.replicas import DDPReplicas

LOSSES = 4
SAME, SAME_BF16 = 1e-4, 2e-2  # relative differences of losses: other kernels in fp32; bf16 against fp32
VARIANTS: dict[str, tuple[str, ...]] = {
    "checkpointing: ops": ("train.activation_checkpointing=ops",),
    "checkpointing: full": ("train.activation_checkpointing=full",),
    "checkpointing: every second layer": ("train.activation_checkpointing=selective",),
    "loss in chunks": ("train.loss_chunks=4",),
    "loss of whole logits": ("train.loss_chunks=1",),
    "two micro-batches": ("batch.micro_size=4",),
    "optimizer on the host": ("strategy.offload=optimizer",),
    "activations on the host": ("train.activation_offload=1KiB",),
    "inputs of layers on the host": ("train.activation_offload=1KiB", "train.activation_checkpointing=full"),
    "activations by a budget": ("train.activation_checkpointing=512KiB",),
    "moments in bf16": ("optim.moments=bf16",),
}
PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what both have, and what must not change the losses
    "updates inside the backward": (("optim.clip_norm=0",), ("optim.in_backward=true",)),
    "z-loss in chunks": (("train.z_loss=1e-2", "train.loss_chunks=1"), ("train.loss_chunks=4",)),
}
IMAGES = "micro-batches of images"
APPROXIMATE = {"moments in bf16": 2e-2}
LARGEST_LEVELS, MEAN_LEVELS = 12.0, 0.6  # assumed of the decoders of GPUs; on CPUs 9 and 0.17


def numbers(probe: Probe) -> None:
    """The losses from the same checkpoint: on the GPU those of the CPU; in bf16 nearly those in fp32.

    A GPU draws other initial weights than the CPU.
    """
    started = train(probe, "cpu", *TINY, "train.steps=1", "checkpoint.every=1", on_gpu=False)
    runs = {"cpu": partial(train, probe, "cpu", *TINY, on_gpu=False)}
    runs |= {name: partial(train, probe, name, *TINY, *given) for name, given in _of_devices(probe).items()}
    for name in runs.keys() - {"cpu"}:
        shutil.copytree(started.path, probe.folder / name)
    losses = dict(zip(runs, (run.losses() for run in at_once(*runs.values())), strict=True))
    reference = losses["cpu"]
    probe.note("losses on the CPU", [reference[min(reference)], reference[max(reference)]])
    if probe.on_gpu:
        probe.within("fp32, GPU against CPU", largest_difference(losses["gpu"], reference), high=SAME)
    probe.within("bf16 against fp32", largest_difference(losses["bf16"], reference), high=SAME_BF16)
    probe.expect("the loss falls", [reference[1], reference[10]], "the last is lower", reference[10] < reference[1])


def _of_devices(probe: Probe) -> dict[str, list[str]]:
    return {"bf16": ["precision=bf16"]} | ({"gpu": []} if probe.on_gpu else {})


def options(probe: Probe) -> None:
    """What saves memory or time changes no loss by more than its arithmetic does."""
    world = World(probe)
    reference = _losses(world)
    for name, overrides in VARIANTS.items():
        found = _losses(world, *overrides)
        probe.within(name, differing(found, reference), high=APPROXIMATE.get(name, SAME))
    for name, (given, changed) in PAIRS.items():
        probe.within(name, differing(_losses(world, *given, *changed), _losses(world, *given)), high=SAME)


def compiled(probe: Probe) -> None:
    """Compiled layers compute the same losses, in whole graphs, and one graph serves all layers."""
    from torch._dynamo.utils import counters

    world = World(probe)
    cases = {
        "fp32": (SAME, _losses, ["precision=fp32"]),
        "bf16 under DDP": (SAME_BF16, _replicated_losses, ["precision=bf16"]),
    }
    for name, (tolerance, losses, given) in cases.items():
        reference = _losses(world, *given)
        torch._dynamo.reset()
        counters.clear()
        found = losses(world, *given, "train.compile=true")
        probe.within(f"{name}: compiled against not", differing(found, reference), high=tolerance)
        breaks = {reason.partition("\n")[0]: count for reason, count in counters["graph_break"].items()}
        probe.equal(f"{name}: graph breaks", breaks, {})
        graphs = counters["stats"]["unique_graphs"]
        probe.within(f"{name}: graphs of four equal layers and a head", graphs, low=2, high=4)


def cuda_graphs(probe: Probe) -> None:
    """Compiled layers as CUDA graphs compute the losses of compiled layers, in less time while kernels are short."""
    world = World(probe)
    given = ["precision=bf16", "batch.micro_size=4", "train.compile=true"]
    found = {}
    for value in ("false", "true"):
        torch._dynamo.reset()
        steps = world.tiny_gpt(*given, f"train.cuda_graphs={value}")
        try:
            found[value] = steps.losses(2 * LOSSES), _seconds(steps)
        finally:
            steps.close()
    (plain, without), (graphed, with_graphs) = found["false"], found["true"]
    probe.note("seconds of a step without and with CUDA graphs", [without, with_graphs])
    probe.within("losses, with CUDA graphs against without", differing(graphed, plain), high=SAME_BF16)
    probe.within("seconds of a step, with CUDA graphs / without", with_graphs / without, high=1.0)


def _seconds(steps: Steps, number: int = 20) -> float:
    """Returns the seconds of a step."""
    batch = steps.batch()
    steps.wait()
    begin = time.perf_counter()
    for _ in range(number):
        steps.step(batch)
    steps.wait()
    return (time.perf_counter() - begin) / number


def _replicated_losses(world: World, *overrides: str) -> list[float]:
    """Returns the losses under DDP, which a run of one rank would not use, with buckets smaller than a layer."""
    steps = world.tiny_gpt("strategy.bucket_cap_mb=0.02", *overrides)
    engine: Any = steps.engine
    engine._replicas = DDPReplicas(engine.parts[0], steps.mesh, steps.config.strategy)
    try:
        return steps.losses(LOSSES)
    finally:
        steps.close()


def no_synchronization(probe: Probe) -> None:
    """A step makes the host wait for the device nowhere: torch raises at each call that would."""
    world = World(probe)
    cases = {
        "fp32": ["precision=fp32"],
        "bf16": ["precision=bf16"],
        "fp16 with its loss scale": ["precision=fp16"],
        "bf16, checkpointing of ops, loss in chunks": [
            "precision=bf16", "train.activation_checkpointing=ops", "train.loss_chunks=4",
        ],
        IMAGES: ["model=vit_tiny", "data.task=images", "batch.micro_size=4"],
        "moments in bf16": ["optim.moments=bf16"],
        "Muon and unfused AdamW": ["optim=muon", "precision=bf16"],
        "updates inside the backward": ["optim.in_backward=true", "optim.clip_norm=0", "precision=bf16"],
        "z-loss": ["train.z_loss=1e-4", "train.loss_chunks=1"],
        "activations on the host": ["train.activation_offload=1KiB"],
    }  # fmt: skip
    for name, overrides in cases.items():
        steps = (world.steps if name == IMAGES else world.tiny_gpt)(*overrides)
        for _ in range(3):  # the first step allocates and loads kernels, and the first two check a custom optimizer
            steps.step()
        probe.equal(name, _raised_in(steps), "")
        steps.close()


def _raised_in(steps: Steps) -> str:
    """Runs five steps in which a synchronization raises; returns its message."""
    batches = [steps.batch() for _ in range(5)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            steps.step(batch)
    except RuntimeError as error:
        import traceback

        traceback.print_exc()
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def overflow(probe: Probe) -> None:
    """A step of fp16 whose gradients overflow changes no weight, halves the scale, and is counted.

    AdamW skips it in its kernel, and the update of Muon is undone.
    """
    world = World(probe)
    for optimizer in ("adamw", "muon"):
        _overflow(probe, world.tiny_gpt("precision=fp16", f"optim={optimizer}"), optimizer)


def _overflow(probe: Probe, steps: Steps, optimizer: str) -> None:
    scale = steps.take.loss_scale
    assert scale is not None
    scale.value.fill_(1e30)
    before = steps.parameters()
    steps.step()
    changed = [name for name, value in steps.parameters().items() if not torch.equal(value, before[name])]
    probe.equal(f"{optimizer}: weights that a skipped step changes", changed, [])
    probe.equal(f"{optimizer}: skipped steps", steps.take.skipped_in_a_row, 1)
    probe.within(f"{optimizer}: loss scale after it (1e30 before)", float(scale.value), high=2.0**24)
    scale.value.fill_(1024.0)
    steps.step()
    probe.equal(f"{optimizer}: skipped steps after a good one", steps.take.skipped_in_a_row, 0)
    changed = [name for name, value in steps.parameters().items() if not torch.equal(value, before[name])]
    probe.equal(f"{optimizer}: weights that it changes", len(changed), len(before))
    steps.close()


def pictures(probe: Probe) -> None:
    """Vision models train: a ViT and a ResNet, whose batch normalization is not part of the optimizer."""
    large = ["model=vit_large", "data.image_size=224", "batch.global_size=32", "optim.lr=1e-4"]
    cases = {
        "ViT": large if probe.on_gpu else ["model=vit_tiny"],
        "ResNet-18": ["model=custom", "model._target_=hpc_train.models.resnet.resnet18", "optim=sgd", "optim.lr=0.01"],
    }
    _check_pixels(probe)
    world = World(probe)
    for name, overrides in cases.items():
        steps = world.steps("data.task=images", "precision=bf16", *overrides)
        batch = steps.batch()
        losses = [steps.engine.reduce(steps.step(batch).result).loss for _ in range(5)]
        probe.expect(f"{name}: losses of one batch", losses, "the last is lower", losses[-1] < losses[0])
        steps.close()


def _check_pixels(probe: Probe) -> None:
    """Every value of a pixel is normalized on the device to the number that the CPU computes."""
    pixels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 256).reshape(2, 3, 16, 16)
    batch = Batch(pixels, torch.zeros(2, dtype=torch.int64))
    scale = pixel_scale(MEAN, STD)
    (found,), (wanted,) = (
        DeviceCopy(torch.device(name), scale).send([batch]).receive() for name in (probe.device, "cpu")
    )
    probe.equal("device of the normalized pixels", found.inputs.device.type, probe.device)
    probe.equal("of 1536 normalized pixels, those that differ", int((found.inputs.cpu() != wanted.inputs).sum()), 0)
    exact = (pixels.numpy().astype("f8") / 255 - MEAN) / STD
    probe.within("largest error of a normalized pixel", float(abs(found.inputs.cpu().numpy() - exact).max()), high=1e-6)


def corruption(probe: Probe) -> None:
    """``train.verify`` compares the passes of real kernels for minutes, and suspects none of them."""
    size = ["model=gpt_124m", "data.vocab_size=50257", "data.sequence_length=1024", "train.steps=4000"]
    given = size if probe.on_gpu else [*TINY, "train.steps=6"]
    cases = {"bf16": ["precision=bf16"], "bf16, compiled": ["precision=bf16", "train.compile=true"]}
    for name, overrides in cases.items():
        run = train(probe, re.sub(r"\W+", "_", name), *given, "train.verify.every=2", *overrides)
        probe.equal(f"{name}: suspicions", [event["message"] for event in run.events("corruption")], [])
        probe.note(f"{name}: warnings", [event["message"] for event in run.events("warning")])
        lines = run.metrics()
        verified_s = sum(line.get("verify_s") or 0.0 for line in lines)
        probe.within(f"{name}: seconds of verification", verified_s, low=1e-3)
        probe.note(f"{name}: their share of the time", verified_s / (lines[-1]["time"] - lines[0]["time"]))


def image_decoders(probe: Probe) -> None:
    """DALI decodes JPEG files to the pixels of Pillow up to rounding, the same in every batch, and faster.

    It needs Pillow, and DALI (the extra ``dali``), without which only the speed of Pillow is measured.
    """
    size, number = (256, 30) if probe.on_gpu else (8, 3)
    _draw_photos(probe.folder, 4 * size)
    steps = partial(_image_steps, probe, size)
    rates = {"pillow": _images_per_s(probe, steps("pillow", 1), size * number)}
    probe.within("images/s, Pillow", rates["pillow"], low=1)
    if module_spec("nvidia.dali") is None:
        probe.note("DALI", "not installed")
        return
    rates["dali"] = _images_per_s(probe, steps("dali", 1), size * number)
    probe.note("images/s, DALI", rates["dali"])
    pixels = {name: _first_pixels(steps(*name)) for name in (("pillow", 1), ("dali", 1), ("dali", 4))}
    difference = (pixels["dali", 1] - pixels["pillow", 1]).abs()
    probe.within("largest difference of a pixel, in levels of 8 bits", float(difference.max()), high=LARGEST_LEVELS)
    probe.within("mean difference of a pixel, in levels of 8 bits", float(difference.mean()), high=MEAN_LEVELS)
    differing_pixels = int((pixels["dali", 1] != pixels["dali", 4]).sum())
    probe.equal("pixels that differ in micro-batches of another size", differing_pixels, 0)
    if probe.on_gpu:
        probe.within("images/s, DALI / Pillow", rates["dali"] / rates["pillow"], low=1.0)


def _draw_photos(folder: Path, number: int) -> None:
    """Writes ``number`` JPEG files of 500 x 375 pixels, smooth colors with noise, as training and validation data."""
    from PIL import Image

    random = np.random.default_rng(0)
    (folder / "validation" / "a").mkdir(parents=True)
    (folder / "train" / "a").mkdir(parents=True)
    for index in range(number):
        coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC))
        noisy = (smooth + random.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "train" / "a" / f"{index}.jpg", quality=90)


def _image_steps(probe: Probe, size: int, decoder: str, micro_batches: int) -> TrainFeed:
    """Returns the batches of ``size`` images in ``micro_batches`` micro-batches."""
    data = ImagesDataConfig(path=str(probe.folder), n_classes=1, decoder=decoder)
    images = build_dataset(data, "train", 0)
    layout = Layout(1, 1, 1, 1, "ddp", "sequential", 1, micro_batches, size // micro_batches)
    return TrainFeed(images, BatchConfig(global_size=size), layout, 0, 0, torch.device(probe.device), 0)


def _images_per_s(probe: Probe, steps: TrainFeed, number: int) -> float:
    """Returns the rate at which batches come to the device, after the first two."""
    with closing(steps):
        sizes = [len(next(steps).micro_batches[0].inputs) for _ in range(2)]
        begin = time.perf_counter()
        for _ in range(number // sizes[0]):
            next(steps)
        if probe.on_gpu:
            torch.cuda.synchronize()
        return number / (time.perf_counter() - begin)


def _first_pixels(steps: TrainFeed) -> Tensor:
    """Returns the pixels of the first step in levels of 8 bits."""
    with closing(steps):
        inputs = torch.cat([batch.inputs for batch in next(steps).micro_batches]).cpu()
    return 255 * (inputs * torch.from_numpy(STD) + torch.from_numpy(MEAN))


def _losses(world: World, *overrides: str) -> list[float]:
    steps = world.tiny_gpt(*overrides)
    try:
        return steps.losses(LOSSES)
    finally:
        steps.close()


def differing(found: list[float], wanted: list[float]) -> float:
    """Returns the largest relative difference of two lists of losses."""
    return largest_difference(dict(enumerate(found)), dict(enumerate(wanted)))
