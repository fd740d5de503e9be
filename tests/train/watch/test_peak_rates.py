"""Peak rates by the names that cards really have."""

from __future__ import annotations

import pytest

from hpc_train.train.watch.peak_rates import peak_flops


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GH200 120GB", 989.4),
        ("NVIDIA GH200 144G HBM3e", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A30", 165),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A1000", 26.9),
        ("NVIDIA RTX A2000 12GB", 31.9),
        ("NVIDIA RTX A4000", 76.7),
        ("NVIDIA RTX A5000", 111.1),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 500),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 500),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI210", 181),
        ("AMD Instinct MI250X", 191.5),  # half of a module
        ("AMD Instinct MI250X / MI250", 191.5),
        ("AMD Instinct MI300A", 980.6),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300X VF", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI355X", 2516.6),
    ],
)
def test_peaks_by_name(name: str, bf16: float) -> None:
    assert peak_flops(name, "bf16") == bf16 * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA H100 64GB HBM2",  # another chip
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of the card
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A40-48Q",  # a share
        "GRID A100D-10C",
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA RTX A3000 Laptop GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA T400",
        "NVIDIA T400 4GB",
        "NVIDIA T4G",
        "NVIDIA L20",
        "Tesla P100-PCIE-16GB",
        "AMD Instinct MI308X",
        "AMD Instinct MI300X HF",
        "AMD Radeon Graphics",
        "AMD gfx942",
        "",
    ],
)
def test_an_unknown_card_has_no_peak(name: str) -> None:
    assert [peak_flops(name, precision) for precision in ("bf16", "fp16", "fp32", "fp64")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla V100S-PCIE-32GB", 130),
        ("Tesla T4", 65),
        ("Quadro RTX 6000", 130.5),
    ],
)
def test_cards_before_ampere_do_not_compute_in_bf16(name: str, fp16: float) -> None:
    assert (peak_flops(name, "bf16"), peak_flops(name, "fp16")) == (None, fp16 * 1e12)


@pytest.mark.parametrize(
    ("name", "units", "bf16"),
    [
        ("AMD Instinct MI300X", 304, 1307.4),  # SPX
        ("AMD Instinct MI300X", 152, 653.7),  # DPX
        ("AMD Instinct MI300X", 38, 163.425),  # CPX
        ("AMD Instinct MI300A", 76, 326.866667),  # TPX
        ("AMD Instinct MI355X", 32, 314.575),
        ("AMD Instinct MI250X", 110, 191.5),
        ("NVIDIA H100 80GB HBM3", 132, 989.4),
    ],
)
def test_a_partition_has_its_share(name: str, units: int, bf16: float) -> None:
    assert peak_flops(name, "bf16", units=units) == pytest.approx(bf16 * 1e12)


def test_precisions() -> None:
    rates = [peak_flops("NVIDIA B300 SXM6 AC", precision) for precision in ("bf16", "fp16", "fp32", "fp64", "int8")]
    assert rates == [2250e12, 2250e12, 75e12, 1.25e12, None]


@pytest.mark.parametrize(
    ("name", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 494.7),
        ("NVIDIA A100-SXM4-40GB", 156),
        ("AMD Instinct MI300X", 653.7),
        ("AMD Instinct MI250X", 47.9),  # without TF32
        ("Tesla V100-SXM2-16GB", 15.7),
    ],
)
def test_fp32_with_tf32(name: str, fp32: float) -> None:
    assert peak_flops(name, "fp32", tf32=True) == fp32 * 1e12
    assert peak_flops(name, "bf16", tf32=True) == peak_flops(name, "bf16")
