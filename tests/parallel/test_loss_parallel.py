"""Logits that are spread over tensor-parallel ranks give the loss, gradients and accuracy of whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.models.linear_head import VocabularyShard, _evaluate_shard, linear_cross_entropy
from hpc_train.models.transformer import count_correct
from hpc_train.parallel import tensor
from hpc_train.parallel.build import build_engine
from tests.models.test_linear_head import VOCABULARY, drawn, plain
from tests.parallel.cells import SEQUENCE, Cell
from tests.parallel.memory import Allocations, PeakMemory
from tests.parallel.oracle import mesh_of
from tests.ranks import run_on_world, run_ranks


def shard_of_rank(rank: int, world_size: int) -> VocabularyShard:
    """Returns the words of a rank; the last one has fewer than the others."""
    assert dist.group.WORLD is not None
    each = -(-VOCABULARY // world_size)
    first = rank * each
    return VocabularyShard(dist.group.WORLD, first, min(VOCABULARY, first + each) - first, VOCABULARY)


def differences(rank: int, world_size: int, cases: list[tuple[int, float | None, float]]) -> list[tuple[float, ...]]:
    """Returns the largest difference of loss, gradients and evaluation from those of whole logits, for each case."""
    shard = shard_of_rank(rank, world_size)
    rows = slice(shard.first, shard.first + shard.words)
    found = []
    for chunks, cap, z_loss in cases:
        hidden, weight, targets = drawn()
        expected, count = plain(hidden, weight, targets, cap, z_loss)
        of_hidden, of_weight = torch.autograd.grad(expected, (hidden, weight))
        own = weight.detach()[rows].clone().requires_grad_()
        loss, counted = linear_cross_entropy(hidden, own, targets, chunks, cap, shard, z_loss)
        ours, of_own = torch.autograd.grad(loss, (hidden, own))
        dist.all_reduce(ours)
        with torch.no_grad():
            evaluated, number, correct = _evaluate_shard(hidden, own, targets, chunks, cap, shard)
        assert count == counted == number
        assert correct == count_correct(hidden @ weight.t(), targets)
        without_z, _ = plain(hidden, weight, targets, cap)
        pairs = [(loss, expected), (evaluated, without_z), (ours, of_hidden), (of_own, of_weight[rows])]
        found.append(tuple(float((a - b).abs().max()) for a, b in pairs))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_of_the_vocabulary_give_the_gradients_of_whole_logits(world_size: int) -> None:
    cases = [(chunks, cap, z_loss) for chunks in (1, 3) for cap in (None, 1.5) for z_loss in (0.0, 0.3)]
    for of_rank in run_on_world(world_size, differences, cases):
        for case, errors in zip(cases, of_rank, strict=True):
            assert max(errors) < 1e-13, (case, errors)


def of_special_cases(rank: int, world_size: int) -> tuple[int, str]:
    """Returns the correct predictions among equal logits, and what is said of a target that is not a word."""
    shard = shard_of_rank(rank, world_size)
    equal = torch.zeros(VOCABULARY, shard.words)
    correct = int(shard.count_correct(equal, torch.arange(VOCABULARY)))
    hidden, weight, targets = drawn()
    targets[0, 0] = VOCABULARY
    with pytest.raises(IndexError):
        shard.embed(targets, weight[: shard.words])
    try:
        linear_cross_entropy(hidden, weight.detach()[: shard.words], targets, 1, None, shard)
    except IndexError as error:
        return correct, str(error)
    return correct, ""


def test_the_first_of_equal_logits_is_predicted_and_what_is_no_word_is_refused() -> None:
    assert run_on_world(2, of_special_cases) == [(1, "Target 11 is out of bounds.")] * 2


WORDS, DIM, MICRO = 2048, 16, 4


def config_of(cell: Cell) -> Config:
    config = cell.config()
    model = replace(config.model, vocab_size=WORDS)
    return replace(config, model=model, data=replace(config.data, vocab_size=WORDS))


def bytes_of_loss(rank: int, world_size: int, chunks: list[int]) -> list[tuple[int, int, int, int]]:
    """Returns what a rank keeps for the backward pass of the loss and its peak, in bytes, and the largest tensor in a
    training step and in an evaluation, in elements."""
    found = []
    for number in chunks:
        cell = Cell(2, "gpt-tied", "fp32", {"tp": 2}, {"global_size": MICRO}, {"loss_chunks": number})
        engine = build_engine(config_of(cell), mesh_of(cell, rank))
        tokens = torch.arange(MICRO * SEQUENCE).view(MICRO, SEQUENCE)
        batch = StepBatch((Batch(tokens, tokens.flip(1)),), tokens.numel())
        with Allocations() as training:
            engine.train_step(0, batch)
        with Allocations() as evaluation:
            engine.eval_step(batch)
        head: Any = engine.parts[0].head
        hidden = torch.randn(MICRO, SEQUENCE // 2, DIM, requires_grad=True)
        with PeakMemory() as memory:
            loss: Tensor = head.loss(hidden, tokens)[0]
            kept = memory.alive
            loss.backward()
        found.append((kept, memory.peak, training.largest, evaluation.largest))
    return found


def test_no_rank_holds_whole_logits() -> None:
    logits, tokens, matrix = 4 * MICRO * SEQUENCE * WORDS, MICRO * SEQUENCE, 4 * WORDS * DIM
    hidden = 4 * tokens * DIM
    cases = [1, 4]
    for of_rank in run_on_world(2, bytes_of_loss, cases):
        for chunks, (kept, peak, trained, evaluated) in zip(cases, of_rank, strict=True):
            gradients = matrix / 2 + 1.5 * hidden  # with the shard of normed hidden states
            assert kept == pytest.approx(gradients, rel=0.05)
            assert peak == pytest.approx(logits / 2 / chunks + gradients + hidden, rel=0.05)
            assert 4 * trained == max(logits / chunks, matrix) / 2  # nor the gradient of the whole table
            assert 4 * evaluated == logits / chunks / 2


def test_a_vocabulary_that_leaves_a_rank_without_words_is_refused() -> None:
    cell = Cell(4, strategy={"tp": 4, "dp": 1})
    config = cell.config()
    small = replace(config, model=replace(config.model, vocab_size=5, n_kv_heads=4))
    with pytest.raises(UserError, match="leaves tensor-parallel ranks without words"):
        validate(small, nodes=1, workers_per_node=4)


def with_an_incomplete_plan(rank: int, world_size: int) -> str:
    """The refusal of a plan of the GPT without the norm of a branch."""
    cell = Cell(world_size, "gpt", strategy={"tp": world_size})
    whole = tensor.imported

    def incomplete(path: str) -> Any:
        return lambda model: {name: style for name, style in whole(path)(model).items() if name != "layers.0.ffn_norm"}

    with mock.patch.object(tensor, "imported", incomplete), pytest.raises(UserError) as raised:
        build_engine(cell.config(), mesh_of(cell, rank))
    return raised.value.what


def test_a_plan_that_omits_a_parameter_of_a_sequence_shard_is_refused() -> None:
    for message in run_ranks(2, with_an_incomplete_plan):
        assert "shards the sequence, but it omits layers.0.ffn_norm.weight" in message
