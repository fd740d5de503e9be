"""A script that knows nothing of hpc_train and imports no torch: it adds up the numbers of its steps.

    python script.py FOLDER STEPS [FAULT ...]

Fault number N happens in attempt N: kill:RANK:STEP, hang:RANK:STEP, exit:RANK:STEP:CODE, or a signal for the agent.
A hang and the end of rank 0 leave a child behind, whose id is in FOLDER/child.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


def inject(fault: str, step: int) -> None:
    kind, rank, at, *rest = fault.split(":")
    if (rank, int(at)) != (os.environ["RANK"], step):
        return
    if kind == "kill":
        import words  # type: ignore[import-not-found]  # next to this file

        print(words.LAST, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        raise SystemExit(int(rest[0]))
    if kind == "hang":
        leave_child_behind()
        time.sleep(1000)
    attempts = Path(os.environ["HPC_TRAIN_RUN_DIR"], "attempts")
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    agent = json.loads((attempts / f"{number:03d}.json").read_text())["pid"]
    os.kill(agent, signal.Signals[kind])
    time.sleep(1000)  # until SIGTERM arrives


def leave_child_behind() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(sys.argv[1], "child").write_text(str(child.pid))


def wait_for_others(folder: Path, step: int) -> None:
    """Waits until all ranks have ended the step before, as collectives do."""
    saved = [folder / f"saved-{rank}.json" for rank in range(int(os.environ["WORLD_SIZE"]))]
    while step > 1 and not all(path.exists() and json.loads(path.read_text())[0] >= step - 1 for path in saved):
        time.sleep(0.01)


def main() -> None:
    folder, steps, faults = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    seen = {name: os.environ[name] for name in VARIABLES} | {"cwd": str(Path.cwd()), "file": __file__}
    (folder / f"seen-{attempt}-{rank}.json").write_text(json.dumps(seen))
    saved = folder / f"saved-{rank}.json"
    step, total = json.loads(saved.read_text()) if saved.exists() else (0, 0)
    while step < steps:
        step += 1
        wait_for_others(folder, step)
        total += step * (int(rank) + 1)
        saved.with_suffix(".new").write_text(json.dumps([step, total]))
        saved.with_suffix(".new").replace(saved)
        Path(os.environ["HPC_TRAIN_PROGRESS"]).write_text(str(step))
        if attempt < len(faults):
            inject(faults[attempt], step)
        time.sleep(0.02)
    if rank == "0":
        leave_child_behind()
    print(f"rank {rank} ends with {total}")


if __name__ == "__main__":
    main()
