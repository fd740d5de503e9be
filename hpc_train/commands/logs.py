"""``python -m hpc_train logs RUN`` prints the failure of an attempt, then the output of its workers merged by time."""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO

from hpc_train.config.options import OptionParser
from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile, open_file, tell_once
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import LINE_BYTES
from hpc_train.run.streams import unescaped
from hpc_train.runs.diagnosis import find_cause
from hpc_train.runs.job_status import JobStatuses, attempt_end, failure_text
from hpc_train.runs.lookup import RunHandle, find_run, of_role, statuses_of

LINE = re.compile(r"(\S{23}) \[(\d{1,9})\] ")
POLL_S = 0.5
RANKS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


class Level(IntEnum):
    info = 0
    warning = 1
    error = 2


_RANK = r"^(?:\[rank\d+\]:\s?)?"  # torch's prefix of the lines that it prints on a failure
# the first that matches counts
_FORMS = (
    (Level.error, rf"{_RANK}Traceback \(most recent call last\):"),
    (Level.error, rf"{_RANK}\[?[EF]\d{{4}} \d\d:\d\d:\d\d"),  # glog, which torch's C++ code uses: [W1123 13:55:27.1
    (Level.warning, rf"{_RANK}\[?W\d{{4}} \d\d:\d\d:\d\d"),
    (Level.error, r"(?:^|[\[|:\s-])(?:ERROR|CRITICAL|FATAL)(?:[\]|:\s-]|$)"),  # Python's logging
    (Level.warning, r"(?:^|[\[|:\s-])WARN(?:ING)?(?:[\]|:\s-]|$)"),  # also NCCL WARN
    (Level.warning, r":\d+: \w*Warning: |^(?:\w+\.)*\w*Warning: "),  # Python's warnings
    (Level.error, rf"{_RANK}(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)"),
    (Level.error, r"^(?:Fatal Python error|Segmentation fault|Killed\b)"),
    (Level.warning, r"^warning\b|^skipped .*non-finite|^rolled back to step|^the last save, .* failed"),  # hpc_train's
)
_PATTERNS = tuple((level, re.compile(pattern)) for level, pattern in _FORMS)
_HEADER = re.compile(_FORMS[0][1])
_INDENTED = re.compile(rf"{_RANK}\s+\S")
_CHAINED = re.compile(rf"{_RANK}(?:$|During handling of the above|The above exception was)")


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    ranks = _ranks(options.rank)
    item = find_run(of_role(options.target, options.role), "logs")
    attempt = _attempt(item.run, options.attempt)
    if not options.follow:
        _print_failure(item.run, attempt, options.json)
    logs = NodeLogs(item.run, max(0, attempt), ranks, Level[options.level], options.json)
    out = unescaped(sys.stdout) if options.raw else sys.stdout
    if options.follow:
        return _follow(item, logs, out)
    printed = False
    for line in logs.read():
        print(line, file=out)
        printed = True
    if not printed and attempt < 0:
        print("the run has not started yet", file=sys.stderr)
    elif not printed:
        rank = "any rank" if ranks is None else f"rank {options.rank}"
        text = f"attempt {attempt} has no output of {rank} at level {options.level} or above"
        print(text, file=sys.stderr)
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m hpc_train logs", description=__doc__)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument("--role", metavar="NAME", help="print the output of this role only")
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
        help="minimum level to print (default: info)",
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="print this attempt (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, or per failure")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="send the colors and other control characters in the output of the workers to the terminal",
    )
    return parser


def _attempt(run: RunDirectory, number: int | None) -> int:
    """Returns the attempt to print: the newest one by default, -1 before the first."""
    newest = run.newest_attempt()
    if number is None:
        return newest
    if 0 <= number <= newest or (number >= 0 and any(run.logs.glob(f"*-{number:03d}.log"))):
        return number
    existing = "it has none"
    if newest == 0:
        existing = "it has only attempt 0"
    elif newest > 0:
        existing = f"it has attempts 0 to {newest}"
    fix = "without --attempt, the newest one is printed"
    raise UserError(f"the run has no attempt {number}: {existing}", where="--attempt", fix=fix)


def _ranks(text: str) -> frozenset[int] | None:
    """Returns the ranks of ``0,4-7``; None for ``all``."""
    if text == "all":
        return None
    if RANKS.fullmatch(text) is None:
        raise UserError(f"--rank must be all or ranks, got {text!r}", where="--rank", fix="--rank 0, or --rank 0,4-7")
    spans = [part.split("-") for part in text.split(",")]
    return frozenset(rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1))


@dataclass
class NodeLogs:
    """Reads the log files of an attempt, one per node; each ``read`` returns the lines written since the last one.

    Attributes:
        ranks: the ranks whose lines are returned; None for all.
        level: the lowest level. A line without a rank, such as the note on the size limit of a log, is always returned.
    """

    run: RunDirectory
    attempt: int
    ranks: frozenset[int] | None
    level: Level
    as_json: bool
    _offsets: dict[Path, int] = field(default_factory=dict, init=False)
    _levels: dict[int, Levels] = field(default_factory=dict, init=False)

    def read(self) -> Iterator[str]:
        """Returns the new lines of all nodes in the order of their times."""
        files = [self._new_lines(path) for path in sorted(self.run.logs.glob(f"*-{self.attempt:03d}.log"))]
        return (line for _, line in heapq.merge(*files, key=lambda item: item[0]))

    def _new_lines(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yields each selected line with its time; a line without a time gets the time of the line before."""
        at = ""
        try:
            file = open_file(path, self.run.path)
        except DamagedFile as error:
            tell_once(f"note: {error.what}; it is not read")
            return
        with file:
            file.seek(self._offsets.get(path, 0))
            while data := file.readline(LINE_BYTES):
                if not data.endswith(b"\n"):
                    return  # the line is incomplete, or the file ends here
                self._offsets[path] = self._offsets.get(path, 0) + len(data)
                line = data.decode(errors="replace").rstrip("\n")
                match = LINE.match(line)
                if match:
                    at = match[1]
                text = self._formatted(line, match)
                if text is not None:
                    yield at, text

    def _formatted(self, line: str, head: re.Match[str] | None) -> str | None:
        """Returns a line as it is printed; None if it is not selected."""
        content: dict[str, Any] = {"text": line}
        if head is not None:
            rank = int(head[2])
            text = line[head.end() :]
            level = self._levels.setdefault(rank, Levels()).of(text)
            if level < self.level or (self.ranks is not None and rank not in self.ranks):
                return None
            content = {"time": head[1], "rank": rank, "level": level.name, "text": text}
        if self.as_json:
            return json.dumps(content)
        return line


def _print_failure(run: RunDirectory, attempt: int, as_json: bool) -> None:
    """Prints how ``attempt`` failed, even if the run has continued after it."""
    text = None
    end = attempt_end(run, attempt)
    if end is not None and end.event.kind.is_failure:
        text = failure_text(run, end.event, whole=True)
    elif cause := find_cause([event for event in run.read_events() if event.attempt == attempt]):
        text = f"attempt {attempt}: {cause.who} failed ({cause.kind}):\n{cause.traceback.rstrip() or cause.message}"
    if text is not None and as_json:
        print(json.dumps({"attempt": attempt, "failure": text}), flush=True)
    elif text is not None:
        print(f"{text}\n", flush=True)


def _follow(item: RunHandle, logs: NodeLogs, out: TextIO) -> int:
    slurm = JobStatuses()
    try:
        while True:
            # the state is read before the lines, so that no line written before the end is missed
            view = item.view(statuses_of([item], slurm))
            newest = item.run.newest_attempt()
            for line in logs.read():
                print(line, file=out, flush=True)
            if logs.attempt < newest:
                _print_failure(item.run, logs.attempt, logs.as_json)
                logs = replace(logs, attempt=logs.attempt + 1)
            elif view.exit is not None:
                _print_failure(item.run, logs.attempt, logs.as_json)
                return Exit.DONE
            else:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return Exit.DETACHED


class Levels:
    """Finds the level of each line of one rank, in order, in the forms that Python, torch and NCCL use.

    A line of unknown form counts as info. Indented lines belong to the line before them, and the line with the
    exception to its traceback.
    """

    def __init__(self) -> None:
        self._level = Level.info
        self._in_traceback = False

    def of(self, text: str) -> Level:
        """Returns the level of the next line; ``text`` is the line without its time and rank."""
        if _INDENTED.search(text) or (self._level is Level.error and _CHAINED.search(text)):
            return self._level
        ends_traceback = self._in_traceback and not _HEADER.search(text)
        self._in_traceback = _HEADER.search(text) is not None
        self._level = next((level for level, pattern in _PATTERNS if pattern.search(text)), Level.info)
        if ends_traceback:
            self._level = Level.error
        return self._level
