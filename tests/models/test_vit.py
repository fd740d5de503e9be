"""The vision transformer against torch's own encoder layer, and its parts against the whole."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from tests.models.models import TINY_VIT, with_values


def images() -> torch.Tensor:
    return torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def randomized(model: Model) -> Model:
    """Every parameter away from its start, so that no bias or norm is without effect."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def torch_layer(model: Model, index: int) -> nn.TransformerEncoderLayer:
    """torch's pre-norm encoder layer with the weights of our layer ``index``."""
    config = TINY_VIT
    layer = nn.TransformerEncoderLayer(
        config.dim, config.n_heads, config.mlp_dim, 0.0, "gelu", config.norm_eps, batch_first=True, norm_first=True
    )
    own = model.layers[str(index)].state_dict()
    joined = {
        f"self_attn.in_proj_{kind}": torch.cat([own[f"attention.w{which}.{kind}"] for which in "qkv"])
        for kind in ("weight", "bias")
    }
    names = {"attention.wo": "self_attn.out_proj", "attention_norm": "norm1", "ffn_norm": "norm2"}
    names |= {"ffn.w1": "linear1", "ffn.w2": "linear2"}
    for mine, theirs in names.items():
        joined |= {f"{theirs}.{kind}": own[f"{mine}.{kind}"] for kind in ("weight", "bias")}
    layer.load_state_dict(joined)
    return layer


def test_logits_equal_those_of_torchs_layers() -> None:
    model = randomized(with_values(TINY_VIT))
    assert model.stem is not None and model.head is not None
    pixels = images()
    stem, head = model.stem, model.head
    patches = pixels.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(5, 16, -1)
    weight, bias = stem.get_parameter("patch.weight"), stem.get_parameter("patch.bias")
    hidden = torch.cat((stem.get_parameter("class_token").expand(5, 1, -1), patches @ weight.flatten(1).T + bias), 1)
    hidden = hidden + stem.get_parameter("position_embedding")
    for index in range(TINY_VIT.n_layers):
        hidden = torch_layer(model, index)(hidden)
    expected = head.get_submodule("output")(head.get_submodule("norm")(hidden[:, 0]))
    torch.testing.assert_close(model(pixels, {}), expected, rtol=1e-4, atol=1e-4)


def test_loss_and_accuracy() -> None:
    model = randomized(with_values(TINY_VIT)).eval()
    targets = torch.tensor([1, 6, IGNORED, 0, 3])
    loss, number, right = model(images(), {}, targets)
    logits = model(images(), {})
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert number.item() == 4
    assert right.item() == sum(int(a == b) for a, b in zip(logits.argmax(1).tolist(), targets.tolist(), strict=True))


def test_stages_together_compute_what_the_whole_does() -> None:
    model = randomized(with_values(TINY_VIT))
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.head = last.stem = None
    del first.layers["2"], last.layers["0"], last.layers["1"]
    hidden = first(images(), {})
    assert tuple(hidden.shape) == model.hidden_shape(images())
    torch.testing.assert_close(last(hidden, {}), model(images(), {}), rtol=0, atol=0)


def test_initial_values_and_names() -> None:
    model = with_values(replace(TINY_VIT, dim=128, mlp_dim=256))
    values = dict(model.named_parameters())
    assert values["stem.patch.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert values["stem.position_embedding"].std().item() == pytest.approx(0.02, rel=0.1)
    assert bool((values["layers.1.ffn_norm.weight"] == 1).all())
    zeros = [name for name, value in values.items() if not value.any()]
    assert set(zeros) == {name for name in values if name.endswith((".bias", "class_token"))}


def test_bf16_autocast_runs() -> None:
    model = with_values(TINY_VIT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model(images(), {}, torch.arange(5))
    loss.backward()
    assert loss.dtype == torch.float32 and bool(loss.isfinite())


@pytest.mark.parametrize(("key", "value"), [("patch_size", 5), ("n_heads", 5)])
def test_sizes_that_do_not_fit_are_refused(key: str, value: int) -> None:
    with pytest.raises(UserError, match="divide"):
        build_model(replace(TINY_VIT, **{key: value}), seed=0)
