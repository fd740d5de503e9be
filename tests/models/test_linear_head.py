"""The loss that computes its gradients chunk by chunk is the plain cross-entropy of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import (
    BatchConfig,
    Config,
    GPTConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.data.dataset import IGNORED
from hpc_train.layout.loss_chunks import LossForm, loss_form
from hpc_train.layout.resolve import resolve_layout
from hpc_train.models.attention import soft_cap
from hpc_train.models.gpt import GPTHead
from hpc_train.models.linear_head import linear_cross_entropy
from hpc_train.models.transformer import cross_entropy, cross_entropy_with_z, widened
from tests.parallel.memory import PeakMemory

SHAPE, DIM, VOCABULARY = (2, 7), 5, 11
CASES = [(chunks, cap, z_loss) for chunks in (1, 3, 14) for cap in (None, 1.5) for z_loss in (0.0, 0.3)]


def drawn(dtype: torch.dtype = torch.float64, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output matrix and targets, two of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*SHAPE, DIM, generator=generator, dtype=torch.float64).mul_(spread).to(dtype)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCABULARY, SHAPE, generator=generator)
    targets[0, 2] = targets[1, 6] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    logits = soft_cap(widened(hidden @ weight.t()), cap)
    loss, count = cross_entropy(logits, targets)
    if not z_loss:
        return loss, count
    return loss + z_loss * logits.logsumexp(-1)[targets != IGNORED].square().sum(), count


@pytest.mark.parametrize(("chunks", "cap", "z_loss"), CASES)
def test_loss_and_gradients_are_those_of_whole_logits(chunks: int, cap: float | None, z_loss: float) -> None:
    hidden, weight, targets = drawn()
    expected, wanted_count = plain(hidden, weight, targets, cap, z_loss)
    found, count = linear_cross_entropy(hidden, weight, targets, chunks, cap, None, z_loss)
    assert count == wanted_count == 12
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    ours, theirs = (torch.autograd.grad(loss * 0.3, (hidden, weight)) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.long_form(2, cases=["1", "3-None", "3-1.5-0.0", "14"])
@pytest.mark.parametrize(("chunks", "cap", "z_loss"), CASES)
def test_the_gradients_are_the_slopes_of_the_loss(chunks: int, cap: float | None, z_loss: float) -> None:
    hidden, weight, targets = drawn()

    def loss(*factors: Tensor) -> Tensor:
        return linear_cross_entropy(*factors, targets, chunks, cap, None, z_loss)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_a_z_loss_of_whole_logits_is_that_of_its_definition() -> None:
    hidden, weight, targets = drawn()
    expected, wanted = plain(hidden, weight, targets, None, 0.3)
    found, count = cross_entropy_with_z(hidden @ weight.t(), targets, 0.3)
    assert count == wanted
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    ours, theirs = (torch.autograd.grad(loss * 0.3, (hidden, weight)) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    targets[1, 1] = VOCABULARY
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        cross_entropy_with_z(hidden @ weight.t(), targets, 0.3)


@pytest.mark.parametrize("chunks", [0, 1, 5])
def test_a_z_loss_in_half_precision_is_near_to_the_exact_one(chunks: int) -> None:
    hidden, weight, targets = drawn(torch.bfloat16)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(plain(*exact, targets, None, 0.3)[0], exact)
    if chunks:
        loss, _ = linear_cross_entropy(hidden, weight, targets, chunks, None, None, 0.3)
    else:
        loss, _ = cross_entropy_with_z(hidden @ weight.t(), targets, 0.3)
    for found, wanted in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert float((found - wanted).norm() / wanted.norm()) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_the_gradients_that_are_needed_are_computed(frozen: str) -> None:
    hidden, weight, targets = drawn()
    expected = torch.autograd.grad(plain(hidden, weight, targets, None)[0], (hidden, weight))
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss, _ = linear_cross_entropy(hidden, weight, targets, 3)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    for value, wanted in zip((hidden, weight), expected, strict=True):
        assert (value.grad is not None) == value.requires_grad
        if value.grad is not None:
            torch.testing.assert_close(value.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 5])
def test_half_precision_is_as_near_to_exact_gradients_as_whole_logits_are(dtype: torch.dtype, chunks: int) -> None:
    """Of tokens that are predicted almost surely too, where the softmax rounded to half precision is 1."""
    hidden, weight, targets = drawn(dtype, spread=4.0)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(plain(*exact, targets, None)[0], exact)
    errors = []
    for loss in (plain(hidden, weight, targets, None)[0], linear_cross_entropy(hidden, weight, targets, chunks)[0]):
        found = torch.autograd.grad(loss, (hidden, weight))
        assert all(value.dtype == dtype for value in found)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)))
    assert errors[1] < 1.5 * errors[0] + torch.finfo(dtype).eps / 4


def test_large_logits_give_finite_losses() -> None:
    hidden, weight, targets = drawn(torch.float32, spread=1e4)
    expected, _ = plain(hidden, weight, targets, None)
    found, _ = linear_cross_entropy(hidden, weight, targets, 2)
    assert found.isfinite()
    torch.testing.assert_close(found, expected)


def test_fp16_sums_gradients_of_the_matrix_beyond_its_range() -> None:
    """All of 4096 tokens change the same row by 32: more than fp16 can hold, until the loss scale divides it."""
    hidden = torch.full((4096, 2), 32.0, dtype=torch.float16)
    weight = torch.zeros(2, 2, dtype=torch.float16, requires_grad=True)
    loss, count = linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64))
    (loss / count).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-16.0, -16.0], [16.0, 16.0]]


def test_a_gradient_is_scaled_in_place_and_only_once() -> None:
    hidden, weight, targets = drawn()
    loss, _ = linear_cross_entropy(hidden, weight, targets, 2)
    scaled = loss * 2
    scaled.backward(retain_graph=True)
    first = [value.grad.clone() for value in (hidden, weight) if value.grad is not None]
    hidden.grad = weight.grad = None
    with PeakMemory() as memory:
        scaled.backward()
    assert memory.peak <= 8 + 8  # the gradients are those of the forward pass, and a scale
    torch.testing.assert_close([hidden.grad, weight.grad], first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="ran twice"):
        loss.backward()


def test_a_target_that_is_no_class_is_refused() -> None:
    hidden, weight, targets = drawn()
    targets[1, 1] = VOCABULARY
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        linear_cross_entropy(hidden, weight, targets, 2)


class Warm(GPTHead):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) / 2


class Doubled(GPTHead):
    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(hidden, targets)
        return 2 * total, count


@pytest.mark.parametrize("kind", [GPTHead, Warm, Doubled])
def test_a_head_that_computes_other_logits_or_losses_keeps_them(kind: type[GPTHead]) -> None:
    torch.manual_seed(0)
    head = kind(GPTConfig(vocab_size=VOCABULARY, dim=6, n_heads=2, n_kv_heads=2, ffn_dim=8)).double()
    hidden, targets = torch.randn(*SHAPE, 6, dtype=torch.float64), drawn()[2]
    found = []
    for form in (LossForm(), LossForm(3, fused=True)):
        head.zero_grad()
        head.chunks, head.fused = form.chunks, form.fused
        loss, count = head.loss(hidden, targets)
        loss.backward()
        found.append([loss.detach(), count, *(value.grad.clone() for value in head.parameters())])  # type: ignore[union-attr]
        with torch.no_grad():
            found[-1] += head.loss(hidden, targets)
    torch.testing.assert_close(found[0], found[1])
    assert head.own_count == (kind is Doubled)


def test_an_output_layer_of_another_kind_is_called() -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 3

    head = GPTHead(GPTConfig(vocab_size=VOCABULARY, dim=6, n_heads=2, n_kv_heads=2, ffn_dim=8))
    head.output = Adapted(6, VOCABULARY, bias=False)
    hidden, targets = torch.randn(*SHAPE, 6), drawn()[2]
    plainly, _ = head.loss(hidden, targets)
    head.chunks, head.fused = 2, True
    torch.testing.assert_close(head.loss(hidden, targets)[0], plainly)


TOKENS, WIDTH, WORDS = 256, 64, 2048


def kept_and_peak(form: LossForm | None, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """The bytes that wait for the backward pass and the most bytes at a time, of a loss in this form or a plain one."""
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(WORDS, (1, TOKENS))
    with PeakMemory() as memory:
        if form is None:
            loss, _ = plain(hidden, weight, targets, None)
        else:
            loss, _ = linear_cross_entropy(hidden, weight, targets, form.chunks)
        kept = memory.alive
        (loss / TOKENS).backward()
    return kept, memory.peak


@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_the_bytes_of_the_loss_are_those_of_one_chunk_and_the_gradients(chunks: int) -> None:
    logits, gradients = 4 * TOKENS * WORDS, 4 * (TOKENS + WORDS) * WIDTH
    kept, peak = kept_and_peak(LossForm(chunks, fused=True))
    assert kept == pytest.approx(gradients, rel=0.05)
    assert peak == pytest.approx(logits / chunks + gradients, rel=0.05)
    kept, peak = kept_and_peak(None)
    assert kept == pytest.approx(logits, rel=0.05)
    assert peak == pytest.approx(3 * logits, rel=0.05)


@pytest.mark.parametrize("chunks", [1, 4])
def test_half_precision_takes_six_bytes_per_logit_of_a_chunk(chunks: int) -> None:
    logits, values = TOKENS * WORDS // chunks, TOKENS * WIDTH
    of_matrix = WORDS * WIDTH * (2 if chunks == 1 else 4)  # fp32 while it is summed
    kept, peak = kept_and_peak(LossForm(chunks, fused=True), torch.bfloat16)
    assert kept == pytest.approx(of_matrix + 2 * values, rel=0.05)
    assert peak == pytest.approx(6 * logits + 2 * values + (of_matrix if chunks > 1 else 0), rel=0.05)


def form_of(sizes: dict[str, Any], micro_size: int, chunks: int | str = "auto", **strategy: Any) -> LossForm:
    config = Config(
        model=GPTConfig(n_layers=8, n_heads=8, n_kv_heads=8, **sizes),
        data=SyntheticDataConfig(sequence_length=2048),
        batch=BatchConfig(global_size=64, micro_size=micro_size),
        strategy=StrategyConfig(**strategy),
        train=TrainConfig(loss_chunks=chunks),
    )
    return loss_form(config, resolve_layout(config, 1, strategy.get("pp", 1) * strategy.get("dp", 1)))


def test_a_large_vocabulary_is_computed_in_chunks() -> None:
    llama = {"dim": 2048, "vocab_size": 128256, "ffn_dim": 8192}
    assert form_of(llama, 8) == LossForm(4, fused=True)
    assert form_of(llama, 1) == LossForm(1, fused=True)
    assert form_of(llama | {"dim": 8192}, 8) == LossForm(2, fused=True)  # chunks of as many tokens
    assert form_of(llama | {"vocab_size": 4096}, 8) == LossForm()
    assert form_of(llama, 8, 3) == LossForm(3, fused=True)
    assert form_of(llama, 8, 1) == LossForm()


@pytest.mark.parametrize(
    ("schedule", "stages", "fused"),
    [("1f1b", 1, True), ("zbv", 2, True), ("interleaved_1f1b", 2, True), ("interleaved_zero_bubble", 2, False),
     ("gpipe", 1, False)],
)  # fmt: skip
def test_a_stage_that_keeps_several_micro_batches_computes_logits_again(
    schedule: str, stages: int, fused: bool
) -> None:
    """It would keep a gradient of the matrix for each of them."""
    llama = {"dim": 2048, "vocab_size": 128256, "ffn_dim": 8192}
    pipeline: dict[str, Any] = {"pp": 2, "schedule": schedule, "stages_per_rank": stages}
    assert form_of(llama, 2, **pipeline) == LossForm(1, fused)
    assert form_of(llama, 2, 4, **pipeline) == LossForm(4, fused)
    assert form_of(llama, 2, 4, **pipeline).recomputes == (not fused)
