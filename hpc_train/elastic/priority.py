"""Decides which runs give nodes back while more urgent jobs of the same user wait for them (``elastic.priority``).

The agent of node 0 of each run that may shrink looks at the queue once a minute, or every five minutes if there are
more than ``MANY`` such runs. They share one answer of ``squeue`` per user in ``.queue-UID`` of the run root, where each
also describes its run. ``decide`` gives the same result in all agents that see the same queue. Each agent acts on the
part that concerns its own run, once per answer.

A job is urgent for a run if its priority is higher. The priority of a pending job is that of the run that its comment
names; jobs of other programs have priority 0. If the file of the site limits ``elastic.priority``, the jobs of all
users of the account count, with priorities up to that limit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.settings import site_limits
from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_lock import LOCKS, LockHeld, LockOwner, acquire
from hpc_train.run.files import BackgroundCall, read_json, write_json
from hpc_train.run.requests import request_resize
from hpc_train.run.rows import check_fields
from hpc_train.schedulers.scheduler import CurrentJob
from hpc_train.schedulers.slurm.client import query
from hpc_train.schedulers.slurm.jobs import SlurmJob
from hpc_train.schedulers.slurm.records import FREE, Free, gpus_of, names_in
from hpc_train.units import counted

ASK_EVERY_S = 60.0
ASK_MANY_EVERY_S = 300.0  # with more than MANY runs
MANY = 20
LOOK_EVERY_S = 10.0  # at the shared answer
RESIZE_S = 900.0  # a shrink that takes longer has failed
FOR_NODES = ("Resources", "Priority")  # reasons of jobs that wait for nodes
FORMAT = "%i|%T|%r|%P|%D|%f|%b|%k"
COMMENT = "hpc_train:"
JOINER = "hpc_train-joiner:"  # the comment of a job that adds nodes to a live run, which is not urgent


@dataclass(frozen=True)
class WaitingJob:
    """Describes a pending job that waits for nodes.

    Attributes:
        run: the directory of its run, also for each job of ``cluster.first``; its id for a job of another program.
        nodes: the nodes that it requests.
        partitions: the partitions in one of which it may start.
        needs: the features and GPU types that it requests.
    """

    job_id: str
    run: str
    priority: int
    nodes: int
    partitions: frozenset[str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LiveRun:
    """Describes a run that trains on several nodes.

    Attributes:
        target: the number of nodes to which it shrinks now; ``nodes`` if it does not.
        urgent: the pending job that caused its last shrink.
        shrunk_at: when that was, in seconds since 1970; 0 if it has not shrunk for a job.
        interval_s: the least time between two shrinks (``elastic.shrink_interval_s``).
    """

    job_id: str
    priority: int
    nodes: int
    target: int
    min_nodes: int
    interval_s: float
    partition: str = ""
    needs: tuple[str, ...] = ()
    urgent: str = ""
    shrunk_at: float = 0.0

    def may_shrink_for(self, job: WaitingJob, partition: str, now: float) -> bool:
        """Returns whether the run has nodes in ``partition`` that ``job`` can use and that it may give back now."""
        if self.target != self.nodes or now - self.shrunk_at < self.interval_s:
            return False
        is_usable = self.partition == partition and set(job.needs) <= set(self.needs)
        return is_usable and self.priority < job.priority and self.nodes > self.min_nodes


@dataclass(frozen=True)
class Shrink:
    """Asks the run with the job ``job_id`` to give back ``nodes`` nodes to ``urgent``."""

    job_id: str
    nodes: int
    urgent: WaitingJob


def decide(waiting: Iterable[WaitingJob], live: Sequence[LiveRun], idle: Mapping[str, int], now: float) -> list[Shrink]:
    """Returns which runs give back how many nodes. No run gives back nodes for several jobs at once.

    The most urgent job comes first. Its missing nodes are those that it requests, without idle ones and without those
    that runs are giving back for it. The runs of the lowest priority give them back, and among these the runs that can
    spare most. If all runs together cannot, none shrinks for this job.

    Args:
        idle: the number of idle nodes of each partition.
        now: seconds since 1970.
    """
    free = dict(idle)
    shrinks: dict[str, Shrink] = {}
    served: set[str] = set()
    for job in sorted(waiting, key=lambda job: (-job.priority, job.run, job.job_id)):
        if job.run in served:  # another job of cluster.first
            continue
        promised = sum(run.nodes - run.target for run in live if run.urgent == job.job_id)
        for partition in sorted(job.partitions):
            missing = job.nodes - promised - free.get(partition, 0)
            usable = [run for run in live if run.job_id not in shrinks and run.may_shrink_for(job, partition, now)]
            if sum(run.nodes - run.min_nodes for run in usable) < missing:
                continue
            free[partition] = max(0, free.get(partition, 0) - max(0, job.nodes - promised))
            for run in sorted(usable, key=lambda run: (run.priority, run.min_nodes - run.nodes, run.job_id)):
                nodes = min(missing, run.nodes - run.min_nodes)
                if nodes > 0:
                    shrinks[run.job_id] = Shrink(run.job_id, nodes, job)
                    missing -= nodes
            served.add(job.run)
            break
    return list(shrinks.values())


def limit_of_site() -> int | None:
    """Returns the highest ``elastic.priority`` that the site allows; None without a limit.

    Raises UserError if the file of the site cannot be used.
    """
    rules = [settings.limits.get("elastic.priority", {}) for settings in site_limits()]
    return min((max(rule.get("one_of") or [rule["max"]]) for rule in rules if rule), default=None)


@dataclass(frozen=True)
class Queue:
    """Holds one answer of ``squeue`` about jobs that wait for nodes or run.

    Attributes:
        asked: when it was asked, in seconds since 1970.
        waiting: the pending jobs.
        running: partition and needs of each running job by its id.
        idle: the number of idle nodes of each partition.
    """

    asked: float
    waiting: tuple[WaitingJob, ...]
    running: Mapping[str, tuple[str, tuple[str, ...]]]
    idle: Mapping[str, int]

    @classmethod
    def read(cls, text: str, free: str, now: float, most: int | None = None) -> Queue:
        """Parses the output of ``squeue`` in ``FORMAT`` and of ``sinfo`` as ``FREE``.

        Args:
            most: the highest priority that counts; None without a limit.
        """
        waiting = []
        running = {}
        for line in text.splitlines():
            if line.count("|") < 7:
                continue
            job_id, state, reason, partitions, nodes, features, gres, comment = line.split("|", 7)
            needs = tuple(sorted(names_in(features) | {name for name in gpus_of(gres) if name}))
            if state == "RUNNING":
                running[job_id] = partitions, needs
            elif state == "PENDING" and reason in FOR_NODES and nodes.isdigit() and not comment.startswith(JOINER):
                run, priority = _run_and_priority(comment)
                priority = priority if most is None else min(priority, most)
                places = frozenset(partitions.split(","))
                waiting.append(WaitingJob(job_id, run or job_id, priority, int(nodes), places, needs))
        idle = {partition.partition: partition.idle for partition in Free.read_all(free)}
        return cls(now, tuple(waiting), running, idle)


def _run_and_priority(comment: str) -> tuple[str, int]:
    """Returns the run directory that the comment of a job names, and the priority of the run; "" and 0 without one."""
    words = comment.removeprefix(COMMENT).split(" ") if comment.startswith(COMMENT) else []
    for count in range(len(words), 0, -1):  # the comment of the user follows the path
        path = Path(" ".join(words[:count]))
        for run in (RunDirectory(path), RunDirectory(path / "0")):  # the comment of an array names the sweep
            with suppress(OSError, DamagedFile, UserError, ValueError):
                if run.config.exists():
                    priority = (run.plain_config("elastic").get("elastic") or {}).get("priority", 0)
                    return str(path), priority if isinstance(priority, int) else 0
    return "", 0


class PriorityWatch:
    """Looks at the queue for the run of this agent, and requests that it shrinks while more urgent jobs wait."""

    def __init__(self, run: RunDirectory, config: Config, job_id: str) -> None:
        elastic = config.elastic
        least = elastic.min_nodes or 1
        self._run = run
        self._state = LiveRun(job_id, elastic.priority, 0, 0, least, elastic.shrink_interval_s)
        self._folder = Path(config.run.root, f".queue-{os.getuid()}")
        self._looking = BackgroundCall(self._look)
        self._next_look = 0.0
        self._answered = time.time()  # the time of the last answer that led to a decision; none before the start
        self._reported: set[str] = set()

    @classmethod
    def of(cls, run: RunDirectory, config: Config, job: CurrentJob) -> PriorityWatch | None:
        """Returns the watch of a run that may shrink (``elastic.min_nodes``) in a Slurm job; None for other runs."""
        if not isinstance(job, SlurmJob) or config.elastic.min_nodes is None:
            return None
        return cls(run, config, job.name)

    def look(self) -> None:
        """Looks at the queue at intervals, in another thread. Does not wait."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        try:
            self._looking.poll(0.0)
        except TimeoutError:  # the call continues
            return
        except (OSError, UserError, ValueError, TypeError, KeyError) as error:
            self._report(f"the queue is not watched for more urgent jobs: {error}")

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            print(text, file=sys.stderr, flush=True)

    def _look(self) -> None:
        now = time.time()
        nodes = self._run.attempt_record(self._run.newest_attempt()).get("nodes", 0)
        if not nodes:  # no attempt has started
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        live = {run.job_id: run for run in self._live_runs()}
        state = live.get(self._state.job_id, self._state)
        target = nodes
        if 0 < state.target < nodes and now - state.shrunk_at < RESIZE_S:
            target = state.target
        state = replace(self._state, nodes=nodes, target=target, urgent=state.urgent, shrunk_at=state.shrunk_at)
        self._write(state)
        live[state.job_id] = state
        queue = self._queue(now, len(live))
        if queue is None or queue.asked <= self._answered:
            return
        self._answered = queue.asked
        running = []
        for job_id, run in live.items():
            if job_id in queue.running:
                partition, needs = queue.running[job_id]
                running.append(replace(run, partition=partition, needs=needs))
        for shrink in decide(queue.waiting, running, queue.idle, now):
            if shrink.job_id == state.job_id:
                urgent = shrink.urgent
                target = nodes - shrink.nodes
                self._write(replace(state, target=target, urgent=urgent.job_id, shrunk_at=now))
                higher = f"priority {urgent.priority} is above {state.priority} (elastic.priority)"
                reason = f"job {urgent.job_id} waits for {counted(urgent.nodes, 'node', 'nodes')}, and its {higher}"
                request_resize(self._run, target, reason, of_user=False)

    def _file(self, job_id: str) -> Path:
        return self._folder / f"run-{job_id}.json"

    def _write(self, state: LiveRun) -> None:
        shared = {name: value for name, value in asdict(state).items() if name not in ("partition", "needs")}
        write_json(self._file(state.job_id), shared)

    def _live_runs(self) -> list[LiveRun]:
        """Returns the runs that agents have described within the last hour; files of earlier ones are removed."""
        runs = []
        for path in sorted(self._folder.glob("run-*.json")):
            with suppress(OSError, DamagedFile, TypeError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()
                    continue
                run = LiveRun(**read_json(path, self._folder))
                check_fields(run)
                runs.append(run)
        return runs

    def _queue(self, now: float, runs: int) -> Queue | None:
        """Returns the queue, from the file in which the runs share it; None if Slurm has not responded yet."""
        file = self._folder / "queue.json"
        every_s = ASK_MANY_EVERY_S if runs > MANY else ASK_EVERY_S
        shared: Any = None
        with suppress(OSError, DamagedFile):
            shared = read_json(file, self._folder)
        if not isinstance(shared, dict) or not 0 <= now - shared["asked"] < every_s:
            try:
                lock = acquire(self._folder / LOCKS / "queue", LockOwner.of_this_process(), ask_slurm=False)
            except LockHeld:
                return None  # another agent asks
            try:
                jobs = query(["squeue", "--noheader", "--states=PENDING,RUNNING", f"--format={FORMAT}", *self._whose()])
                shared = {"asked": now, "jobs": jobs or "", "free": query(FREE) or ""}
                write_json(file, shared)
            finally:
                lock.give_back()
        return Queue.read(shared["jobs"], shared["free"], shared["asked"], limit_of_site())

    def _whose(self) -> list[str]:
        """Returns the option of ``squeue`` for the jobs that count: those of the user, or of the account."""
        account = os.environ.get("SLURM_JOB_ACCOUNT")
        if limit_of_site() is None or account is None:
            return ["--me"]
        config = query(["scontrol", "show", "config"]) or ""
        hidden = next(
            (line.partition("=")[2] for line in config.splitlines() if line.startswith("PrivateData")), "jobs"
        )
        if "jobs" in hidden or "all" in hidden:
            self._report("only your own jobs count as urgent: the controller hides those of others (PrivateData)")
            return ["--me"]
        return [f"--account={account}"]
