"""``python -m hpc_train logs RUN`` prints the failure of an attempt, then the output of its workers merged by time."""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile, open_file, tell_once
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import LINE_BYTES
from hpc_train.run.streams import unescaped
from hpc_train.runs.diagnosis import find_cause
from hpc_train.runs.job_status import SlurmStatuses, attempt_end, failure_text
from hpc_train.runs.lookup import RunHandle, find_run, statuses_of
from hpc_train.telemetry.log_level import Level, Levels

LINE = re.compile(r"(\S{23}) \[(\d{1,9})\] ")
POLL_S = 0.5
RANKS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    wanted = Wanted(_ranks(options.rank), Level[options.level], options.json)
    found = find_run(options.target, "logs")
    attempt = _attempt(found.run, options.attempt)
    if not options.follow:
        _print_failure(found.run, attempt, wanted)
    logs = NodeLogs(found.run, max(0, attempt), wanted)
    out = unescaped(sys.stdout) if options.raw else sys.stdout
    if options.follow:
        return _follow(found, logs, out)
    printed = False
    for line in logs.read():
        print(line, file=out)
        printed = True
    if not printed:
        rank = "any rank" if logs.wanted.ranks is None else f"rank {options.rank}"
        none = f"attempt {attempt} has no output of {rank} at level {options.level} or above"
        print("the run has not started yet" if attempt < 0 else none, file=sys.stderr)
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpc_train logs", description=__doc__)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new output as it is written, until the run ends"
    )
    parser.add_argument(
        "--rank", default="0", metavar="all|RANKS", help="print the output of these ranks, e.g. 0,4-7 (default: 0)"
    )
    parser.add_argument(
        "--level",
        choices=[level.name for level in Level],
        default="info",
        help="print no lines below it (default: info)",
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="print this attempt (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, or per failure")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="send the colors and other control characters in the output of the workers to the terminal",
    )
    return parser


def _attempt(run: RunDirectory, wanted: int | None) -> int:
    """Returns the attempt to print: the newest one by default, -1 before the first."""
    newest = run.newest_attempt()
    if wanted is None:
        return newest
    if 0 <= wanted <= newest or (wanted >= 0 and any(run.logs.glob(f"*-{wanted:03d}.log"))):
        return wanted
    exist = (
        f"it has attempts 0 to {newest}" if newest > 0 else "it has only attempt 0" if newest == 0 else "it has none"
    )
    fix = "without --attempt, the newest one is printed"
    raise UserError(f"the run has no attempt {wanted}: {exist}", where="--attempt", fix=fix)


def _ranks(text: str) -> frozenset[int] | None:
    """Returns the ranks of ``0,4-7``; None for ``all``."""
    if text == "all":
        return None
    if RANKS.fullmatch(text) is None:
        raise UserError(f"--rank must be all or ranks, got {text!r}", where="--rank", fix="--rank 0, or --rank 0,4-7")
    spans = [part.split("-") for part in text.split(",")]
    return frozenset(rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1))


@dataclass(frozen=True)
class Wanted:
    """Decides which lines are printed, and how.

    Attributes:
        ranks: None for all.
        level: the lowest level. A line without a rank, such as the note on the size limit of a log, is always printed.
    """

    ranks: frozenset[int] | None
    level: Level = Level.info
    as_json: bool = False


class NodeLogs:
    """Reads the log files of an attempt, one per node; each ``read`` returns the lines written since the last one."""

    def __init__(self, run: RunDirectory, attempt: int, wanted: Wanted) -> None:
        self._run = run
        self.attempt = attempt
        self.wanted = wanted
        self._offsets: dict[Path, int] = {}
        self._levels: dict[int, Levels] = {}

    def read(self) -> Iterator[str]:
        """Returns the new lines of all nodes in the order of their times."""
        files = [self._new_lines(path) for path in sorted(self._run.logs.glob(f"*-{self.attempt:03d}.log"))]
        return (line for _, line in heapq.merge(*files, key=lambda item: item[0]))

    def _new_lines(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yields each wanted line with its time; a line without a time gets that of the line before."""
        at = ""
        try:
            file = open_file(path, self._run.path)
        except DamagedFile as error:
            tell_once(f"note: {error.what}; it is not read")
            return
        with file:
            file.seek(self._offsets.get(path, 0))
            while data := file.readline(LINE_BYTES):
                if not data.endswith(b"\n"):
                    return  # the line is still being written, or is none
                self._offsets[path] = self._offsets.get(path, 0) + len(data)
                line = data.decode(errors="replace").rstrip("\n")
                match = LINE.match(line)
                at = match[1] if match else at
                if (shown := self._shown(line, match)) is not None:
                    yield at, shown

    def _shown(self, line: str, head: re.Match[str] | None) -> str | None:
        """Returns a line as it is printed; None if it is not wanted."""
        if head is None:
            return json.dumps({"text": line}) if self.wanted.as_json else line
        rank, text = int(head[2]), line[head.end() :]
        level = self._levels.setdefault(rank, Levels()).of(text)
        if level < self.wanted.level or (self.wanted.ranks is not None and rank not in self.wanted.ranks):
            return None
        if self.wanted.as_json:
            return json.dumps({"time": head[1], "rank": rank, "level": level.name, "text": text})
        return line


def _print_failure(run: RunDirectory, attempt: int, wanted: Wanted) -> None:
    """Prints how ``attempt`` failed, even if the run has continued after it."""
    text = _failure(run, attempt)
    if text is not None:
        print(json.dumps({"attempt": attempt, "failure": text}) if wanted.as_json else f"{text}\n", flush=True)


def _failure(run: RunDirectory, attempt: int) -> str | None:
    end = attempt_end(run, attempt)
    if end is not None and end.event.kind.is_failure:
        return failure_text(run, end.event, whole=True)
    if cause := find_cause([event for event in run.read_events() if event.attempt == attempt]):
        who = f"attempt {attempt}: {cause.who} failed ({cause.kind})"
        return f"{who}:\n{cause.traceback.rstrip() or cause.message}"
    return None


def _follow(found: RunHandle, logs: NodeLogs, out: TextIO) -> int:
    slurm = SlurmStatuses()
    try:
        while True:
            # the state is read before the lines, so that no line written before the end is missed
            view = found.view(statuses_of([found], slurm))
            newest = found.run.newest_attempt()
            for line in logs.read():
                print(line, file=out, flush=True)
            if logs.attempt < newest:
                _print_failure(found.run, logs.attempt, logs.wanted)
                logs = NodeLogs(found.run, logs.attempt + 1, logs.wanted)
            elif view.exit is not None:
                _print_failure(found.run, logs.attempt, logs.wanted)
                return Exit.DONE
            else:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return Exit.DETACHED
