"""The steps of two replicas, one at half speed, before and after ``batch.balance`` moves micro-batches.

    python -m benchmarks.uneven_replicas DIR [--micro-batches 2,4,8] [--steps 40]

A replica sleeps in each micro-batch, so a step takes a time in proportion to its micro-batches, whatever else the
machine does. The steps with and without moved micro-batches are those of one run: the run begins with equally many.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from hpc_train.parallel.replica_engine import ReplicaEngine
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from tests.train.runs import frozen, run_attempt

MICRO_BATCH_S = (0.5, 1.0)  # of each rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--micro-batches", type=lambda text: text.split(","), default=["2", "4", "8"])
    parser.add_argument("--steps", type=int, default=40, help="of each run; default: %(default)s")
    given = parser.parse_args()
    print("| micro-batches | step | moved to | step | throughput | by the sleeps alone |")
    print("|---|---|---|---|---|---|")
    for micro_batches in given.micro_batches:
        options = ["+strategy=dp", "batch.balance=true", "batch.global_size=16", f"batch.micro_batches={micro_batches}"]
        options += ["model.n_layers=1", "checkpoint.every=0"]
        run = frozen(given.out / micro_batches, *options, f"train.steps={given.steps}")
        run_attempt(run, 2, sleep_in_micro_batches, timeout=3600)
        moves = [event for event in run.read_events() if event["event"] == "micro_batches_moved"]
        if not moves:
            raise SystemExit(f"no micro-batch has moved in {given.steps} steps; is the machine busy?")
        moved_at = [event["step"] for event in moves] + [given.steps]
        step_s = {line.step: line["step_s"] for line in run.read_metrics()}
        before = median(step_s[step] for step in range(2, moved_at[0] + 1))
        after = median(step_s[step] for step in range(moved_at[0] + 3, moved_at[1] + 1))
        slept = max(count * seconds for count, seconds in zip(moves[0]["counts"], MICRO_BATCH_S, strict=True))
        expected = int(micro_batches) * max(MICRO_BATCH_S) / slept
        counts = " and ".join(map(str, moves[0]["counts"]))
        even = f"{micro_batches} and {micro_batches}"
        ratio = f"x {before / after:.2f} | x {expected:.2f}"
        print(f"| {even} | {before:.2f} s | {counts} | {after:.2f} s | {ratio} |", flush=True)


def sleep_in_micro_batches(spec: WorkerSpec, stop: StopFlag) -> None:
    forward = ReplicaEngine._forward

    def slow_forward(self: ReplicaEngine, *args: Any) -> Any:
        time.sleep(MICRO_BATCH_S[spec.rank])
        return forward(self, *args)

    ReplicaEngine._forward = slow_forward  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
