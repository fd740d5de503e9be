"""Whether a job that was stopped by its time limit or a preemption is to run again.

Slurm announces both by SIGUSR2 (``--signal``); SIGUSR1, SIGTERM and Ctrl-C are somebody's wish that it stops. The agent
of node 0 decides and leaves a marker; the batch script, which outlives the agents, asks Slurm (``launch/requeue.py``).

How a Slurm job ended, told by the agents to the batch script that started them.

The batch script stands outside of any container and may know no Python: these are files whose names a shell can compute
from ``SLURM_JOB_ID`` and ``SLURM_RESTART_COUNT``, in ``attempts/`` of the run directory:

    end-<job>.<restart>.node-<N>    the exit code of all agents, by that of node 0, or of who acts for it; and on
                                    a second line their step ("step 0"), which the script has killed if it does not end
    end-<job>.<restart>.succession  node 0 is lost, and another acts for it
    end-<job>.<restart>.exclude     nodes on which it is not to run again
    end-<job>.<restart>.requeue     the job is to run again; what it had reached, as JSON
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.elastic.decision import over_budget
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.files import patiently, read_json, write_json, write_text
from hpc_train.run.ledger import read_ledger
from hpc_train.slurm.client import may_run_again

LEAST_USEFUL = 0.2
SAYS_MUCH_S = 600.0  # of a shorter job the start takes most of the time anyway


def request(end: JobEnd, config: Config, events: EventLog, reason: str) -> Exit:
    """Leaves the marker for the batch script (75), or says why the job is given up (93)."""
    newest = CheckpointStore(end.run.checkpoints).newest()
    step, before = 0 if newest is None else newest.step, end.requeues()
    refusal = _refusal(config, step, before) or over_budget(end.run, config) or _useless(end.run) or _once(end, config)
    if refusal is None:
        exclude = _excluded(end.run, config)
        end.ask_for_requeue(step, exclude)
        events.write("requeued", step=step, requeues=len(before) + 1, reason=reason, exclude=exclude)
        return Exit.STOPPED
    message = "; ".join(filter(None, (reason, f"given up, not requeued: {refusal}")))
    events.write("gave_up", step=step, exit_code=int(Exit.GAVE_UP), message=message)
    print(message, file=sys.stderr)
    return Exit.GAVE_UP


def _refusal(config: Config, step: int, before: Sequence[dict[str, Any]]) -> str | None:
    if len(before) >= config.elastic.max_requeues:
        return f"it was requeued {len(before)} times (elastic.max_requeues)"
    if before and step <= before[-1]["step"]:
        return f"no step was saved since the requeue before, at step {before[-1]['step']}: the job does not get on"
    return None


def _useless(run: RunDirectory) -> str | None:
    """Words for a run whose last two jobs have spent their time on other things than steps."""
    jobs = [job for job in read_ledger(run, time.time()).jobs if job.held_s >= SAYS_MUCH_S][-2:]
    if len(jobs) < 2 or any(job.useful_share >= LEAST_USEFUL for job in jobs):
        return None
    shares = " and ".join(f"{job.useful_share:.0%}" for job in jobs)
    return f"of its last two jobs only {shares} of the time went into steps that were kept"


def _once(end: JobEnd, config: Config) -> str | None:
    """Words for a job that Slurm runs only once; not for one of a chain, where the next job goes on."""
    in_job = os.environ.get("SLURM_JOB_ID") == end.job_id
    if not in_job or config.launch.chain > 1 or may_run_again(end.job_id):
        return None
    return (
        f"Slurm may not run job {end.job_id} again (Requeue=0). This goes on: python -m hpc_train resume {end.run.path}"
    )


def _excluded(run: RunDirectory, config: Config) -> list[str]:
    """The nodes that the user excludes and those that have failed too often recent; none where none of these have."""
    failing = sorted(NodeFailures(run, config.elastic.exclude_hours * 3600).failing_nodes())
    return [*filter(None, [config.cluster.exclude]), *failing]


@dataclass(frozen=True)
class JobEnd:
    """The end of one start of a Slurm job, as the agent of node ``node_rank`` sees and tells it.

    ``step_id`` is Slurm's number of the step that the agents are; None outside of a step.
    """

    run: RunDirectory
    job_id: str
    restart: int
    node_rank: int
    step_id: str | None = None

    @classmethod
    def of_this_process(cls, run: RunDirectory, environment: Mapping[str, str] = os.environ) -> JobEnd | None:
        """None outside of Slurm."""
        if "SLURM_JOB_ID" not in environment:
            return None
        restart = int(environment.get("SLURM_RESTART_COUNT", "0"))
        node_rank = int(environment.get("SLURM_NODEID", "0"))
        return cls(run, environment["SLURM_JOB_ID"], restart, node_rank, environment.get("SLURM_STEP_ID"))

    @property
    def _name(self) -> str:
        return f"end-{self.job_id}.{self.restart}"

    def begin(self) -> None:
        """Forgets what an earlier step of the same job has left."""
        (self.run.attempts / f"{self._name}.node-{self.node_rank}").unlink(missing_ok=True)
        if self.node_rank == 0:
            (self.run.attempts / f"{self._name}.succession").unlink(missing_ok=True)

    def tell(self, code: int) -> None:
        self.run.attempts.mkdir(parents=True, exist_ok=True)
        step = "" if self.step_id is None else f"step {self.step_id}\n"
        path = self.run.attempts / f"{self._name}.node-{self.node_rank}"
        patiently(lambda: write_text(path, f"{int(code)}\n{step}"))

    def told(self) -> bool:
        """Whether the agent of node 0 has told its end."""
        return (self.run.attempts / f"{self._name}.node-0") in set(self.run.attempts.glob(f"{self._name}.node-*"))

    def claim_succession(self) -> bool:
        """True for one agent of those that are left without the one of node 0: it acts for the job."""
        try:
            os.close(os.open(self.run.attempts / f"{self._name}.succession", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def succeeded(self) -> bool:
        """Whether another agent acts for the one of node 0, which was frozen for so long that it was taken for lost."""
        return (self.run.attempts / f"{self._name}.succession").exists()

    @property
    def exclude_file(self) -> Path:
        """Names of nodes, separated by commas, as Slurm wants them; there where a requeue sets or lifts the list."""
        return self.run.attempts / f"{self._name}.exclude"

    def requeues(self) -> list[dict[str, Any]]:
        """What earlier starts of this job, or earlier jobs of its chain, had reached when they asked to run again."""
        chain = [str(job) for job in self.run.record().get("submissions", [{}])[-1].get("chain", [])]
        jobs = chain[: chain.index(self.job_id)] if self.job_id in chain else []
        starts = [*((job, 0) for job in jobs), *((self.job_id, number) for number in range(self.restart))]
        earlier = (self.run.attempts / f"end-{job}.{number}.requeue" for job, number in starts)
        return [read_json(path) for path in earlier if path.exists()]

    def unasked(self) -> bool:
        """Whether this is a start that the one before had not asked for."""
        return self.restart > 0 and not (self.run.attempts / f"end-{self.job_id}.{self.restart - 1}.requeue").exists()

    def ask_for_requeue(self, step: int, exclude: Sequence[str] = ()) -> None:
        """Has the batch script ask Slurm to run this job again, elsewhere than on the nodes ``exclude``.

        Args:
            step: that of the newest checkpoint.
        """
        if exclude or any(self.run.attempts.glob(f"end-{self.job_id}.*.exclude")):  # an empty list lifts the one before
            write_text(self.exclude_file, ",".join(exclude))
        write_json(self.run.attempts / f"{self._name}.requeue", {"step": step, "time": time.time()})
