"""Turns composed configs into checked jobs, and submits the jobs of one launch.

An executor without a queue (this machine) gets only as many jobs at a time as may run, so that a sweep of a thousand
jobs is not a thousand waiting processes. On detaching, all others are submitted too, and wait for each other's locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hpc_train.config.command_line import CommandLine
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.values import fewest_nodes, runs_own_code
from hpc_train.errors import Mistakes
from hpc_train.launch.executors.executor import Choice, Executor, Job, Submitted
from hpc_train.launch.executors.select import in_allocation, select_executor
from hpc_train.launch.memory import memory_need
from hpc_train.layout.compilation import check_compiler_device
from hpc_train.layout.float8_gpus import check_gpus
from hpc_train.layout.open_keys import check_chosen, open_keys
from hpc_train.layout.user_keys import user_keys
from hpc_train.layout.validate import validate
from hpc_train.layout.without_effect import Place, notices, without_effect
from hpc_train.registration import CHOOSE_LAYOUT, MACHINE_OF_JOB, registered
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.files import concurrently
from hpc_train.run.freeze import check_freeze
from hpc_train.run.lease import add_submission
from hpc_train.run.requests import record_stop_request
from hpc_train.runs.job_status import NOT_STARTED, View

ANNOUNCED_SINGLY = 20  # with more jobs only their number is printed
WAITING = View("waiting", {})


class JobQueue:
    """Submits frozen jobs in order and keeps a view of each."""

    def __init__(self, jobs: Sequence[Job], executor: Executor, sweep: Path, console: Console) -> None:
        self.jobs = list(jobs)
        self.executor = executor
        self._sweep = sweep
        self._console = console
        self._at_once = executor.at_once(jobs)
        self._waiting = list(jobs)
        self._submitted: dict[int, Submitted] = {}
        self._views: dict[int, View] = {}
        self.stopped = False  # by the user of this process

    @property
    def views(self) -> list[View]:
        """The views of the jobs, in order."""
        return [self._views.get(job.number, WAITING) for job in self.jobs]

    @property
    def over(self) -> bool:
        return not self._waiting and not self._open()

    @property
    def open_ids(self) -> list[str]:
        """The ids of the submitted jobs that have not ended."""
        return [item.job_id for item in self._open()]

    def advance(self) -> None:
        """Updates the views and submits as many jobs as may run."""
        statuses = self.executor.statuses(self.open_ids)
        for item in self._open():
            self._views[item.job.number] = item.view(statuses.get(item.job_id))
        room = self._at_once - len(self._open())
        self._submit(self._waiting[: max(0, room)])

    def submit_all(self) -> None:
        self._submit(self._waiting)

    def drop_waiting(self) -> None:
        """Gives up the jobs that were not submitted yet."""
        for job in self._waiting:
            self._views[job.number] = View(NOT_STARTED, {}, exit=None)
        self._waiting = []

    def stop_all(self, *, cancel: bool) -> None:
        """Drops the waiting jobs and stops the submitted ones; with ``cancel`` they need not save a checkpoint."""
        self.stopped = True
        self.drop_waiting()
        for item in self._open():
            record_stop_request(item.job.run)
        end = self.executor.cancel if cancel else self.executor.stop
        end(self.open_ids)

    def _open(self) -> list[Submitted]:
        views = self._views
        return [item for number, item in self._submitted.items() if number not in views or views[number].exit is None]

    def _submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        first_attempts = [job.run.newest_attempt() + 1 for job in jobs]
        ids = self.executor.submit(jobs, self._sweep, self._at_once)
        entries = list(map(Submitted, jobs, ids, first_attempts, map(self.executor.output, jobs, ids)))
        try:
            for _ in concurrently(self._record, entries):
                pass
        except BaseException:  # a job that its run does not record could start it again, and nothing would cancel it
            self.executor.cancel(ids)
            raise
        self._submitted |= {entry.job.number: entry for entry in entries}
        for job, job_id in zip(jobs, ids, strict=True):
            if len(jobs) <= ANNOUNCED_SINGLY:
                announce(job, self.executor, self._console, job_id)
        if len(jobs) > ANNOUNCED_SINGLY:
            where = f"{ids[0]} to {ids[-1]}: {self._sweep}"
            self._console.print(f"{len(jobs)} jobs to {self.executor.name}, {where}", markup=False, soft_wrap=True)
        self._waiting = self._waiting[len(jobs) :]

    def _record(self, submitted: Submitted) -> None:
        run, name, identity = submitted.job.run, self.executor.name, self.executor.identity(submitted.job_id)
        add_submission(run, name, first_attempt=submitted.first_attempt, **identity)
        events = EventLog.open(run, "submitter", submitted.first_attempt)
        events.write("submitted", job_id=submitted.job_id, executor=name, layout=str(submitted.job.layout))


def prepare(
    config: Config, run: RunDirectory, number: int = 0, overrides: Sequence[str] = (), trust_owner: bool = False
) -> Job:
    """Checks ``config`` and returns its job; writes nothing.

    Args:
        trust_owner: whether the run, or the run to fork, may have files of other users.

    Raises:
        UserError: a value is wrong, the executor cannot run the job, or the run cannot be frozen. The message reports
            all independent mistakes.
    """
    executor = select_executor(config.cluster)
    nodes, gpus, workers = executor.shape(config.cluster)
    device_bytes = executor.device_bytes(config.cluster)
    layout = choice = None
    is_foreign = False
    mistakes = Mistakes()
    with mistakes.collected():
        config, choice = with_layout(config, run, lambda: (nodes, gpus, workers), executor.gpu_types)
        layout = validate(config, nodes, workers, device_bytes)
        fewest = fewest_nodes(config)
        if fewest < nodes:
            validate(config, fewest, workers, device_bytes)  # the job must also be able to run on the fewest nodes
    with mistakes.collected():
        check_compiler_device(config, gpus)
    with mistakes.collected():
        _check_float8(config, gpus, executor)
    with mistakes.collected():
        is_foreign = check_freeze(config, run, trust_owner)
    mistakes.report()
    assert layout is not None
    need = memory_need(config, layout, executor, gpus)
    if need is not None and need.exceeds:
        layout = replace(layout, notes=(*layout.notes, need.note))
    return Job(number, tuple(overrides), config, layout, gpus, workers, run, is_foreign, choice)


def _check_float8(config: Config, gpus: int, executor: Executor) -> None:
    """Checks that all types of GPUs that the job may get support ``precision.fp8``.

    Raises:
        UserError: a type of GPUs that the job may get has no units for ``precision.fp8``. If the types are unknown,
            ``cluster.machine`` describes them. ``strategy=auto`` has refused them already.
    """
    if config.precision.fp8 is None or not gpus or open_keys(config):
        return
    types, machine = executor.gpu_types(config.cluster), config.cluster.machine
    if not types and machine != "auto":
        types = frozenset({registered(MACHINE_OF_JOB)(machine, gpus, types).device})
    check_gpus(config, types)


def with_layout(
    config: Config,
    run: RunDirectory,
    shape: Callable[[], tuple[int, int, int]],
    gpu_types: Callable[[ClusterConfig], frozenset[str]],
) -> tuple[Config, Choice | None]:
    """Returns ``config`` with the layout that ``strategy=auto`` chooses, and the choice; None with another strategy.

    A run that continues keeps its choice while the question is the same.

    Args:
        shape: returns nodes (without spares), GPUs per node and workers per node of the job.
        gpu_types: returns the types of GPUs that the job may get.

    Raises:
        UserError: custom code runs instead of the trainer, the machine or the size of the model is unknown,
            or no layout is possible or fits.
    """
    if runs_own_code(config):
        check_chosen(config)
    if not open_keys(config) or runs_own_code(config):
        return config, None
    nodes, gpus, workers = shape()
    types = gpu_types(config.cluster) if gpus else frozenset()
    choice: Choice = registered(CHOOSE_LAYOUT)(config, run, nodes, gpus, workers, types)
    return choice.apply(config), choice


def notices_of(jobs: Sequence[Job], line: CommandLine, told: set[tuple[str, str]] | None = None) -> list[str]:
    """Returns the lines about keys that the user sets without an effect in some of ``jobs``, which ``-m`` submits.

    Args:
        told: the keys and reasons of earlier batches of the sweep, which are left out; gets those of ``jobs``.
    """
    told, found = set() if told is None else told, {}
    for job in jobs:
        name = select_executor(job.config.cluster).name
        place = Place(True, name == "Slurm", name != "this machine" or in_allocation(), job.gpus)
        unread = without_effect(job.config, job.layout, place, user_keys(line, job.overrides))
        found[job.number] = [each for each in unread if (each.key, each.reason) not in told]
    told.update((each.key, each.reason) for unread in found.values() for each in unread)
    return notices(found)


def announce(job: Job, executor: Executor, console: Console, job_id: str | None = None) -> None:
    """Prints what ``job`` is and where it runs, with the id of a submitted job."""
    device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
    place = f"{executor.name}, job id {job_id}" if job_id else executor.name
    lines = [f"job {job.number}: {job.config.strategy.name}: {job.layout}, {device}; {place}", f"  {job.run.path}"]
    lines += [f"  note: {note}" for note in job.layout.notes]
    lines += [] if job.choice is None else [f"  {job.choice.lines[0]}; table: {job.run.plan}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
