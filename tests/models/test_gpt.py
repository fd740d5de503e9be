"""The GPT against a reference written differently, and the parts against the whole."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.models.attention import rotary_tables, rotate
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.models.transformer import OffsetRMSNorm
from tests.models.models import TINY_GPT, with_values
from tests.parallel.cells import OPTIONS


def reference_logits(model: Model, tokens: Tensor) -> Tensor:
    """The same function in another way: complex rotations, explicit loops over heads, a softmax with a mask."""
    weights = dict(model.named_parameters())
    config = TINY_GPT
    head_dim = config.dim // config.n_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weights[name]

    def turned(x: Tensor) -> Tensor:  # [seq, head_dim]; coordinates i and i + head_dim/2 are one complex number
        half = head_dim // 2
        frequency = config.rope_theta ** (-2 * torch.arange(half, dtype=torch.float64) / head_dim)
        angle = torch.arange(len(x), dtype=torch.float64).outer(frequency)
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    rows = []
    for row in tokens:
        x = weights["stem.embedding.weight"][row]
        for n in range(config.n_layers):
            p = f"layers.{n}."
            y = norm(x, p + "attention_norm.weight")
            q, k, v = (y @ weights[f"{p}attention.{w}.weight"].T for w in ("wq", "wk", "wv"))
            out = []
            for head in range(config.n_heads):
                group = head // (config.n_heads // config.n_kv_heads)
                mine = slice(head * head_dim, (head + 1) * head_dim)
                theirs = slice(group * head_dim, (group + 1) * head_dim)
                scores = turned(q[:, mine]) @ turned(k[:, theirs]).T / math.sqrt(head_dim)
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
                out.append(scores.softmax(-1) @ v[:, theirs])
            x = x + torch.cat(out, -1) @ weights[p + "attention.wo.weight"].T
            y = norm(x, p + "ffn_norm.weight")
            gate = y @ weights[p + "ffn.w1.weight"].T
            x = x + (gate * gate.sigmoid() * (y @ weights[p + "ffn.w3.weight"].T)) @ weights[p + "ffn.w2.weight"].T
        rows.append(norm(x, "head.norm.weight") @ weights["head.output.weight"].T)
    return torch.stack(rows)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, TINY_GPT.vocab_size, (3, 21), generator=torch.Generator().manual_seed(1))


def widened(model: Model) -> Model:
    """Larger weights, so that attention is far from uniform and an error shows."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(10)
    return model


def test_logits_equal_the_reference(tokens: Tensor) -> None:
    model = widened(with_values(TINY_GPT, torch.float64))
    expected = reference_logits(model, tokens)
    # The tables are float32 by definition, also under fp64.
    torch.testing.assert_close(model(tokens, {}), expected, rtol=1e-4, atol=1e-5)


def test_loss_is_the_sum_over_the_targets_that_count(tokens: Tensor) -> None:
    model = widened(with_values(TINY_GPT))
    targets = tokens.roll(-1, dims=1)
    targets[:, -4:] = IGNORED
    loss, number = model(tokens, {}, targets)
    kept = targets != IGNORED
    expected = -model(tokens, {})[kept].log_softmax(-1).gather(1, targets[kept].unsqueeze(1)).sum()
    torch.testing.assert_close(loss, expected)
    assert number.dtype == torch.int64 and number.item() == 3 * 17
    evaluated = model.eval()(tokens, {}, targets)
    right = (model(tokens, {}).argmax(-1) == targets)[kept].sum()
    assert [value.item() for value in evaluated] == [loss.item(), number.item(), right.item()]


def test_positions_of_the_context_replace_counting_from_zero(tokens: Tensor) -> None:
    model = widened(with_values(TINY_GPT))
    counted = torch.arange(tokens.shape[1]).expand_as(tokens)
    torch.testing.assert_close(model(tokens, {"positions": counted}), model(tokens, {}))
    torch.testing.assert_close(model(tokens, {"positions": counted + 9}), model(tokens, {}), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(model(tokens, {"positions": counted * 2}), model(tokens, {}), atol=1e-2)


def test_documents_do_not_see_each_other(tokens: Tensor) -> None:
    model = widened(with_values(TINY_GPT))
    length = tokens.shape[1]
    documents = (torch.arange(length) >= 8).long().expand_as(tokens)
    positions = torch.cat((torch.arange(8), torch.arange(length - 8))).expand_as(tokens)
    packed = model(tokens, {"document_ids": documents, "positions": positions})
    alone = torch.cat((model(tokens[:, :8], {}), model(tokens[:, 8:], {})), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_rotary_products_depend_on_the_distance_only() -> None:
    heads = torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 50, 1, 16)
    cosine, sine = rotary_tables(torch.arange(50), 16, 10000.0)
    turned = rotate(heads, cosine, sine)[0, :, 0]
    products = turned @ turned.T
    torch.testing.assert_close(products.diagonal(7), products[0, 7].expand(43), rtol=1e-5, atol=1e-5)
    assert rotate(heads.bfloat16(), cosine, sine).dtype == torch.bfloat16


def test_a_longer_sequence_after_a_shorter_one(tokens: Tensor) -> None:
    model, fresh = with_values(TINY_GPT), with_values(TINY_GPT)
    model(tokens[:, :5], {})
    torch.testing.assert_close(model(tokens, {}), fresh(tokens, {}), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_compute_what_the_whole_does(tokens: Tensor, tied: bool) -> None:
    model = with_values(replace(TINY_GPT, tied_embeddings=tied))
    stages = []
    for held in (("0",), ("1", "2"), ("3",)):
        stage = copy.deepcopy(model)
        stage.stem = stage.stem if "0" in held else None
        stage.head = stage.head if "3" in held else None
        for key in set(stage.layers) - set(held):
            del stage.layers[key]
        stages.append(stage)
    hidden = stages[0](tokens, {})
    assert tuple(hidden.shape) == model.hidden_shape(tokens)
    whole = model(tokens, {}, tokens)
    parts = stages[2](stages[1](hidden, {}), {}, tokens)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert set(names) == set(dict(model.named_parameters(remove_duplicate=False)))


def test_a_stage_with_a_shard_of_the_sequence_takes_the_whole_table(tokens: Tensor) -> None:
    model = with_values(TINY_GPT)
    model.stem, model.sequence_shards = None, 3
    context = model.prepare(torch.zeros(3, 7, TINY_GPT.dim), {})
    assert context["rotary_cosine"].shape == (21, 1, TINY_GPT.dim // TINY_GPT.n_heads)


def test_tied_embeddings_are_one_parameter() -> None:
    model = build_model(replace(TINY_GPT, tied_embeddings=True), seed=0)
    assert isinstance(model, Model)
    assert model.tied == {"head.output.weight": "stem.embedding.weight"}
    assert model.get_parameter("head.output.weight") is model.get_parameter("stem.embedding.weight")
    assert build_model(TINY_GPT, seed=0).tied == {}


def test_initial_values() -> None:
    model = with_values(replace(TINY_GPT, vocab_size=4000, dim=96, ffn_dim=256))
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert deviations["stem.embedding.weight"] == pytest.approx(0.02, rel=0.05)
    assert deviations["layers.2.ffn.w1.weight"] == pytest.approx(0.02, rel=0.05)
    assert deviations["layers.2.ffn.w2.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert deviations["layers.0.attention.wo.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert bool((model.get_parameter("head.norm.weight") == 1).all())
    loss, number = model(torch.arange(40).view(2, 20), {}, torch.arange(40).view(2, 20))
    assert loss.item() / number.item() == pytest.approx(math.log(4000), rel=0.02)


def test_dropout_acts_in_training_only(tokens: Tensor) -> None:
    model, plain = with_values(replace(TINY_GPT, dropout=0.5)), with_values(TINY_GPT)
    assert not torch.allclose(model(tokens, {}), plain(tokens, {}))
    torch.testing.assert_close(model.eval()(tokens, {}), plain.eval()(tokens, {}), rtol=0, atol=0)


def test_bf16_autocast_stays_near_fp32(tokens: Tensor) -> None:
    model = with_values(TINY_GPT)
    plain, _ = model(tokens, {}, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model(tokens, {}, tokens)
        assert model(tokens, {}).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=2e-3, atol=0.0)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_loss_of_half_precision_hidden_states_is_formed_in_float32() -> None:
    logits = torch.randn(5, 11).bfloat16()
    from hpc_train.models.transformer import cross_entropy

    targets = torch.tensor([0, 3, IGNORED, 10, 2])
    loss, number = cross_entropy(logits, targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets, reduction="sum"))
    assert loss.dtype == torch.float32 and number.item() == 4
    assert cross_entropy(logits.double(), targets)[0].dtype == torch.float64


def test_norms_with_an_offset_and_biases_start_at_zero() -> None:
    model = with_values(replace(TINY_GPT, **OPTIONS))
    for name, parameter in model.named_parameters():
        assert bool((parameter == 0).all()) == ("norm" in name or name.endswith(".bias")), name
    assert {name.split(".", 2)[2] for name, _ in model.named_parameters() if name.startswith("layers.0.")} >= {
        "attention_post_norm.weight", "ffn_post_norm.weight", "attention.q_norm.weight", "attention.wk.bias",
    }  # fmt: skip


def test_the_offset_of_a_norm_is_not_rounded() -> None:
    norm = OffsetRMSNorm(64, eps=1e-6)
    hidden = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm.weight.data.fill_(0.003)  # 1.003 is 1 in bf16
    exact = norm(hidden.float())
    norm.bfloat16()
    with_offset = norm(hidden).float()
    norm.weight.data.zero_()
    assert (with_offset - exact).abs().mean() < 0.8 * (norm(hidden).float() - exact).abs().mean()


def test_all_options_in_bf16_stay_near_fp32(tokens: Tensor) -> None:
    model = widened(with_values(replace(TINY_GPT, **OPTIONS)))
    plain, _ = model(tokens, {}, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model(tokens, {}, tokens)
    torch.testing.assert_close(loss, plain, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_heads", 5), ("n_kv_heads", 4), ("n_heads", 48), ("head_dim", 7), ("global_every", 2), ("local_rope_theta", 9)],
)
def test_sizes_that_do_not_fit_are_refused(key: str, value: int) -> None:
    with pytest.raises(UserError, match=r"divide|even head width|no layer has a sliding window"):
        build_model(replace(TINY_GPT, **{key: value}), seed=0)
