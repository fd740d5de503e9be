"""A run directory as agents and workers write it, without a run, and all that reads one, as functions of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpc_train import cli
from hpc_train.commands.plot import sweep_results
from hpc_train.elastic.nodes import NodeFailures, have_been_checked
from hpc_train.elastic.requeue import find_killed_step
from hpc_train.errors import UserError
from hpc_train.preflight.bandwidth import read_fabric
from hpc_train.report import top
from hpc_train.report.live_runs import Details, Row
from hpc_train.report.monitoring.metrics import Identity, RunReader
from hpc_train.report.plots import Curves, _figure
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json
from hpc_train.run.freeze import freeze
from hpc_train.run.ledger import read_ledger
from hpc_train.run.requests import stop_was_requested
from hpc_train.runs.lookup import find_run, find_runs
from hpc_train.telemetry.progress import Notices, summary
from hpc_train.telemetry.sinks.replay import NewOfAttempts
from tests.config.composing import config_of

BEGAN = 1_700_000_000.0
STEPS = 6
TRACEBACK = 'Traceback (most recent call last):\n  File "net.py", line 14, in forward\n    1 / 0\nValueError: shape'


def _event(at: float, event: str, attempt: int, rank: int | None = None, **details: Any) -> dict[str, Any]:
    head = {"time": BEGAN + at, "event": event, "rank": rank, "node": "n1", "attempt": attempt, "step": None}
    return head | details


def _started(at: float, attempt: int) -> dict[str, Any]:
    facts = {"layout": "dp 2", "world_size": 2, "gpus": 0, "began": BEGAN + at - 5, "job_id": "7", "launch": "7.0.0"}
    return _event(at, "started", attempt, nodes=["n1", "n2"], **facts)


CHUNKS = [["forward", 0, 0.0, 0.1], ["backward", 0, 0.1, 0.3]]
AGENT = (
    [
        _started(10, 0),
        _event(40, "suspended", 0, seconds=2.0, until=BEGAN + 40, reason="suspended"),
        _event(
            50, "worker_failed", 0, 1, **{"class": "user_error", "message": "ValueError: shape"}, traceback=TRACEBACK
        )
        | {"gpus": ["GPU 0: Xid 79"]},
        _event(51, "restarted", 0, reason="user_error", seconds=1.0, world_size=2),
    ],
    [
        _started(52, 1),
        _event(80, "hang_detected", 1, 0, stacks="logs/stacks/hang.txt", message="no step"),
        _event(81, "stopped_retrying", 1, 0, exit_code=1, **{"class": "hang", "message": "too many failures"}),
    ],
)
RANK_0 = (
    [
        _event(20, "checkpoint_saved", 0, 0, step=2, path="checkpoints/step-2", bytes=10, seconds=0.2),
        _event(21, "checkpoint_failed", 0, 0, step=3, message="[Errno 28] No space", final=False),
        _event(21.5, "save_deferred", 0, 0, step=3, message="full", path="checkpoints", seconds=60.0),
        _event(22, "straggler", 0, 1, share=0.4, late_s=1.5, message="rank 1 is slow"),
        _event(23, "warning", 0, 0, step=3, message="continues with changed settings: optim.lr: 1 -> 2"),
        _event(24, "advice", 0, 0, step=3, message="larger batch"),
        _event(
            25, "preflight", 0, 0, launch="7.0.0", nodes=["n1", "n2"], mode="fast", seconds=1.0,
            bus_gb_per_s={"nodes": {"n1": 1.0}, "rails": [1.0], "world": None}, findings=[],
        ),
        _event(26, "slow_node", 0, 0, partners=["n2"], message="slow", drain="scontrol"),
        _event(27, "slow_gpu", 0, 0, gpu="GPU-7", message="slow"),
        _event(28, "unfit_node", 0, 0, reason="memory", message="unfit"),
        _event(29, "step_skipped", 0, 0, step=3, steps=1, in_a_row=1),
        _event(29.5, "file_system_failed", 0, 0, began=BEGAN + 29, seconds=0.5, message="EIO"),
        _event(29.8, "collective_timed_out", 0, 1, stacks="logs/stacks/x.txt", message="all_reduce"),
        _event(29.9, "evaluation_started", 0, 0, step=3),
    ],
    [
        _event(60, "resumed", 1, 0, step=2, path="checkpoints/step-2", with_optimizer=True),
        _event(63, "rolled_back", 1, 0, step=4, to_step=2, reason="loss is nan", bad_steps=[3, 4]),
        _event(64, "checkpoint_set_aside", 1, 0, step=2, path="bad", message="damaged"),
        _event(
            65, "pipeline_step", 1, 0, schedule="1f1b", micro_batches=2, seconds=0.5,
            ranks=[{"rank": 0, "chunks": CHUNKS}, {"rank": 1, "chunks": [["forward", 1, 0.1, 0.2]]}],
        ),
        _event(78, "training_finished", 1, 0, step=STEPS, steps=STEPS, loss=1.0, save_s=0.1, step_s=0.5, ledger={}),
    ],
)  # fmt: skip
FINISHED = _event(82, "finished", 1, None, exit_code=0, reason="")


def metrics(attempt: int) -> list[dict[str, Any]]:
    first = 1 if attempt == 0 else 3
    return [
        {
            "time": BEGAN + 30 + 20 * attempt + step, "attempt": attempt, "world_size": 2, "step": step,
            "loss": 5.0 / step,
            "samples": 8 * step, "tokens": 128 * step, "step_s": 0.5, "tokens_per_s": 900.0, "samples_per_s": 60.0,
            "save_s": 0.1, "eval_s": 0.1, "val_loss": 4.0, "mfu": 0.4, "hfu": 0.4, "peak_memory_bytes": 1 << 20,
            "comm_share": 0.1, "bubble_share": 0.2, "data_wait_share": 0.1, "host_share": 0.1, "gpu_util": 0.9,
            "rdma_tx_bytes": 1.0, "accuracy of mine": 0.5,
        }
        for step in range(first, STEPS + 1)
    ]  # fmt: skip


def lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))


def record_run(path: Path, *, done: bool) -> RunDirectory:
    """Writes the directory of a run that is ``done``, or was given up."""
    run = RunDirectory(path)
    freeze(config_of(f"run.root={path.parent}", f"run.name={path.name}", "optim.lr=0.1"), run)
    for attempt in (0, 1):
        write_json(
            run.attempts / f"{attempt:03d}.json",
            {
                "attempt": attempt, "launch_id": "7.0.0", "job_id": "7", "node": "n1", "pid": 1, "address": "n1",
                "port": 1, "nodes": 2, "gpus_per_node": 0, "workers_per_node": 1,
                "layout": {"dp": 1, "pp": 2, "tp": 1, "micro_batches": 2}, "order": [0, 1], "started": BEGAN,
            },
        )  # fmt: skip
        lines(run.metrics_file(attempt), metrics(attempt))
        agent = AGENT[attempt] if attempt == 0 or not done else [AGENT[1][0], FINISHED]
        lines(run.events_file("agent-n1", attempt), agent)
        lines(run.events_file("rank-0000", attempt), RANK_0[attempt])
    failures = [{"time": time.time(), "node": "n3", "class": "node_lost", "times": 2} for _ in range(3)]
    lines(run.attempts / "node-failures.jsonl", failures)
    lines(
        run.texts / "attempt-000.jsonl", [{"time": BEGAN, "step": 1, "attempt": 0, "name": "sample", "text": "hello"}]
    )
    output = run.logs / "slurm" / "7.out"
    output.parent.mkdir(parents=True)
    output.write_text("the end of the output\n")
    (run.logs / "n1-001.log").write_text("2026-11-28T05:27:27.696 [0] step 5/6  loss 5.5\n")
    submission = {"executor": "local", "time": BEGAN, "job_id": None, "host": "n1", "pid": 1, "pid_started": "boot:1"}
    result = {"steps": STEPS, "attempt": 1, "loss": 1.0, "samples": 48, "tokens": 768, "val_loss": 4.0, "seconds": 9.0}
    run.update_record(
        submissions=[submission | {"output": str(output), "first_attempt": 0}],
        overrides=["optim.lr=0.1", f"run.name={path.name}"],
        total_steps=STEPS,
        **({"result": result} if done else {}),
        memory={"estimated": 1e6, "ranks": [dict.fromkeys(MEMORY, 1 << 20)]},
        prediction={"machine": "h100", "predicted": {"step_s": 0.5}, "measured": {"step_s": 0.6}},
        wandb={"mode": "disabled"},
        utilization={"flops_per_sample": 1e9, "peak_flops": 1e12, "formula": "MFU", "peak_source": "data sheet"},
        loss_warning="the loss depends on the split",
        stop_requested=1.0,
    )
    write_json(run.fabric, {"machines": [], "nodes": []})
    write_json(run.plan, {"chosen": "dp"})
    run.profile.mkdir()
    write_json(run.profile / "summary.json", {"first": 1, "last": 2, "ranks": {"0": {"computation": 1.0}}})
    return run


MEMORY = ("peak", "parameters", "gradients", "optimizer", "activations", "device")


__all__ = ["UserError"]


def command(*words: str) -> Callable[[RunDirectory], None]:
    """Returns a call of the command line with the run's directory."""

    def call(run: RunDirectory) -> None:
        filled = [word.format(run=run.path) for word in words]
        assert cli.run(filled) in (0, 1, 2, 75, 130)

    return call


def live(run: RunDirectory) -> None:
    found = find_run(str(run.path), "top")
    view = found.view({})
    Row(found, "name", view).cells()
    details = Details(found)
    details.look()
    details.lines(view)
    list(map(top._event, details.events))


def agent(run: RunDirectory) -> None:
    failures = NodeFailures(run, 1e6)
    failures.failing_nodes()
    have_been_checked(run, "7.0.0", ["n1"])
    find_killed_step(run, "7.1.0", 1)
    read_fabric(run)
    stop_was_requested(run)
    read_ledger(run, 2e9)


def messages(run: RunDirectory) -> None:
    for event in run.read_events():
        Notices().message(event)


def monitoring(run: RunDirectory) -> None:
    RunReader(run, Identity({})).read(2e9)


def plotted(run: RunDirectory) -> None:
    curves = [Curves("run", run.read_metrics())]
    sweep_results(find_runs(str(run.path), "plot"), curves, None)
    _figure(curves, "hours", None)


def trackers(run: RunDirectory) -> None:
    NewOfAttempts(run, run.metrics).read()
    NewOfAttempts(run, run.texts).read()


READERS: dict[str, Callable[[RunDirectory], object]] = {
    "status": command("status", "{run}"),
    "status --json": command("status", "--json", "{run}"),
    "status of all": command("status"),
    "why": command("why", "{run}"),
    "why --json": command("why", "--json", "{run}"),
    "logs": command("logs", "{run}", "--rank", "all"),
    "compare": command("compare", "{run}", "{run}"),
    "report": command("report", "{run}"),
    "plot": plotted,
    "checkpoint list": command("checkpoint", "list", "{run}"),
    "summary": summary,
    "live": live,
    "agent": agent,
    "messages": messages,
    "monitoring": monitoring,
    "trackers": trackers,
}
