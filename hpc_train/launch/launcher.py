"""Implements the Hydra launcher behind ``-m``: it composes, checks, freezes and submits all jobs, and then follows them
or detaches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.status import Status

from hpc_train.config.command_line import CommandLine, JobComposer
from hpc_train.config.compose import SWEEPER, typed
from hpc_train.config.evaluation import best_metric
from hpc_train.config.hydra_settings import is_search
from hpc_train.config.run_path import job_directory
from hpc_train.config.secrets import HIDDEN, PASSWORD, file_mode, refuse_secrets
from hpc_train.config.translate import translate
from hpc_train.errors import UserError, UserErrors
from hpc_train.launch.continued import with_frozen_defaults
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.job import Job, with_memory_note
from hpc_train.launch.request import check_job, notices_of
from hpc_train.launch.submission import Display, JobQueue, hand_over, report, wait
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit, worst_exit
from hpc_train.run.files import share_one, write_text
from hpc_train.run.freeze import freeze_all
from hpc_train.run.owner import warn_if_open
from hpc_train.run.snapshot import code_note, snapshot_code
from hpc_train.runs.job_status import View
from hpc_train.runs.job_table import plain_line, print_messages, print_results
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import format_metric

T = TypeVar("T")


@dataclass
class Ended:
    """Holds the results of the jobs of one command. The launcher fills the attribute ``ended`` of Hydra's task
    function."""

    runs: list[tuple[RunDirectory, View]] = field(default_factory=list)
    trials: Trials | None = None  # only for a sweeper that searches


MANY = 20  # a progress bar is shown for this many jobs or more


class HpcTrainLauncher(Launcher):
    """Submits the jobs of a sweep; nothing is submitted unless all of them are valid."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        refuse_secrets(OmegaConf.to_container(config, resolve=False))
        self._loader = hydra_context.config_loader
        self._config = config
        self._console = Terminal()
        line: CommandLine | None = getattr(task_function, "line", None)
        trusts_owner: bool = getattr(task_function, "trust_owner", False)
        self._sweep = Sweep(Path(config.hydra.sweep.dir), self._console, line, config, trusts_owner)
        self._trials: Trials | None = None
        self._ended: Ended = getattr(task_function, "ended", Ended())
        if is_search(config.hydra):
            if config.launch.detach:
                what = "the sweeper reads the result of each job, so the jobs cannot be left running"
                raise UserError(what, where="launch.detach", fix="launch.detach=false")
            compose = self._composer(2)
            fixed = config.hydra.overrides.task
            trial = partial(self._trial, compose)
            self._trials = Trials(self._sweep.directory, fixed, self._console, trial, self._run)
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
        count = initial_job_idx + len(job_overrides)
        if self._config.hydra.sweeper.max_batch_size is not None:
            count = max(count, 2)  # the sweeper submits in batches: all of its runs are numbered
        jobs = self._sweep.prepare(self._composer(count), job_overrides, initial_job_idx, count)
        if jobs[0].config.launch.detach:
            queue = self._sweep.enqueue(jobs, self._console)
            hand_over(queue, self._console)
            self._ended.runs += runs_of(queue)
            return []
        queue = self._run(jobs)
        report(queue, self._console)
        results = [result_of(job, view) for job, view in zip(jobs, queue.views, strict=True)]
        if queue.stopped or self._config.hydra.sweeper._target_ != SWEEPER:
            end(results)
        return results

    def _run(self, jobs: Sequence[Job], display: Display | None = None) -> JobQueue:
        """Runs jobs to their end. Only the first trial of a search is announced, since the others are submitted in the
        same way."""
        quiet = display is not None and self._sweep.code is not None
        queue = self._sweep.enqueue(jobs, Terminal(quiet=True) if quiet else self._console)
        try:
            wait(queue, self._console, display=display)
        finally:
            self._ended.runs += runs_of(queue)
        return queue

    def _trial(self, compose: Callable[[Sequence[str]], DictConfig], number: int, overrides: Sequence[str]) -> Job:
        (job,) = self._sweep.prepare(compose, [overrides], number, max(number + 1, 2))
        return job

    def _composer(self, count: int) -> Callable[[Sequence[str]], DictConfig]:
        """Returns the composer; a single job reuses the config with which Hydra found this launcher, to save time."""
        task = OverridesParser.create().parse_overrides(list(self._config.hydra.overrides.task))
        swept = self._config.hydra.sweeper.get("params") or any(override.is_sweep_override() for override in task)
        if count == 1 and not swept:
            return lambda overrides: _without_hydra(self._config.copy())
        load = self._loader.load_sweep_config
        return JobComposer(lambda overrides: _without_hydra(load(self._config, overrides)))


def runs_of(queue: JobQueue) -> list[tuple[RunDirectory, View]]:
    """Returns the runs of a queue with their present states."""
    return [(job.run, view) for job, view in zip(queue.jobs, queue.views, strict=True)]


@dataclass
class Sweep:
    """Prepares and enqueues the jobs of one command, in one batch or several.

    Attributes:
        directory: the directory of the sweep, or of its only run.
        line: the command line; None if the launcher belongs to another application of Hydra.
        multirun: the config with ``hydra.overrides``, which is written into the directory of a sweep.
        trust_owner: allows runs that have files of other users.
        code: the snapshot from which agents and workers start; the first batch takes it.
    """

    directory: Path
    console: Console
    line: CommandLine | None
    multirun: DictConfig
    trust_owner: bool = False
    code: FrozenCode | None = None
    _reported: set[tuple[str, str]] = field(default_factory=set)  # keys without effect, with the reasons

    def prepare(
        self,
        compose: Callable[[Sequence[str]], DictConfig],
        job_overrides: Sequence[Sequence[str]],
        first: int,
        count: int,
    ) -> list[Job]:
        """Composes and checks the jobs ``first``, ``first`` + 1, ... of ``count``; writes nothing.

        Raises UserError if jobs are wrong; the message names them, with their overrides.
        """
        jobs: list[Job] = []
        refused: list[RefusedJob] = []
        uncomposed: list[Exception] = []
        numbered = list(enumerate(job_overrides, start=first))
        for number, overrides in _with_progress(numbered, len(numbered), "composing jobs", self.console):
            of_user = filter_overrides(list(overrides))
            run = RunDirectory(job_directory(self.directory, number, count))
            try:
                config = typed(compose(overrides))
                if self.line is not None:
                    config = with_frozen_defaults(config, run, self.line, of_user)
                job = check_job(config, run, number=number, overrides=of_user, trust_owner=self.trust_owner)
                jobs.append(with_memory_note(job))
            except Exception as error:
                mistake = translate(error)
                if count == 1 or mistake is None:
                    raise
                refused.append(RefusedJob(number, " ".join(of_user), mistake))
                if mistake is not error:
                    uncomposed.append(error)
        if len(uncomposed) == len(numbered):
            raise uncomposed[0]  # the caller finds all mistakes of such a command line
        if refused:
            raise refusal(refused, len(numbered))
        return jobs

    def enqueue(self, jobs: Sequence[Job], console: Console) -> JobQueue:
        """Checks all ``jobs``, then freezes them; the returned queue submits them and prints to ``console``.

        Raises UserError if a job is refused; nothing is written in that case.
        """
        if self.line is not None:
            for text in notices_of(jobs, self.line, self._reported):
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            jobs = [replace(job, options=self.line.options) for job in jobs]
        executor = select_executor(jobs[0].config.cluster)
        for line in executor.check(jobs):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        executor.confirm(jobs, console)
        configs = [job.config for job in jobs]
        if self.code is None:
            self.code = snapshot_code(configs, self.directory / "code")
            if (note := code_note(self.code, configs)) is not None:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
        frozen = freeze_all(
            [(job.config, job.run, job.overrides, job.options, job.plan, job.trust_owner) for job in jobs], self.code
        )
        for _ in _with_progress(frozen, len(jobs), "writing run directories", console):
            pass
        if jobs[0].run.path != self.directory:
            path = self.directory / "multirun.yaml"  # as Hydra's basic sweeper writes it, without passwords in URLs
            text = PASSWORD.sub(rf"\1{HIDDEN}@", OmegaConf.to_yaml(self.multirun))
            write_text(path, text, file_mode(jobs[0].config))
            if jobs[0].config.run.group is not None:
                share_one(path, jobs[0].config.run.group)
        warn_if_open(jobs[0].run, jobs[0].config)  # the other runs are in the same directory
        return JobQueue(jobs, executor, self.directory, console)


@dataclass(frozen=True)
class RefusedJob:
    """A job of a sweep that cannot be submitted."""

    number: int
    overrides: str
    error: UserError


REASONS, NUMBERS = 5, 10  # the most reasons in one message, and job numbers per reason


def refusal(refused: Sequence[RefusedJob], count: int) -> UserError:
    """Returns the error for the ``refused`` jobs among ``count``. It groups jobs with the same mistake."""
    alike: dict[str, list[RefusedJob]] = {}
    for job in refused:
        alike.setdefault(str(job.error), []).append(job)
    mistakes = []
    for jobs in alike.values():
        error = jobs[0].error
        name = f"job {jobs[0].number} ({jobs[0].overrides})"
        if len(jobs) > 1:
            numbers = ", ".join(str(job.number) for job in jobs[:NUMBERS]) + (", ..." if len(jobs) > NUMBERS else "")
            name = f"jobs {numbers} (the first: {jobs[0].overrides})"
        refused_jobs = [job.number for job in jobs]
        mistakes.append(UserError(f"{name}: {error.what}", where=error.where, fix=error.fix, jobs=refused_jobs))
    if len(refused) == 1:
        return mistakes[0]
    head = f"{len(refused)} of {count} jobs are refused, and none was submitted"
    if len(mistakes) > REASONS:
        head += f"; the first {REASONS} of {len(mistakes)} reasons"
    return UserErrors(mistakes, f"{head}:", REASONS)


def end(results: Sequence[JobReturn]) -> None:
    """Ends the process if a job did not end well, with the worst exit code."""
    failed = [result._return_value.code for result in results if result.status == JobStatus.FAILED]
    if failed:
        sys.exit(worst_exit(failed))


def _without_hydra(composed: DictConfig) -> DictConfig:
    with open_dict(composed):
        del composed["hydra"]
    return composed


def _with_progress(items: Iterable[T], count: int, what: str, console: Console) -> Iterable[T]:
    """Yields the ``count`` items, with a progress bar at a terminal if there are many."""
    disable = not console.is_terminal or count < MANY
    return track(items, what, total=count, console=console, transient=True, disable=disable)


HOPELESS = 3  # a search ends after so many failed trials if none has succeeded


class JobFailed(Exception):
    """Replaces the result of a job that did not end well."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class TrialLines:
    """Prints one line for each trial that has ended; a terminal also shows the running trials."""

    def __init__(self, jobs: Sequence[Job], line: Callable[[Job, View], str], console: Console) -> None:
        self._jobs = jobs
        self._line = line
        self._console = console
        self._status = console.status("starting") if console.is_terminal else nullcontext()
        self._status.__enter__()
        self._printed: set[int] = set()

    def show(self, views: Sequence[View]) -> None:
        running = []
        for job, view in zip(self._jobs, views, strict=True):
            if view.exit is None:
                running.append(plain_line(job, view))
            elif job.number not in self._printed:
                self._printed.add(job.number)
                self._console.print(self._line(job, view), markup=False, highlight=False, soft_wrap=True)
        if isinstance(self._status, Status) and running:
            self._status.update(escape("; ".join(running)))

    def close(self) -> None:
        self._status.__exit__(None, None, None)


class Trials:
    """Launches the trials of one search.

    Args:
        fixed: the overrides of the command line, which all trials have.
        prepare: takes a number and overrides, checks the job and returns it; raises UserError.
        run: runs jobs to their end.
    """

    def __init__(
        self,
        sweep: Path,
        fixed: Collection[str],
        console: Console,
        prepare: Callable[[int, Sequence[str]], Job],
        run: Callable[[Sequence[Job], Display], JobQueue],
    ) -> None:
        self._fixed = fixed
        self._console = console
        self._ended: list[tuple[Job, View]] = []
        self._prepare = prepare
        self._run = run
        self._first = 1 + max((int(path.name) for path in sweep.glob("*") if path.name.isdigit()), default=-1)
        self._succeeded = False
        self._failed = 0

    def launch(self, batch: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Runs the trials ``first``, ``first`` + 1, ... of the search and returns their results, in order.

        Trials of an earlier search in the same directory stay: the new runs get the numbers after theirs. Raises
        JobFailed if several trials have failed and none has succeeded yet.
        """
        numbered = list(enumerate(batch, start=self._first + first))
        jobs: list[Job] = []
        for number, overrides in numbered:
            try:
                jobs.append(self._prepare(number, overrides))
            except UserError as error:
                print(error, file=sys.stderr)
        results: dict[int, JobReturn] = {}
        if jobs:
            queue = self._run(jobs, TrialLines(jobs, self._line, self._console))
            self._ended += zip(queue.jobs, queue.views, strict=True)
            if queue.stopped:
                sys.exit(Exit.STOPPED)
            results = {job.number: result_of(job, view) for job, view in zip(queue.jobs, queue.views, strict=True)}
        returns = []
        for number, overrides in numbered:
            returns.append(results.get(number) or _failed(overrides, f"job {number} was refused", Exit.REFUSED))
        failures = [result._return_value for result in returns if result.status == JobStatus.FAILED]
        self._succeeded |= len(failures) < len(returns)
        self._failed += len(failures)
        if not self._succeeded and self._failed >= HOPELESS:
            raise JobFailed(f"the search ends: all of its {self._failed} trials have failed", failures[-1].code)
        return returns

    def report(self) -> None:
        """Prints the failures and the results of all trials; nothing if there were none."""
        if not self._ended:
            return
        jobs, views = zip(*self._ended, strict=True)
        print_messages(jobs, views)
        print_results(jobs, views, self._console, live=False)

    def _line(self, job: Job, view: View) -> str:
        """Returns the number, the values and the result of a trial that has ended."""
        values = " ".join(override for override in job.overrides if override not in self._fixed)
        head = f"job {job.number} ({values}): {view.state}"
        name, value = _objective(job, view.metrics)
        if view.exit == Exit.DONE and isinstance(value, float):
            head += f", {name} {format_metric(value)}"
        return head


def result_of(job: Job, view: View) -> JobReturn:
    """Returns the result of a job: the metric of ``checkpoint.keep_best``, else the validation loss, else the loss; or
    the failure."""
    if view.exit != Exit.DONE:
        what = f"job {job.number} {view.state}; python -m hpc_train why {job.run.path} shows the cause"
        result = _failed(job.overrides, what, Exit.STOPPED if view.exit is None else view.exit)
    else:
        result = JobReturn(overrides=list(job.overrides), status=JobStatus.COMPLETED)
        _, result.return_value = _objective(job, view.metrics)
    result.working_dir = str(job.run.path)
    return result


def _failed(overrides: Sequence[str], what: str, code: int) -> JobReturn:
    result = JobReturn(overrides=list(overrides), status=JobStatus.FAILED)
    result.return_value = JobFailed(what, code)
    return result


def _objective(job: Job, metrics: dict[str, Any]) -> tuple[str, Any]:
    """Returns the name of the metric that the sweeper gets, and its value."""
    checkpoint = job.config.checkpoint
    best = best_metric(checkpoint.keep_best, checkpoint.best_mode)
    if best is not None:
        return best.name, metrics.get(best.name)
    name = "val_loss" if "val_loss" in metrics else "loss"
    return name, metrics.get(name)
