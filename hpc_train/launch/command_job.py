"""Runs a command of hpc_train as a Slurm job: with one task, for long work that needs no ranks, or one per node."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import NO_SITE, output_file, refuse_other_scheduler
from hpc_train.launch.script import (
    ENVIRONMENT,
    IN_SHELL,
    container_of,
    exports,
    python,
    quoted,
    setup_lines,
    shell_word,
)
from hpc_train.run.exits import Exit
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import LostAnswer, Problem, SlurmError
from hpc_train.schedulers.slurm.site import other_clusters

CORES = 2  # one core computes hashes, the other reads and writes
SETTLE_S = 75.0  # the longest wait until a file of another node is visible (NFS attribute caches)
_POLL_S = 0.5
_ASK_EVERY_S = 15.0


@dataclass(frozen=True)
class CommandJob:
    """A submitted command. When it ends, the job writes its exit code to the file ``code``."""

    job_id: str
    log: Path
    code: Path
    clusters: str | None = None


def submit(
    words: Sequence[str],
    config: Config,
    folder: Path,
    extra: Sequence[str] = (),
    program: Sequence[str] | None = None,
    job: Job | None = None,
) -> CommandJob:
    """Submits ``python -m hpc_train WORDS``, or another program.

    Raises UserError if Slurm does not respond or refuses the job, or as ``refuse_other_scheduler`` does.

    Args:
        config: sets partition, account, time limit, environment and container.
        folder: directory for the output of the job.
        extra: further options of sbatch, which take precedence.
        program: the other program and its arguments; ``words`` then only name the job.
        job: a training job on whose nodes the command runs, as one task per node; None requests one task with ``CORES``
            cores. Its options are in ``extra``.
    """
    refuse_other_scheduler(config.cluster)
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(word for word in words[:2] if word.isalpha())  # the command without overrides, which may be paths
    log = folder.absolute() / f"{name}-{secrets.token_hex(3)}.out"
    code = log.with_suffix(".code")
    options = [f"--job-name=hpc_train-{words[0]}", "--no-requeue", f"--output={output_file(log.parent, log.name)}"]
    if job is None:
        options += _one_task(config)
    options += extra
    clusters = other_clusters(config.cluster.clusters, NO_SITE)
    try:
        job_id = client.submit(options, _script(words, config, code, program, job), f"hpc_train-job:{log}", clusters)
        return CommandJob(job_id, log, code, clusters)
    except LostAnswer:
        raise
    except SlurmError as error:
        if error.problem is not Problem.REFUSED:
            fix = "use a login node of a Slurm cluster, or run the command on this machine without --submit"
            raise UserError(error.what, where="Slurm", fix=fix) from error
        fix = "values of your site: cluster.partition=NAME cluster.time=1:00:00, or --sbatch='--partition=NAME'"
        raise UserError(f"Slurm refuses the job: {error.said}", where="cluster, --sbatch", fix=fix) from error


def without_submission(arguments: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Returns ``arguments`` without ``--submit``, ``--sbatch`` and the options ``others``, which have a value, for the
    command that the job runs."""
    words = list(arguments)
    for option in ("--sbatch", *others):
        while option in words:
            index = words.index(option)
            del words[index : index + 2]
        words = [word for word in words if not word.startswith(f"{option}=")]
    return [word for word in words if word != "--submit"]


def follow(job: CommandJob) -> int:
    """Copies the output of the job to standard output until the job ends; returns its exit code.

    Ctrl-C detaches and leaves the job running.
    """
    print(f"Slurm job {job.job_id}, output in {job.log}", flush=True)
    try:
        return wait(job, shows_output=True)
    except KeyboardInterrupt:
        print(f"job {job.job_id} keeps running; scancel {job.job_id} cancels it")
        return Exit.DETACHED


def wait(job: CommandJob, shows_output: bool = False) -> int:
    """Waits until the job ends; returns its exit code."""
    shown = 0
    last_query = time.monotonic()
    gone_since = None
    while True:
        code = None
        if job.code in set(job.code.parent.glob("*.code")):  # a network file system would cache a failed lookup
            with suppress(ValueError):
                code = int(job.code.read_text())
        if shows_output:
            with suppress(FileNotFoundError), job.log.open("rb") as file:
                file.seek(shown)
                data = file.read()
                shown += len(data)
                sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
        if code is not None:
            return code
        now = time.monotonic()
        if now - last_query > _ASK_EVERY_S:
            last_query = now
            state = client.job_state(job.job_id, job.clusters)
            if state is None or state.is_alive:
                gone_since = None
            else:
                gone_since = gone_since or now
                if now - gone_since > SETTLE_S or not state.by_itself:
                    print(f"job {job.job_id} ended without an exit code: {state.name}", file=sys.stderr)
                    return Exit.FAILED
        time.sleep(_POLL_S)


def _one_task(config: Config) -> list[str]:
    cluster = config.cluster
    values = {
        "clusters": other_clusters(cluster.clusters, NO_SITE),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.extra.get("reservation"),
        "wckey": cluster.extra.get("wckey"),
        "time": cluster.time,
        "nodes": 1,
        "ntasks-per-node": 1,
        "cpus-per-task": CORES,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _script(
    words: Sequence[str], config: Config, code: Path, program: Sequence[str] | None, job: Job | None = None
) -> str:
    cluster = config.cluster
    container = container_of(config, 0 if job is None else job.gpus)
    if program is None:
        program = [python(cluster, container), "-m", "hpc_train", *words]
    step = ["srun", "--nodes=1", "--ntasks=1", "--unbuffered"]  # the job of `doctor` may have several nodes
    if job is not None:
        step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    mounts = []
    if container is not None:
        step += [*container.srun_options(IN_SHELL), *container.command(IN_SHELL)]
        mounts = container.lines()
    lines = [
        "#!/bin/bash",
        ENVIRONMENT,
        *exports(cluster.env),
        *setup_lines(cluster.setup),
        *mounts,
        quoted([*step, *program]),
        "status=$?",
        f'echo "$status" > {shell_word(str(code))}',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"
