"""Metrics under every layout equal those of one process over the whole evaluation set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.config.schema import TargetConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.precision.dtypes import parameter_dtype
from hpc_train.train.metrics import CallFailed, MetricSums, build_metric
from hpc_train.train.metrics.ready import F1, Accuracy, MeanIoU, Perplexity, TopK
from tests.checkpoint.training import join_again
from tests.parallel.cells import VOCABULARY, Cell
from tests.parallel.oracle import global_batch, local_batch
from tests.ranks import run_on_world

READY = "hpc_train.train.metrics.ready."
METRICS = {
    "accuracy": TargetConfig(f"{READY}Accuracy"),
    "top_k": TargetConfig(f"{READY}TopK", {"k": 3}),
    "perplexity": TargetConfig(f"{READY}Perplexity"),
    "f1": TargetConfig(f"{READY}F1"),
    "micro": TargetConfig(f"{READY}F1", {"average": "micro"}),
    "miou": TargetConfig(f"{READY}MeanIoU"),
    "confidence": TargetConfig("tests.parallel.test_metrics.confidence", {"power": 2}),
}
REDUCE = {"data_parallel": "allreduce"}
CELLS = [
    Cell(4, "gpt", strategy={"dp": 4}, batch={"micro_batches": 3}),
    Cell(4, "gpt-tied", strategy={"dp": 4, "data_parallel": "zero3"}),
    Cell(4, "vit", strategy={"dp": 2, "pp": 2, "schedule": "1f1b"}),
    Cell(4, "gpt", strategy={"pp": 4, "schedule": "gpipe"}, batch={"micro_batches": 4}),
    Cell(4, "gpt", strategy={"dp": 2, "pp": 2, "schedule": "zbv", "stages_per_rank": 2} | REDUCE),
    Cell(4, "gpt", strategy={"dp": 2, "tp": 2} | REDUCE, train={"loss_chunks": 2}),
    Cell(4, "gpt", strategy={"pp": 2, "tp": 2, "schedule": "1f1b"} | REDUCE),
    Cell(4, "gpt", strategy={"dp": 2, "cp": 2, "data_parallel": "zero3"}, train={"loss_chunks": 2}),
    Cell(4, "gpt", strategy={"pp": 2, "cp": 2, "schedule": "1f1b"}),
    Cell(4, "custom", strategy={"dp": 4, "data_parallel": "zero2"}),
    Cell(4, "gpt-weighted", strategy={"dp": 4}),
    Cell(4, "custom-weighted", strategy={"dp": 4}),
]
ON_TWO = [
    Cell(2, "vit", strategy={"pp": 2, "schedule": "1f1b"}),
    Cell(2, "gpt", strategy={"tp": 2}, train={"loss_chunks": 2}),
    Cell(2, "gpt", strategy={"cp": 2, "data_parallel": "zero3"}, train={"loss_chunks": 2}),
]


def confidence(outputs: Tensor, targets: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """A metric of a user: the mean probability of the target, to a power."""
    kept = targets != IGNORED
    chosen = outputs[kept].softmax(-1).gather(1, targets[kept][:, None])
    return chosen.pow(power).sum(), kept.sum()


def measured(rank: int, world_size: int, cells: list[Cell], metrics: dict[str, TargetConfig]) -> list[dict[str, float]]:
    """Returns the metrics of each cell by its engine, after an evaluation whose sums must not be left over."""
    found = []
    for cell in cells:
        mesh = join_again(cell.config(), rank, world_size)
        engine, sums = build_engine(cell.config(), mesh), MetricSums(metrics, mesh)
        for step in (1, 2):
            with sums.watching(engine.parts):
                engine.eval_step(local_batch(cell, mesh.layout, mesh.dp_rank, step))
            values = sums.read()
        engine.eval_step(local_batch(cell, mesh.layout, mesh.dp_rank, 0))  # nobody watches
        check_outputs(cell, engine)
        found.append(values)
    return found


def check_outputs(cell: Cell, engine: Engine) -> None:
    """Compares the outputs that a hook gets with those of one process; a pipeline has none."""
    inputs = global_batch(cell, 2)[0]
    if cell.layout().pp > 1:
        with pytest.raises(UserError, match="no rank holds the whole model"):
            engine.outputs(inputs)
        return
    torch.testing.assert_close(engine.outputs(inputs), whole_outputs(cell)[0], rtol=1e-10, atol=1e-12)


def whole_outputs(cell: Cell) -> tuple[Tensor, Tensor]:
    config, dtype = cell.config(), parameter_dtype(cell.precision)
    model: Any = build_model(config.model, config.train.seed)
    if cell.model.startswith("custom"):
        model.to(dtype)
    else:
        materialize(model, torch.device("cpu"), config.train.seed, dtype)
    inputs, targets = global_batch(cell, 2)
    with torch.no_grad():
        return model.eval()(inputs, {}, None), targets


@pytest.mark.parametrize(
    "chosen", [ON_TWO, pytest.param(CELLS, marks=pytest.mark.long_form(25))], ids=["short", "every"]
)
def test_every_layout_has_the_metrics_of_one_process(chosen: list[Cell]) -> None:
    for of_rank in run_on_world(chosen[0].world_size, measured, chosen, METRICS):
        for cell, found in zip(chosen, of_rank, strict=True):
            outputs, targets = whole_outputs(cell)
            for name, config in METRICS.items():
                metric = build_metric(name, config)
                parts = [torch.as_tensor(part, dtype=torch.float64).flatten() for part in metric.sums(outputs, targets)]
                assert found[name] == pytest.approx(metric.value(torch.cat(parts)), rel=1e-10), (str(cell), name)


@pytest.mark.long_form(8)
def test_metrics_of_torchmetrics() -> None:
    """Their states are added up over micro-batches as over ranks."""
    functional = pytest.importorskip("torchmetrics.functional.classification")
    args = {"num_classes": VOCABULARY}
    wanted = {
        "f1": TargetConfig("torchmetrics.classification.MulticlassF1Score", args | {"average": "macro"}),
        "each": TargetConfig("torchmetrics.classification.MulticlassRecall", args | {"average": "none"}),
    }
    outputs, targets = whole_outputs(Cell(1, "gpt"))
    kept = targets != IGNORED
    expected = {
        "f1": functional.multiclass_f1_score(outputs[kept], targets[kept], average="macro", **args),
        "each": functional.multiclass_recall(outputs[kept], targets[kept], average="none", **args),
    }
    for name, config in wanted.items():
        metric = build_metric(name, config)
        sums = [metric.sums(*micro) for micro in zip(outputs.split(3), targets.split(3), strict=True)]
        found = metric.value(torch.stack([torch.as_tensor(each) for each in sums]).sum(0))
        values = [*found.values()] if isinstance(found, dict) else [found]
        assert values == pytest.approx(expected[name].flatten().tolist(), rel=1e-6)
    with pytest.raises(UserError, match="its state preds is not a sum"):
        build_metric("auroc", TargetConfig("torchmetrics.classification.MulticlassAUROC", args | {"thresholds": None}))


def test_the_formulas() -> None:
    """Three classes, of which one is neither predicted nor a target; the last target is padding."""
    logits = torch.tensor([[3.0, 1, 0], [2, 1, 0], [0, 4, 0], [1, 0, 0]], dtype=torch.float64)
    targets = torch.tensor([0, 1, 1, IGNORED])

    def value(metric: Any) -> float:
        parts = [torch.as_tensor(part, dtype=torch.float64).flatten() for part in metric.sums(logits, targets)]
        return float(metric.value(torch.cat(parts)))

    assert value(Accuracy()) == value(F1("micro")) == pytest.approx(2 / 3)
    assert value(TopK(2)) == 1.0
    assert value(F1()) == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert value(MeanIoU()) == pytest.approx(1 / 2)
    assert value(Perplexity()) == pytest.approx(float(F.cross_entropy(logits[:3], targets[:3]).exp()))


def alone(rank: int, world_size: int) -> Mesh:
    return join_again(Cell(1).config(), rank, world_size)


def failing(rank: int, world_size: int) -> str:
    mesh = alone(rank, world_size)
    engine = build_engine(Cell(1).config(), mesh)
    sums = MetricSums({"mine": TargetConfig("tests.parallel.test_metrics.broken")}, mesh)
    with pytest.raises(CallFailed) as caught, sums.watching(engine.parts):
        engine.eval_step(local_batch(Cell(1), mesh.layout, 0, 0))
    return str(caught.value)


def broken(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError("I want pictures")


def test_an_error_names_the_metric_and_the_line_of_the_user() -> None:
    (message,) = run_on_world(1, failing)
    line = broken.__code__.co_firstlineno + 1
    assert message == (
        "metric mine (tests.parallel.test_metrics.broken) failed in sums(): ValueError: I want pictures "
        f"({__file__}:{line})"
    )
