"""MFU and HFU against numbers computed by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import Mock

import numpy as np
import pynvml
import pytest
import torch

from hpc_train.config.schema import GPTConfig, PrecisionConfig, ViTConfig
from hpc_train.config.values import Recomputation, parse_recomputation
from hpc_train.data.tokens import PackedDataset
from hpc_train.layout.loss_chunks import LossForm
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.train.watch import utilization
from hpc_train.train.watch.utilization import (
    GpuUtilization,
    Peak,
    busy_share,
    count_flops,
    count_mean_flops,
    device_peak,
    precision_notes,
)

SIZES = GPTConfig(vocab_size=10, n_layers=3, dim=4, n_heads=2, n_kv_heads=1, ffn_dim=8)
TOKENS = torch.empty(2, 5, dtype=torch.int64, device="meta")
# of a layer: queries 4x4, keys and values 4x2 each, output 4x4, three matrices of 4x8, two norms of 4
LAYER = 6 * 5 * (16 + 8 + 8 + 16 + 96 + 8) + 12 * 4 * 5 * 5
HEAD = 6 * 5 * (4 + 10 * 4)


def model(config: GPTConfig | ViTConfig) -> Model:
    built = build_model(config, 0)
    assert isinstance(built, Model)
    return built


@pytest.mark.parametrize(
    ("checkpointing", "recomputed"),
    [("none", 0), ("ops", 0), ("full", 3 * LAYER / 3), ("selective", 2 * LAYER / 3), ("selective:3", LAYER / 3)],
)
def test_what_a_gpt_computes(checkpointing: str, recomputed: float) -> None:
    layers = parse_recomputation(checkpointing)
    count, again, fused = (
        count_flops(model(SIZES), TOKENS, layers, loss) for loss in (LossForm(), LossForm(2), LossForm(2, fused=True))
    )
    assert again.recomputed == pytest.approx(recomputed + HEAD / 3)
    assert fused == count
    assert count.model == 3 * LAYER + HEAD
    assert count.hardware == pytest.approx(count.model + recomputed)
    assert count.causal == count.model - 3 * 12 * 4 * 5 * 5 / 2
    assert count.with_embeddings == count.model + 6 * 5 * 10 * 4
    found = count.utilization(samples_per_s=7.0, peak=Peak(1e6, 1e5))
    assert found.keys() == {"mfu", "mfu_of_precision", "hfu", "mfu_causal", "mfu_with_embeddings"}
    assert found["mfu_of_precision"] == pytest.approx(10 * found["mfu"])
    assert found["mfu"] == pytest.approx(7 * (3 * LAYER + HEAD) / 1e6)
    assert found["hfu"] == pytest.approx(found["mfu"] + 7 * recomputed / 1e6)


def test_attention_between_packed_documents_is_not_counted() -> None:
    class Lengths:
        def document_lengths(self) -> np.ndarray:
            return np.array([6, 3, 4, 3])  # of which the last token is only a target

    packed = PackedDataset(cast(Any, Lengths()), 8)
    assert packed.documents_per_sequence == {5: 0.5, 3: 0.5, 2: 1.0, 4: 0.5}, "the last one is padding"
    split = count_mean_flops(model(SIZES), packed, (8,), Recomputation(), LossForm())
    whole = count_flops(model(SIZES), torch.empty(1, 8, device="meta"), Recomputation(), LossForm())
    squares = (5**2 + 3**2) / 2 + (2**2 + 2**2 + 4**2) / 2
    assert whole.model - split.model == pytest.approx(3 * 12 * 4 * (8**2 - squares))
    assert split.causal == pytest.approx(split.model - 3 * 12 * 4 * squares / 2)


def test_a_vision_transformer_has_neither_a_mask_nor_a_table() -> None:
    sizes = ViTConfig(image_size=8, patch_size=4, n_classes=5, n_layers=1, dim=8, n_heads=2, mlp_dim=16)
    images = torch.empty(1, 3, 8, 8, device="meta")
    count = count_flops(model(sizes), images, Recomputation(), LossForm())
    assert count.causal is None and count.with_embeddings == count.model == count.hardware


class Driver:
    """NVML, whose driver reports the utilization of the GPU a while longer."""

    shares: ClassVar[list[float | None]] = [0.5, 1.0, None]

    def utilization(self, uuid: str) -> float | None:
        assert uuid == "GPU-1a"
        return self.shares.pop(0)


def test_the_driver_is_sampled_until_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "Nvml", Driver)
    monkeypatch.setattr(utilization, "EVERY_S", 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1a"))
    gpu = GpuUtilization(torch.device("cuda", 0))
    for _ in range(5):
        gpu.look()
    assert (gpu.take(), gpu.take(), Driver.shares) == (0.75, None, [])


def test_nothing_is_sampled_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    for device in (torch.device("cuda", 0), torch.device("cpu")):
        gpu = GpuUtilization(device)
        gpu.look()
        assert gpu.take() is None


def test_amdgpu_shows_the_utilization_in_sys(tmp_path: Path) -> None:
    assert busy_share(tmp_path) is None
    (tmp_path / "gpu_busy_percent").write_text("37\n")
    assert busy_share(tmp_path) == 0.37


def test_the_peak_of_a_device_counts_its_compute_units(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = SimpleNamespace(name="AMD Instinct MI300X", multi_processor_count=38)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: partition)
    peak = device_peak(torch.device("cuda", 0), "fp32", False)
    assert peak is not None and peak.flops == pytest.approx(1307.4e12 / 8)
    assert peak.of_precision == pytest.approx(163.4e12 / 8)


def test_a_rank_says_that_products_in_fp32_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    (note,) = precision_notes(PrecisionConfig(), gpu)
    assert "at up to 67 TFLOP/s; precision=bf16 reaches 989" in note
    assert precision_notes(PrecisionConfig(), torch.device("cpu")) == []
    assert precision_notes(PrecisionConfig(name="bf16"), gpu) == precision_notes(PrecisionConfig(tf32=True), gpu) == []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert precision_notes(PrecisionConfig(), gpu) == []
