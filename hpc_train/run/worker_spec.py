"""What an agent tells a worker: who it is in which attempt of which run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_train.config.layout import Layout


@dataclass(frozen=True)
class WorkerSpec:
    """One worker of one attempt. ``layout`` is the effective one, derived by the agent of node 0.

    ``environment`` and ``cpus`` are applied as soon as the worker is forked; ``cpus`` None leaves it unbound.
    """

    run_dir: str
    attempt: int
    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    layout: Layout
    master_address: str
    master_port: int
    gpus_per_node: int  # 0: this attempt runs on the CPU with gloo
    threads: int  # intra-op CPU threads
    cuda_device: int = 0  # among those that the worker sees
    environment: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None
    stop_grace_s: float = 60.0  # from a stop request until the agent kills this worker
    heartbeat: int | None = None  # in the worker: the open file of its heartbeat
