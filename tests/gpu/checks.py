"""The checks in the order of their value: what comes first is known even if the visit is cut short."""

from __future__ import annotations

from tests.gpu.check import Check

# The limits leave room above what an H200 is expected to take; all together they exceed a visit of ten minutes.
ALONE = (
    Check("facts", "tests.gpu.environment:facts", 60, gpus=0),
    Check("warm_parent", "tests.gpu.environment:warm_parent", 60, gpus=0),
    Check("numbers", "tests.gpu.training:numbers", 120, gpus=0),
    Check("worker", "tests.gpu.environment:worker", 60, gpus=0),
    Check("options", "tests.gpu.training:options", 90, gpus=0),
    Check("no_synchronization", "tests.gpu.training:no_synchronization", 60),
    Check("flight_recorder", "tests.gpu.faults:flight_recorder", 40, gpus=0),
    Check("collectives_alone", "tests.gpu.kernels:collectives_alone", 40),
    Check("overflow", "tests.gpu.training:overflow", 40, gpus=0),
    Check("attention", "tests.gpu.kernels:attention", 60, gpus=0),
    Check("packed_documents", "tests.gpu.packing:packed_documents", 150, gpus=0),
    Check("products", "tests.gpu.kernels:products", 30),
    Check("speed", "tests.gpu.speed:steps", 210, gpus=0, least_s=60),
    Check("killed_worker", "tests.gpu.faults:killed_worker", 90, gpus=0),
    Check("background_saves", "tests.gpu.checkpoints:background_saves", 120, gpus=0),
    Check("compiled", "tests.gpu.training:compiled", 90),
    Check("kernels", "tests.gpu.kernels:kernels", 120, least_s=40),
    Check("device_errors", "tests.gpu.faults:device_errors", 90, gpus=0),
    Check("hang", "tests.gpu.faults:hang", 90, gpus=0, least_s=30),
    Check("copies", "tests.gpu.kernels:copies", 60),
    Check("clocks", "tests.gpu.kernels:clocks", 40),
    Check("stall", "tests.gpu.faults:stall", 60, gpus=0),
    Check("memory_estimate", "tests.gpu.checkpoints:memory_estimate", 60),
    Check("out_of_memory", "tests.gpu.faults:out_of_memory", 60),
    Check("profile_files", "tests.gpu.kernels:profile_files", 60, gpus=0),
    Check("pictures", "tests.gpu.training:pictures", 60, gpus=0),
    Check("compile_cache", "tests.gpu.speed:compile_cache", 120, least_s=40),
)
TOGETHER = (
    Check("layouts", "tests.gpu.several:layouts", 240, gpus=2, least_s=60),
    Check("start_up", "tests.gpu.several:start_up", 60, gpus=2),
    Check("contexts", "tests.gpu.several:background_saves", 180, gpus=2),
    Check("killed_in_a_collective", "tests.gpu.several:killed_in_a_collective", 120, gpus=2),
    Check("compiled_replicas", "tests.gpu.several:compiled_replicas", 120, gpus=2),
    Check("overlap", "tests.gpu.several:overlap", 120, gpus=2),
)


def checks_for(gpus: int, cpu_ranks: int = 0) -> tuple[Check, ...]:
    """Returns the checks of a machine: with several GPUs first those that need them."""
    return (*TOGETHER, *ALONE) if gpus > 1 else (*ALONE, *TOGETHER)
