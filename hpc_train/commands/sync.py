"""``python -m hpc_train sync [RUN...]`` sends the metrics of runs to W&B, MLflow or TensorBoard."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import default_root
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.run.owner import is_own, output_directory
from hpc_train.runs.job_status import JobStatuses
from hpc_train.runs.lookup import RunHandle, find_runs, run_directories, statuses_of
from hpc_train.telemetry.sinks.replay import BACKENDS, Replay
from hpc_train.telemetry.sinks.tracker import Session
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted

POLL_S = 5.0
_EPILOG = """\
examples:
  python -m hpc_train sync mine                    to W&B, from a machine with a route to it
  python -m hpc_train sync mine --follow           until the run ends
  python -m hpc_train sync sweep --to mlflow       all runs of a sweep
  python -m hpc_train sync --to tensorboard        all runs below run.root

The metrics are read from RUN/metrics, whether or not the run was tracked. The command continues where the run or an
earlier call has stopped; if a step was repeated, its newest values are sent.
"""


def main(arguments: list[str]) -> int:
    """Sends the metrics; a run that fails does not keep the others from being sent."""
    options = _parser().parse_args(arguments)
    targets = options.runs or [str(path) for path in run_directories(Path(default_root()))]
    items = {item.run.path: item for target in targets for item in find_runs(target, "sync")}
    if not items:
        raise UserError(f"no run found in {default_root()}", where="RUN", fix="name a run directory")
    rows = [_Row(item, options.to, options.json) for item in items.values()]
    console = Terminal(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    is_interrupted = False
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            for row in rows:
                row.send(progress)
            if options.follow:
                _follow(rows)
    except KeyboardInterrupt:
        is_interrupted = True
    for row in rows:
        row.finish()
    if is_interrupted:
        return Exit.DETACHED
    for row in rows:
        row.report()
    return Exit.FAILED if any(row.error for row in rows) else Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m hpc_train sync",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs or sweeps (default: all below run.root)")
    parser.add_argument("--to", choices=[*BACKENDS], default="wandb", help="the tracker (default: %(default)s)")
    parser.add_argument("-f", "--follow", action="store_true", help="send new metrics as they are written, to the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    return parser


class _Row:
    """Describes a run whose metrics are sent.

    Attributes:
        error: the error after which nothing is sent.
        ended: whether the run had ended when its newest lines were read.
    """

    def __init__(self, item: RunHandle, to: str, as_json: bool) -> None:
        self.item = item
        self.name = item.run.title
        self.to = to
        self.error: UserError | None = None
        self.ended = False
        self._json = as_json
        self._replay: Replay | None = None

    def send(self, progress: Progress | None = None) -> None:
        """Sends the new lines, and shows their number if there is a ``progress``."""
        if self.error is not None:
            return
        try:
            if self._replay is None:
                output = output_directory(self.item.run.path)
                config = self.item.config
                if not is_own(self.item.run.path):
                    # without the accounts and servers that the owner names
                    wandb = replace(config.telemetry.wandb, entity=None)
                    mlflow = replace(config.telemetry.mlflow, uri="auto")
                    config = replace(config, telemetry=replace(config.telemetry, wandb=wandb, mlflow=mlflow))
                    self._warn(f"the run belongs to another user; files are written to {output}")
                session = Session(config, self.item.run, self._warn, output=output)
                self._replay = Replay(session.run, BACKENDS[self.to](session))
            task = None if progress is None else progress.add_task(self.name, total=None)

            def show(done: int, total: int) -> None:
                if progress is not None and task is not None:
                    progress.update(task, completed=done, total=total)

            self._replay.send_new(show)
        except UserError as error:
            self.error = error
        except Exception as error:
            self.error = UserError(
                f"{self.to} did not accept the metrics of {self.item.run.path}: {type(error).__name__}: {error}",
                where=f"sync --to {self.to}",
                fix="repeat the command when the tracker responds; it continues where it has stopped",
            )

    def finish(self) -> None:
        if self._replay is not None and self.error is None:
            try:
                self._replay.finish()
            except Exception as error:
                self.error = UserError(f"{self.to}: {type(error).__name__}: {error}", where=f"sync --to {self.to}")

    def report(self) -> None:
        sent = 0
        last = 0
        outcome: Mapping[str, Any] = {}
        if self._replay is not None:
            sent = self._replay.sent
            last = self._replay.last
            outcome = self._replay.backend.outcome()
        if self._json:
            row = {"run": str(self.item.run.path), "to": self.to, "sent": sent, "last_step": last, **outcome}
            if self.error is not None:
                row["error"] = str(self.error)
            print(json.dumps(row))
        elif self.error is not None:
            print(f"{self.name}: {self.error}", file=sys.stderr)
        elif last == 0:
            print(f"{self.name}: no step is logged yet")
        elif sent == 0:
            print(f"{self.name}: nothing new, {self.to} has step {last}")
        else:
            lines = counted(sent, "line", "lines")
            print(f"{self.name}: sent {lines}, up to step {last}  {outcome.get('url') or ''}".rstrip())

    def _warn(self, message: str) -> None:
        print(f"{self.name}: {message}", file=sys.stderr)


def _follow(rows: Sequence[_Row]) -> None:
    slurm = JobStatuses()
    while True:
        open_rows = [row for row in rows if not row.ended and row.error is None]
        if not open_rows:
            return
        # the states are read before the lines, so that no line written before the end is missed
        statuses = statuses_of([row.item for row in open_rows], slurm)
        for row in open_rows:
            row.ended = row.item.view(statuses).exit is not None
            row.send()
        if not all(row.ended for row in open_rows):
            time.sleep(POLL_S)
