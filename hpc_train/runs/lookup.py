"""Finds runs by path, by name, below the run root, or by the comments on the user's Slurm jobs."""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.config.run_path import default_root
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.techniques import AUTO
from hpc_train.opening import tell_once
from hpc_train.run.directory import ROLES, RunDirectory, refuse_empty_name, sweep_given
from hpc_train.run.files import read_or
from hpc_train.run.freeze import load
from hpc_train.run.lease import is_live, job_ids, jobs_of_submission, only_started
from hpc_train.run.owner import open_run
from hpc_train.run.processes import is_alive
from hpc_train.run.record import RECORD
from hpc_train.runs.job_status import JobStatuses, View, folded, view_of
from hpc_train.schedulers.current import OtherJobs
from hpc_train.schedulers.scheduler import PRESENT, JobStatus, SubmittedJobs
from hpc_train.schedulers.slurm.client import QUERY_S
from hpc_train.schedulers.slurm.jobs import ask, status_of

COMMENT = "hpc_train:"
OF_JOBS = ("cancel", "resize", "resume", "retry", "wait")
UNKNOWN = "UNKNOWN"  # the state of a job whose scheduler cannot be asked; it may be alive


@dataclass(frozen=True)
class RunHandle:
    """Holds a run and its newest submission. ``number`` is its index in a sweep."""

    run: RunDirectory
    number: int
    submission: dict[str, Any]
    error: UserError | None = None  # why the directory cannot be read
    trusts_owner: bool = False  # a command executes the run, which has files of another user whom the caller trusts

    @property
    def job_id(self) -> str | None:
        """Returns the id of the job; None for a run that is a process of a machine."""
        return self.submission.get("job_id")

    @property
    def job_key(self) -> str:
        """Identifies the job in ``statuses_of``, since schedulers and clusters give the same ids."""
        parts = [self.submission.get(name) for name in ("job_id", "clusters", "scheduler")]
        return " ".join(part for part in parts if part)

    @property
    def job_ids(self) -> list[str]:
        """Returns the ids of the jobs: one, those of a chain, or those of ``cluster.first`` until one has started.

        There is none for a run that is a process of a machine.
        """
        return job_ids(self.submission)

    @property
    def withdrawn(self) -> list[str]:
        """Returns the ids of the jobs of ``cluster.first`` that do not train the run, after another one has started."""
        return list(self.submission.get("withdrawn", []))

    @cached_property
    def jobs(self) -> SubmittedJobs:
        """The scheduler that knows the jobs. Raises UserError if a user's scheduler cannot be loaded."""
        return jobs_of_submission(self.run, self.submission)

    @property
    def pid(self) -> int | None:
        return self.submission.get("pid")

    @cached_property
    def config(self) -> Config:
        return load(self.run)

    @cached_property
    def plain_config(self) -> dict[str, Any]:
        return self.run.plain_config()

    @cached_property
    def _sections(self) -> dict[str, Any]:  # those that tables of many runs show
        return self.run.plain_config("strategy", "cluster")

    @property
    def strategy(self) -> str:
        """Returns the name of the strategy in the frozen config; empty if it is not readable."""
        return str((self._sections.get("strategy") or {}).get("name", ""))

    @property
    def asked_nodes(self) -> int | str:
        """Returns the nodes that the frozen config requests; empty if it is not readable."""
        nodes: int | str = (self._sections.get("cluster") or {}).get("nodes", "")
        return nodes

    @property
    def choice(self) -> str | None:
        """Returns the choice of ``strategy=auto`` in one line; None with another strategy."""
        if self.strategy == AUTO:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return str(self.run.json(self.run.plan)["chosen"])
        return None

    def lives_here(self) -> bool:
        return is_alive(self.submission)

    def view(self, statuses: dict[str, JobStatus]) -> View:
        status = statuses.get(self.job_key)
        if status is None and self.lives_here():
            status = PRESENT
        if status is None and not self.submission:
            return View("not submitted", {})
        output = Path(self.submission.get("output") or os.devnull)
        first = self.submission.get("first_attempt", 0)
        return view_of(self.run, first, status, output, self.run.record().get("total_steps"))


def find_runs(target: str, command: str, *, trust_owner: bool = False, unreadable: bool = False) -> list[RunHandle]:
    """Returns the run in ``target``, or all runs of the sweep there: a directory, or its name below the usual root.
    Raises UserError if there is no run or sweep, ``target`` is empty, or the command may not use runs of this owner.

    Args:
        command: the command that opens the runs (see ``run.owner``).
        trust_owner: whether the caller has passed ``--trust-owner``.
        unreadable: whether to return directories that cannot be read, with their ``error``, instead of raising it.
    """
    refuse_empty_name(target)
    root = Path(default_root())
    for path in (Path(target), root / target):
        if (path / "config.yaml").exists():
            paths = [path]
        else:
            paths = sorted((config.parent for config in path.glob("*/config.yaml")), key=_number)
        if paths:
            runs = [RunDirectory(run.absolute()) for run in paths]
            trusts = [open_run(run, command, trust_owner) for run in runs]
            handles = [_handle(run, index, trusts[index]) for index, run in enumerate(runs)]
            if command in OF_JOBS and runs[0].path.parent.name == ROLES:
                what = f"{runs[0].path} is a role, and {command} concerns the job with all of its roles"
                job = runs[0].path.parents[1]
                raise UserError(what, where="the command line", fix=f"python -m hpc_train {command} {job}")
            for item in handles:
                if item.error is not None and not unreadable:
                    raise item.error
            return handles
        if (path / RECORD).exists():
            fix = "restore the file, or repeat the command that started the run, which writes it again"
            raise UserError(f"the run directory {path} has no config.yaml", where=str(path), fix=fix)
    raise UserError(
        f"no run or sweep found in {target}",
        where="the command line",
        fix=f"pass a run directory or a name below {root}/; status without an argument lists all runs",
    )


def find_run(target: str, command: str, *, trust_owner: bool = False) -> RunHandle:
    """Returns the one run in ``target``; see ``find_runs``. Raises UserError if there is no run, or several, or the
    command may not use a run of this owner."""
    runs = find_runs(target, command, trust_owner=trust_owner)
    if len(runs) > 1:
        raise sweep_given(target, [item.run.path for item in runs], command)
    return runs[0]


def of_role(target: str, role: str | None) -> str:
    """Returns the run of a role of the run ``target``, as ``find_runs`` accepts it; ``target`` without a role."""
    return target if role is None else f"{target.rstrip('/')}/{ROLES}/{role}"


def with_roles(runs: list[RunHandle]) -> list[RunHandle]:
    if len(runs) != 1 or not runs[0].run.roles:
        return runs
    return [*runs, *find_runs(str(runs[0].run.path / ROLES), "status", unreadable=True)]


@dataclass(frozen=True)
class Overview:
    """Holds the runs below a root, and the runs of this user with jobs in Slurm. The runs of a sweep are adjacent, and
    the newest run is the last.

    Attributes:
        older: the number of older runs that were left out.
        silent: whether this machine has Slurm and it did not respond.
    """

    runs: list[RunHandle]
    older: int
    silent: bool


def find_all_runs(root: Path, newest: int) -> Overview:
    """Returns the ``newest`` runs below ``root``, and all runs of this user with jobs in Slurm.

    Jobs are found by their comments. A directory that cannot be read is returned with its ``error``.
    """
    has_slurm = shutil.which("squeue") is not None
    jobs = ask(["--me"], QUERY_S) if has_slurm else None
    below = _newest_last(run_directories(root))
    handles = {item.run.path: item for item in _runs_of_jobs(jobs or {})}
    for index, path in enumerate(below[-newest:]):
        handles[path] = _handle(RunDirectory(path), index)
    runs = [handles[path] for path in _newest_last(handles)]
    return Overview(runs, max(0, len(below) - newest), silent=has_slurm and jobs is None)


DEPTH = 3  # of run directories below a root: NAME, SWEEP/NUMBER, and GROUP/SWEEP/NUMBER


def run_directories(folder: Path) -> Iterator[Path]:
    """Yields the run directories below ``folder``, without looking into them, frozen code or hidden directories.

    No directory is listed twice, as links to directories could multiply them without end, and directories behind a link
    come last.
    """
    listed: set[tuple[int, int]] = set()
    folders = deque([(folder, DEPTH)])
    links: deque[tuple[Path, int]] = deque()
    while folders or links:
        above, depth = (folders or links).popleft()
        try:
            status = above.stat()
            if (status.st_dev, status.st_ino) in listed:
                continue
            listed.add((status.st_dev, status.st_ino))
            with os.scandir(above) as listing:
                entries = [entry for entry in listing if not entry.name.startswith(".") and entry.name != "code"]
        except OSError:  # it does not exist, or belongs to somebody else
            continue
        for entry in entries:
            path = Path(entry.path).absolute()
            with suppress(OSError):  # a symbolic link to itself
                if not entry.is_dir():
                    continue
                if _is_run(path):
                    yield path
                elif depth > 1:
                    (links if entry.is_symlink() else folders).append((path, depth - 1))


def _is_run(path: Path) -> bool:
    with suppress(OSError):  # it belongs to somebody else
        return (path / "config.yaml").exists() and (path / "attempts").exists()
    return False


def _newest_last(paths: Iterable[Path]) -> list[Path]:
    """Sorts run directories by the time of their last start or end; a sweep counts as its newest run."""
    sweeps = {path: path.parent if path.name.isdigit() else path for path in paths}
    times = dict.fromkeys(sweeps.values(), 0.0)
    for path, sweep in sweeps.items():
        for file in (path / RECORD, path / "config.yaml", path):
            with suppress(OSError):
                times[sweep] = max(times[sweep], file.stat().st_mtime)
                break
    return sorted(sweeps, key=lambda path: (times[sweeps[path]], str(sweeps[path]), _number(path)))


def _runs_of_jobs(jobs: Mapping[str, JobStatus]) -> Iterator[RunHandle]:
    comments = {job.comment for job in jobs.values() if job.comment.startswith(COMMENT)}
    for comment in sorted(comments):
        words = comment.removeprefix(COMMENT).split(" ")
        paths = [" ".join(words[:count]) for count in range(len(words), 0, -1)]  # the user's comment follows the path
        with suppress(UserError):  # the directory is gone
            runs = find_runs(next(filter(os.path.exists, paths), paths[-1]), "status", unreadable=True)
            yield from (item for item in runs if any(status_of(job_id, jobs) for job_id in item.job_ids))


def unreadable(run: RunDirectory, error: Exception) -> UserError:
    """Returns the error for a run that cannot be shown, in spite of which the other runs are listed."""
    if isinstance(error, UserError):
        return error
    what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    fix = "ask its owner for permission to read it, or move it out of the run root"
    return UserError(f"the run cannot be read: {what}", where=str(run.path), fix=fix)


def statuses_of(runs: Iterable[RunHandle], statuses: JobStatuses) -> dict[str, JobStatus]:
    by_scheduler: dict[SubmittedJobs, list[RunHandle]] = {}
    found: dict[str, JobStatus] = {}
    for item in runs:
        if not item.job_ids:
            continue
        try:
            if not isinstance(item.jobs, OtherJobs):
                by_scheduler.setdefault(item.jobs, []).append(item)
            elif is_live(item.run):  # only the lease shows whether the job runs
                found[item.job_key] = PRESENT
        except UserError as error:  # the other runs are shown nevertheless
            tell_once(f"note: the state of job {', '.join(item.job_ids)} is unknown: {error.what} ({error.where})")
            found[item.job_key] = JobStatus(UNKNOWN)
    for jobs, items in by_scheduler.items():
        listed = statuses.of([job_id for item in items for job_id in item.job_ids], jobs)
        listed = folded({item.job_ids[0]: item.job_ids for item in items if len(item.job_ids) > 1}, listed)
        found |= {item.job_key: listed[item.job_ids[0]] for item in items if item.job_ids[0] in listed}
    return found


def _number(path: Path) -> tuple[int, str]:
    return (int(path.name) if re.fullmatch(r"\d+", path.name) else -1), path.name


def _handle(run: RunDirectory, index: int, trusts_owner: bool = False) -> RunHandle:
    number = _number(run.path)[0]
    if number < 0:
        number = index
    try:
        record = run.record()
    except Exception as error:
        return RunHandle(run, number, {}, unreadable(run, error), trusts_owner)
    submissions = record.get("submissions") or [record.get("claimed_by") or {}]
    submission = submissions[-1]
    if run.path.parent.name == ROLES:  # the attempts of a role have numbers of their own
        submission = _handle(RunDirectory(run.path.parents[1]), 0).submission | {"first_attempt": 0}
    elif submission.get("chain"):
        submission = read_or(lambda: only_started(run, submissions[-1], len(submissions) - 1), submission)
    return RunHandle(run, number, submission, trusts_owner=trusts_owner)
