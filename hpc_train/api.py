"""Provides the Python API, which submits runs from a script or a notebook and reads them back. It imports no torch.

import hpc_train

run = hpc_train.submit(["+strategy=dp", "train.steps=100"])
run.wait()
losses = run.columns("step", "loss")
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from rich.console import Console

from hpc_train.checkpoint.listing import list_checkpoints
from hpc_train.commands.submitted import cancel_runs, request_resize_of
from hpc_train.config.arguments import expand, override_value, own_files_checked, refuse_search, wants_dry_run
from hpc_train.config.run_path import run_directory
from hpc_train.config.schema import Config
from hpc_train.config.translate import translate
from hpc_train.errors import UserError
from hpc_train.launch.launcher import Sweep
from hpc_train.launch.request import parse_line
from hpc_train.runs import lookup
from hpc_train.runs.job_status import JobStatuses, time_left
from hpc_train.telemetry.progress import final_result
from hpc_train.telemetry.terminal import Terminal

__all__ = ["CheckpointInfo", "Run", "Status", "UserError", "find_runs", "submit"]

POLL_S = 0.5


@dataclass(frozen=True)
class Status:
    """Describes the state of a run at one moment.

    ``state`` is the word of the ``status`` command (``waiting``, ``pending (Priority)``, ``running``, ``done``,
    ``failed``, ...). ``exit_code`` is None until the run has ended: 0 done, 1 failed, 2 refused, 75 stopped, 93 given
    up. ``step`` is the newest logged step of ``steps``. ``message`` describes a failure, with the traceback of the
    failing rank. What is not known yet is None.
    """

    state: str
    exit_code: int | None
    step: int | None
    steps: int | None
    restarts: int
    nodes: int | None
    seconds_left: float | None
    message: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint. ``problem`` describes missing or short files; it is None if names and sizes match."""

    step: int
    path: Path
    size_bytes: int | None
    problem: str | None


class Run:
    """Represents a run, read from its run directory. Reading needs no Slurm, except for the state of a waiting job.

    Args:
        target: a run directory, or the name of a run below the usual root.

    Raises:
        UserError: there is no such run, or ``target`` is a sweep (see ``find_runs``).
    """

    def __init__(self, target: str | Path) -> None:
        self._directory = lookup.find_run(str(target), "status").run
        self._slurm = JobStatuses()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Returns the run directory."""
        return self._directory.path

    @property
    def config(self) -> Config:
        """Returns the frozen config."""
        return self._handle().config

    @property
    def job_id(self) -> str | None:
        """Returns the id of the newest Slurm job; None for a run on this machine."""
        return self._handle().job_id

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one dict per logged step, in order. After a restart the newest attempt's values of a step count."""
        return [*self._directory.read_metrics()]

    def columns(self, *names: str) -> dict[str, list[Any]]:
        """Returns the metrics by column, ready for ``pandas.DataFrame``; a value that was not logged is None.

        Args:
            names: the columns, e.g. ``"step", "loss"``; without names, all columns.
        """
        rows = self.metrics()
        names = names or tuple(dict.fromkeys(key for row in rows for key in row))
        return {name: [row.get(name) for row in rows] for name in names}

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Returns the events of all nodes and ranks ordered by time, or only those called ``name``."""
        return [event for event in self._directory.read_events() if name in (None, event.name)]

    def checkpoints(self) -> list[CheckpointInfo]:
        """Returns the committed checkpoints, oldest first. Compares file names and sizes, but reads no tensor."""
        return [
            CheckpointInfo(
                step=item.checkpoint.step,
                path=item.checkpoint.path,
                size_bytes=None if item.manifest is None else item.manifest.size,
                problem=item.problem,
            )
            for item in list_checkpoints(self._directory)
        ]

    @property
    def result(self) -> dict[str, Any] | None:
        """The final numbers (``steps``, ``loss``, ``val_loss``, ...); None until the run has reached its last step."""
        return final_result(self._directory.record())

    def status(self) -> Status:
        """Returns the current state. Slurm is asked at most every 30 seconds."""
        handle = self._handle()
        view = handle.view(lookup.statuses_of([handle], self._slurm))
        return Status(
            state=view.state,
            exit_code=None if view.exit is None else int(view.exit),
            step=view.metrics.get("step"),
            steps=view.steps,
            restarts=view.restarts,
            nodes=view.nodes,
            seconds_left=time_left(view),
            message=view.message,
        )

    def wait(self, timeout: float | None = None) -> Status:
        """Waits until the run ends and returns its last status. A run that was never submitted is returned at once.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: the run has not ended in time. It continues.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.status()).exit_code is None and self._handle().submission:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.path} is {status.state} after {timeout:g} s")
            time.sleep(POLL_S)
        return status

    def cancel(self, *, save: bool = False) -> bool:
        """Ends the run for good; returns False if it had already ended.

        Args:
            save: let a running Slurm job save a checkpoint first. A run on this machine always saves one.

        Raises:
            UserError: Slurm refuses.
        """
        if self.status().exit_code is not None:  # its processes may still be exiting
            return False
        return cancel_runs([self._handle()], save=save) > 0

    def resize(self, nodes: int) -> None:
        """Asks the live run to continue on ``nodes`` nodes. The events ``resized`` and ``resize_refused`` answer.

        Raises:
            UserError: the run has no live workers.
        """
        request_resize_of(self._directory, nodes, "Run.resize")

    def _handle(self) -> lookup.RunHandle:
        return lookup.find_run(str(self.path), "status")


def find_runs(target: str | Path) -> list[Run]:
    """Returns the run in ``target``, or all runs of the sweep in it: a directory, or its name below the usual root.

    Raises:
        UserError: there is no run.
    """
    return [Run(item.run.path) for item in lookup.find_runs(str(target), "status")]


def submit(
    overrides: Sequence[str] = (),
    *,
    entry: str | Callable[..., Any] | None = None,
    args: Mapping[str, Any] | None = None,
    detach: bool = True,
    config_dir: str | Path | None = None,
    verbose: bool = False,
    trust_owner: bool = False,
) -> Run | list[Run]:
    """Submits what ``python -m hpc_train OVERRIDES -m`` submits: to Slurm if there is one, else to this machine.

    All jobs are composed and checked before the first is submitted.

    Args:
        overrides: the overrides of the command line, e.g. ``["+strategy=dp", "train.steps=100"]``; several values
            separated by commas make a sweep.
        entry: your own function, or its path ``package.module:function``, which runs in every worker instead of the
            trainer and is called with an ``hpc_train.loop.Context`` (``run.entry``).
        args: the arguments of ``entry`` (``context.args``): numbers, strings, and lists and dicts of them.
        detach: return after submission; False waits until all runs have ended, whatever their exit code.
        config_dir: a directory with your own config groups (``-cd`` on the command line).
        verbose: print what the command prints, and ask at a terminal if the jobs may cost many GPU-hours. Otherwise
            such jobs need ``launch.yes=true``.
        trust_owner: allow a run directory that belongs to another user (``--trust-owner``).

    Returns:
        The run, or a list of runs for a sweep.

    Raises:
        UserError: a mistake in the config, or the jobs do not fit the site; nothing was submitted.
    """
    _check_types(overrides, entry, args, config_dir)
    console = Terminal()
    if not verbose:
        console = Terminal(file=io.StringIO(), force_jupyter=False)
    try:
        paths = _submit([*overrides, *_own_code(entry, args or {})], config_dir, console, trust_owner)
    except Exception as error:
        mistake = translate(error)
        if mistake is None or mistake is error:
            raise
        raise mistake from error
    runs = [Run(path) for path in paths]
    if not detach:
        for run in runs:
            run.wait()
    return runs[0] if len(runs) == 1 else runs


def _check_types(overrides: object, entry: object, args: object, config_dir: object) -> None:
    """Raises UserError for an argument of ``submit`` that has the wrong type."""
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str | bytes)
    if not is_list or not all(isinstance(override, str) for override in cast("Sequence[object]", overrides)):
        what = f"the overrides are {overrides!r:.80}, not a list of strings"
        raise UserError(what, where="overrides", fix='submit(["optim.lr=1e-3", "train.steps=100"])')
    if not (entry is None or isinstance(entry, str) or hasattr(entry, "__qualname__")):
        what = f"the entry is {entry!r:.80}, which workers cannot import by a name"
        raise UserError(what, where="entry", fix="a function of a module, or entry='package.module:function'")
    if not (args is None or isinstance(args, Mapping)):
        raise UserError(f"args is {args!r:.80}, not a dict", where="args", fix='args={"width": 64}')
    for name in args or {}:
        if re.fullmatch(r"[\w-]+", str(name)) is None:
            raise UserError(f"args has the name {name!r:.80}", where="args", fix="names of letters, digits, _ and -")
    if not (config_dir is None or isinstance(config_dir, str | os.PathLike)):
        what = f"config_dir is {config_dir!r:.80}, not a path"
        raise UserError(what, where="config_dir", fix='config_dir="my_conf"')


def _own_code(entry: str | Callable[..., Any] | None, args: Mapping[str, Any]) -> list[str]:
    """Returns the overrides for a custom function."""
    overrides = [f"++run.args.{name}={override_value(value)}" for name, value in args.items()]
    if entry is None:
        return overrides
    if isinstance(entry, str):
        return [f"run.entry={entry}", *overrides]
    path = f"{entry.__module__}:{entry.__qualname__}"
    if entry.__module__ == "__main__" or "." in entry.__qualname__:
        raise UserError(
            f"workers cannot import {path}",
            where="entry",
            fix="move the function to the top level of a module and pass it, or entry='package.module:function'",
        )
    return [f"run.entry={path}", *overrides]


def _submit(overrides: list[str], config_dir: str | Path | None, console: Console, trust_owner: bool) -> list[Path]:
    for override in overrides:
        if override.startswith("-"):
            raise UserError(f"{override} is an option", where="overrides", fix="overrides only, as train.steps=100")
    if wants_dry_run(overrides):
        raise UserError(
            "submit has no dry run", where="launch.dry_run", fix="python -m hpc_train ... launch.dry_run=true -m"
        )
    arguments = [*overrides, "--multirun"]
    if config_dir is not None:
        arguments += ["--config-dir", os.fspath(config_dir)]
    line = parse_line(arguments)
    refuse_search(line, "submit")
    jobs_overrides = expand(line.overrides)
    with own_files_checked(line), line.composer() as compose:
        run = compose(jobs_overrides[0]).run
        directory = Path(run_directory(run.root, run.name, run.fork))
        multirun = OmegaConf.create({"hydra": {"overrides": {"task": list(line.overrides)}}})
        sweep = Sweep(directory, console, line, multirun, trust_owner)
        jobs = sweep.prepare(compose, jobs_overrides, 0, len(jobs_overrides))
    sweep.enqueue(jobs, console).submit_all()
    return [job.run.path for job in jobs]
