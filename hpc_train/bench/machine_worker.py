"""Runs the workers of ``bench machine``, which measure the numbers of a machine file on all ranks at the same time.

Each rank measures for itself, and rank 0 takes the median over the ranks. A time is the lower quartile of repeated
blocks: other processes slow down single blocks, and a GPU reaches the highest clocks only for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hpc_train.bench.machine import fit_rate
from hpc_train.bench.request import MachineRequest
from hpc_train.bench.worker import BenchRank, measure_on_ranks
from hpc_train.config.schema import Config, GPTConfig, SyntheticDataConfig
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh, synchronize
from hpc_train.parallel.tensor import apply_tensor_parallel
from hpc_train.planner.passes import ATTENTION_BACKWARD, PRODUCTS
from hpc_train.planner.work import TOUCHES, Block, count_work
from hpc_train.preflight.measure import Ranks, copy_rate, measure, to_first
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from hpc_train.train.watch.utilization import device_memory

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
BLOCKS = 12
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Sizes:
    """Lists what is measured.

    Attributes:
        square: the rows of the largest matrix products.
        products: rows, columns and inner size of products as in layers.
        attention: batch, heads, positions, and the width of a head.
        copied: bytes of a copy in the device's memory.
        messages: bytes of the small and of the large collective.
        layer: width, positions and samples of the layer whose element-wise operations are measured on CPUs.
    """

    square: int
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int, int]
    copied: int
    messages: tuple[int, int]
    layer: tuple[int, int, int]


ON_GPU = Sizes(
    8192,
    (
        (2048, 1024, 1024), (4096, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 2048), (8192, 5120, 13824),
        (16384, 8192, 8192),
    ),
    (4, 32, 2048, 128),
    1 << 30,
    (1 << 10, 256 << 20),
    (0, 0, 0),
)  # fmt: skip
ON_CPU = Sizes(
    512,
    ((256, 128, 128), (512, 128, 352), (1024, 128, 128), (1024, 256, 704), (512, 512, 512), (2048, 512, 1408)),
    (8, 4, 128, 32),
    64 << 20,
    (1 << 10, 4 << 20),
    (128, 128, 8),
)


def measure_machine(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Measures what a machine file states; rank 0 writes ``bench-result.json``."""
    return measure_on_ranks(spec, stop, MachineRequest, _measure_figures)


def _measure_figures(rank: BenchRank, request: MachineRequest) -> dict[str, Any] | None:
    bench = _MachineBench(rank.config, rank.mesh, rank.spec, request.seconds)
    stages: Sequence[Callable[[], Mapping[str, float]]] = (
        bench.memory, bench.peaks, bench.products, bench.attention, bench.moving, bench.launch, bench.inside,
        bench.between,
    )  # fmt: skip
    figures: dict[str, float] = {}
    for done, stage in enumerate(stages):
        rank.write_progress(done, len(stages))
        figures |= stage()
        if rank.is_stopped():
            return None
    of_ranks = to_first(figures, rank.mesh)
    if of_ranks:
        figures = {name: median(other[name] for other in of_ranks if name in other) for name in figures}
    units = None
    if bench.cuda:
        units = torch.cuda.get_device_properties(bench.device).multi_processor_count
    return {
        **rank.setting(),
        "units": units,
        "nodes": rank.spec.nodes,
        "ranks_per_node": rank.spec.local_world_size,
        "threads": torch.get_num_threads(),
        "precision": bench.precision,
        "figures": figures,
    }


class _MachineBench:
    """Measures the numbers of one rank. All methods are collective, and each returns numbers by name."""

    def __init__(self, config: Config, mesh: Mesh, spec: WorkerSpec, seconds: float) -> None:
        self.config = config
        self.mesh = mesh
        self.spec = spec
        self.seconds = seconds
        self.device = mesh.device
        self.cuda = mesh.device.type == "cuda"
        self.sizes = ON_GPU if self.cuda else ON_CPU
        self.precision = "fp32"
        if self.cuda and torch.cuda.is_bf16_supported(including_emulation=False):
            self.precision = "bf16"
        elif self.cuda:
            self.precision = "fp16"
        self.rate = self.half_flops = self.attention_rate = 0.0

    def memory(self) -> dict[str, float]:
        """Returns the memory of the device, and the memory that the context and the libraries take after the first
        collective."""
        Ranks.world(self.device).largest(0.0)
        if not self.cuda:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            return {"memory_bytes": device_memory(self.device) / self.spec.local_world_size, "reserved_bytes": resident}
        torch.mm(*(torch.ones(64, 64, device=self.device) for _ in range(2)))  # loads cuBLAS
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return {"memory_bytes": total, "reserved_bytes": total - free - torch.cuda.memory_reserved(self.device)}

    def peaks(self) -> dict[str, float]:
        """Returns the FLOP/s of large products by precision, or 0 for a precision without kernels or hardware units."""
        size = self.sizes.square
        rates = {}
        for name, dtype in DTYPES.items():
            if self.cuda and name == "bf16" != self.precision:  # torch would emulate it
                rates[f"{name}_flops"] = 0.0
                continue
            try:
                rates[f"{name}_flops"] = 2.0 * size**3 / self._product(size, size, size, dtype)
            except RuntimeError:  # no such kernel
                rates[f"{name}_flops"] = 0.0
        return rates

    def products(self) -> dict[str, float]:
        """Returns the FLOP/s of products as in layers, and the number of operations at which a product reaches half of
        this rate."""
        dtype = DTYPES[self.precision]
        times = [(2.0 * m * n * k, self._product(m, n, k, dtype)) for m, n, k in self.sizes.products]
        self.rate, self.half_flops = fit_rate(times)
        return {"product_flops": self.rate, "half_rate_flops": self.half_flops}

    def attention(self) -> dict[str, float]:
        """Returns the FLOP/s of causal attention, forward and backward, not halved for the mask."""
        batch, heads, length, width = self.sizes.attention
        shape = (batch, heads, length, width)
        dtype = DTYPES[self.precision]
        query, key, value = (torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True) for _ in range(3))
        gradient = torch.randn(shape, device=self.device, dtype=dtype)

        def both() -> None:
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(output, (query, key, value), gradient)

        self.attention_rate = 3 * 4.0 * batch * heads * length**2 * width / self._seconds(both)
        return {"attention_flops": self.attention_rate}

    def moving(self) -> dict[str, float]:
        """Returns the bytes/s within the device's memory, and between it and the host's."""
        source = torch.zeros(self.sizes.copied, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copied = 2.0 * source.numel() / self._seconds(lambda: target.copy_(source))
        if not self.cuda:
            return {"copied_bytes_per_s": copied, "host_bytes_per_s": copied / 2}
        to_device = copy_rate(self.device, self.mesh.control)
        return {"memory_bytes_per_s": copied, "host_bytes_per_s": to_device}

    def launch(self) -> dict[str, float]:
        """Returns the host's time for a kernel: the time of a layer of a tiny model, divided by the kernels that the
        planner counts. Also returns how many times as long a layer of DTensors takes.

        On CPUs, a core limits element-wise operations, not the memory. Their rate follows from the time of a larger
        layer, minus the time of its products, its attention and the host.
        """
        tiny, layer = self._layer_seconds(32, 8, 1)
        host_s = tiny / (3 * layer.kernels)
        split, _ = self._layer_seconds(32, 8, 1, split=True)
        figures = {"launch_s": host_s, "tp_launches": max(1.0, split / tiny)}
        if not self.cuda:
            width, length, samples = self.sizes.layer
            seconds, layer = self._layer_seconds(width, length, samples)
            products = (samples * layer.products + PRODUCTS * self.half_flops) / self.rate
            attention = samples * layer.attention / self.attention_rate
            passes = 3 * (products + layer.kernels * host_s) + (1 + ATTENTION_BACKWARD) * attention
            rest = seconds - passes
            moved = 3 * samples * layer.elements * 4 * TOUCHES / 2  # as the planner counts the bytes
            figures["memory_bytes_per_s"] = moved / max(rest, 0.1 * seconds)
        return figures

    def inside(self) -> dict[str, float]:
        """Returns latency and bus bandwidth among the ranks of a node."""
        per_node = self.spec.local_world_size
        first = self.mesh.rank // per_node * per_node
        return self._links("node", range(first, first + per_node))

    def between(self) -> dict[str, float]:
        """Returns latency and bus bandwidth to the same rank of the other nodes, while all ranks of a node send."""
        per_node = self.spec.local_world_size
        return self._links("fabric", range(self.mesh.rank % per_node, self.mesh.layout.world_size, per_node))

    def _links(self, scope: str, ranks: Sequence[int]) -> dict[str, float]:
        if len(ranks) == 1:
            return {}
        # all ranks call this at once, each with its group of a partition of all ranks
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"bench {scope}")
        small, large = self.sizes.messages
        members = Ranks(group, self.device)
        latency = measure("all_reduce", small, members, self.seconds).seconds
        if not self.cuda:
            latency = max(latency, self._delay_of_product(small, members))
        bus = {name: measure(name, large, members, self.seconds).bus for name in OPERATIONS}
        dist.barrier(group=self.mesh.control)  # no rank closes a connection that another still reads
        dist.destroy_process_group(group)
        bandwidth = fmean((bus["all_reduce"], bus["all_gather"]))
        share = {"scatter_share": min(1.0, bus["reduce_scatter"] / bandwidth)}
        return {f"{scope}_latency_s": latency / log2(len(ranks)), f"{scope}_bytes_per_s": bandwidth} | share

    def _delay_of_product(self, size: int, ranks: Ranks) -> float:
        """Returns how much a collective of ``size`` bytes delays a product that runs at the same time.

        On CPUs, gloo's threads wait for a core that is busy with a product, for up to one time slice of the kernel.
        """
        left = torch.randn(self.sizes.square, self.sizes.square)
        message = torch.zeros(size, dtype=torch.uint8)

        def overlapped() -> None:
            work = dist.all_reduce(message, group=ranks.group, async_op=True)
            torch.mm(left, left)
            work.wait()

        alone = self._seconds(lambda: torch.mm(left, left))
        repeats = max(3, int(self.seconds / alone / 4))  # the same on all ranks
        repeats = int(ranks.largest(repeats))
        return ranks.largest(self._block(overlapped, repeats) - alone)

    def _product(self, m: int, n: int, k: int, dtype: torch.dtype) -> float:
        left = torch.randn(m, k, device=self.device).to(dtype)
        right = torch.randn(k, n, device=self.device).to(dtype)
        return self._seconds(lambda: torch.mm(left, right))

    def _layer_seconds(self, width: int, length: int, samples: int, split: bool = False) -> tuple[float, Block]:
        """Returns the time of forward and backward of a layer of a GPT, and its work for one sample.

        The time is a quarter of the difference between models with six and with two layers. With ``split`` the models
        are those of tensor parallelism, on a mesh of one rank, which sends nothing.
        """
        times = []
        for layers in (2, 6):
            sizes = GPTConfig(
                vocab_size=32, n_layers=layers, dim=width, n_heads=2, n_kv_heads=2, ffn_dim=width * 11 // 4
            )  # two heads and a vocabulary of 32
            data = SyntheticDataConfig(vocab_size=32, sequence_length=length)
            config = replace(self.config, model=sizes, data=data)
            model = build_model(config.model, seed=0)
            assert isinstance(model, Model), "a GPT is one"
            if split:
                apply_tensor_parallel(model, self.mesh.device_mesh["tp"])
            model.to_empty(device=self.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0.0, 0.02)
            model.init_buffers(self.device)
            inputs = torch.zeros(samples, length, dtype=torch.int64, device=self.device)
            times.append(self._seconds(partial(_forward_and_backward, model, inputs)))
        return max(times[1] - times[0], 0.1 * times[1]) / 4, count_work(config).blocks[1]

    def _seconds(self, call: Callable[[], object]) -> float:
        """Returns the time of a call. The calls are repeated for ``self.seconds``, at least once."""
        call()
        once = self._block(call, 1)
        repeats = max(1, int(self.seconds / BLOCKS / once))
        blocks = max(1, min(BLOCKS, int(self.seconds / (repeats * once))))
        return sorted(self._block(call, repeats) for _ in range(blocks))[blocks // 4]

    def _block(self, call: Callable[[], object], repeats: int) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(self.device)
        return (time.perf_counter() - began) / repeats


def _forward_and_backward(model: nn.Module, inputs: Tensor) -> None:
    model(inputs, context={}).sum().backward()
