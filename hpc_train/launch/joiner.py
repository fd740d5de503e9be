"""Submits a joiner: a job that adds nodes to a live run. The agent of node 0 calls

    python -m hpc_train.launch.joiner RUN_DIR NODES LAUNCH:FIRST MINUTES EXCLUDED NICE

and reads the id of the job. The arguments are the number of nodes (``2``, or ``1-3``), the launch that they join, the
number of the first of them, the time limit (may be empty), the nodes that the run has already, separated by commas, and
by how much the priority is reduced.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hpc_train.config.values import with_alternative
from hpc_train.elastic.priority import JOINER
from hpc_train.errors import UserError
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import options, output_file
from hpc_train.launch.script import Script, container_of, one_run, render
from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.run.lease import first_file, started_first
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.site import read_site


def submit_joiner(run: RunDirectory, nodes: str, target: str, minutes: str, excluded: str, nice: str) -> str:
    """Submits a joiner and returns the id of its job. Joiners of earlier launches that still wait are cancelled.

    Raises UserError if Slurm refuses it.
    """
    submissions = run.record().get("submissions") or [{}]
    jobs = submissions[-1].get("chain", [])
    started = started_first(run, first_file(run, len(submissions) - 1))
    alternative = jobs.index(started) if started in jobs else 0
    config = with_alternative(load(run), alternative)
    fewest, _, most = nodes.partition("-")
    if most:  # Slurm refuses a range that ends above the limit of the partition
        partition = read_site().partition(config.cluster.partition)
        if partition is not None and partition.max_nodes is not None:
            nodes = f"{fewest}-{min(int(most), partition.max_nodes)}"
    exclude = ",".join(filter(None, [config.cluster.exclude, excluded]))
    cluster = replace(config.cluster, nodes=nodes, exclude=exclude, nodelist=None, time_min=None, first=[])
    config = replace(config, cluster=cluster, elastic=replace(config.elastic, spares=0, min_nodes=None))
    shape = SlurmJobExecutor().shape(config)
    job = Job(config, resolve_layout(config, shape.nodes, shape.workers, shape.device_bytes), shape, run)
    sbatch = {name: value for name, value in options(job).items() if name not in ("requeue", "begin", "dependency")}
    sbatch |= {"no-requeue": None, "job-name": f"{run.path.name}-joiner", "output": output_file(run.logs, "%j.out")}
    if nice != "0":
        sbatch["nice"] = nice
    if minutes:
        sbatch["time"] = minutes
    script = Script(
        title=f"hpc_train, {nodes} more nodes for a run",
        cluster=config.cluster,
        run=one_run(run.path),
        header=(),
        code=frozen_code(run),
        container=container_of(config, job.gpus),
        survives_node_loss=True,
        restarts=False,
        agent_options=(*job.agent_options, f"--alternative={alternative}", f"--join={target}"),
    )
    of_run = f"{JOINER}{run.path}:"
    waiting = [job for job in client.list_jobs(["--me"]) or () if job.state == "PENDING"]
    launch = target.rpartition(":")[0]
    earlier = [job for job in waiting if job.comment.startswith(of_run) and f"{of_run}{launch}:" not in job.comment]
    client.cancel([job.job_id for job in earlier])
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in sbatch.items()]
    return client.submit(words, render(script), f"{of_run}{target}")


if __name__ == "__main__":
    try:
        print(submit_joiner(RunDirectory(Path(sys.argv[1])), *sys.argv[2:]))
    except UserError as error:
        sys.exit(error.what)
