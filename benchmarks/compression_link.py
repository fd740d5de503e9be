"""Bytes on the wire and seconds per step of every compression and of local steps, over a slow link and a fast one.

    python -m benchmarks.compression_link --rate 100mbit --out FOLDER        (as root)

Two ranks in two network namespaces, with a virtual link between them that ``tc`` slows. Each technique trains the same
small GPT for some steps; bytes are the kernel's counters of the link. Predicted is, without overlap, the time of the
technique's step on the fast link and its bytes at the rate of the slow one. The advice of
``bench step`` is measured on both links.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

TECHNIQUES = ("none", "fp16", "bf16", "powersgd", "topk", "local")
LOCAL_STEPS = 10  # of the technique ``local``; a multiple of it should be measured
NAMES = ("hpc-train-a", "hpc-train-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
WARMUP = 2  # steps


def work(rank: int, address: str, device: str, steps: int) -> dict[str, Any]:
    """One of two ranks: per technique, bytes that this end of ``device`` has sent and the seconds of each step."""
    import torch
    import torch.distributed as dist

    from hpc_train.bench.step_worker import advised, compression_seconds
    from hpc_train.config.compose import compose, typed
    from hpc_train.layout.resolve import resolve_layout
    from hpc_train.parallel.mesh import join_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29517", rank=rank, world_size=2)
    small = ["model.n_layers=2"] if device == "lo" else []
    sizes = [
        "strategy.data_parallel=allreduce",
        "model.dim=256",
        "model.ffn_dim=512",
        "batch.global_size=4",
        "data.sequence_length=32",
        *small,
    ]
    config = typed(compose(["+strategy=dp", *sizes]))
    mesh = join_mesh(resolve_layout(config, 1, 2), rank, torch.device("cpu"))
    found: dict[str, Any] = {}
    for technique in TECHNIQUES:
        if technique == "local":
            chosen = replace(config, strategy=replace(config.strategy, local_steps=LOCAL_STEPS, shard=1))
            apart = join_mesh(resolve_layout(chosen, 1, 2), rank, torch.device("cpu"))
            found[technique] = _train(chosen, apart, device, steps)
        else:
            chosen = replace(config, strategy=replace(config.strategy, compression=technique))
            found[technique] = _train(chosen, mesh, device, steps)
    measured = compression_seconds(config, mesh)
    assert measured is not None
    found["advised"] = {"technique": advised(measured), "seconds": measured}
    dist.destroy_process_group()
    return found


def _train(config: Any, mesh: Any, device: str, steps: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hpc_train.data.dataset import Batch, StepBatch
    from hpc_train.parallel.build import build_engine
    from hpc_train.train.optimizers.optimizer import Optimizer
    from hpc_train.train.optimizers.outer import OuterSteps
    from hpc_train.train.step import TrainStep

    engine = build_engine(config, mesh)
    optimizer = Optimizer(config.optim, engine.named_parameters())
    outer = None if config.strategy.local_steps is None else OuterSteps(config.strategy, mesh, engine, optimizer)
    take_step = TrainStep(config, mesh, engine, optimizer, 1000, outer=outer)
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(mesh.rank))
    batch = StepBatch((Batch(tokens[:, :-1], tokens[:, 1:]),), 2 * 2 * 32)
    seconds = []
    sent = 0
    for step in range(WARMUP + steps):
        dist.barrier(group=mesh.control)
        if step == WARMUP:
            sent = sent_bytes(device)
        began = time.perf_counter()
        take_step(step, batch)
        seconds.append(time.perf_counter() - began)
    dist.barrier(group=mesh.control)
    elements = sum(parameter.numel() for parameter in engine.named_parameters().values())
    return {"bytes": (sent_bytes(device) - sent) / steps, "seconds": seconds[WARMUP:], "elements": elements}


def sent_bytes(device: str) -> int:
    """Bytes that left ``device`` of this process's network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == device)
    return int(counters.split()[8])


class Link:
    """Two namespaces and the link between them."""

    def __enter__(self) -> Link:
        self.__exit__()
        for name in NAMES:
            _call("ip", "netns", "add", name)
        _call("ip", "-n", NAMES[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _call("ip", "-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in NAMES:
            if Path("/run/netns", name).exists():
                _call("ip", "netns", "del", name)

    def slow(self, rate: str) -> None:
        for name in NAMES:
            bucket = ["burst", "64kb", "latency", "100ms"]
            _call("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, *bucket)

    def run(self, steps: int) -> dict[str, Any]:
        """What rank 0 found; both ranks run in their namespaces."""
        ranks = []
        for rank, name in enumerate(NAMES):
            call = [sys.executable, "-m", __spec__.name, "--rank", str(rank), "--steps", str(steps)]
            inside = ["ip", "netns", "exec", name, *call, "--address", ADDRESSES[0], "--device", "eth0"]
            env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
            ranks.append(subprocess.Popen(inside, env=env, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    rank.kill()
        return dict(json.loads(outputs[0].splitlines()[-1]))


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def bits_per_second(rate: str) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]]


def rows(fast: dict[str, Any], slow: dict[str, Any], rate: str) -> list[dict[str, float | str]]:
    """One line per technique; the factors are against no compression."""
    table: list[dict[str, float | str]] = []
    for technique in TECHNIQUES:
        quick, measured = (statistics.median(link[technique]["seconds"]) for link in (fast, slow))
        sent = slow[technique]["bytes"]
        predicted = quick + sent * 8 / bits_per_second(rate)
        line: dict[str, float | str] = {"technique": technique, "bytes_per_step": sent, "fast_step_s": quick}
        table.append(line | {"slow_step_s": measured, "predicted_slow_step_s": predicted})
    for line in table:
        for key in ("fast_step_s", "slow_step_s", "predicted_slow_step_s"):
            line[f"{key.removesuffix('_step_s')}_factor"] = float(table[0][key]) / float(line[key])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("compression_link"))
    for name in ("--rank", "--address", "--device"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(work(int(given.rank), given.address, given.device, given.steps)), flush=True)
        return
    with Link() as link:
        fast = link.run(given.steps)
        link.slow(given.rate)
        slow = link.run(given.steps)
    table = rows(fast, slow, given.rate)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "compression_link.csv").open("w") as file:
        writer = csv.DictWriter(file, [*table[0]])
        writer.writeheader()
        writer.writerows(table)
    for line in table:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else value for key, value in line.items()))
    print(f"advised on the fast link: {fast['advised']['technique']}, {fast['advised']['seconds']}")
    print(f"advised at {given.rate}: {slow['advised']['technique']}, {slow['advised']['seconds']}")


if __name__ == "__main__":
    main()
