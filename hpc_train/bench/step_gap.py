"""Finds what a training step loses against the peak matrix rate of its devices, from a profile of a few steps.

The ideal step computes the FLOPs of the model at the peak rate and nothing else. The rest of a measured step is the
gap, which this module divides among the kinds of work: for matrix products and attention, the loss is their time beyond
the ideal step; for every other kind, it is its entire time. A loss function that is fused with the head
(``models/linear_head.py``) counts as element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import profile

from hpc_train.config.schema import Config
from hpc_train.parallel.mesh import synchronize
from hpc_train.train.watch.profiler import HOST_COPIES, MICRO, activities, cpu_intervals, gpu_intervals, uncovered

PRODUCTS, RECOMPUTED, ELEMENTWISE = "matrix products and attention", "recomputed forward", "element-wise operations"
LOSS, OPTIMIZER, COPIES = "loss", "optimizer", "copies and casts"
COMMUNICATION, BUBBLE, WAITING = "communication", "pipeline bubble", "waiting for the host"
TRANSFERS = "copies between host and device"
# The first kind with a word that the name of a kernel or operator contains, in lower case. Attention precedes products,
# because some of its kernels are built with CUTLASS.
WORDS: Sequence[tuple[str, tuple[str, ...]]] = (
    (PRODUCTS, ("flash", "fmha", "sdpa", "attention", "cudnn::fusion")),
    (PRODUCTS, ("gemm", "gemv", "cutlass", "nvjet", "xmma", "cublas", "cijk_", "splitk", "conv", "mkldnn")),
    (PRODUCTS, ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")),
    (LOSS, ("softmax", "nll_loss", "cross_entropy", "logsumexp")),
    (OPTIMIZER, ("multi_tensor_apply", "adam", "foreach", "sgd", "lerp")),  # AdamW with compact moments has a lerp
    (COPIES, ("memcpy", "memset", "copy", "catarray", "aten::cat", "fill", "zero")),
)
# The names of compiled kernels list the operators around them; the names of products begin with the name of a template.
COMPILED, TEMPLATE = "triton_", "triton_tem_"
STEPS = 3  # number of profiled steps


def kind_of(name: str) -> str:
    lower = name.lower()
    if lower.startswith(TEMPLATE):
        return PRODUCTS
    if lower.startswith(COMPILED):
        fused = [kind for kind, words in WORDS if kind in (LOSS, OPTIMIZER) and any(word in lower for word in words)]
        return fused[0] if fused else ELEMENTWISE
    return next((kind for kind, words in WORDS if any(word in lower for word in words)), ELEMENTWISE)


def profiled(step: Callable[[], object], device: torch.device, stages: bool, steps: int = STEPS) -> dict[str, float]:
    """Runs ``steps`` steps under torch.profiler and returns the seconds per step of each kind of work on this rank.

    Kernels that run at the same time share it. Collectives and messages between stages count only while no computation
    runs. ``stages`` states whether there are pipeline stages."""
    synchronize(device)  # otherwise, the steps would wait for work that was launched before
    with profile(activities=activities(device)) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    seconds = seconds_by_kind(profiler.events() or [], device.type == "cuda", stages)
    return {kind: value / steps for kind, value in seconds.items()}


def seconds_by_kind(events: Iterable[Any], on_gpu: bool, stages: bool) -> dict[str, float]:
    """Returns the seconds of each kind of work in the events of torch.profiler."""
    events = [*events]
    intervals = gpu_intervals(events, stages) if on_gpu else cpu_intervals(events)
    seconds = dict.fromkeys([*(kind for kind, _ in WORDS), ELEMENTWISE], 0.0)
    for name, length in _kernels(events) if on_gpu else _operators(events):
        seconds[kind_of(name)] += MICRO * length
    total = sum(seconds.values())
    covered = MICRO * uncovered(intervals.computation, [])
    if total > covered:  # kernels overlap
        seconds = {kind: value * covered / total for kind, value in seconds.items()}
    computing = [*intervals.computation, *intervals.communication]
    seconds[COMMUNICATION] = MICRO * uncovered(intervals.communication, intervals.computation)
    seconds[BUBBLE] = MICRO * uncovered(intervals.messages, computing)
    seconds[TRANSFERS] = MICRO * uncovered(intervals.transfers, [*computing, *intervals.messages])
    return seconds


def _kernels(events: Iterable[Any]) -> Iterable[tuple[str, float]]:
    for event in events:
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if is_kernel and "nccl" not in event.name and not event.name.startswith(HOST_COPIES):
            yield event.name, event.time_range.end - event.time_range.start


def _operators(events: Iterable[Any]) -> Iterable[tuple[str, float]]:
    """Yields the operators of the CPU with their own time, without the time of the operators that they call."""
    for event in events:
        if event.name.startswith(("aten::", "Torch-Compiled", "CompiledFx")):
            yield event.name, event.self_cpu_time_total


def losses(seconds: Mapping[str, float], step_s: float, ideal_s: float, recomputed_s: float) -> dict[str, float]:
    """Divides the gap between the measured ``step_s`` and ``ideal_s`` among the kinds of work, in seconds, the largest
    loss first.

    The profiler slows the host down. If the profiled work takes longer than the measured step, all of it is scaled
    down. Products that appear faster than the peak rate, because a causal mask skips half of the counted attention,
    lose nothing.

    Args:
        seconds: the mean over ranks of what ``profiled`` returns.
        recomputed_s: the seconds of the recomputed forward at the peak rate.
    """
    busy = sum(seconds.values())
    scale = min(1.0, step_s / busy) if busy else 1.0
    lost = {kind: value * scale for kind, value in seconds.items()}
    beyond = max(0.0, lost[PRODUCTS] - ideal_s - recomputed_s)
    lost |= {PRODUCTS: beyond, RECOMPUTED: recomputed_s, WAITING: step_s - busy * scale}
    return dict(sorted(lost.items(), key=lambda loss: -loss[1]))


def advice(kind: str, config: Config) -> str:
    compiled = config.train.compile
    fused = casts = _fewer_bytes(config)
    if compiled and config.precision.name == "bf16" and config.precision.weights == "fp32":
        casts = "precision.weights=bf16, so that weights are not cast in each step"
    return {
        PRODUCTS: "a larger batch.micro_size, and sizes of the model that are multiples of 64",
        RECOMPUTED: "train.activation_checkpointing=ops or none, if the memory is sufficient",
        ELEMENTWISE: fused,
        COPIES: casts,
        LOSS: "train.loss_chunks=auto",
        OPTIMIZER: "more micro-batches per step, or sharding (strategy=zero1)",
        COMMUNICATION: "the strategy.bucket_cap_mb that `bench step` advises, strategy.shard=node, or a smaller "
        "strategy.tp or strategy.cp",
        TRANSFERS: "a larger train.activation_offload, or strategy.offload=none",
        BUBBLE: "more micro-batches per step, or a schedule with a smaller bubble",
        WAITING: f"{'' if compiled else 'train.compile=true, or '}a larger batch.micro_size with fewer micro-batches",
    }[kind]


def _fewer_bytes(config: Config) -> str:
    if not config.train.compile:
        return "train.compile=true"
    if config.precision.residual == "fp32" and config.precision.name in ("bf16", "fp16"):
        return "precision.residual=compute, which halves its bytes"
    if config.train.activation_checkpointing not in ("none", "auto"):
        return "train.activation_checkpointing=none, if the memory is sufficient"
    return "compiled already; its share is smaller in a wider model (model.dim)"
