"""Published parameter counts, and the operations that follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpc_train.config.compose import typed
from hpc_train.config.extensions import family_of
from hpc_train.config.schema import GPTConfig, MoEConfig, ViTConfig
from hpc_train.layout.sizes import active_count
from hpc_train.models.build import build_model
from hpc_train.models.gpt_sizes import gpt_flops_per_sample, query_width
from hpc_train.models.model import Model
from tests.config.composing import compose
from tests.doors.command import REPOSITORY
from tests.models.models import TINY_GPT, TINY_VIT, with_values

LLAMA = {
    "llama 2 7B": (
        GPTConfig(vocab_size=32000, n_layers=32, dim=4096, n_heads=32, n_kv_heads=32, ffn_dim=11008),
        6_738_415_616,
    ),
    "llama 2 70B": (
        GPTConfig(vocab_size=32000, n_layers=80, dim=8192, n_heads=64, n_kv_heads=8, ffn_dim=28672),
        68_976_648_192,
    ),
    "llama 3 70B": (
        GPTConfig(vocab_size=128256, n_layers=80, dim=8192, n_heads=64, n_kv_heads=8, ffn_dim=28672),
        70_553_706_496,
    ),
    "llama 3.2 1B": (
        GPTConfig(
            vocab_size=128256, n_layers=16, dim=2048, n_heads=32, n_kv_heads=8, ffn_dim=8192, tied_embeddings=True
        ),
        1_235_814_400,
    ),
}
VIT = {  # n_layers, dim, n_heads, mlp_dim, patch_size
    "tiny/16": ((12, 192, 3, 768, 16), 5_717_416),
    "base/16": ((12, 768, 12, 3072, 16), 86_567_656),
    "large/16": ((24, 1024, 16, 4096, 16), 304_326_632),
    "huge/14": ((32, 1280, 16, 5120, 14), 632_045_800),
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", LLAMA)
def test_llama_has_the_published_number_of_parameters(name: str) -> None:
    config, published = LLAMA[name]
    assert count(build_model(config, seed=0)) == published


@pytest.mark.parametrize("name", VIT)
def test_vit_has_the_published_number_of_parameters(name: str) -> None:
    (n_layers, dim, n_heads, mlp_dim, patch), published = VIT[name]
    config = ViTConfig(
        image_size=224,
        patch_size=patch,
        channels=3,
        n_classes=1000,
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        mlp_dim=mlp_dim,
    )
    assert count(build_model(config, seed=0)) == published


CONFIGS = {  # of conf/model/: the published count
    "gpt_124m": 124_439_808,
    "gpt_175b": 174_600_000_000,
    "llama_1b": 1_235_814_400,
    "llama_7b": 6_738_415_616,
    "llama_70b": 68_976_648_192,
    "qwen2_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "gemma_7b": 8_537_680_896,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "vit_tiny": VIT["tiny/16"][1],
    "vit_base": VIT["base/16"][1],
    "vit_large": VIT["large/16"][1],
    "vit_huge": VIT["huge/14"][1],
}


def config_of(name: str) -> GPTConfig | ViTConfig:
    data = {"image_size": 224, "channels": 3, "n_classes": 1000}
    file = OmegaConf.load(REPOSITORY / f"conf/model/{name}.yaml")
    values: Any = OmegaConf.to_container(OmegaConf.create({"data": data, "model": file}), resolve=True)
    del values["model"]["defaults"]
    if name.startswith("vit"):
        return ViTConfig(**values["model"])
    return GPTConfig(**values["model"] | {"moe": MoEConfig(**values["model"].get("moe", {}))})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sizes_of_the_field_are_what_they_are_called(name: str) -> None:
    config = config_of(name)
    model = build_model(config, seed=0)
    tolerance = 0.02 if name.startswith("gpt") else 0.0  # GPT's sizes and Llama's layers
    assert count(model) == pytest.approx(CONFIGS[name], rel=tolerance, abs=0)
    stated = family_of(config).parameters
    assert stated is not None and stated(config) == count(model)


def test_flops_count_the_active_parameters() -> None:
    """The published counts are 12.9 and 3.3 billion."""
    active = {"mixtral_8x7b": 12_879_925_248, "qwen3_30b_a3b": 3_353_032_704}
    for name, count_active in active.items():
        config = config_of(name)
        assert isinstance(config, GPTConfig)
        assert active_count(config) == count_active
        tables = config.vocab_size * config.dim  # the look-up is no product
        attention = 12 * query_width(config) * config.n_layers
        assert gpt_flops_per_sample(config, (1,)) == 6 * (count_active - tables) + attention
        model = build_model(config, seed=0)
        assert isinstance(model, Model)
        blocks = model.block_flops(torch.empty(1, 1, device="meta"))
        assert blocks is not None and sum(blocks) == gpt_flops_per_sample(config, (1,))


def test_a_command_line_has_the_sizes_of_the_file() -> None:
    assert typed(compose(["model=qwen3_30b_a3b"])).model == config_of("qwen3_30b_a3b")
    assert typed(compose(["model=gemma2_9b"])).model == config_of("gemma2_9b")


def test_gpt_flops_are_six_per_multiplied_parameter_and_token_and_the_attention() -> None:
    model = build_model(TINY_GPT, seed=0)
    assert isinstance(model, Model) and model.stem is not None
    multiplied = count(model) - count(model.stem)
    length = 40
    expected = length * (6 * multiplied + 12 * TINY_GPT.n_layers * TINY_GPT.dim * length)
    assert model.flops_per_sample(torch.empty(3, length, device="meta")) == expected
    tied = build_model(replace(TINY_GPT, tied_embeddings=True), seed=0)
    assert isinstance(tied, Model)
    assert tied.flops_per_sample(torch.empty(1, length, device="meta")) == expected


def test_a_layer_with_a_window_counts_the_keys_in_it() -> None:
    config = replace(TINY_GPT, head_dim=10, sliding_window=7, global_every=2)
    model, length = build_model(config, seed=0), 40
    assert isinstance(model, Model) and model.stem is not None
    tokens = torch.empty(3, length, device="meta")
    multiplied = count(model) - count(model.stem)
    expected = length * (6 * multiplied + 12 * 60 * (7 + 40 + 7 + 40))
    assert model.flops_per_sample(tokens) == expected == gpt_flops_per_sample(config, (length,))
    stem, *layers, head = model.block_flops(tokens) or ()
    assert layers[0] == layers[2] == layers[1] - 12 * 60 * length * (40 - 7) and layers[1] == layers[3]
    assert stem + sum(layers) + head == expected
    terms = model.flop_terms(tokens)
    assert terms is not None and terms.masked == 12 * 60 * 2 * (7 * 7 / 2 + 40 * 40 / 2)
    wide = replace(config, sliding_window=40)
    assert gpt_flops_per_sample(wide, (40,)) == gpt_flops_per_sample(replace(wide, sliding_window=None), (40,))


def test_vit_flops_count_each_part_by_the_tokens_that_it_sees() -> None:
    model = build_model(TINY_VIT, seed=0)
    assert isinstance(model, Model) and model.stem is not None and model.head is not None
    tokens = 1 + (16 // 4) ** 2
    layers, patch = count(model.layers), count(model.stem.get_submodule("patch"))
    classifier = count(model.head.get_submodule("output"))
    attention = 12 * TINY_VIT.n_layers * TINY_VIT.dim * tokens
    expected = tokens * (6 * layers + attention) + 6 * (tokens - 1) * patch + 6 * classifier
    assert model.flops_per_sample(torch.empty(2, 3, 16, 16, device="meta")) == expected


def test_flops_agree_with_torchs_own_counter() -> None:
    config = GPTConfig(vocab_size=97, n_layers=3, dim=64, n_heads=4, n_kv_heads=4, ffn_dim=160)
    model = with_values(config)
    tokens = torch.randint(0, 97, (2, 32))
    # The plain attention: the counter does not know the CPU's fused one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, _ = model(tokens, {}, tokens)
        loss.backward()
    # The formula also counts the few parameters of norms as multiplied.
    assert counter.get_total_flops() == pytest.approx(2 * model.flops_per_sample(tokens), rel=0.01)
