"""Runs a benchmark as a Slurm job with one task per node, and waits for its result, the JSON object that it prints."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import arguments, options, output_file
from hpc_train.launch.script import ENVIRONMENT, IN_SHELL, container_of, exports, own_lines, python, quoted, shell_word
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import LostAnswer, Problem, SlurmError
from hpc_train.schedulers.slurm.states import FORGOTTEN

_OF_A_TRAINING = ("signal", "requeue", "no-requeue", "no-kill", "open-mode")  # options that a measurement does not need
_POLL_S, _ASK_EVERY_S, _SETTLE_S = 1.0, 15.0, 75.0


@dataclass(frozen=True)
class Measurement:
    """A submitted benchmark, which writes its JSON object to ``result``."""

    job_id: str
    result: Path
    log: Path
    clusters: str | None = None


def submit(job: Job, words: Sequence[str], stem: Path, executor: SlurmJobExecutor) -> Measurement:
    """Submits ``bench WORDS`` with the resources of ``job``.

    Args:
        words: the benchmark with its arguments, among them ``--json``.
        stem: path of the job's files without suffix; the directory exists.

    Raises:
        UserError: Slurm does not respond, or rejects the job.
    """
    log = stem.with_suffix(".log")
    result = stem.with_suffix(".out")
    sbatch_options = {name: value for name, value in options(job, executor.site).items() if name not in _OF_A_TRAINING}
    sbatch_options |= {
        "job-name": f"hpc_train-bench-{words[0]}",
        "output": output_file(log.parent, log.name),
        "no-requeue": None,
    }
    clusters = sbatch_options.get("clusters")
    try:
        job_id = client.submit(arguments(sbatch_options), _script(job, words, result), f"hpc_train-job:{log}", clusters)
        return Measurement(job_id, result, log, clusters)
    except LostAnswer:
        raise
    except SlurmError as error:
        if error.problem is not Problem.REFUSED:
            fix = "use a login node of a Slurm cluster, or measure on this machine"
            raise UserError(error.what, where="-m, --submit", fix=fix) from error
        raise UserError(f"Slurm rejected the job: {error.said}", where="cluster", fix="cluster.KEY=VALUE") from error


def _script(job: Job, words: Sequence[str], result: Path) -> str:
    cluster = job.config.cluster
    container = container_of(job.config, job.gpus)
    outer = [] if container is None else container.srun_options(IN_SHELL)
    inner = [] if container is None else container.command(IN_SHELL)
    step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *outer, *inner, python(cluster, container)]
    unfinished, finished = (shell_word(str(path)) for path in (result.with_suffix(".part"), result))
    lines = [
        "#!/bin/bash",
        ENVIRONMENT,
        *exports(cluster.env),
        *own_lines(cluster.setup, "cluster.setup"),
        *([] if container is None else container.lines()),
        f"{quoted([*step, '-m', 'hpc_train', 'bench', *words])} > {unfinished} && mv {unfinished} {finished}",
        'status=$?; echo "exit code $status"; exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _read(output: Path) -> dict[str, Any]:
    """Returns the result, the last JSON line of the output; on several nodes the agents print other lines as well."""
    lines = output.read_text(encoding="utf-8").splitlines()
    return dict(json.loads(next(line for line in reversed(lines) if line.startswith("{"))))


def wait(measurement: Measurement) -> dict[str, Any] | None:
    """Waits for the result; returns None if the job has ended and no result has appeared for a while."""
    queried = time.monotonic()
    gone = None
    while True:
        if measurement.result in set(measurement.result.parent.glob("*.out")):
            return _read(measurement.result)
        now = time.monotonic()
        if now - queried > _ASK_EVERY_S:
            queried = now
            state = client.job_state(measurement.job_id, measurement.clusters)
            if state is None or state.is_alive:
                gone = None
            elif now - (gone := gone or now) > _SETTLE_S or not (state.ended_well or state.name == FORGOTTEN):
                print(f"job {measurement.job_id} has no result ({state.name}): {measurement.log}", flush=True)
                return None
        time.sleep(_POLL_S)
