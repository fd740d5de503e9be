"""Compares the built-in mixture of experts with loops over tokens and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.config.schema import GPTConfig, MoEConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.gpt import GatedFeedForward
from hpc_train.models.moe import MixtureOfExperts, routing_context
from tests.parallel.cells import MIXTURES

DIM, EXPERTS, TOKENS = 16, 4, 6


def mixture(dtype: torch.dtype = torch.float64, **options: Any) -> MixtureOfExperts:
    moe = MoEConfig(**{"experts": EXPERTS, "top_k": 2, "expert_dim": 8} | options)
    sizes = {"vocab_size": 10, "n_layers": 1, "dim": DIM, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 24}
    shared = GatedFeedForward(DIM, moe.shared_experts * 8) if moe.shared_experts else None
    built = MixtureOfExperts(GPTConfig(**sizes, moe=moe), F.silu, shared).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    return built


def hidden_states(sequences: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sequences, TOKENS, DIM, generator=generator, dtype=dtype).requires_grad_()


def in_loops(built: MixtureOfExperts, hidden: Tensor, targets: Tensor) -> Tensor:
    """Computes the result token by token, with the experts chosen by sorting the scores of each."""
    moe = built.router.config
    rows = []
    for sequence, row in zip(hidden, targets, strict=True):
        length = int((row != IGNORED).nonzero().max()) + 1 if (row != IGNORED).any() else 0
        left = [float("inf")] * EXPERTS
        if moe.capacity_factor is not None:
            left = [-(-moe.capacity_factor * moe.top_k * length // EXPERTS)] * EXPERTS
        for position, token in enumerate(sequence):
            logits = built.router.weight @ token
            scores = logits.softmax(0) if moe.router == "softmax" else logits.sigmoid()
            bias = 0 if built.router.expert_bias is None else built.router.expert_bias
            experts = (scores + bias).argsort(descending=True)[: moe.top_k].tolist()
            total = scores[experts].sum() if moe.normalize else 1
            result = built.shared(token) if built.shared is not None else torch.zeros_like(token)
            for expert in experts if position < length else ():
                left[expert] -= 1
                if left[expert] < 0:
                    continue
                w1, w2, w3 = (getattr(built.experts, name)[expert] for name in ("w1", "w2", "w3"))
                result = result + scores[expert] / total * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
            rows.append(result)
    return torch.stack(rows).view_as(hidden)


def gradients(built: MixtureOfExperts, hidden: Tensor, results: Tensor) -> dict[str, Tensor]:
    parameters = dict(built.named_parameters())
    direction = torch.linspace(-1, 1, results.numel(), dtype=results.dtype).view_as(results)
    found = torch.autograd.grad((results * direction).sum(), [hidden, *parameters.values()])
    return dict(zip(["hidden", *parameters], found, strict=True))


@pytest.mark.parametrize("options", [{}, *MIXTURES.values()], ids=["plain", *MIXTURES])
def test_results_and_gradients_are_those_of_a_loop(options: dict[str, Any]) -> None:
    built = mixture(**options | {"experts": EXPERTS, "balance_loss": 0.0, "z_loss": 0.0})
    if built.router.expert_bias is not None:
        built.router.expert_bias.copy_(torch.tensor([0.3, -0.3, 0.1, 0.0]))
    hidden = hidden_states()
    targets = torch.zeros(3, TOKENS, dtype=torch.int64)
    targets[0, 2] = IGNORED  # inside of a sequence: not padding
    targets[1, 4:] = IGNORED
    targets[2] = IGNORED
    found = built(hidden, routing_context(targets))
    expected = in_loops(built, hidden, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pair = gradients(built, hidden, found), gradients(built, hidden, expected)
    torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["loop", "grouped_mm"])
def test_all_tokens_on_one_expert(dtype: torch.dtype) -> None:
    """The other experts get gradients of zero, as do all experts if every token is padding."""
    built = mixture(dtype, top_k=1, normalize=False)
    built.router.weight.data.zero_()
    built.router.weight.data[2] = 1.0
    hidden = hidden_states(dtype=dtype).detach().abs().requires_grad_()  # the largest score is that of expert 2
    targets = torch.zeros(3, TOKENS, dtype=torch.int64)
    of_all = gradients(built, hidden, built(hidden, routing_context(targets)))
    assert [bool(expert.any()) for expert in of_all["experts.w2"]] == [False, False, True, False]
    assert built.router.counts.tolist() == [0, 0, 3 * TOKENS, 0, 0]
    padding = gradients(built, hidden, built(hidden, routing_context(targets.fill_(IGNORED))))
    assert not any(gradient.any() for gradient in padding.values())
    assert built.router.counts.sum() == 3 * TOKENS


def test_ties_and_single_tokens_do_not_depend_on_the_batch() -> None:
    built = mixture()
    built.router.weight.data[1] = built.router.weight.data[3] = built.router.weight.data[0]
    hidden = hidden_states()
    _, experts, _ = built.router(hidden, {})
    for sample in range(len(hidden)):
        for position in range(TOKENS):
            alone = hidden[sample : sample + 1, position : position + 1]
            assert torch.equal(built.router(alone, {})[1], experts[sample : sample + 1, position : position + 1])


def test_capacity_does_not_depend_on_later_tokens() -> None:
    built = mixture(capacity_factor=1.0)
    hidden = hidden_states(1)
    changed = hidden.detach().clone()
    changed[:, 4:] = 5.0
    torch.testing.assert_close(built(hidden, {})[:, :4], built(changed, {})[:, :4], rtol=1e-12, atol=1e-12)
    assert built.router.counts[-1] > 0
    dropped = int(built.router.counts[-1])
    built.eval()(hidden, {})
    assert built.router.counts[-1] == dropped  # evaluations drop none
