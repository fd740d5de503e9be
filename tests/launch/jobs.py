"""Jobs for the tests of launching, made without composing a config."""

from __future__ import annotations

from pathlib import Path

from hpc_train.config.schema import (
    BatchConfig,
    ClusterConfig,
    Config,
    GPTConfig,
    LaunchConfig,
    RunConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.config.values import node_range
from hpc_train.launch.job import Job
from hpc_train.layout.layout import JobShape, Place
from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.directory import RunDirectory

TINY = GPTConfig(vocab_size=256, n_layers=2, dim=16, n_heads=2, n_kv_heads=2, ffn_dim=32)


def make_job(
    sweep: Path,
    number: int = 0,
    *,
    cluster: ClusterConfig | None = None,
    dp: int | str = "fill",
    cap: int | str = "auto",
    gpus: int = 0,
) -> Job:
    """A data-parallel job on ``gpus`` GPUs or on the CPU workers of ``cluster``."""
    cluster = cluster or ClusterConfig(kind="local", cpu_workers=2)
    config = Config(
        cluster=cluster,
        strategy=StrategyConfig(name="dp", dp=dp),
        model=TINY,
        data=SyntheticDataConfig(),
        train=TrainConfig(steps=100),
        batch=BatchConfig(global_size=64),
        launch=LaunchConfig(array_parallelism=cap),
        run=RunConfig(root=str(sweep.parent), name=sweep.name),
    )
    workers = gpus or cluster.cpu_workers
    run = RunDirectory(sweep / str(number))
    run.create()
    nodes = node_range(cluster)[1]
    layout = resolve_layout(config, nodes, workers)
    shape = JobShape(nodes, nodes, gpus, workers, Place.MACHINE)
    return Job(config, layout, shape, run, number=number, overrides=("+strategy=dp",))
