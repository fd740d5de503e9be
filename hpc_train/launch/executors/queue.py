"""Submits jobs to a scheduler that ``cluster.kind`` names by its import path (``schedulers/scheduler.py``)."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from hpc_train.config.schema import Config
from hpc_train.config.secrets import file_mode
from hpc_train.config.values import asked_nodes, fewest_nodes, node_range
from hpc_train.errors import UserError
from hpc_train.launch.executors.cost import confirm_cost, confirmation_notes, total_cost
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import signal_lead
from hpc_train.launch.script import code_lines, exports, setup_lines, shell_word
from hpc_train.launch.storage import check_room
from hpc_train.layout.layout import JobShape, Place
from hpc_train.machine.allocation import workers_of_run
from hpc_train.run.code import frozen_code
from hpc_train.run.files import write_text
from hpc_train.runs.job_status import JobStatuses
from hpc_train.schedulers.environment import JOB_ID, RESTART
from hpc_train.schedulers.scheduler import JobRequest, JobStatus, NoAnswer, Scheduler
from hpc_train.schedulers.slurm.records import seconds

TRIES = 3
REPEAT_AFTER_S = 5.0


class QueueExecutor:
    """Submits each job to ``scheduler``. ``kind`` is the import path of the scheduler."""

    def __init__(self, scheduler: Scheduler, kind: str) -> None:
        self.name = scheduler.name
        self._scheduler = scheduler
        self._kind = kind
        self._statuses = JobStatuses()
        self._outputs: dict[str, Path] = {}

    def shape(self, config: Config) -> JobShape:
        cluster = config.cluster
        gpus_per_node = cluster.gpus_per_node
        if not isinstance(gpus_per_node, int):
            raise UserError(
                f"cluster.gpus_per_node={gpus_per_node}, and the GPUs of the nodes of {self.name} are unknown",
                where="cluster.gpus_per_node",
                fix="cluster.gpus_per_node=N; 0 trains on the CPUs",
            )
        gpus, workers = workers_of_run(config, visible=gpus_per_node)
        return JobShape(
            nodes=node_range(cluster)[1],
            fewest_nodes=fewest_nodes(config),
            gpus=gpus,
            workers=workers,
            place=Place.QUEUE,
            in_job=True,
        )

    def at_once(self, jobs: Sequence[Job]) -> int:
        limit = jobs[0].config.launch.array_parallelism
        return min(limit, len(jobs)) if isinstance(limit, int) else len(jobs)

    def check(self, jobs: Sequence[Job]) -> list[str]:
        if jobs[0].config.launch.chain > 1:
            raise UserError(
                f"launch.chain={jobs[0].config.launch.chain} needs Slurm, but cluster.kind={self._kind}",
                where="launch.chain",
                fix="launch.chain=1; the run continues when its job is requeued",
            )
        if jobs[0].config.launch.detach and self.at_once(jobs) < len(jobs):
            raise UserError(
                f"launch.array_parallelism={self.at_once(jobs)} needs a command that waits, but launch.detach=true "
                f"submits all {len(jobs)} jobs to {self.name} at once",
                where="launch.detach",
                fix="launch.detach=false, or launch.array_parallelism=auto",
            )
        notes = dict.fromkeys(note for job in jobs for note in self._scheduler.check(self._request(job)))
        costs = [f"{self.name}: {total_cost(jobs)}", *confirmation_notes(jobs)]
        return [*costs, *check_room(jobs), *notes]

    def earlier_starts(self, job: Job) -> list[str]:
        return []

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        confirm_cost(jobs, console)

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        return [(f"submitted to {self.name}: job.script", self._scheduler.script(self._request(job))) for job in jobs]

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        ids: list[str] = []
        try:
            for job in jobs:
                request = self._request(job)
                script = self._scheduler.script(request)
                request.output.parent.mkdir(parents=True, exist_ok=True)
                write_text(job.run.path / "job.script", script, file_mode(job.config))
                job_id = self._submit(request, script)
                ids.append(job_id)
                self._outputs[job_id] = request.output
        except BaseException:  # also an interrupt; no other command could cancel the jobs that no run has recorded
            if ids:
                print(f"cancelling the jobs that were submitted before: {', '.join(ids)}", file=sys.stderr)
                self.cancel(ids)
            raise
        return ids

    def _submit(self, request: JobRequest, script: str) -> str:
        for _ in range(TRIES - 1):
            with suppress(NoAnswer):
                return self._scheduler.submit(request, script)
            time.sleep(REPEAT_AFTER_S)
        return self._scheduler.submit(request, script)

    def identity(self, job_id: str) -> dict[str, Any]:
        return {"job_id": job_id, "output": str(self._outputs[job_id]), "scheduler": self._kind}

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        return self._statuses.of(ids, self._scheduler)

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        try:
            self._scheduler.cancel(ids, save=save)
        except UserError as error:  # the caller continues to follow the jobs
            print(error, file=sys.stderr)

    def output(self, job: Job, job_id: str) -> Path:
        return self._outputs[job_id]

    def _request(self, job: Job) -> JobRequest:
        config = job.config
        cluster = config.cluster
        # the same for a submission that is repeated because its process died before it recorded the job
        number = len(job.run.record().get("submissions", []))
        digest = hashlib.sha256(str(job.run.path).encode()).hexdigest()[:16]
        key = f"hpc-train-{digest}-{number}"
        interpreter = cluster.python or ("python" if cluster.container.image else sys.executable)
        return JobRequest(
            key=key,
            name=job.run.path.name,
            nodes=asked_nodes(config),
            gpus=job.gpus,
            time_s=seconds(cluster.time),
            lead_s=int(signal_lead(job).seconds),
            setup=(
                f"export {JOB_ID}={key}",
                f'export {RESTART}=$(find {shell_word(str(job.run.attempts))} -name "end-{key}.*.requeue" | wc -l)',
                *exports(cluster.env),
                *code_lines(frozen_code(job.run)),
                *setup_lines(cluster.setup),
            ),
            agent=(interpreter, "-m", "hpc_train", "agent", *job.agent_options, str(job.run.path)),
            output=job.run.logs / f"{key}.out",
            cluster=cluster,
        )
