"""Logits that are spread over tensor-parallel ranks give the loss, gradients and accuracy of whole logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.layout.validate import validate
from hpc_train.models.linear_head import VocabularyShard, _evaluate_shard, linear_cross_entropy
from hpc_train.models.transformer import count_correct
from hpc_train.parallel import tensor
from hpc_train.parallel.build import build_engine
from hpc_train.run.freeze import check_identity
from tests.config.composing import compose
from tests.models.test_linear_head import VOCABULARY, drawn, plain
from tests.parallel.cells import SEQUENCE, Cell, Form, in_two_forms
from tests.parallel.memory import Allocations, PeakMemory
from tests.parallel.oracle import check_cells, mesh_of
from tests.ranks import run_on_world


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


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long_form(2))])
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
    cases = [4]
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
    whole = tensor.locate

    def incomplete(path: str, where: str) -> Any:
        plan = whole(path, where)
        return lambda model: {name: style for name, style in plan(model).items() if name != "layers.0.ffn_norm"}

    with mock.patch.object(tensor, "locate", incomplete), pytest.raises(UserError) as raised:
        build_engine(cell.config(), mesh_of(cell, rank))
    return raised.value.what


def test_a_plan_that_omits_a_parameter_of_a_sequence_shard_is_refused() -> None:
    for message in run_on_world(2, with_an_incomplete_plan):
        assert "shards the sequence, but it omits layers.0.ffn_norm.weight" in message


Z: dict[str, Any] = {"z_loss": 0.3}  # far more than is usual, so that an error shows
MODELS = ("gpt-tied", "gpt-options", "gpt")


def cells(world_size: int, splits: list[dict[str, Any]], **fields: Any) -> list[Cell]:
    """One cell for each split, in turn with whole logits and chunks of the loss."""
    batches = [2 * split.get("pp", 1) * split.get("stages_per_rank", 1) for split in splits]
    return [
        Cell(
            world_size,
            MODELS[number % 3],
            strategy=split,
            batch={"micro_batches": 1 if split.get("schedule") == "sequential" else batch},
            train=Z | ({"loss_chunks": 3} if number % 2 else {}),
            **fields,
        )
        for number, (split, batch) in enumerate(zip(splits, batches, strict=True))
    ]


def test_one_rank_in_every_form_of_the_loss(record: Callable[..., None]) -> None:
    forms: list[dict[str, Any]] = [{"loss_chunks": 1}, {"loss_chunks": 3}, {"activation_checkpointing": "full"}]
    record(check_cells([Cell(1, model, train=Z | form) for model in MODELS for form in forms]), [])


@in_two_forms(20)
def test_two_ranks_of_every_kind(form: Form, record: Callable[..., None]) -> None:
    splits: list[dict[str, Any]] = [{"dp": 2, "data_parallel": kind} for kind in KINDS]
    splits += [{"tp": 2}, {"cp": 2}, {"tp": 2}, {"cp": 2}]
    scaled = cells(2, [{"dp": 2}, {"tp": 2}], loss_scale=1024.0)
    record(check_cells(form([*cells(2, splits), *scaled], "dp", "tp", "cp")), [])


@pytest.mark.long_form(15)  # test_pipeline has one schedule
def test_every_pipeline_schedule(record: Callable[..., None]) -> None:
    splits = [{"pp": 2, "schedule": name, "stages_per_rank": row.stages_per_rank[0]} for name, row in SCHEDULES.items()]
    record(check_cells(cells(2, splits)), [])


@pytest.mark.long_form(40)
def test_several_axes(record: Callable[..., None]) -> None:
    """Also recomputed chunks: a stage of gpipe keeps several micro-batches."""
    splits: list[dict[str, Any]] = [
        {"pp": 2, "dp": 2, "data_parallel": "zero2", "schedule": "gpipe"},
        {"pp": 2, "tp": 2, "schedule": "1f1b"},
        {"dp": 2, "cp": 2, "data_parallel": "zero2"},
        {"pp": 2, "cp": 2, "schedule": "1f1b"},
        {"dp": 2, "tp": 2, "data_parallel": "zero3"},
        {"cp": 2, "tp": 2, "data_parallel": "allreduce"},
    ]
    record(check_cells(cells(4, splits)), [])


def test_what_is_no_language_model_is_refused() -> None:
    config = typed(compose(["model=hf", "model.name_or_path=x", "model.task=masked_lm", "train.z_loss=1e-4"]))
    with pytest.raises(UserError, match=r"model\.task=masked_lm predicts no next token"):
        validate(config, 1, 1)
    with pytest.raises(UserError, match=r"train\.z_loss is -1"):
        Cell(1, train={"z_loss": -1.0}).layout()


def build(rank: int, world_size: int, model: str) -> None:
    cell = Cell(1, model, train=Z)
    build_engine(cell.config(), mesh_of(cell, rank))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("custom", "has no head that returns the logits of each token"),
        ("custom-weighted", "computes its own loss"),
        ("gpt-weighted", "computes its own loss"),
        ("gpt-contrastive", "computes its own loss"),
    ],
)
def test_a_loss_of_the_users_is_refused(model: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=rf"train\.z_loss is set, but the model {reason}"):
        run_on_world(1, build, model)


def test_a_run_keeps_its_z_loss() -> None:
    config = typed(compose(["train.z_loss=1e-4"]))
    other = replace(config, train=replace(config.train, z_loss=0.0))
    with pytest.raises(UserError, match="z_loss"):
        check_identity(config, other)
