"""Measurements as Slurm jobs: ``bench step`` on several nodes, with the resources of a training of that size."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.arguments import CommandLine, with_right_plus
from hpc_train.config.errors import ConfigError
from hpc_train.launch.container import IN_SHELL, container_of, quoted
from hpc_train.launch.job import Job
from hpc_train.launch.prepare import prepare
from hpc_train.launch.sbatch import arguments, options
from hpc_train.launch.script import ENVIRONMENT, python
from hpc_train.launch.slurm import PATIENCE_S, SlurmSubmitter, sbatch
from hpc_train.run.directory import RunDirectory
from hpc_train.run.slurm_jobs import ENDED, job_state

_OF_A_TRAINING = ("signal", "requeue", "no-requeue", "no-kill", "open-mode")  # of no use to a measurement
_POLL_S, _ASK_EVERY_S, _SETTLE_S = 1.0, 15.0, 75.0


@dataclass(frozen=True)
class _Measurement:
    job_id: str
    result: Path
    log: Path


def measure_on_slurm(words: Sequence[Sequence[str]], nodes: Sequence[int]) -> list[dict[str, Any]] | None:
    """Submits ``bench step WORDS`` for each of ``words``; returns their results in order, None where one failed.

    Raises:
        ConfigError: a job cannot run there, or Slurm refuses it.
    """
    submitter = SlurmSubmitter()
    jobs = [_job(own) for own in words]
    folder = Path(jobs[0].config.run.root).absolute() / f"scaling-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    submitted = []
    for number, (job, own) in enumerate(zip(jobs, words, strict=True)):
        submitted.append(_submit(job, own, folder / f"{number}", submitter))
        print(f"Slurm job {submitted[-1].job_id}: {nodes[number]} nodes, output in {submitted[-1].log}", flush=True)
    results = [_wait(each) for each in submitted]
    return None if any(result is None for result in results) else [result for result in results if result is not None]


def _job(words: Sequence[str]) -> Job:
    overrides = [word for word in words if "=" in word]
    line = CommandLine.parse(with_right_plus(overrides))
    with line.composer() as compose:
        return prepare(compose(line.overrides), RunDirectory(Path("scaling")))


def _submit(job: Job, words: Sequence[str], stem: Path, submitter: SlurmSubmitter) -> _Measurement:
    log, result = stem.with_suffix(".log"), stem.with_suffix(".out")
    asked = {name: value for name, value in options(job, submitter.site).items() if name not in _OF_A_TRAINING}
    asked |= {"job-name": "hpc_train-scaling", "output": str(log), "no-requeue": None}
    command = [*sbatch({}), "--parsable", *arguments(asked)]
    text = _script(job, words, result)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"sbatch: {error}", where="-m", mend="a machine of a Slurm cluster, or workers=") from error
    if done.returncode != 0:
        raise ConfigError(f"Slurm refuses the job: {done.stderr.strip()}", where="cluster", mend="cluster.KEY=VALUE")
    return _Measurement(done.stdout.strip().partition(";")[0], result, log)


def _script(job: Job, words: Sequence[str], result: Path) -> str:
    cluster, container = job.config.cluster, container_of(job.config, job.gpus)
    outer = [] if container is None else container.srun_options(IN_SHELL)
    inner = [] if container is None else container.command(IN_SHELL)
    step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *outer, *inner, python(cluster, container)]
    unfinished, there = (shlex.quote(str(path)) for path in (result.with_suffix(".part"), result))
    lines = [
        "#!/bin/bash",
        ENVIRONMENT,
        *(f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items()),
        *cluster.setup,
        *([] if container is None else container.lines()),
        f"{quoted([*step, '-m', 'hpc_train', 'bench', 'step', *words])} > {unfinished} && mv {unfinished} {there}",
        'status=$?; echo "exit code $status"; exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _read(output: Path) -> dict[str, Any]:
    """The agents have their say on several nodes; the result is one line of it."""
    lines = output.read_text(encoding="utf-8").splitlines()
    return dict(json.loads(next(line for line in reversed(lines) if line.startswith("{"))))


def _wait(measurement: _Measurement) -> dict[str, Any] | None:
    """The result; None once the job has ended without one for a while."""
    asked, gone = time.monotonic(), None
    while True:
        if measurement.result in set(measurement.result.parent.glob("*.out")):
            return _read(measurement.result)
        now = time.monotonic()
        if now - asked > _ASK_EVERY_S:
            asked, state = now, job_state(measurement.job_id)
            ended = state in (ENDED, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
            gone = (gone or now) if ended else None
            if gone is not None and (now - gone > _SETTLE_S or state not in (ENDED, "COMPLETED")):
                print(f"job {measurement.job_id} has no result ({state}): {measurement.log}", flush=True)
                return None
        time.sleep(_POLL_S)
