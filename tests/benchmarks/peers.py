"""Our training step against Lightning Fabric, Accelerate and a bare PyTorch loop.

    make bench-peers
    python -m tests.benchmarks.peers [--cases single,dp2,…] [--pairs 20] [--steps 5]

The same model, data, global batch, precision and number of threads. All contenders of a case live in the same processes
and take turns, block by block, so what slows the machine slows all of them. Printed are the median ratios of our speed
to theirs, with the bootstrap 95 % interval over the turns; n/a where a peer has nothing of the kind on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.bench.bare_loop import bare_batches, build_bare_loop
from hpc_train.bench.request import paired_ratio
from hpc_train.bench.step_worker import StepBench
from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.parallel.parallelise import materialise
from hpc_train.plan.layout import Layout
from hpc_train.plan.validate import validate
from hpc_train.run.requests import StopFlag

OURS, BARE, FABRIC, ACCELERATE = "ours", "bare", "fabric", "accelerate"
WARMUP = 3  # steps of each contender
THREADS = 1  # of each rank

Step = Callable[[Sequence[Batch], int], None]
Turn = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A strategy, and the bare loop of ``raw.py`` that goes with it; None where there is none."""

    ranks: int
    overrides: tuple[str, ...]
    bare: str | None


CASES = {
    "single": Case(1, ("+strategy=single",), "single"),
    "dp2": Case(2, ("+strategy=dp",), "dp"),
    "dp4": Case(4, ("+strategy=dp",), "dp"),
    "zero2": Case(2, ("+strategy=zero2",), "zero2"),
    "zero3": Case(2, ("+strategy=zero3",), None),
    "pp2": Case(2, ("+strategy=pp",), "pp"),
    "2x2": Case(4, ("+strategy=hybrid",), None),
}
MODEL = (
    "model.dim=256", "model.ffn_dim=704", "model.n_layers=4", "data=synthetic", "data.samples=65536",
    "data.sequence_length=128", "batch.global_size=16", "train.steps=1", "optim.warmup_steps=0",
)  # fmt: skip


class NotThere(Exception):
    """A peer has nothing of the kind; the message says why."""


def config_of(case: Case) -> tuple[Config, Layout]:
    workers = (f"cluster.cpu_workers={case.ranks}", "cluster=local", "cluster.gpus_per_node=0")
    config = typed(compose([*case.overrides, *MODEL, *workers]))
    return config, validate(config, 1, case.ranks)


def contender(name: str, case: Case, config: Config, mesh: Mesh) -> Turn:
    """One step of ``name``, its data among it.

    Raises:
        NotThere: it has no such strategy.
    """
    if name == OURS:
        return StepBench(config, mesh, StopFlag()).step
    if name == BARE:
        if case.bare is None:
            raise NotThere("no bare loop")
        step: Step = build_bare_loop(case.bare, config, mesh).step
    else:
        if mesh.layout.pp > 1:
            raise NotThere("no pipelines")
        model = build_model(config.model, config.train.seed)
        assert isinstance(model, Model)
        step = (_fabric if name == FABRIC else _accelerate)(model, config, mesh)
    batches = bare_batches(config, mesh)

    def turn() -> None:
        batch = next(batches)
        step(batch.micro_batches, batch.target_count)

    return turn


def _filled(model: Model, config: Config, mesh: Mesh) -> tuple[Model, torch.optim.Optimizer]:
    materialise(model, mesh.device, config.train.seed, torch.float32)
    optim = config.optim
    betas = (optim.betas[0], optim.betas[1])
    weights = model.parameters()
    return model.train(), torch.optim.AdamW(
        weights, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def _fabric(model: Model, config: Config, mesh: Mesh) -> Step:
    from lightning.fabric import Fabric

    if mesh.layout.data_parallel != "ddp" and mesh.layout.dp > 1:
        raise NotThere("FSDP needs GPUs")
    strategy: Any = "ddp" if mesh.layout.dp > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=mesh.layout.world_size, strategy=strategy, precision="32-true")
    fabric.launch()
    module, optimizer = fabric.setup(*_filled(model, config, mesh))
    ranks = mesh.layout.dp

    def step(micro_batches: Sequence[Batch], target_count: int) -> None:
        optimizer.zero_grad()
        for index, batch in enumerate(micro_batches):
            with fabric.no_backward_sync(module, enabled=ranks > 1 and index < len(micro_batches) - 1):
                loss, _ = module(batch.inputs, batch.context, batch.targets)
                fabric.backward(loss * (ranks / target_count))
        fabric.clip_gradients(module, optimizer, max_norm=config.optim.clip_norm)
        optimizer.step()

    return step


def _accelerate(model: Model, config: Config, mesh: Mesh) -> Step:
    from accelerate import Accelerator

    if mesh.layout.data_parallel != "ddp" and mesh.layout.dp > 1:
        raise NotThere("FSDP needs GPUs")
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    if accelerator.num_processes != mesh.layout.world_size:
        raise NotThere(f"sees {accelerator.num_processes} processes")
    prepared: tuple[nn.Module, Any] = accelerator.prepare(*_filled(model, config, mesh))
    module, optimizer = prepared
    ranks = mesh.layout.dp

    def step(micro_batches: Sequence[Batch], target_count: int) -> None:
        optimizer.zero_grad()
        for batch in micro_batches:
            loss, _ = module(batch.inputs, batch.context, batch.targets)
            accelerator.backward(loss * (ranks / target_count))
        accelerator.clip_grad_norm_(module.parameters(), config.optim.clip_norm)
        optimizer.step()

    return step


def run_rank(name: str, rank: int, port: int, pairs: int, steps: int, results: Any) -> None:
    """One rank of a case; rank 0 sends seconds by contender, or why it is not there."""
    case = CASES[name]
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
    os.environ |= {key: str(value) for key, value in (own | {"MASTER_PORT": port}).items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": str(THREADS),
        "TORCHELASTIC_RUN_ID": "peers",
    }
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo", rank=rank, world_size=case.ranks)
    config, layout = config_of(case)
    mesh = join_mesh(layout, rank, torch.device("cpu"))
    turns: dict[str, Turn] = {}
    found: dict[str, Any] = {}
    for who in (OURS, BARE, FABRIC, ACCELERATE):
        try:
            turns[who] = contender(who, case, config, mesh)
        except (NotThere, ImportError) as reason:
            found[who] = str(reason)
    torch.set_num_threads(THREADS)  # whatever a peer has set
    for turn in turns.values():
        for _ in range(WARMUP):
            turn()
    seconds: dict[str, list[float]] = {who: [] for who in turns}
    for _ in range(pairs):
        for who, turn in turns.items():
            dist.barrier(group=mesh.control)
            begin = time.perf_counter()
            for _ in range(steps):
                turn()
            dist.barrier(group=mesh.control)
            seconds[who].append((time.perf_counter() - begin) / steps)
    if rank == 0:
        results.put(found | seconds)
        results.close()
        results.join_thread()
    os._exit(0)


def run_case(name: str, pairs: int, steps: int) -> dict[str, Any]:
    """Seconds per step of each contender by turn; a string where it is not there."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    results = context.Queue()
    start = partial(context.Process, target=run_rank)
    ranks = [start(args=(name, rank, port, pairs, steps, results)) for rank in range(CASES[name].ranks)]
    for process in ranks:
        process.start()
    try:
        return dict(results.get(timeout=1800))
    finally:
        for process in ranks:
            process.kill()
            process.join()


def line(name: str, found: dict[str, Any]) -> str:
    ours = found[OURS]
    cells = []
    for who in (BARE, FABRIC, ACCELERATE):
        if isinstance(found[who], str):
            cells.append(f"n/a ({found[who]})")
            continue
        ratio = paired_ratio(found[who], ours)  # their seconds over ours: our speed over theirs
        cells.append(f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    middle = sorted(ours)[len(ours) // 2]
    return f"{name:8} {1e3 * middle:>8.1f}  " + "".join(f"{cell:28}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--pairs", type=int, default=20, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    options = parser.parse_args()
    versions = {peer: _version(peer) for peer in ("torch", "lightning", "accelerate")}
    print(", ".join(f"{peer} {version}" for peer, version in versions.items()))
    print(f"{'':8} {'ms/step':>8}  " + "".join(f"{'ours / ' + who:28}" for who in (BARE, FABRIC, ACCELERATE)))
    for name in options.cases.split(","):
        print(line(name, run_case(name, options.pairs, options.steps)), flush=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
