"""The checks in the order of their value: what comes first is known even if the visit is cut short."""

from __future__ import annotations

from gpu_checks.check import Check

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
    Check("rotation", "gpu_checks.kernels:rotation", 60, expected_s=15),
    Check("copies", "gpu_checks.kernels:copies", 60, expected_s=9),
    Check("profile_files", "gpu_checks.kernels:profile_files", 60, gpus=0, expected_s=15),
    Check("pictures", "gpu_checks.training:pictures", 60, gpus=0, expected_s=12),
    Check("cuda_graphs", "gpu_checks.training:cuda_graphs", 120, expected_s=40),
    Check("levers", "gpu_checks.levers:levers", 545, gpus=0, least_s=120, expected_s=480),
    Check("fp8", "gpu_checks.float8:float8", 240, gpus=0, least_s=60, expected_s=140),
)
TOGETHER = (
    Check("layouts", "gpu_checks.several:layouts", 240, gpus=2, least_s=60, expected_s=180),
    Check("start_up", "gpu_checks.several:start_up", 60, gpus=2, expected_s=15),
    Check("contexts", "gpu_checks.several:background_saves", 180, gpus=2, expected_s=30),
    Check("transports", "gpu_checks.several:transports", 120, gpus=2, expected_s=30),
    Check("killed_in_a_collective", "gpu_checks.several:killed_in_a_collective", 120, gpus=2, expected_s=35),
    Check("compiled_replicas", "gpu_checks.several:compiled_replicas", 120, gpus=2, expected_s=90),
    Check("async_tp", "gpu_checks.several:async_tp", 180, gpus=2, expected_s=80),
    Check("overlap", "gpu_checks.several:overlap", 120, gpus=2, expected_s=45),
)

ALL = (*ALONE, *TOGETHER, *LATER)


def checks_for(gpus: int, cpu_ranks: int = 0) -> tuple[Check, ...]:
    """Returns the checks of a machine: with several GPUs first those that need them."""
    return (*TOGETHER, *ALONE, *LATER) if gpus > 1 else (*ALONE, *TOGETHER, *LATER)
