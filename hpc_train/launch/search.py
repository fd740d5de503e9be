"""The trials of a sweeper that chooses values by the results of earlier jobs, as Optuna's does.

Such a sweeper launches its trials in batches and reads the result of each. A trial that failed, or whose values are
refused, is reported to the sweeper as failed, and the search goes on. It ends if no trial succeeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from hpc_train.config.evaluation import best_metric
from hpc_train.errors import UserError
from hpc_train.launch.job import Job
from hpc_train.launch.monitor import Display
from hpc_train.launch.submission import JobQueue
from hpc_train.run.exits import Exit, worst_exit
from hpc_train.runs.job_status import View
from hpc_train.runs.job_table import plain_line, print_messages, print_results

HOPELESS = 3  # trials that fail before one succeeds
FAILURE_RATES = {"optuna": "max_failure_rate", "nevergrad": "optim.max_failure_rate"}  # keys of sweepers


class JobFailed(Exception):
    """Replaces the result of a job that did not end well.

    Args:
        code: its exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class TrialLines:
    """Prints one line for each trial when it has ended; a terminal also shows those that run.

    Args:
        line: returns the line of a trial.
    """

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
        prepare: checks the job with a number and overrides; raises UserError.
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

        Trials of an earlier search in the same directory are kept: the numbers of the runs continue after them.

        Raises:
            JobFailed: no trial has succeeded yet, and several have failed.
        """
        jobs = self._accepted(batch, self._first + first)
        found: dict[int, JobReturn] = {}
        if jobs:
            queue = self._run(jobs, TrialLines(jobs, self._line, self._console))
            self._ended += zip(queue.jobs, queue.views, strict=True)
            if queue.stopped:
                sys.exit(Exit.STOPPED)
            found = {job.number: result_of(job, view) for job, view in zip(queue.jobs, queue.views, strict=True)}
        returns = []
        for number, overrides in enumerate(batch, start=self._first + first):
            returns.append(found.get(number) or _failed(overrides, f"job {number} was refused", Exit.REFUSED))
        self._count(returns)
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
        own = " ".join(override for override in job.overrides if override not in self._fixed)
        head = f"job {job.number} ({own}): {view.state}"
        name, value = _objective(job, view.metrics)
        return f"{head}, {name} {value:.4f}" if view.exit == Exit.DONE and isinstance(value, float) else head

    def _accepted(self, batch: Sequence[Sequence[str]], first: int) -> list[Job]:
        jobs: list[Job] = []
        for number, overrides in enumerate(batch, start=first):
            try:
                jobs.append(self._prepare(number, overrides))
            except UserError as error:
                print(error, file=sys.stderr)
        return jobs

    def _count(self, returns: Sequence[JobReturn]) -> None:
        failed = [each._return_value for each in returns if each.status == JobStatus.FAILED]
        self._succeeded |= len(failed) < len(returns)
        self._failed += len(failed)
        if not self._succeeded and self._failed >= HOPELESS:
            raise JobFailed(f"the search ends: all of its {self._failed} trials have failed", failed[-1].code)


def result_of(job: Job, view: View) -> JobReturn:
    """Returns the metric of ``checkpoint.keep_best``, otherwise the validation loss or the loss; or the failure."""
    if view.exit != Exit.DONE:
        what = f"job {job.number} {view.state}; python -m hpc_train why {job.run.path} tells more"
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
    name = ("val_loss" if "val_loss" in metrics else "loss") if best is None else best.name
    return name, metrics.get(name)


def exit_code(results: Sequence[JobReturn]) -> Exit:
    """Returns the exit code of a sweep with these results."""
    return worst_exit(each._return_value.code if each.status == JobStatus.FAILED else Exit.DONE for each in results)


def tolerate_failed_trials() -> None:
    """Changes the default with which the sweepers of Optuna and Nevergrad end a search at its first failed trial."""
    sweepers: dict[str, Any] = ConfigStore.instance().repo.get("hydra", {}).get("sweeper", {})
    for name, key in FAILURE_RATES.items():
        if f"{name}.yaml" in sweepers:
            OmegaConf.update(sweepers[f"{name}.yaml"].node, key, 1.0)
