"""Documents packed or padded give the loss and the gradients of each by itself, under every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from hpc_train.config.schema import BatchConfig
from hpc_train.data.dataset import IGNORED, Batch, Dataset, Sample, StepBatch
from hpc_train.data.device_copy import with_document_ends
from hpc_train.data.feed import TrainFeed
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.models.packed_attention import VARLEN
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import materialize
from tests.models.varlen import kernels_in_plain_torch
from tests.parallel.cells import SEQUENCE, VOCABULARY, Cell
from tests.parallel.oracle import error, mesh_of, whole
from tests.ranks import run_on_world

LENGTHS = [[3, 5], [8], [2, 2, 3], [1, 6]]  # of the documents in each sequence of 8; what is left is padding
UNEVEN = [[3, 17, 1, 9, 3, 17, 1, 9]]  # few lengths: DTensor plans each operator for each shape

CELLS: dict[str, list[Cell]] = {
    "2": [
        Cell(2, "gpt-tied", strategy={"dp": 2, "data_parallel": "zero3"}),
        Cell(2, "gpt-windows", strategy={"pp": 2, "schedule": "1f1b"}),
        Cell(2, "gpt-windows", strategy={"cp": 2, "data_parallel": "zero3"}),
        Cell(2, "gpt-windows", strategy={"cp": 2, "context": "ring"}),
    ],
    "4": [
        Cell(4, strategy={"pp": 2, "tp": 2}),
        Cell(4, strategy={"cp": 2, "tp": 2, "data_parallel": "allreduce"}),
        Cell(4, "gpt-windows", strategy={"cp": 2, "pp": 2, "schedule": "1f1b"}),
        Cell(4, strategy={"dp": 2, "cp": 2, "data_parallel": "zero2"}),
        Cell(4, strategy={"cp": 2, "tp": 2, "context": "ring", "data_parallel": "allreduce"}),
        Cell(4, "gpt-windows", strategy={"cp": 2, "pp": 2, "context": "ring", "schedule": "1f1b"}),
        *(Cell(4, "gpt-few-heads", strategy={"cp": 4, "context": context}) for context in ("ring", "both")),
    ],
    "2-more": [
        Cell(2, strategy={"dp": 2}),
        Cell(2, "gpt-windows", strategy={"tp": 2}),
        Cell(2, "gpt-windows", strategy={"tp": 2}, train={"z_loss": 0.3, "loss_chunks": 2}),
        Cell(2, strategy={"pp": 2, "schedule": "zbv", "stages_per_rank": 2}),
        Cell(2, strategy={"tp": 2}),
        Cell(2, strategy={"pp": 2, "schedule": "gpipe"}),
        Cell(2, "gpt-tied", strategy={"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}),
        Cell(2, strategy={"dp": 2}, train={"activation_checkpointing": "full"}),
        Cell(2, strategy={"cp": 2}),
        Cell(2, strategy={"cp": 2}, train={"z_loss": 0.3}),
    ],
    "4-more": [
        Cell(4, strategy={"dp": 2, "pp": 2, "data_parallel": "zero2"}),
        Cell(4, strategy={"dp": 2, "tp": 2, "data_parallel": "allreduce"}),
    ],
}
FORMS = ["2", *(pytest.param(form, marks=pytest.mark.long_form(25)) for form in ("4", "2-more", "4-more"))]


def padded(form: str) -> list[Cell]:
    """Returns the cells for samples of uneven length. Recomputation and z-loss see no padding.

    Those of tensor parallelism are in the long form: DTensor plans each operator for each shape.
    """
    short = form.removesuffix("-more")
    seen = [one for one in CELLS[short] if "tp" not in one.strategy]
    return seen if form == short else [*(one for one in CELLS[short] if one not in seen), *CELLS[form]]


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_train_as_single_ones_do(form: str) -> None:
    cells = CELLS[form]
    run_on_world(cells[0].world_size, _compare, cells, timeout=280)


def _compare(rank: int, _: int, cells: list[Cell]) -> None:
    for cell in (replace(cell, batch={"global_size": 4, "micro_size": 1}) for cell in cells):
        mesh = mesh_of(cell, rank)
        documents = _documents(LENGTHS)
        loss, plain, gradients = _one_by_one(cell, [one for sequence in documents for one in sequence])
        engine = build_engine(cell.config(), mesh)
        batch = _packed(documents, mesh)
        found = engine.reduce(engine.train_step(0, batch))
        assert found.loss == pytest.approx(loss, rel=1e-12) and found.target_count == batch.target_count, cell
        packed = {name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()}
        assert error(packed, gradients) < 1e-10, cell
        assert engine.reduce(engine.eval_step(batch)).loss == pytest.approx(plain, rel=1e-12), cell
        with kernels_in_plain_torch(VARLEN) as chosen:  # with the boundaries of the documents in place of a mask
            ends = tuple(with_document_ends(micro, pin=False) for micro in batch.micro_batches)
            found = engine.reduce(engine.train_step(1, replace(batch, micro_batches=ends)))
            assert found.loss == pytest.approx(loss, rel=1e-12), cell
            packed = {name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()}
            assert error(packed, gradients) < 1e-10, cell
            assert len(chosen) >= len(ends) or mesh.layout.ring > 1, cell  # a ring has plain products
            evaluated = engine.eval_step(replace(batch, micro_batches=ends))
            assert engine.reduce(evaluated).loss == pytest.approx(plain, rel=1e-12), cell


class _Documents(Dataset):
    """Each of ``UNEVEN`` as a sample of its own length."""

    def __init__(self) -> None:
        self.documents = _documents(UNEVEN)[0]
        self.lengths = np.array(UNEVEN[0])

    def __len__(self) -> int:
        return len(self.documents)

    def sample(self, index: int, epoch: int) -> Sample:
        tokens, wanted = self.documents[index]
        return Sample(tokens.numpy(), wanted.numpy(), {"positions": np.arange(len(tokens))})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.long_form(25, cases=["2"])  # tests/data/test_ragged.py
def test_samples_of_uneven_length_train_as_single_ones_do(form: str) -> None:
    cells = padded(form)
    run_on_world(cells[0].world_size, _compare_uneven, cells, timeout=280)


def _compare_uneven(rank: int, _: int, cells: list[Cell]) -> None:
    """Through the feed: who gets what, and its padding."""
    dataset = _Documents()
    for cell in (replace(cell, batch={"global_size": 8, "micro_size": 1}) for cell in cells):
        mesh = mesh_of(cell, rank)
        loss, _plain, gradients = _one_by_one(cell, dataset.documents)
        engine = build_engine(cell.config(), mesh)
        feed = TrainFeed(dataset, BatchConfig(global_size=8), mesh.layout, mesh.dp_rank, 5, mesh.device, 0)
        widths = set()
        for step in range(2):
            batch = StepBatch(next(feed).micro_batches, sum(UNEVEN[0]))
            found = engine.reduce(engine.train_step(step, batch))
            assert found.loss == pytest.approx(loss, rel=1e-12) and found.target_count == batch.target_count, cell
            padded = {name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()}
            assert error(padded, gradients) < 1e-10, cell
            widths |= {micro.inputs.shape[1] for micro in batch.micro_batches}
        assert len(widths) == 1 if mesh.layout.pp > 1 else len(widths) > 2, cell


Document = tuple[torch.Tensor, torch.Tensor]


def _documents(lengths: list[list[int]]) -> list[list[Document]]:
    generator = torch.Generator().manual_seed(1)
    drawn: Callable[[int], torch.Tensor] = lambda n: torch.randint(VOCABULARY, (n + 1,), generator=generator)  # noqa: E731
    return [[(tokens[:-1], tokens[1:]) for tokens in map(drawn, each)] for each in lengths]


def _one_by_one(cell: Cell, documents: list[Document]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Each document alone through the whole model, without packing and context: the loss with and without z-loss, and
    its gradients."""
    config = cell.config()
    model = build_model(config.model, config.train.seed)
    assert isinstance(model, Model)
    materialize(model, torch.device("cpu"), config.train.seed, torch.float64)
    targets = sum(len(wanted) for _, wanted in documents)
    plain = z_loss = torch.zeros((), dtype=torch.float64)
    for inputs, wanted in documents:
        plain = plain + model(inputs.unsqueeze(0), {}, wanted.unsqueeze(0))[0] / targets
        logits = model(inputs.unsqueeze(0), {})
        assert isinstance(logits, torch.Tensor)
        z_loss = z_loss + logits.logsumexp(-1).square().sum() / targets
    loss = plain + config.train.z_loss * z_loss
    loss.backward()
    return loss.item(), plain.item(), {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def _packed(documents: list[list[Document]], mesh: Mesh) -> StepBatch:
    """This rank's share, as ``PackedTokensDataset`` makes sequences."""
    own = range(mesh.dp_rank * 4 // mesh.layout.dp, (mesh.dp_rank + 1) * 4 // mesh.layout.dp)
    targets = sum(len(wanted) for sequence in documents for _, wanted in sequence)
    return StepBatch(tuple(_sequence(documents[index]) for index in own), targets)


def _sequence(documents: list[Document]) -> Batch:
    inputs, targets = torch.zeros(1, SEQUENCE, dtype=torch.int64), torch.full((1, SEQUENCE), IGNORED)
    positions, ids = torch.zeros(1, SEQUENCE, dtype=torch.int64), torch.full((1, SEQUENCE), -1)
    at = 0
    for number, (tokens, wanted) in enumerate(documents):
        end = at + len(tokens)
        inputs[0, at:end], targets[0, at:end], ids[0, at:end] = tokens, wanted, number
        positions[0, at:end] = torch.arange(len(tokens))
        at = end
    return Batch(inputs, targets, {"positions": positions, "document_ids": ids})
