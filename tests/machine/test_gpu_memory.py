"""The memory of GPUs by the names of GRES types, as sites choose them and as AutoDetect=nvml gives them."""

from __future__ import annotations

import pytest

from hpc_train.machine.gpus import gpu_memory


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [
        ("h100", 80),
        ("H200", 141),
        ("nvidia_h100_80gb_hbm3", 80),
        ("nvidia_h100_nvl", 94),
        ("nvidia_h100_pcie", 80),
        ("nvidia_h200", 141),
        ("nvidia_b200", 180),
        ("nvidia_gh200_120gb", 96),
        ("gh200", 96),
        ("nvidia_gb200", 186),
        ("nvidia_a100-sxm4-80gb", 80),
        ("nvidia_a100-sxm-64gb", 64),
        ("nvidia_a100_80gb_pcie", 80),
        ("a100_1g.10gb", 10),
        ("nvidia_a100_3g.20gb", 20),
        ("tesla_v100-sxm2-32gb", 32),
        ("nvidia_l40s", 48),
        ("nvidia_l40", 48),
        ("nvidia_rtx_a6000", 48),
        ("nvidia-rtx-3090", 24),
        ("nvidia_geforce_rtx_4090", 24),
        ("tesla_t4", 16),
        ("a100", None),
        ("v100", None),
        ("shard", None),
        ("", None),
    ],
)
def test_memory_by_name(kind: str, gigabytes: float | None) -> None:
    assert gpu_memory(kind) == (None if gigabytes is None else gigabytes * 1e9)
