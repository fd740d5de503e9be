"""The bare loops train like the engine: only then is a comparison of their speeds worth anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hpc_train.bench.step import bare_loop
from hpc_train.config.schema import (
    BatchConfig,
    Config,
    GPTConfig,
    OptimConfig,
    PrecisionConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from tests.ranks import run_ranks

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp": (2, {"dp": "fill"}),
    "zero2": (2, {"dp": "fill", "data_parallel": "zero2"}),
    "zero3": (2, {"dp": "fill", "data_parallel": "zero3"}),
    "pp": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}),
}


def config_of(strategy: dict[str, Any], precision: str = "fp32") -> Config:
    return Config(
        strategy=StrategyConfig(**strategy),
        model=GPTConfig(vocab_size=20, n_layers=4, dim=16, n_heads=2, n_kv_heads=2, ffn_dim=32),
        data=SyntheticDataConfig(samples=64, sequence_length=8, vocab_size=20),
        # Weight decay apart: the bare loops give it to all parameters, as most of their kind do.
        optim=OptimConfig(lr=1e-3, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=0.3),
        precision=PrecisionConfig(precision),
        batch=BatchConfig(global_size=8, micro_batches=4),
        train=TrainConfig(steps=3),
    )


def trained(rank: int, world_size: int, kind: str, strategy: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Parameters of this rank after three steps, of the engine and of the bare loop."""
    import torch
    from torch.distributed.tensor import DTensor

    from hpc_train.bench.bare_loop import build_bare_loop
    from hpc_train.data.build import build_dataset
    from hpc_train.data.dataset import StepBatch
    from hpc_train.data.feed import TrainFeed
    from hpc_train.parallel.build import build_engine
    from hpc_train.parallel.mesh import join_mesh
    from hpc_train.train.optimizers.optimizer import Optimizer
    from hpc_train.train.step import TrainStep

    config = config_of(strategy)
    layout = validate(config, 1, world_size)
    mesh = join_mesh(layout, rank, torch.device("cpu"))
    engine = build_engine(config, mesh)
    step = TrainStep(config, mesh, engine, Optimizer(config.optim, engine.named_parameters()), 3)
    bare = build_bare_loop(kind, config, mesh)
    feed = TrainFeed(build_dataset(config.data, "train", 0), config.batch, layout, mesh.dp_rank, 0, mesh.device, 0)
    for number in range(3):
        batch = next(feed).micro_batches
        step(number, StepBatch(batch, 8 * 8))
        bare.step(batch, 8 * 8)

    def values(parameter: torch.Tensor) -> list[float]:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local.detach().flatten().tolist()

    parts = bare.model if isinstance(bare.model, torch.nn.ModuleList) else [bare.model]
    theirs = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    return {name: [values(ours), values(theirs[name])] for name, ours in engine.named_parameters().items()}


@pytest.mark.long_form(5, cases=[name for name in STRATEGIES if name not in ("single", "pp")])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_bare_loop_trains_as_the_engine_does(name: str) -> None:
    ranks, strategy = STRATEGIES[name]
    kind = bare_loop(config_of(strategy), validate(config_of(strategy), 1, ranks))
    assert kind == ("pp" if name == "interleaved" else name)
    for parameters in run_ranks(ranks, trained, kind, strategy):
        assert parameters
        for parameter, (ours, theirs) in parameters.items():
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), parameter


@pytest.mark.parametrize(
    ("strategy", "precision", "words"),
    [
        ({"dp": "fill", "data_parallel": "zero1"}, "fp32", "no bare loop for"),
        ({"pp": 2, "dp": "fill"}, "fp32", "no bare loop for"),
        ({"pp": 4, "schedule": "gpipe"}, "fp32", "no bare loop for"),
        ({}, "fp16", "needs loss scaling"),
    ],
)
def test_what_has_no_bare_loop_is_said_before_anything_starts(
    strategy: dict[str, Any], precision: str, words: str
) -> None:
    config = config_of(strategy, precision)
    with pytest.raises(UserError, match=words):
        bare_loop(config, validate(config, 1, 4))


def test_a_bare_pipeline_has_no_loss_in_chunks() -> None:
    config = config_of({"pp": 2})
    config = replace(config, train=replace(config.train, loss_chunks=2))
    with pytest.raises(UserError, match="computes the loss in one piece"):
        bare_loop(config, validate(config, 1, 2))


def products(rank: int, world_size: int) -> list[list[int]]:
    """Floating-point operations of one step of the engine and of the bare loop, with the loss in 1 and in 4 chunks."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from hpc_train.bench.bare_loop import build_bare_loop
    from hpc_train.data.dataset import Batch, StepBatch
    from hpc_train.parallel.build import build_engine
    from hpc_train.parallel.mesh import join_mesh

    tokens = torch.arange(16).view(2, 8)
    batches = (Batch(tokens, tokens),)
    mesh = join_mesh(validate(config_of({}), 1, world_size), rank, torch.device("cpu"))
    found = []
    for chunks in (1, 4):
        config = config_of({})
        config = replace(config, train=replace(config.train, loss_chunks=chunks))
        engine, bare = build_engine(config, mesh), build_bare_loop("single", config, mesh)
        flops = []
        for step in (partial(engine.train_step, 0, StepBatch(batches, 16)), partial(bare.step, batches, 16)):
            with FlopCounterMode(display=False) as counter:
                step()
            flops.append(counter.get_total_flops())
        found.append(flops)
    return found


def test_the_bare_loop_computes_the_products_of_the_engine_also_with_a_loss_in_chunks() -> None:
    (found,) = run_ranks(1, products)
    for ours, theirs in found:
        assert ours == theirs
