"""The checks in the order of their value: what comes first is known even if the visit is cut short."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.savers import ROWS
from gpu_checks.check import Check
from hpc_train.layout.techniques import ATTENTION_KERNELS

# ``expected_s`` is an estimate: 12 s for a training by command, nearly all for its start; 4 s for a process with
# CUDA and NCCL; 10 s for the first compilation of a layer, whose result later checks find in a cache. Measured on one
# H200 was only what five checks at a time take. Those of ``ALONE`` fit into a visit together, and a test adds them up.
# The limits leave room above them.
VISIT_S = 560.0
ALONE = (
    Check("facts", "gpu_checks.environment:facts", 60, gpus=0, expected_s=10),
    Check("warm_parent", "gpu_checks.environment:warm_parent", 60, gpus=0, expected_s=10),
    Check("numbers", "gpu_checks.training:numbers", 120, gpus=0, expected_s=28),
    Check("worker", "gpu_checks.environment:worker", 60, gpus=0, expected_s=12),
    Check("options", "gpu_checks.training:options", 90, gpus=0, expected_s=40),
    Check("no_synchronization", "gpu_checks.training:no_synchronization", 60, expected_s=15),
    Check("collectives_alone", "gpu_checks.engines:collectives_alone", 40, gpus=0, expected_s=8),
    Check("overflow", "gpu_checks.training:overflow", 40, gpus=0, expected_s=5),
    Check("attention", "gpu_checks.kernels:attention", 60, gpus=0, expected_s=15),
    Check("packed_documents", "gpu_checks.packing:packed_documents", 150, gpus=0, expected_s=32),
    Check("products", "gpu_checks.kernels:products", 30, expected_s=5),
    Check("speed", "gpu_checks.speed:steps", 210, gpus=0, least_s=60, expected_s=110),
    Check("killed_worker", "gpu_checks.faults:killed_worker", 90, gpus=0, expected_s=20),
    Check("background_saves", "gpu_checks.checkpoints:background_saves", 120, gpus=0, expected_s=28),
    Check("large_save", "gpu_checks.checkpoints:large_save", 90, gpus=0, least_s=30, expected_s=34),
    Check("compiled", "gpu_checks.training:compiled", 90, expected_s=28),
    Check("one_shard", "gpu_checks.engines:one_shard", 60, gpus=0, expected_s=9),
    Check("one_rank", "gpu_checks.engines:one_rank", 90, gpus=0, expected_s=33),
    Check("kernels", "gpu_checks.kernels:kernels", 120, least_s=24, expected_s=24),
    Check("hang", "gpu_checks.faults:hang", 100, gpus=0, least_s=36, expected_s=36),
    Check("device_errors", "gpu_checks.faults:device_errors", 90, gpus=0, expected_s=16),
    Check("clocks", "gpu_checks.kernels:clocks", 40, expected_s=8),
    Check("memory_estimate", "gpu_checks.checkpoints:memory_estimate", 60, expected_s=12),
    Check("out_of_memory", "gpu_checks.faults:out_of_memory", 60, expected_s=18),
)
LATER = (  # for which a visit has time only if others take less than estimated; a second one begins with them
    Check("compile_cache", "gpu_checks.speed:compile_cache", 120, least_s=30, expected_s=45),
    Check("attention_kernels", "gpu_checks.packing:attention_kernels", 90, gpus=0, least_s=20, expected_s=45),
    Check("rotation", "gpu_checks.kernels:rotation", 60, expected_s=15),
    Check("ring", "gpu_checks.kernels:ring", 60, gpus=0, expected_s=8),
    Check("experts", "gpu_checks.kernels:experts", 60, gpus=0, expected_s=8),
    Check("four_bits", "gpu_checks.kernels:four_bits", 60, gpus=0, expected_s=8),
    Check("copies", "gpu_checks.kernels:copies", 60, expected_s=9),
    Check("profile_files", "gpu_checks.kernels:profile_files", 60, gpus=0, expected_s=15),
    Check("pictures", "gpu_checks.training:pictures", 60, gpus=0, expected_s=12),
    Check("image_decoders", "gpu_checks.training:image_decoders", 120, gpus=0, expected_s=45),
    Check("cuda_graphs", "gpu_checks.training:cuda_graphs", 120, expected_s=40),
    Check("corruption", "gpu_checks.training:corruption", 560, gpus=0, least_s=120, expected_s=420),
    Check("fp8", "gpu_checks.float8:float8", 240, gpus=0, least_s=60, expected_s=140),
)
TOGETHER = (
    Check("transports", "gpu_checks.several:transports", 120, gpus=2, expected_s=30),
    Check("layouts", "gpu_checks.several:layouts", 330, gpus=2, least_s=60, expected_s=180),
    Check("start_up", "gpu_checks.several:start_up", 60, gpus=2, expected_s=15),
    Check("contexts", "gpu_checks.several:background_saves", 180, gpus=2, expected_s=30),
    Check("killed_in_a_collective", "gpu_checks.several:killed_in_a_collective", 120, gpus=2, expected_s=35),
    Check("compiled_replicas", "gpu_checks.several:compiled_replicas", 120, gpus=2, expected_s=90),
    Check("async_tp", "gpu_checks.several:async_tp", 180, gpus=2, expected_s=80),
    Check("algorithms", "gpu_checks.several:algorithms", 120, gpus=2, expected_s=60),
    Check("local_steps", "gpu_checks.several:local_steps", 120, gpus=2, expected_s=30),
    Check("balance", "gpu_checks.several:balance", 120, gpus=2, expected_s=30),
    Check("overlap", "gpu_checks.several:overlap", 120, gpus=2, expected_s=45),
)


@dataclass(frozen=True)
class Lever:
    """Changes of the experiment ``gpt1b_h200`` whose speed and memory are measured.

    Attributes:
        title: the first cell of its row.
        compiler: settings of TorchInductor.
    """

    title: str
    overrides: tuple[str, ...] = ()
    compiler: Mapping[str, Any] = field(default_factory=dict)


KERNELS = {value: Lever(f"attention: {value}", (f"train.attention={value}",)) for value in ATTENTION_KERNELS}
PACKAGES = [name for name, kernel in ATTENTION_KERNELS.items() if kernel.package]  # without it, refused at once
FIRST = {
    **{name: KERNELS[name] for name in PACKAGES},
    "graphs_32": Lever("CUDA graphs, micro-batches of 32", ("batch.micro_size=32", "train.cuda_graphs=true")),
    "products": Lever("kernels of products by measurement", compiler={"max_autotune_gemm": True}),
}
SAVERS = {re.sub(r"\W+", "_", title): Lever(title, overrides) for title, overrides in ROWS.items()}
LEVERS = {f"lever_{name}": lever for name, lever in {**KERNELS, **FIRST, **SAVERS}.items()}
STEADY = (  # a minute or more of each row, with clock and power
    Check("turns", "gpu_checks.levers:turns", 420, gpus=0, least_s=90, expected_s=330),
    Check("seven_billion", "gpu_checks.levers:seven_billion", 240, gpus=0, least_s=90, expected_s=150),
    *(
        Check(name, "gpu_checks.levers:lever", 240, gpus=0, least_s=45, expected_s=160 if lever.compiler else 85)
        for name, lever in LEVERS.items()
    ),
)
STRATEGIES = ("dp", "zero2", "zero3")
PRETRAINED = tuple(
    Check(f"pretrain_{name}", "gpu_checks.node:pretrain", 240, gpus=2, least_s=60, expected_s=115)
    for name in STRATEGIES
)
NODE = (  # what only several GPUs can show, beside ``TOGETHER``
    Check("communication", "gpu_checks.node:communication", 480, gpus=2, least_s=90, expected_s=420),
    Check("saves", "gpu_checks.node:saves", 180, gpus=2, least_s=60, expected_s=80),
)

ALL = (*ALONE, *TOGETHER, *LATER, *PRETRAINED, *NODE, *STEADY)
BY_NAME = {check.name: check for check in ALL}


def _named(*names: str) -> tuple[Check, ...]:
    return tuple(BY_NAME[name] for name in names)


# A visit of 15 minutes less the start of the machine, in two commands with the same directory where one may take ten.
ONE_GPU_S = 780.0
FIRST_MINUTES_S = 600.0  # of a node
ONE_GPU = _named("facts", "turns", "attention_kernels", *(f"lever_{name}" for name in FIRST), "seven_billion")
FIRST_MINUTES = (*_named("facts", "transports", "layouts"), *PRETRAINED)
PLANS: Mapping[str, Sequence[Check]] = {
    "one-gpu": ONE_GPU,
    "levers": _named("facts", "turns", *(f"lever_{name}" for name in SAVERS), "lever_cudnn"),
    "node": (*FIRST_MINUTES, *NODE, *(check for check in TOGETHER if check not in FIRST_MINUTES)),
}


def checks_for(gpus: int) -> tuple[Check, ...]:
    """Returns the checks of a visit without a plan: with several GPUs first those that need them."""
    return (*TOGETHER, *ALONE, *LATER) if gpus > 1 else (*ALONE, *TOGETHER, *LATER)
