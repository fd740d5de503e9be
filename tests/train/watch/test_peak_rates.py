"""Peak rates by the names that cards really have."""

from __future__ import annotations

import pytest

from hpc_train.train.watch.peak_rates import peak_flops

BF16 = {  # in TFLOP/s
    989.4: [
        "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA GH200 144G HBM3e",
    ],
    756: ["NVIDIA H100 PCIe"],
    835.5: ["NVIDIA H100 NVL", "NVIDIA H200 NVL"],
    2250: ["NVIDIA B200", "NVIDIA B300 SXM6 AC"],
    2500: ["NVIDIA GB200", "NVIDIA GB300"],
    312: [
        "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe",
        "A100-SXM4-40GB",
    ],
    165: ["NVIDIA A30"],
    149.7: ["NVIDIA A40"],
    125: ["NVIDIA A10"],
    70: ["NVIDIA A10G"],
    121: ["NVIDIA L4"],
    181: ["NVIDIA L40", "AMD Instinct MI210"],
    362: ["NVIDIA L40S"],
    26.9: ["NVIDIA RTX A1000"],
    31.9: ["NVIDIA RTX A2000 12GB"],
    76.7: ["NVIDIA RTX A4000"],
    111.1: ["NVIDIA RTX A5000"],
    154.8: ["NVIDIA RTX A6000"],
    364.2: ["NVIDIA RTX 6000 Ada Generation"],
    500: ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition"],
    438.9: ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
    71: ["NVIDIA GeForce RTX 3090"],
    165.2: ["NVIDIA GeForce RTX 4090"],
    209.5: ["NVIDIA GeForce RTX 5090"],
    191.5: ["AMD Instinct MI250X", "AMD Instinct MI250X / MI250"],
    980.6: ["AMD Instinct MI300A"],
    1307.4: ["AMD Instinct MI300X", "AMD Instinct MI300X VF", "AMD Instinct MI325X"],
    2516.6: ["AMD Instinct MI355X"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "bf16"), [(name, bf16) for bf16, names in BF16.items() for name in names])
def test_peaks_by_name(name: str, bf16: float) -> None:
    assert peak_flops(name, "bf16") == bf16 * 1e12


UNKNOWN = (  # other chips, slices and shares of cards, laptops
    "NVIDIA H20", "NVIDIA H100 64GB HBM2", "NVIDIA A100-SXM-64GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA A40-48Q", "GRID A100D-10C", "NVIDIA RTX A1000 Laptop GPU",
    "NVIDIA RTX A3000 Laptop GPU", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti", "NVIDIA T400", "NVIDIA T400 4GB", "NVIDIA T4G", "NVIDIA L20", "Tesla P100-PCIE-16GB",
    "AMD Instinct MI308X", "AMD Instinct MI300X HF", "AMD Radeon Graphics", "AMD gfx942", "",
)  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
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
