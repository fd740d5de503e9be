"""Provides frozen runs of a few CPU workers and commands of Slurm to the tests of the agent, and counts the files that
they open."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import (
    BatchConfig,
    ClusterConfig,
    Config,
    ElasticConfig,
    GPTConfig,
    RunConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze

Freeze = Callable[..., RunDirectory]
TINY = GPTConfig(vocab_size=256, n_layers=2, dim=16, n_heads=2, n_kv_heads=2, ffn_dim=32)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def frozen(tmp_path: Path) -> Freeze:
    """Returns a function that freezes a run of ``workers`` data-parallel CPU workers under ``tmp_path``."""

    def make(
        name: str = "run",
        workers: int = 2,
        stop_grace_s: float = 30,
        max_gpu_hours: float | None = None,
        gpus_per_node: int | str = 0,
        on_event: str | None = None,
    ) -> RunDirectory:
        config = Config(
            cluster=ClusterConfig(kind="local", gpus_per_node=gpus_per_node, cpu_workers=workers),
            strategy=StrategyConfig(name="dp", dp="fill"),
            model=TINY,
            data=SyntheticDataConfig(),
            train=TrainConfig(steps=1),
            batch=BatchConfig(global_size=12),
            elastic=ElasticConfig(stop_grace_s=stop_grace_s),
            run=RunConfig(root=str(tmp_path), name=name, max_gpu_hours=max_gpu_hours, on_event=on_event),
        )
        run = RunDirectory(tmp_path / name)
        freeze(config, run)
        return run

    return make


class Opened:
    """The paths that this process opens or lists inside a ``with`` block. An audit hook stays for ever."""

    def __init__(self) -> None:
        self._paths: list[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._paths is not None and event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename"):
            self._paths.append(str(arguments[0]))

    @contextmanager
    def below(self, folder: Path) -> Iterator[list[str]]:
        found: list[str] = []
        self._paths = []
        try:
            yield found
        finally:
            found += [path for path in self._paths if path.startswith(str(folder))]
            self._paths = None


@pytest.fixture(scope="session")
def opened() -> Opened:
    return Opened()


def stand_in(folder: Path, **lines: str) -> None:
    """Makes commands by these names."""
    for name, line in lines.items():
        tool = folder / name
        tool.write_text(f"#!/bin/sh\n{line}\n")
        tool.chmod(0o755)


@pytest.fixture
def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that replaces commands for this process, which is in job 7."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return partial(stand_in, tmp_path)
