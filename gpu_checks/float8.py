"""Checks that products in fp8 on a GPU are those that a CPU emulates, and that they make training faster than bf16."""

from __future__ import annotations

import time
from contextlib import suppress

import torch
from torch import Tensor, nn

from benchmarks.savers import measured, speed
from gpu_checks.check import Probe
from gpu_checks.speed import SMALL, for_this_gpu
from gpu_checks.steps import World
from hpc_train.config.schema import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.float8 import CAPABILITIES
from hpc_train.parallel.precision.float8 import check_device, use_float8

LOSSES = 4
SAME = 1e-2  # relative; both sums are rounded to bf16, and a GPU adds up with fewer bits
NEAR = 5e-2  # losses of the first steps in fp8 and in bf16
FASTER = {"tensorwise": 1.1, "rowwise": 1.0}  # than bf16; tensorwise was 1.21 on an H200
BF16 = "bf16"
PARTS = ("result", "gradient of the input", "gradient of the weight")


def float8(probe: Probe) -> None:
    """Products and losses in each format that the device has, and the speed of steps of 1.2 billion parameters."""
    recipes = [recipe for recipe in CAPABILITIES if _is_supported(recipe, _device(probe))]
    probe.note("formats of this device", recipes)
    world = World(probe)
    reference = world.tiny_gpt("precision=bf16").losses(LOSSES)
    for recipe in recipes:
        for what, error in zip(PARTS, _errors(probe, recipe), strict=True):
            probe.within(f"{recipe}: {what}, relative to the emulated one", error, high=SAME)
        found = world.tiny_gpt("precision=fp8", f"precision.fp8={recipe}").losses(LOSSES)
        far = max(abs(one - other) / other for one, other in zip(found, reference, strict=True))
        probe.within(f"{recipe}: losses against bf16", far, high=NEAR)
    _speeds(probe, recipes)


def _device(probe: Probe) -> torch.device:
    return torch.device("cuda", 0) if probe.on_gpu else torch.device("cpu")


def _is_supported(recipe: str, device: torch.device) -> bool:
    with suppress(UserError):
        check_device(recipe, device)
        return True
    return False


def _errors(probe: Probe, recipe: str) -> list[float]:
    """Returns the relative differences between a product with its gradients on this device and on the CPU."""
    torch.manual_seed(0)
    weight, inputs, gradient = torch.randn(256, 512) / 16, torch.randn(128, 512), torch.randn(128, 256)
    own, emulated = (_product(recipe, each, weight, inputs, gradient) for each in (_device(probe), torch.device("cpu")))
    return [float((one - other).norm() / other.norm()) for one, other in zip(own, emulated, strict=True)]


def _product(recipe: str, device: torch.device, weight: Tensor, inputs: Tensor, gradient: Tensor) -> list[Tensor]:
    linear = nn.Linear(512, 256, bias=False)
    linear.weight.data = weight.clone()
    layer = nn.Sequential(linear).to(device)
    use_float8(layer, PrecisionConfig(name="bf16", fp8=recipe), device)
    given = inputs.to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        result = layer(given)
    result.backward(gradient.to(device, torch.bfloat16))
    assert given.grad is not None and linear.weight.grad is not None
    return [value.detach().float().cpu() for value in (result, given.grad, linear.weight.grad)]


def _speeds(probe: Probe, recipes: list[str]) -> None:
    rows: dict[str, tuple[str, ...]] = {BF16: ()}
    rows |= {recipe: (f"precision.fp8={recipe}",) for recipe in FASTER if recipe in recipes}
    given = for_this_gpu() if probe.on_gpu else [*SMALL, "precision=bf16"]
    count, begin = "3" if probe.on_gpu else "2", time.monotonic()
    found: dict[str, float] = {}
    for row in measured(rows, given, ["--pairs", count, "--steps", count], probe.check.limit_s - 30):
        if isinstance(row, str) or row.result is None:
            probe.note("not measured", row if isinstance(row, str) else row.name)
            continue
        found[row.name] = speed(row.result)
        probe.note(f"{row.name}: tokens/s", found[row.name])
    probe.note("seconds for all rows", time.monotonic() - begin)
    probe.expect("bf16 was measured", BF16 in found, "True", BF16 in found)
    for recipe, factor in FASTER.items():
        if recipe in found and BF16 in found and probe.on_gpu:
            probe.within(f"{recipe} / bf16, tokens/s", found[recipe] / found[BF16], low=factor)
