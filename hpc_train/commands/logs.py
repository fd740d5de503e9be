"""``python -m hpc_train logs RUN`` prints the failure of an attempt, then the output of its workers merged by time."""

from __future__ import annotations

import argparse
import heapq
import re
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.diagnosis import find_cause
from hpc_train.launch.job_status import SlurmStatuses, attempt_end, failure_text
from hpc_train.launch.lookup import RunHandle, find_run, statuses_of
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit

LINE = re.compile(r"(\S{23}) \[(\d+)\] ")
POLL_S = 0.5


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train logs", description=__doc__)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new output as it is written, until the run ends"
    )
    parser.add_argument("--rank", default="0", metavar="all|N", help="print the output of this rank (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="print this attempt (default: the newest)")
    options = parser.parse_args(arguments)
    if options.rank != "all" and not options.rank.isdigit():
        raise UserError(f"--rank must be a number or all, got {options.rank!r}", where="--rank", fix="--rank 0")
    found = find_run(options.target, "logs")
    rank = None if options.rank == "all" else int(options.rank)
    attempt = found.run.newest_attempt() if options.attempt is None else options.attempt
    if not options.follow:
        _print_failure(found.run, attempt)
    logs = NodeLogs(found.run, max(0, attempt), rank)
    if options.follow:
        return _follow(found, logs, rank)
    for line in logs.read():
        print(line)
    return Exit.DONE


class NodeLogs:
    """Reads the log files of an attempt, one per node; each ``read`` returns the lines written since the last one.

    Args:
        rank: the rank whose lines are returned; None returns the lines of all ranks.
    """

    def __init__(self, run: RunDirectory, attempt: int, rank: int | None) -> None:
        self._run = run
        self.attempt = attempt
        self._rank = rank
        self._offsets: dict[Path, int] = {}

    def read(self) -> Iterator[str]:
        """Returns the new lines of all nodes in the order of their times."""
        files = [self._new_lines(path) for path in sorted(self._run.logs.glob(f"*-{self.attempt:03d}.log"))]
        return (line for _, line in heapq.merge(*files, key=lambda item: item[0]))

    def _new_lines(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yields each line with its time; a line without a time gets that of the line before."""
        at = ""
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            for data in file:
                if not data.endswith(b"\n"):
                    return  # the line is still being written
                self._offsets[path] = self._offsets.get(path, 0) + len(data)
                line = data.decode(errors="replace").rstrip("\n")
                match = LINE.match(line)
                at = match[1] if match else at
                if self._rank is None or match is None or int(match[2]) == self._rank:
                    yield at, line


def _print_failure(run: RunDirectory, attempt: int) -> None:
    """Prints how ``attempt`` failed, even if the run has continued after it."""
    end = attempt_end(run, attempt)
    if end is not None and end.event["event"] in ("failed", "stopped_retrying"):
        print(f"{failure_text(run, end.event)}\n", flush=True)
    elif cause := find_cause([event for event in run.read_events() if event["attempt"] == attempt]):
        who = f"attempt {attempt}: {cause.who} failed ({cause.kind})"
        print(f"{who}:\n{cause.traceback.rstrip() or cause.message}\n", flush=True)


def _follow(found: RunHandle, logs: NodeLogs, rank: int | None) -> int:
    slurm = SlurmStatuses()
    try:
        while True:
            # the state is read before the lines, so that no line written before the end is missed
            view = found.view(statuses_of([found], slurm))
            newest = found.run.newest_attempt()
            for line in logs.read():
                print(line, flush=True)
            if logs.attempt < newest:
                _print_failure(found.run, logs.attempt)
                logs = NodeLogs(found.run, logs.attempt + 1, rank)
            elif view.exit is not None:
                _print_failure(found.run, logs.attempt)
                return Exit.DONE
            else:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return Exit.DETACHED
