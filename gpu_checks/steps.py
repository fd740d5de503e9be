"""A training of this process alone, step by step, as the trainer runs it, without an agent.

Checks that a command cannot make (kernels, streams, synchronizations) use it. All that it takes from hpc_train stands
here, in one place.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu_checks.check import Probe
from gpu_checks.commands import SMALL, SYNTHETIC
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import TrainFeed
from hpc_train.elastic.rendezvous.store import serve
from hpc_train.layout.layout import Layout
from hpc_train.layout.resolve import resolve_layout
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.processes import join
from hpc_train.train.step import StepOutcome, TrainStep

HORIZON = 1000  # steps of the learning rate's schedule
TINY_GPT = ["model=gpt_tiny", "data.vocab_size=256", "data.sequence_length=64"]
TINIER = ["model.dim=32", "model.ffn_dim=64"]  # on the CPU


class World:
    """The process group of this process, which all ``Steps`` in it use."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._mesh: Mesh | None = None
        self._store: Any = None

    def mesh(self, config: Config) -> Mesh:
        layout = resolve_layout(config, 1, 1)
        if self._mesh is None:
            self._store = serve(socket.create_server(("127.0.0.1", 0)))
            self._mesh = join(self._spec(layout), config)
        return replace(self._mesh, layout=layout)

    def tiny_gpt(self, *overrides: str) -> Steps:
        """Returns the training of a GPT with four layers."""
        return self.steps(*TINY_GPT, *([] if self.probe.on_gpu else TINIER), *overrides)

    def steps(self, *overrides: str) -> Steps:
        """Returns a training that ``overrides`` change."""
        data = [] if any(each.startswith(("data=", "experiment=")) for each in overrides) else SYNTHETIC
        return self.of(self.config(*data, *SMALL, *overrides))

    def config(self, *overrides: str) -> Config:
        """Returns the config of ``overrides``, as a command takes them, on this device."""
        return typed(compose(with_right_plus([f"cluster.gpus_per_node={int(self.probe.on_gpu)}", *overrides])))

    def of(self, config: Config) -> Steps:
        """Returns the training of ``config``."""
        return Steps(config, self.mesh(config))

    def _spec(self, layout: Layout) -> WorkerSpec:
        return WorkerSpec(
            run_dir=str(self.probe.folder),
            attempt=0,
            rank=0,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            nodes=1,
            layout=layout,
            master_address="127.0.0.1",
            master_port=self._store.port,
            gpus_per_node=int(self.probe.on_gpu),
            threads=torch.get_num_threads() if self.probe.on_gpu else 1,
        )


class Steps:
    """Trains ``config`` step by step.

    Attributes:
        take: the trainer's step, with optimizer and loss scale.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        dataset = build_dataset(config.data, "train", config.train.seed)
        self.engine = build_engine(config, mesh)
        optimizer = Optimizer(config.optim, self.engine.named_parameters(), config.strategy.offload == "optimizer")
        self.optimizer = optimizer
        self.take = TrainStep(config, mesh, self.engine, optimizer, HORIZON)
        self.feed = TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, config.train.seed, mesh.device, 0)
        self.done = 0

    def batch(self) -> StepBatch:
        local = next(self.feed)
        return StepBatch(local.micro_batches, local.local_count)

    def step(self, batch: StepBatch | None = None) -> StepOutcome:
        outcome = self.take(self.done, batch or self.batch())
        self.done += 1
        return outcome

    def losses(self, steps: int) -> list[float]:
        return [self.engine.reduce(self.step().result).loss for _ in range(steps)]

    def parameters(self) -> dict[str, Tensor]:
        """Returns copies of all parameters."""
        return {name: value.detach().clone() for name, value in self.engine.named_parameters().items()}

    def wait(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def close(self) -> None:
        self.feed.close()


@contextmanager
def profiled(steps: Steps) -> Iterator[Any]:
    """Yields a profiler of what is done in the context, on the host and the device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (steps.mesh.device.type == "cuda")
    steps.wait()
    with profile(activities=activities, record_shapes=True) as profiler:
        yield profiler
        steps.wait()


def trace_of(profiler: Any, folder: Path) -> list[dict[str, Any]]:
    """Returns the events of the trace, which unlike the profiler's own name the stream of each kernel."""
    import json

    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    return [event for event in events if event.get("ph") == "X"]
