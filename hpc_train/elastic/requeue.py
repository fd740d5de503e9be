"""Decides whether a stopped job runs again, and records the end of a job for its batch script.

Slurm announces the time limit and preemptions with SIGUSR2 (``--signal``); SIGUSR1, SIGTERM and Ctrl-C are stop
requests of a user, unless they come shortly before the limit and no command of hpc_train has sent them. The agent of
node 0 decides and leaves a marker; the batch script, which outlives the agents, asks Slurm. With other schedulers
(``schedulers/environment.py``) the agent itself asks at its end.

The batch script runs outside of any container and possibly without Python, so these are files in ``attempts/`` whose
names a shell can compute from the id of the job and ``SLURM_RESTART_COUNT``:

    end-<job>.<restart>.node-<N>    the exit code of all agents, written by node 0 or its successor; a second line has
                                    their step ("step 0"), which the script kills if it does not end
    end-<job>.<restart>.succession  node 0 is lost and another agent acts for it
    end-<job>.<restart>.frozen      written by the batch script if it had to have the step killed: when that was over
    end-<job>.<restart>.exclude     nodes on which the job must not run again
    end-<job>.<restart>.requeue     the job must run again; the progress it made, as JSON
    end-<job>.<restart>.asked       an agent has requested the requeue

If all agents of a step are killed, none of them records it, and the batch script starts another step of the same job
(``launch/script.py``). slurmstepd, which kills a step that exceeds its memory, writes so into the output of the job.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.values import node_range, runs_command
from hpc_train.elastic.decision import over_budget
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.errors import UserError
from hpc_train.machine.allocation import expand
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.files import in_time, patiently, write_json, write_text
from hpc_train.run.ledger import read_ledger
from hpc_train.run.requests import ANNOUNCING, stop_was_requested
from hpc_train.schedulers.current import NoJob, current_job
from hpc_train.schedulers.scheduler import CurrentJob

MIN_USEFUL_SHARE = 0.2
MIN_JOB_S = 600.0  # shorter jobs spend most of their time starting


def request(end: JobEnd, config: Config, events: EventLog, reason: str) -> Exit:
    """Leaves the marker for the batch script (returns 75), or reports why the job is given up (returns 93)."""
    step = progress_of(end.run, config)
    before = end.requeues()
    refusal = _refusal(config, step, before) or over_budget(end.run, config, events.now())
    if refusal is None and not runs_command(config):  # how much of a script's time was useful is not known
        jobs = [job for job in read_ledger(end.run, events.now()).jobs if job.held_s >= MIN_JOB_S][-2:]
        if len(jobs) == 2 and all(job.useful_share < MIN_USEFUL_SHARE for job in jobs):
            shares = " and ".join(f"{job.useful_share:.0%}" for job in jobs)
            refusal = f"only {shares} of the time of the last two jobs went into steps that were kept"
    if refusal is None and config.launch.chain <= 1:
        refusal = end.job.why_no_requeue()
        if refusal is not None:
            refusal += f". Resume the run with: python -m hpc_train resume {end.run.path}"
    if refusal is not None:
        message = "; ".join(filter(None, (reason, f"not requeued: {refusal}")))
        events.write("stopped_retrying", step=step, exit_code=int(Exit.GAVE_UP), message=message)
        print(message, file=sys.stderr)
        return Exit.GAVE_UP

    failing = NodeFailures(end.run, config.elastic.exclude_hours * 3600).failing_nodes()
    if failing and not _has_enough_without(failing, config.cluster):
        names = ", ".join(sorted(failing))
        print(f"{names} failed too often but is not excluded: the job needs the node to start", file=sys.stderr)
        failing = frozenset()
    exclude = [*filter(None, [config.cluster.exclude]), *sorted(failing)]
    end.ask_for_requeue(step, exclude)
    events.write("requeued", step=step, requeues=len(before) + 1, reason=reason, exclude=exclude)
    return Exit.STOPPED


LAST_S = 3600.0  # before its time limit, in which a job takes a stop signal as an announcement of the limit
EARLY_S = 60.0  # by which Slurm may send the signal early


def is_announcement(stop: str | None, run: RunDirectory) -> bool:
    """Returns whether the scheduler, and not a user, has sent the signal ``stop`` to this job.

    A batch script may request another signal than USR2 before its limit. Then the job is in the last third of its
    time, or Slurm preempts it, and no command of hpc_train has recorded a stop request.
    """
    if stop not in ANNOUNCING or stop_was_requested(run):
        return False
    limit = current_job().limit()
    if limit.limit_s is None or limit.run_s is None:
        return limit.is_preempted
    return limit.is_preempted or limit.limit_s - limit.run_s <= min(limit.limit_s / 3, LAST_S) + EARLY_S


def request_without_marker(end: JobEnd, config: Config) -> str | None:
    """Asks the scheduler to run the job again, where the run directory does not accept the marker for the batch script.

    Returns why the job is not requeued; None if it is, or if the scheduler ends or holds it already.
    """
    job = end.job
    if not job.job_id:
        return "this process is not in the job"
    if end.restart >= config.elastic.max_requeues:
        return _requeued_enough(end.restart)
    if job.is_running() is False:
        return None
    chained = config.launch.chain > 1
    if not chained and (refusal := job.why_no_requeue()) is not None:
        return refusal
    if not job.ask(job.requeue_command(chained)):
        return f"{job.scheduler} refuses to requeue it"
    return None


def progress_of(run: RunDirectory, config: Config) -> int:
    """Returns the step of the newest checkpoint; of a script, which saves by itself, the last step that it reported."""
    if runs_command(config):
        return max((line.step for line in run.read_all_metrics()), default=0)
    newest = CheckpointStore(run.checkpoints).newest()
    if newest is None:
        return 0
    return newest.step


def _refusal(config: Config, step: int, before: Sequence[dict[str, Any]]) -> str | None:
    if len(before) >= config.elastic.max_requeues:
        return _requeued_enough(len(before))
    if runs_command(config) and step == 0:
        return None  # it does not report its progress
    if before and step <= before[-1]["step"]:
        missing = "no further step was taken"
        if not runs_command(config):
            missing = "no checkpoint was saved"
        return f"{missing} since the previous requeue, at step {before[-1]['step']}: no progress"
    return None


def _requeued_enough(count: int) -> str:
    if count == 0:
        return "elastic.max_requeues=0 allows no requeue"
    return f"the job was already requeued {count} times (elastic.max_requeues)"


def _has_enough_without(failing: Collection[str], cluster: ClusterConfig) -> bool:
    """Returns whether the job can start without some nodes. Slurm holds a job for ever that excludes too many nodes
    (BadConstraints).
    """
    required = set(expand(cluster.nodelist)) if cluster.nodelist else set()
    job = current_job()
    fewest, most = node_range(cluster)
    needed = fewest if fewest < most else job.nodes() or most
    excluded = {*failing, *(expand(cluster.exclude) if cluster.exclude else [])}
    is_enough = job.may_start_without(excluded, needed)
    if is_enough is None:
        return not required & set(failing)
    return is_enough and not required & excluded


@dataclass(frozen=True)
class JobEnd:
    """Describes the end of one start of a job, as recorded by the agent of node ``node_rank``.

    ``step_id`` is Slurm's number of the agents' step; None outside of a step.
    """

    run: RunDirectory
    job_id: str
    restart: int
    node_rank: int
    step_id: str | None = None

    @classmethod
    def of_this_process(cls, run: RunDirectory, environment: Mapping[str, str] = os.environ) -> JobEnd | None:
        """Returns the end of this process's job; None outside of a job."""
        job = current_job(environment)
        if not job.job_id:
            return None
        return cls(run, job.job_id, job.restart, job.node_rank, job.step_id)

    @property
    def job(self) -> CurrentJob:
        """The job, if this process runs in it."""
        job = current_job()
        if job.job_id == self.job_id:
            return job
        return NoJob()

    @property
    def _name(self) -> str:
        return f"end-{self.job_id}.{self.restart}"

    def begin(self) -> None:
        """Removes what an earlier step of the same job has left."""
        (self.run.attempts / f"{self._name}.node-{self.node_rank}").unlink(missing_ok=True)
        if self.node_rank == 0:
            (self.run.attempts / f"{self._name}.succession").unlink(missing_ok=True)

    def record(self, code: int, command_exit_code: int | None = None) -> None:
        step = "" if self.step_id is None else f"step {self.step_id}\n"
        if command_exit_code is not None:
            step += f"command {command_exit_code}\n"
        path = self.run.attempts / f"{self._name}.node-{self.node_rank}"
        patiently(lambda: write_text(path, f"{int(code)}\n{step}"))

    def is_recorded(self) -> bool:
        """Returns whether the agent of node 0 has recorded its end."""
        return (self.run.attempts / f"{self._name}.node-0") in set(self.run.attempts.glob(f"{self._name}.node-*"))

    def claim_succession(self) -> bool:
        """Returns True for exactly one of the agents that are left without node 0; that one acts for the job."""
        try:
            os.close(os.open(self.run.attempts / f"{self._name}.succession", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def has_successor(self) -> bool:
        """Returns whether another agent acts for node 0, which was frozen for so long that it counted as lost."""
        return (self.run.attempts / f"{self._name}.succession").exists()

    @property
    def exclude_file(self) -> Path:
        """Returns the path of the file with node names separated by commas, as Slurm expects them; it exists if a
        requeue sets or clears the list.
        """
        return self.run.attempts / f"{self._name}.exclude"

    def excluded(self) -> str:
        """Returns the content of ``exclude_file``."""
        return self.run.read(self.exclude_file).decode()

    def requeues(self) -> list[dict[str, Any]]:
        """Returns the progress recorded by earlier requeues of this job, or by earlier jobs of its chain."""
        chain = [str(job) for job in (self.run.record().get("submissions") or [{}])[-1].get("chain", [])]
        jobs = chain[: chain.index(self.job_id)] if self.job_id in chain else []
        starts = [*((job, 0) for job in jobs), *((self.job_id, number) for number in range(self.restart))]
        earlier = (self.run.attempts / f"end-{job}.{number}.requeue" for job, number in starts)
        return [self.run.json(path) for path in earlier if path.exists()]

    def was_requeued_externally(self) -> bool:
        """Returns whether this job was restarted without a request of the previous start."""
        return self.restart > 0 and not (self.run.attempts / f"end-{self.job_id}.{self.restart - 1}.requeue").exists()

    def ask_for_requeue(self, step: int, exclude: Sequence[str] = ()) -> None:
        """Makes the batch script ask Slurm to run this job again, on other nodes than ``exclude``.

        Args:
            step: the step of the newest checkpoint.
        """
        earlier = any(self.run.attempts.glob(f"end-{self.job_id}.*.exclude"))
        if exclude or earlier:  # an empty list clears the previous one
            write_text(self.exclude_file, ",".join(exclude))
        write_json(self.run.attempts / f"{self._name}.requeue", {"step": step, "time": time.time()})

    def asks_for_requeue(self) -> bool:
        """Returns whether an agent has left the marker for the requeue of this start."""
        return (self.run.attempts / f"{self._name}.requeue").exists()

    def must_ask(self) -> bool:
        """Returns whether this agent asks the scheduler for the requeue that the marker requests, where no batch script
        does. That is one agent for each start of the job, also if it calls this method again.
        """

        def claim() -> bool:
            if not self.asks_for_requeue():
                return False
            if self.node_rank > 0 and not self.has_successor():
                return False
            os.close(os.open(self.run.attempts / f"{self._name}.asked", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True

        if not self.job.agents_ask:
            return False
        try:
            return in_time(claim)
        except OSError:  # it exists, or the file system fails
            return False

    def ask(self) -> bool:
        """Asks the scheduler for a requeue, without the nodes in ``exclude_file``; returns whether it succeeds."""
        exclude = ""
        if self.exclude_file.exists():
            exclude = self.excluded()
        return self.job.ask(self.job.requeue_command(chained=False), exclude)


TAIL_BYTES = 1 << 16
# What slurmstepd writes: "Exceeded job memory limit", "exceeded memory limit (9 > 8), being killed",
# "Detected 1 oom_kill event in StepId=7.0", "Detected 1 oom-kill event(s) in step 7.0 cgroup"
MEMORY = re.compile(r"slurmstepd.*(exceeded (job |step )?memory limit|oom[-_]kill)", re.IGNORECASE)
SIZE = re.compile(r"([\d.]+)([KMGT]?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class KilledStep:
    """Describes a step of this start of the job whose agents were killed.

    Attributes:
        attempt: the attempt that it ran.
        step: its id, ``7.0``.
        node: its first node.
        for_memory: the line that slurmstepd wrote because the step used too much memory; None otherwise.
    """

    attempt: int
    step: str
    node: str
    for_memory: str | None

    def details(self, mem: str | None) -> dict[str, Any]:
        """Returns the fields of the event. ``mem`` is ``cluster.mem``."""
        if self.for_memory is None:
            how = f"a signal killed all agents of step {self.step} (scancel --signal=KILL, or a fault of the node)"
            return {"class": Failure.KILLED, "rank": None, "node": self.node, "message": how}
        how = f"Slurm killed step {self.step} for exceeding its memory: {self.for_memory}; {more_memory(mem)}"
        return {"class": Failure.OUT_OF_MEMORY, "rank": None, "node": self.node, "message": how}


def find_killed_step(run: RunDirectory, launch_id: str, attempt: int) -> KilledStep | None:
    """Returns the step that ran ``attempt``, if it belongs to this start of the job and its agents were killed.

    Args:
        launch_id: that of this step: job, step and restart (``machine/allocation.py``).
    """
    path = run.attempts / f"{attempt:03d}.json"
    if attempt < 0 or launch_id.count(".") != 2 or not path.exists() or not path.stat().st_size:
        return None
    spec = run.attempt_record(attempt)
    earlier = str(spec.get("launch_id"))
    if earlier.count(".") != 2:
        return None
    job, step, restart = earlier.split(".")
    this_job, this_step, this_restart = launch_id.split(".")
    if (job, restart) != (this_job, this_restart) or step == this_step:
        return None
    if any("exit_code" in event for event in run.events_of("agent-*", attempt)):
        return None

    matches = []
    if output := (run.record().get("submissions") or [{}])[-1].get("output"):
        lines = map(str.strip, run.end_of_output(Path(output)).splitlines())
        matches = [line for line in lines if MEMORY.search(line)]
    # slurmstepd may add lines that do not name the step ("Exceeded job memory limit") to those that do; without ids,
    # it may be any of the steps
    if any("stepid=" in line.lower() for line in matches):
        of_step = re.compile(rf"StepId={re.escape(f'{job}.{step}')}\b", re.IGNORECASE)
        matches = [line for line in matches if of_step.search(line)]
    return KilledStep(attempt, f"{job}.{step}", str(spec.get("node")), matches[-1] if matches else None)


def refuse_third_kill(run: RunDirectory, killed: KilledStep | None, mem: str | None) -> None:
    """Raises UserError if two steps in a row were killed for their memory: the next one would be as well."""
    if killed is None or killed.for_memory is None:
        return
    before = [event for event in run.events_of("agent-*", killed.attempt) if event.name == "agents_killed"]
    if any(event.failure == Failure.OUT_OF_MEMORY for event in before):
        raise UserError(
            f"Slurm killed two steps of the job for exceeding its memory: {killed.for_memory}",
            where="cluster.mem",
            fix=more_memory(mem),
        )


def more_memory(mem: str | None) -> str:
    """Returns the advice for a job that requested ``mem`` (``64G``) and needs more."""
    match = SIZE.fullmatch(mem or "")
    if match is None or float(match[1]) == 0:
        default = "the default of the partition (scontrol show config | grep DefMemPer)"
        return f"set cluster.mem to more than {mem or default}, or reduce batch.loader_workers"
    more = f"{1.5 * float(match[1]):.0f}{match[2]}"
    return f"set cluster.mem={more} instead of {mem}, or reduce batch.loader_workers"
