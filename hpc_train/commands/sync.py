"""``python -m hpc_train sync [RUN...]`` sends the metrics of runs to W&B, MLflow or TensorBoard."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hpc_train.config.run_path import default_root
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.run.owner import is_own, output_directory
from hpc_train.runs.job_status import SlurmStatuses
from hpc_train.runs.lookup import RunHandle, find_runs, run_directories, statuses_of
from hpc_train.telemetry.sinks.replay import BACKENDS, Replay, Session
from hpc_train.telemetry.terminal import Terminal

POLL_S = 5.0
_EPILOG = """\
examples:
  python -m hpc_train sync mine                    to W&B, from a machine with a route to it
  python -m hpc_train sync mine --follow           until the run ends
  python -m hpc_train sync sweep --to mlflow       all runs of a sweep
  python -m hpc_train sync --to tensorboard        all runs below run.root

The metrics are read from RUN/metrics, whether or not the run was tracked. The command continues where the run or an
earlier call has stopped; of steps that were done twice, the newest values are sent.
"""


def main(arguments: list[str]) -> int:
    """Sends the metrics; a run that fails does not keep the others from being sent."""
    options = _parser().parse_args(arguments)
    items = list(
        {item.run.path: item for target in _targets(options.runs) for item in find_runs(target, "sync")}.values()
    )
    if not items:
        raise UserError(f"no run found in {default_root()}", where="RUN", fix="name a run directory")
    rows = [_Row(item, options.to, options.json) for item in items]
    try:
        with _bar() as bar:
            for row in rows:
                row.send(bar)
            if options.follow:
                _follow(rows)
    except KeyboardInterrupt:
        for row in rows:
            row.finish()
        return Exit.DETACHED
    for row in rows:
        row.finish()
        row.report()
    return Exit.FAILED if any(row.error for row in rows) else Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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


def _targets(named: Sequence[str]) -> list[str]:
    return list(named) or [str(path) for path in run_directories(Path(default_root()))]


class _Row:
    """A run that is sent, and what became of it."""

    def __init__(self, item: RunHandle, to: str, as_json: bool) -> None:
        self.item = item
        self.to = to
        self.error: UserError | None = None
        self.ended = False
        self._json = as_json
        self._replay: Replay | None = None

    @property
    def name(self) -> str:
        path = self.item.run.path
        return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name

    def send(self, bar: _Bar | None = None) -> None:
        """Sends what is new; keeps an error, after which nothing is sent."""
        if self.error is not None:
            return
        try:
            if self._replay is None:
                output = output_directory(self.item.run.path)
                is_foreign = not is_own(self.item.run.path)
                config = _for_caller(self.item.config) if is_foreign else self.item.config
                if is_foreign:
                    self._tell(f"the run belongs to another user; files are written to {output}")
                session = Session(config, self.item.run, self._tell, output=output)
                self._replay = Replay(session.run, BACKENDS[self.to](session))
            self._replay.send_new(bar.advance(self.name) if bar is not None else _ignore)
        except UserError as error:
            self.error = error
        except Exception as error:
            self.error = UserError(
                f"{self.to} did not accept the metrics of {self.item.run.path}: {type(error).__name__}: {error}",
                where=f"sync --to {self.to}",
                fix="repeat the command when the tracker responds; it continues where it has stopped",
            )

    def finish(self) -> None:
        """Ends the connection."""
        if self._replay is not None and self.error is None:
            try:
                self._replay.finish()
            except Exception as error:
                self.error = UserError(f"{self.to}: {type(error).__name__}: {error}", where=f"sync --to {self.to}")

    def report(self) -> None:
        sent, last = (0, 0) if self._replay is None else (self._replay.sent, self._replay.last)
        if self._json:
            found: dict[str, Any] = {"run": str(self.item.run.path), "to": self.to, "sent": sent, "last_step": last}
            found |= {} if self._replay is None else self._replay.backend.outcome()
            print(json.dumps(found | ({} if self.error is None else {"error": str(self.error)})))
        elif self.error is not None:
            print(f"{self.name}: {self.error}", file=sys.stderr)
        elif last == 0:
            print(f"{self.name}: no step is logged yet")
        elif sent == 0:
            print(f"{self.name}: nothing new, {self.to} has step {last}")
        else:
            url = "" if self._replay is None else self._replay.backend.outcome().get("url") or ""
            print(f"{self.name}: sent {sent} line{'s' if sent > 1 else ''}, up to step {last}  {url}".rstrip())

    def _tell(self, message: str) -> None:
        print(f"{self.name}: {message}", file=sys.stderr)


def _for_caller(config: Config) -> Config:
    """Returns the config of another user's run without the accounts and servers that it names."""
    wandb = replace(config.telemetry.wandb, entity=None)
    mlflow = replace(config.telemetry.mlflow, uri="auto")
    return replace(config, telemetry=replace(config.telemetry, wandb=wandb, mlflow=mlflow))


def _ignore(done: int, total: int) -> None:
    """Shows no progress."""


def _follow(rows: Sequence[_Row]) -> None:
    """Sends new lines until all runs have ended."""
    slurm = SlurmStatuses()
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


class _Bar:
    """Shows the lines sent of each run on standard error, if it is a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def advance(self, name: str) -> Any:
        task = self._progress.add_task(name, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)


@contextmanager
def _bar() -> Iterator[_Bar]:
    console = Terminal(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield _Bar(progress)
