"""The validation loss is the exact mean over the validation set, however it is split."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from hpc_train.config.schema import BatchConfig, SyntheticDataConfig, TrainConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.feed import EvalFeed
from hpc_train.layout.resolve import resolve_layout
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.train.evaluation import Evaluation, evaluate
from hpc_train.train.metrics import MetricSums
from tests.data.layouts import replicas
from tests.ranks import run_ranks
from tests.train.runs import frozen

SAMPLES = 10  # the validation set of the tiny runs: no multiple of the batch of 8, and 2 of them fill no micro-batch


def test_a_short_run_evaluates_half_as_many_samples_as_it_trains_on() -> None:
    data = build_dataset(SyntheticDataConfig(validation_samples=100), "validation", 0)
    feed = EvalFeed(data, BatchConfig(global_size=8), replicas(1, 8), 0, torch.device("cpu"))
    whole = Evaluation({"": feed, "code": feed}, MetricSums({}, cast(Mesh, None)), cast(Mesh, None))
    found = {
        (setting, trained): whole.limited(TrainConfig(eval_samples=setting), trained).extent()
        for setting, trained in [("auto", 160), ("auto", 200), ("all", 8), (99, 10**6), (1, 8)]
    }
    assert found == {
        ("auto", 160): "80 of 100 samples, 80 of 100 samples of eval_sets.code",
        ("auto", 200): None,
        ("all", 8): None,
        (99, 10**6): "99 of 100 samples, 99 of 100 samples of eval_sets.code",
        (1, 8): "1 of 100 samples, 1 of 100 samples of eval_sets.code",
    }


def both_means(rank: int, world_size: int, path: str) -> tuple[float, float, float, float]:
    """Loss and accuracy by the engine, and by one sample after the other on a model of its own."""
    config = load(RunDirectory(Path(path)))
    mesh = join_mesh(resolve_layout(config, 1, world_size), rank, torch.device("cpu"))
    dataset = build_dataset(config.data, "validation", config.train.seed)
    engine = build_engine(config, mesh)
    feed = EvalFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, mesh.device)
    first, found = evaluate(engine, feed), evaluate(engine, feed)
    assert first == found is not None
    assert found.target_count == SAMPLES * 8
    model = build_model(config.model, config.train.seed)
    assert isinstance(model, Model)
    materialize(model, mesh.device, config.train.seed, torch.float64)
    model.eval()
    loss = right = count = 0.0
    for index in range(len(dataset)):
        sample = dataset.sample(index, 0)
        sums = model(torch.from_numpy(sample.inputs)[None], {}, torch.from_numpy(sample.targets)[None])
        loss, count, right = loss + float(sums[0]), count + float(sums[1]), right + float(sums[2])
    assert found.accuracy is not None
    return found.loss, found.accuracy, loss / count, right / count


ZBV = ["strategy.schedule=zbv", "strategy.stages_per_rank=2", "strategy.data_parallel=allreduce"]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, ["+strategy=single", "batch.micro_size=3"], id="single"),
        pytest.param(3, ["+strategy=dp"], id="dp"),
        pytest.param(2, ["+strategy=zero3"], id="zero3"),
        pytest.param(2, ["+strategy=tp"], id="tp"),
        pytest.param(4, ["+strategy=hybrid"], id="hybrid"),
        pytest.param(2, ["+strategy=pp", *ZBV], id="zbv"),
    ],
)
@pytest.mark.long_form(4, cases=["single", "dp", "zero3", "tp", "zbv"])
def test_the_mean_is_exact(tmp_path: Path, ranks: int, overrides: list[str]) -> None:
    run = frozen(tmp_path / "run", *overrides, "precision=fp64")
    for loss, accuracy, expected_loss, expected_accuracy in run_ranks(ranks, both_means, str(run.path)):
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert accuracy == pytest.approx(expected_accuracy, rel=1e-12)
