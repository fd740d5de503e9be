"""Implements the Hydra launcher behind ``-m``: it composes and checks all jobs, freezes and submits them, and then
watches them or leaves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import track

from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import SWEEPER
from hpc_train.config.hydra_settings import is_search
from hpc_train.config.jobs import JobComposer, JobConfigs
from hpc_train.config.run_path import job_directory
from hpc_train.config.schema import Config
from hpc_train.config.secrets import HIDDEN, file_mode, refuse_secrets
from hpc_train.config.translate import translate
from hpc_train.errors import UserError, UserErrors
from hpc_train.launch.executors.select import select_executor
from hpc_train.launch.job import Job
from hpc_train.launch.memory import with_memory_note
from hpc_train.launch.monitor import Display, hand_over, report, wait
from hpc_train.launch.request import check_job, notices_of
from hpc_train.launch.search import Trials, exit_code, result_of
from hpc_train.launch.submission import JobQueue
from hpc_train.run.code import FrozenCode, frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import share_one, write_text
from hpc_train.run.freeze import freeze_all
from hpc_train.run.owner import warn_if_open
from hpc_train.run.snapshot import snapshot_code, unfrozen_note
from hpc_train.runs.job_status import View
from hpc_train.telemetry.terminal import Terminal

T = TypeVar("T")


@dataclass
class Ended:
    """Holds how the jobs of one command ended. It is ``ended`` of Hydra's task function; the launcher fills it."""

    runs: list[tuple[RunDirectory, View]] = field(default_factory=list)
    trials: Trials | None = None  # of a sweeper that searches


MANY = 20  # show a progress bar from this number of jobs on


class HpcTrainLauncher(Launcher):
    """Submits the jobs of a sweep; nothing is submitted unless all of them are valid."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        refuse_secrets(config)
        self._loader = hydra_context.config_loader
        self._config = config
        self._sweep = Path(config.hydra.sweep.dir)
        self._console = Terminal()
        self._code: FrozenCode | None = None
        self._told: set[tuple[str, str]] = set()  # keys without effect, with the reasons
        self._trials: Trials | None = None
        self._ended: Ended = getattr(task_function, "ended", Ended())
        self._line: CommandLine | None = getattr(task_function, "line", None)
        self._trusts_owner: bool = getattr(task_function, "trust_owner", False)
        if is_search(config.hydra):
            if config.launch.detach:
                what = "the sweeper reads the result of each job, so the jobs cannot be left running"
                raise UserError(what, where="launch.detach", fix="launch.detach=false")
            compose = self._composer(2)
            fixed = config.hydra.overrides.task
            trial = partial(self._trial, compose)
            self._trials = Trials(self._sweep, fixed, self._console, trial, self._run_trials)
            self._ended.trials = self._trials

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs to their end, or leaves them running (``launch.detach``).

        Returns:
            the metric of each job, for sweepers that search; nothing when detached.

        Raises:
            UserError: a job is wrong or was refused.
            SystemExit: the user stopped the jobs.
        """
        if self._trials is not None:
            return self._trials.launch(job_overrides, initial_job_idx)
        jobs = self._jobs(job_overrides, initial_job_idx)
        if jobs[0].config.launch.detach:
            queue = self._enqueue(jobs)
            hand_over(queue, self._console)
            self._ended.runs += runs_of(queue)
            return []
        queue = self._run(jobs)
        results = [result_of(job, view) for job, view in zip(jobs, queue.views, strict=True)]
        if queue.stopped or self._config.hydra.sweeper._target_ != SWEEPER:
            end(results)
        return results

    def _run(self, jobs: Sequence[Job]) -> JobQueue:
        queue = self._enqueue(jobs)
        try:
            wait(queue, self._console)
        finally:
            self._ended.runs += runs_of(queue)
        report(queue, self._console)
        return queue

    def _run_trials(self, jobs: Sequence[Job], display: Display) -> JobQueue:
        console = self._console if self._code is None else Terminal(quiet=True)  # all are announced like the first
        queue = self._enqueue(jobs, console)
        try:
            wait(queue, self._console, display=display)
        finally:
            self._ended.runs += runs_of(queue)
        return queue

    def _enqueue(self, jobs: Sequence[Job], console: Console | None = None) -> JobQueue:
        if self._line is not None:
            tell_without_effect(jobs, self._line, self._console, self._told)
        queue = enqueue(jobs, self._sweep, console or self._console, self._config, self._code)
        self._code = frozen_code(jobs[0].run)  # that of later batches as well
        return queue

    def _trial(self, compose: Callable[[Sequence[str]], DictConfig], number: int, overrides: Sequence[str]) -> Job:
        (job,) = prepare_all(
            compose, [overrides], number, max(number + 1, 2), self._sweep, self._console, self._trusts_owner
        )
        return job

    def _jobs(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Job]:
        count = first + len(job_overrides)
        if self._config.hydra.sweeper.max_batch_size is not None:
            count = max(count, 2)  # the sweeper submits in batches: all of its runs are numbered
        composer = self._composer(count)
        return prepare_all(composer, job_overrides, first, count, self._sweep, self._console, self._trusts_owner)

    def _composer(self, count: int) -> Callable[[Sequence[str]], DictConfig]:
        """Returns the composer; a single job reuses the config with which Hydra found this launcher, to save time."""
        task = OverridesParser.create().parse_overrides(list(self._config.hydra.overrides.task))
        swept = self._config.hydra.sweeper.get("params") or any(override.is_sweep_override() for override in task)
        if count == 1 and not swept:
            return lambda overrides: _without_hydra(self._config.copy())
        return JobComposer(self._compose)

    def _compose(self, overrides: list[str]) -> DictConfig:
        return _without_hydra(self._loader.load_sweep_config(self._config, overrides))


def tell_without_effect(
    jobs: Sequence[Job], line: CommandLine, console: Console, told: set[tuple[str, str]] | None = None
) -> None:
    """Prints a line about the keys that the user sets without an effect in ``jobs``; see ``notices_of``."""
    for text in notices_of(jobs, line, told):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def runs_of(queue: JobQueue) -> list[tuple[RunDirectory, View]]:
    """Returns the runs of a queue with how they stand."""
    return [(job.run, view) for job, view in zip(queue.jobs, queue.views, strict=True)]


def prepare_all(
    compose: Callable[[Sequence[str]], DictConfig],
    job_overrides: Sequence[Sequence[str]],
    first: int,
    count: int,
    sweep: Path,
    console: Console,
    trust_owner: bool = False,
) -> list[Job]:
    """Composes and checks the jobs ``first``, ``first`` + 1, ... of ``count`` below ``sweep``; writes nothing.

    Args:
        trust_owner: whether the runs may have files of other users.

    Raises:
        UserError: jobs are wrong; the message names them, with their overrides.
    """
    jobs, config_of = [], JobConfigs(compose)
    refused: list[RefusedJob] = []
    uncomposed: list[Exception] = []
    listed = list(enumerate(job_overrides, start=first))
    for number, overrides in _followed(listed, len(listed), "composing jobs", console):
        own = filter_overrides(list(overrides))
        run = RunDirectory(job_directory(sweep, number, count))
        try:
            job = check_job(config_of(overrides), run, number=number, overrides=own, trust_owner=trust_owner)
            jobs.append(with_memory_note(job))
        except Exception as error:
            mistake = translate(error)
            if count == 1 or mistake is None:
                raise
            refused.append(RefusedJob(number, " ".join(own), mistake))
            if mistake is not error:
                uncomposed.append(error)
    if len(uncomposed) == len(listed):
        raise uncomposed[0]  # the caller finds all mistakes of such a command line
    if refused:
        raise refusal(refused, len(listed))
    return jobs


@dataclass(frozen=True)
class RefusedJob:
    """A job of a sweep that cannot be submitted."""

    number: int
    overrides: str
    error: UserError


REASONS, NUMBERS = 5, 10  # of refused jobs in one message


def refusal(refused: Sequence[RefusedJob], count: int) -> UserError:
    """Returns the message about the jobs that are ``refused``, of ``count``; those with the same mistake are told
    together.
    """
    alike: dict[str, list[RefusedJob]] = {}
    for job in refused:
        alike.setdefault(str(job.error), []).append(job)
    found = [_of_jobs(jobs) for jobs in alike.values()]
    if len(refused) == 1:
        return found[0]
    head = f"{len(refused)} of {count} jobs are refused, and none was submitted"
    more = f"; the first {REASONS} of {len(found)} reasons" if len(found) > REASONS else ""
    return UserErrors(found[:REASONS], f"{head}{more}:")


def _of_jobs(jobs: Sequence[RefusedJob]) -> UserError:
    """Returns the mistake of ``jobs``, with their numbers and the overrides of the first."""
    first = jobs[0]
    numbers = ", ".join(str(job.number) for job in jobs[:NUMBERS]) + (", ..." if len(jobs) > NUMBERS else "")
    named = f"job {numbers} ({first.overrides})" if len(jobs) == 1 else f"jobs {numbers} (the first: {first.overrides})"
    return UserError(f"{named}: {first.error.what}", where=first.error.where, fix=first.error.fix)


def end(results: Sequence[JobReturn]) -> None:
    """Ends the process if a job did not end well, with its exit code."""
    if code := exit_code(results):
        sys.exit(code)


def enqueue(
    jobs: Sequence[Job], sweep: Path, console: Console, multirun: DictConfig, code: FrozenCode | None = None
) -> JobQueue:
    """Checks all ``jobs``, then freezes them; the returned queue submits them.

    Args:
        multirun: the config of the sweep, with ``hydra.overrides``, which is kept in the directory of the sweep.
        code: the snapshot from which agents and workers start; None takes one.

    Raises:
        UserError: a job is refused; nothing was written then.
    """
    executor = select_executor(jobs[0].config.cluster)
    for line in executor.check(jobs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    executor.confirm(jobs, console)
    configs = [job.config for job in jobs]
    code = code or snapshot_code(configs, sweep / "code")
    if code is None and (note := unfrozen_note(configs)) is not None:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    frozen = freeze_all([(job.config, job.run, job.overrides, job.plan, job.trust_owner) for job in jobs], code)
    for _ in _followed(frozen, len(jobs), "writing run directories", console):
        pass
    if jobs[0].run.path != sweep:
        write_multirun(multirun, jobs[0].config, sweep)
    warn_if_open(jobs[0].run, jobs[0].config)  # the others are beside it
    return JobQueue(jobs, executor, sweep, console)


PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s@/]+@")


def write_multirun(multirun: DictConfig, job: Config, sweep: Path) -> None:
    """Writes ``multirun.yaml`` as Hydra's basic sweeper does, without passwords in URLs such as that of a study."""
    path = sweep / "multirun.yaml"
    write_text(path, PASSWORD.sub(rf"\1{HIDDEN}@", OmegaConf.to_yaml(multirun)), file_mode(job))
    if job.run.group is not None:
        share_one(path, job.run.group)


def _without_hydra(composed: DictConfig) -> DictConfig:
    with open_dict(composed):
        del composed["hydra"]
    return composed


def _followed(items: Iterable[T], count: int, what: str, console: Console) -> Iterable[T]:
    """Yields the ``count`` items, with a progress bar at a terminal if there are many."""
    hidden = not console.is_terminal or count < MANY
    return track(items, what, total=count, console=console, transient=True, disable=hidden)
