"""Freezes tiny runs for tests, and runs their ranks as real processes that call the worker's entry."""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from hpc_train.checkpoint.space import stop_time
from hpc_train.config.compose import typed
from hpc_train.elastic.agent_loop import _pickled
from hpc_train.elastic.rendezvous.store import serve
from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from hpc_train.run.requests import StopFlag
from tests.config.composing import compose
from tests.ranks import CONTEXT, collect

TINY = [
    "model.vocab_size=32",
    "model.n_layers=4",
    "model.dim=16",
    "model.ffn_dim=32",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "model.dropout=0.1",
    "data=synthetic",
    "data.vocab_size=32",
    "data.sequence_length=8",
    "data.samples=64",
    "data.validation_samples=10",
    "batch.global_size=8",
    "optim.warmup_steps=2",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "train.steps=10",
    "elastic.collective_timeout_s=60",
]
Prepare = Callable[[WorkerSpec, StopFlag], None]


def frozen(path: Path, *overrides: str) -> RunDirectory:
    """Creates a run directory as the command line does; another freeze of it changes free keys."""
    run = RunDirectory(path)
    freeze(typed(compose([*TINY, *overrides])), run)
    return run


def run_attempt(run: RunDirectory, workers: int = 4, prepare: Prepare | None = None, timeout: float = 120) -> list[int]:
    """Runs one attempt of ``run`` on at most ``workers`` ranks and returns the exit code of each.

    Args:
        prepare: a module-level function that each rank calls before it trains.

    Raises:
        AssertionError: a rank failed; the message contains its traceback.
    """
    config = load(run)
    layout, grace_s = resolve_layout(config, 1, workers), stop_time(config, run, 1).seconds
    attempt = run.claim_attempt()
    store = serve(socket.create_server(("127.0.0.1", 0)))
    passed = _pickled(config)
    specs = [
        WorkerSpec(
            run_dir=str(run.path),
            attempt=attempt,
            rank=rank,
            local_rank=rank,
            local_world_size=layout.world_size,
            node_rank=0,
            nodes=1,
            layout=layout,
            master_address="127.0.0.1",
            master_port=store.port,
            store_prefix="random",
            gpus_per_node=0,
            threads=1,
            stop_grace_s=grace_s,
            config=passed,
        )
        for rank in range(layout.world_size)
    ]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in specs]
    processes = [
        CONTEXT.Process(target=_rank, args=(spec, config.run.entry is not None, pipe[1], prepare))
        for spec, pipe in zip(specs, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        codes = collect([receiver for receiver, _ in pipes], timeout)
        keys = store.list_keys() if hasattr(store, "list_keys") else []  # not in all versions of torch
        assert all(key.startswith("random/") for key in keys), "no key can be guessed"
        return codes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(spec: WorkerSpec, is_custom_loop: bool, sender: Connection, prepare: Prepare | None) -> None:
    gc.freeze()  # as workers do: the collector does not read, write and so copy what the warm parent has imported
    if is_custom_loop:
        from hpc_train.train.custom_loop import train
    else:
        from hpc_train.train.worker import train

    log = Path(spec.run_dir) / "logs" / f"rank-{spec.rank}-{spec.attempt:03d}.log"
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    stop = StopFlag()
    try:
        if prepare is not None:
            prepare(spec, stop)
        sender.send((True, int(train(spec, stop))))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)
