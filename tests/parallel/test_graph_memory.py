"""The estimate with CUDA graphs is the peak of their pool and that of all else, counted tensor by tensor on CPUs.

No graph is recorded. Compiled code runs as torch traced it and inductor's partitioner cut it into a forward and a
backward, and what it allocates counts as the pool's. As in
``CUDAGraphNode`` of torch/_inductor/cudagraph_trees.py it gets copies of its inputs, except for parameters and what is
in the pool already.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import join_mesh
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from tests.checkpoint.progress import LONG
from tests.parallel.memory import PeakMemory, norms_of_gpus
from tests.parallel.test_peak_memory import LENGTH, Case, config_of
from tests.ranks import run_ranks


class PooledMemory(PeakMemory):
    """Observes the peak of the pool as well.

    Attributes:
        compiled: whether compiled code runs.
        pool_peak, rest_peak: the most bytes that the pool held, and all else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compiled = False
        self.pool_peak = self.rest_peak = 0
        self._pool: dict[int, Any] = {}

    supports_higher_order_operators = True  # such as one that keeps the state of random numbers

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            self._add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {key: self._references[key] for key in self._sizes}
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for key in self._sizes:
            if self.compiled and before.get(key) is not self._references[key]:
                self._pool[key] = self._references[key]
        pooled = sum(size for key, size in self._sizes.items() if self._pool.get(key) is self._references[key])
        self.pool_peak = max(self.pool_peak, pooled)
        self.rest_peak = max(self.rest_peak, self.alive - pooled)
        return made

    def in_pool(self, tensor: Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key in self._sizes and self._pool.get(key) is self._references[key]


def pooled(memory: PooledMemory, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Returns a function that runs ``graph`` as its CUDA graph would, and frees its inputs like that."""

    def run(inputs: list[Any]) -> Any:
        memory.compiled = True
        try:
            given = [
                value.clone()
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not memory.in_pool(value)
                else value
                for value in inputs
            ]
            inputs.clear()
            return fx.Interpreter(graph).boxed_run(given)
        finally:
            memory.compiled = False

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def peaks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, int]]:
    torch.set_num_threads(1)
    return [_peaks(rank, world_size, captured(case)) for case in cases]


def captured(case: Case) -> Config:
    config = config_of(**case)
    return replace(config, train=replace(config.train, compile=True, cuda_graphs=True))


def existing() -> list[Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not each.is_meta]


def _peaks(rank: int, world_size: int, config: Config) -> tuple[int, int]:
    """Returns the peaks of the pool and of all else in the second step, after the first has compiled."""
    import torch._inductor.compile_fx as inductor

    before = existing()  # of earlier cases, kept so that no id is used again
    memory = PooledMemory()
    compiler = partial(pooled, memory)
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    inductor.compile_fx = lambda graph, inputs, **_: backend(graph, inputs)  # type: ignore[assignment]
    mesh = join_mesh(resolve_layout(config, 1, world_size), rank, torch.device("cpu"))
    tokens = torch.arange(LENGTH).expand(mesh.layout.micro_size, -1).contiguous()
    batch = StepBatch((Batch(tokens, tokens.clone()),) * mesh.layout.micro_batches, config.batch.global_size * LENGTH)
    with norms_of_gpus():
        engine = build_engine(config, mesh)
        take_step = TrainStep(config, mesh, engine, Optimizer(config.optim, engine.named_parameters()), 2)
        take_step(0, batch)
        earlier = {*map(id, before)}
        memory.know(each for each in existing() if id(each) not in earlier)
        with memory:
            take_step(1, batch)
    torch._dynamo.reset()
    return memory.pool_peak, memory.rest_peak


GRADIENTS: Case = {"dim": 128, "micro": 1}  # decide the peak
CASES: list[Case] = [GRADIENTS | {"precision": "bf16", "batches": 2}]
if LONG:
    CASES += [{}, GRADIENTS, GRADIENTS | {"precision": "bf16", "weights": "bf16"}]
    CASES += [{"precision": "bf16", "micro": 16, "batches": 2}, {"precision": "bf16", "vocabulary": 4096}]


@pytest.mark.long_form(10)
def test_the_estimate_is_the_peak_of_the_pool_and_that_of_all_else() -> None:
    [found] = run_ranks(1, peaks, [{"layers": 4} | case for case in CASES], timeout=300)
    for case, both in zip(CASES, found, strict=True):
        config = captured({"layers": 4} | case)
        wanted = estimate(config, resolve_layout(config, 1, 1))
        assert wanted is not None
        assert wanted.total == pytest.approx(sum(both), rel=0.05), (case, both)
