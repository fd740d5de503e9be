"""MFU and HFU against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from hpc_train.config.schema import GPTConfig, TrainConfig, ViTConfig
from hpc_train.measure.utilisation import count_flops, peak_flops
from hpc_train.models.build import build_model
from hpc_train.models.model import Model

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
    count = count_flops(model(SIZES), TOKENS, TrainConfig(activation_checkpointing=checkpointing))
    chunks = count_flops(model(SIZES), TOKENS, TrainConfig(activation_checkpointing=checkpointing, loss_chunks=2))
    assert chunks.recomputed == pytest.approx(recomputed + HEAD / 3)
    assert count.model == 3 * LAYER + HEAD
    assert count.hardware == pytest.approx(count.model + recomputed)
    assert count.causal == count.model - 3 * 12 * 4 * 5 * 5 / 2
    assert count.with_embeddings == count.model + 6 * 5 * 10 * 4
    found = count.utilisation(samples_per_s=7.0, peak_flops=1e6)
    assert found.keys() == {"mfu", "hfu", "mfu_causal", "mfu_with_embeddings"}
    assert found["mfu"] == pytest.approx(7 * (3 * LAYER + HEAD) / 1e6)
    assert found["hfu"] == pytest.approx(found["mfu"] + 7 * recomputed / 1e6)


def test_a_vision_transformer_has_neither_a_mask_nor_a_table() -> None:
    sizes = ViTConfig(image_size=8, patch_size=4, n_classes=5, n_layers=1, dim=8, n_heads=2, mlp_dim=16)
    images = torch.empty(1, 3, 8, 8, device="meta")
    count = count_flops(model(sizes), images, TrainConfig())
    assert count.causal is None and count.with_embeddings == count.model == count.hardware


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("AMD Instinct MI250X", 191.5e12),  # half of a module
        ("AMD Instinct MI250X / MI250", 191.5e12),
        ("AMD Instinct MI300X VF", 1307.4e12),
        ("AMD Instinct MI308X", None),
        ("AMD gfx942", None),
        ("NVIDIA A30", 165e12),
    ],
)
def test_peaks_by_name(name: str, bf16: float | None) -> None:
    assert peak_flops(name, "bf16") == bf16


def test_the_peak_of_fp32_is_that_of_tf32_where_it_is_chosen_and_exists() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 66.9e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32", tf32=True) == 494.7e12
    assert peak_flops("Tesla V100-SXM2-16GB", "fp32", tf32=True) == 15.7e12
