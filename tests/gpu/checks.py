"""The checks in the order of their value: what comes first is known even if the visit is cut short."""

from __future__ import annotations

from tests.gpu.check import Check

# ``expected_s`` is an estimate: 12 s for a training by command, nearly all for its start; 4 s for a process with
# CUDA and NCCL; 10 s for the first compilation of a layer, whose result later checks find in a cache. Measured on one
# H200 was only what five checks at a time take. Those of ``ALONE`` fit into a visit together, and a test adds them up.
# The limits leave room above them.
VISIT_S = 560.0
ALONE = (
    Check("facts", "tests.gpu.environment:facts", 60, gpus=0, expected_s=10),
    Check("warm_parent", "tests.gpu.environment:warm_parent", 60, gpus=0, expected_s=10),
    Check("numbers", "tests.gpu.training:numbers", 120, gpus=0, expected_s=28),
    Check("worker", "tests.gpu.environment:worker", 60, gpus=0, expected_s=12),
    Check("options", "tests.gpu.training:options", 90, gpus=0, expected_s=40),
    Check("no_synchronization", "tests.gpu.training:no_synchronization", 60, expected_s=15),
    Check("collectives_alone", "tests.gpu.engines:collectives_alone", 40, gpus=0, expected_s=8),
    Check("overflow", "tests.gpu.training:overflow", 40, gpus=0, expected_s=5),
    Check("attention", "tests.gpu.kernels:attention", 60, gpus=0, expected_s=15),
    Check("packed_documents", "tests.gpu.packing:packed_documents", 150, gpus=0, expected_s=32),
    Check("products", "tests.gpu.kernels:products", 30, expected_s=5),
    Check("speed", "tests.gpu.speed:steps", 210, gpus=0, least_s=60, expected_s=110),
    Check("killed_worker", "tests.gpu.faults:killed_worker", 90, gpus=0, expected_s=20),
    Check("background_saves", "tests.gpu.checkpoints:background_saves", 120, gpus=0, expected_s=28),
    Check("large_save", "tests.gpu.checkpoints:large_save", 90, gpus=0, least_s=30, expected_s=34),
    Check("compiled", "tests.gpu.training:compiled", 90, expected_s=28),
    Check("one_shard", "tests.gpu.engines:one_shard", 60, gpus=0, expected_s=9),
    Check("one_rank", "tests.gpu.engines:one_rank", 90, gpus=0, expected_s=33),
    Check("kernels", "tests.gpu.kernels:kernels", 120, least_s=24, expected_s=24),
    Check("hang", "tests.gpu.faults:hang", 100, gpus=0, least_s=36, expected_s=36),
    Check("device_errors", "tests.gpu.faults:device_errors", 90, gpus=0, expected_s=16),
    Check("clocks", "tests.gpu.kernels:clocks", 40, expected_s=8),
    Check("memory_estimate", "tests.gpu.checkpoints:memory_estimate", 60, expected_s=12),
    Check("out_of_memory", "tests.gpu.faults:out_of_memory", 60, expected_s=18),
)
LATER = (  # for which a visit has time only if others take less than estimated; a second one begins with them
    Check("compile_cache", "tests.gpu.speed:compile_cache", 120, least_s=30, expected_s=45),
    Check("rotation", "tests.gpu.kernels:rotation", 60, expected_s=15),
    Check("copies", "tests.gpu.kernels:copies", 60, expected_s=9),
    Check("profile_files", "tests.gpu.kernels:profile_files", 60, gpus=0, expected_s=15),
    Check("pictures", "tests.gpu.training:pictures", 60, gpus=0, expected_s=12),
    Check("cuda_graphs", "tests.gpu.training:cuda_graphs", 120, expected_s=40),
    Check("levers", "tests.gpu.levers:levers", 545, gpus=0, least_s=120, expected_s=480),
    Check("fp8", "tests.gpu.float8:float8", 240, gpus=0, least_s=60, expected_s=140),
)
TOGETHER = (
    Check("layouts", "tests.gpu.several:layouts", 240, gpus=2, least_s=60, expected_s=180),
    Check("start_up", "tests.gpu.several:start_up", 60, gpus=2, expected_s=15),
    Check("contexts", "tests.gpu.several:background_saves", 180, gpus=2, expected_s=30),
    Check("transports", "tests.gpu.several:transports", 120, gpus=2, expected_s=30),
    Check("killed_in_a_collective", "tests.gpu.several:killed_in_a_collective", 120, gpus=2, expected_s=35),
    Check("compiled_replicas", "tests.gpu.several:compiled_replicas", 120, gpus=2, expected_s=90),
    Check("async_tp", "tests.gpu.several:async_tp", 180, gpus=2, expected_s=80),
    Check("overlap", "tests.gpu.several:overlap", 120, gpus=2, expected_s=45),
)

ALL = (*ALONE, *TOGETHER, *LATER)


def checks_for(gpus: int, cpu_ranks: int = 0) -> tuple[Check, ...]:
    """Returns the checks of a machine: with several GPUs first those that need them."""
    return (*TOGETHER, *ALONE, *LATER) if gpus > 1 else (*ALONE, *TOGETHER, *LATER)
