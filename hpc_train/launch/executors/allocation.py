"""Runs jobs as steps of the surrounding Slurm allocation (salloc, a notebook), or a run in the foreground."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.config.roles import components_of
from hpc_train.config.schema import Config
from hpc_train.config.values import fewest_nodes, node_range, runs_command
from hpc_train.elastic.warm_parent.head_start import HeadStart
from hpc_train.errors import UserError
from hpc_train.launch.executors.local import ProcessExecutor
from hpc_train.launch.gpus import depends_on_gpu_types, gpu_types_here, gpus_of_this_job, has_several_tasks
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import survives_node_loss
from hpc_train.launch.script import container_of, node_loss_options, python, step_on_nodes
from hpc_train.launch.storage import check_room
from hpc_train.layout.layout import JobShape, Place
from hpc_train.machine.allocation import refuse_components, workers_of_run
from hpc_train.machine.gpus import gpu_memory, visible_devices
from hpc_train.opening import open_to_append
from hpc_train.registration import RUN_ENDED, registered
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.streams import nonfailing_streams
from hpc_train.runs.job_status import command_exit_code, final_code, how_stopped, resume_command
from hpc_train.schedulers.current import current_job
from hpc_train.schedulers.environment import EnvironmentJob
from hpc_train.schedulers.slurm.client import is_in_step
from hpc_train.schedulers.slurm.variables import Receiver, environment_for
from hpc_train.telemetry.progress import Progress
from hpc_train.telemetry.terminal import Terminal

# If a run cannot continue without a node, the step ends this long after its first agent: srun then kills agents that do
# not end, such as an agent on a frozen node.
OVER_S = 60


class AllocationExecutor(ProcessExecutor):
    """Runs jobs as steps of the Slurm allocation that this process runs in."""

    name = "this allocation"
    stop_signal = signal.SIGUSR1  # srun forwards it to the agents

    def __init__(self) -> None:
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    def shape(self, config: Config) -> JobShape:
        refuse_components(config)
        fewest, most = node_range(config.cluster)
        here = _nodes_here()
        if fewest > here:
            raise UserError(
                f"{fewest} nodes are requested, but this allocation has {here}",
                where="cluster.nodes",
                fix=f"cluster.nodes={here}; cluster=slurm submits a separate job instead",
            )
        return shape_in_job(config, min(most, here), Place.ALLOCATION)

    def at_once(self, jobs: Sequence[Job]) -> int:
        if is_in_step():
            return 1  # several steps with --overlap would share nodes
        limit = jobs[0].config.launch.array_parallelism
        room = max(1, _nodes_here() // max(job.shape.nodes for job in jobs))
        return min(room, limit if isinstance(limit, int) else len(jobs))

    def check(self, jobs: Sequence[Job]) -> list[str]:
        check_room(jobs)
        if any(job.shape.components for job in jobs):
            what = "-m starts one step for all nodes, and the components of this heterogeneous job need one each"
            raise UserError(what, where="-m", fix="exec without -m runs the roles here; cluster=slurm submits a job")
        return [f"inside the allocation {os.environ['SLURM_JOB_ID']}; cluster=slurm submits a separate job instead"]

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        ids = []
        receiver = Receiver.SCRIPT
        if is_in_step() or has_several_tasks():
            receiver = Receiver.INNER_STEP
        for job in jobs:
            output = self.output(job, "")
            output.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(output, job.run.path) as file:
                step = subprocess.Popen(
                    self._command(job),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    env=environment_for(receiver),
                )
            self._steps[str(step.pid)] = step
            ids.append(str(step.pid))
        return ids

    def is_running(self, job_id: str) -> bool:
        return self._steps[job_id].poll() is None

    def output(self, job: Job, job_id: str) -> Path:
        return job.run.logs / "allocation.out"

    def _command(self, job: Job) -> list[str]:
        cluster = job.config.cluster
        nodes = min(job.shape.nodes + job.config.elastic.spares, _nodes_here())
        survives = survives_node_loss(job.config.elastic)
        options = [*node_loss_options(survives)]
        if not survives:
            options.append(f"--wait={OVER_S}")
        options.append("--unbuffered")
        options += _core_options(job)
        options += gpus_of_this_job().srun_options(job.gpus)
        container = container_of(job.config, job.gpus)
        if container is not None:
            options += [*container.srun_options(container.seen()), *container.command(container.seen())]
        agent = [python(cluster, container), "-m", "hpc_train", "agent", *job.agent_options, str(job.run.path)]
        return step_on_nodes(nodes, *options, *agent)


def _core_options(job: Job) -> list[str]:
    """Returns the options of srun for the cores of a node.

    If this process itself runs in a step, the new step shares the cores of the job, because a step such as ``srun --pty
    bash`` without ``-c`` has a single core. If the job requests several tasks per node, the agent gets the cores of all
    tasks.
    """
    options = []
    of_gpu = job.config.cluster.cpus_per_gpu
    if isinstance(of_gpu, int):
        options.append(f"--cpus-per-task={of_gpu * max(job.gpus, job.workers)}")
    elif is_in_step() or has_several_tasks():
        of_nodes = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        if of_nodes:
            options.append(f"--cpus-per-task={min(map(int, of_nodes))}")
    if is_in_step():
        options.append("--overlap")
    return options


def shape_in_job(config: Config, nodes: int, place: Place) -> JobShape:
    """Returns the shape of a job on ``nodes`` nodes of the job around this process.

    Raises:
        UserError: a node has fewer GPUs than are requested, or ``elastic.min_nodes`` is larger than ``cluster.nodes``.
    """
    cluster = config.cluster
    parts = _shapes_of_components(config, place)
    if parts:
        return replace(parts[0], nodes=sum(part.nodes for part in parts), components=tuple(parts))
    # the number of GPUs that the scheduler has allocated; the agents check later whether the nodes can use them
    job = current_job()
    visible = job.gpus if isinstance(job, EnvironmentJob) else gpus_of_this_job().per_node or None
    if visible is None:
        visible = len(visible_devices())
    gpus, workers = workers_of_run(config, visible)
    return JobShape(
        nodes=nodes,
        fewest_nodes=min(fewest_nodes(config), nodes),
        gpus=gpus,
        workers=workers,
        place=place,
        in_job=True,
        device_bytes=gpu_memory(cluster.gpu_type) if nodes > 1 and gpus else None,
        gpu_types=gpu_types_here(cluster) if depends_on_gpu_types(config, gpus) else frozenset(),
    )


def _shapes_of_components(config: Config, place: Place) -> list[JobShape]:
    """Returns the shapes of the components of the job around this process, if it has one for each component of
    ``run.roles``; none otherwise. Raises UserError as ``shape_in_job`` does.
    """
    components = components_of(config)
    if len(components) != int(os.environ.get("SLURM_HET_SIZE", "0")):
        return []
    parts = []
    for number, component in enumerate(components):
        nodes = int(os.environ[f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}"])
        job = {"PATH": os.environ.get("PATH", ""), "SLURM_JOB_ID": os.environ[f"SLURM_JOB_ID_HET_GROUP_{number}"]}
        part = replace(config, cluster=component.cluster)
        gpus, workers = workers_of_run(part, gpus_of_this_job(job).per_node)
        parts.append(JobShape(nodes, nodes, gpus, workers, place, in_job=True))
    return parts


def shape_in_script(config: Config) -> JobShape:
    """Returns the shape of a run that the batch script around this process trains on the nodes of its job.

    The script requests the nodes, so their number replaces ``cluster.nodes``. A range stays, because Slurm may later
    restart the script on fewer nodes. Raises UserError as ``shape_in_job`` does.
    """
    nodes = max(1, _nodes_here() - config.elastic.spares)
    fewest, most = node_range(config.cluster)
    if fewest == most:
        config = replace(config, cluster=replace(config.cluster, nodes=nodes))
    return shape_in_job(config, nodes, Place.QUEUE)


def _nodes_here() -> int:
    return current_job().nodes() or 1


@nonfailing_streams()
def run_in_foreground(run: RunDirectory, arguments: Sequence[str] | None, begun: HeadStart | None = None) -> int:
    """Runs the agent of the frozen ``run`` in this process with progress on the terminal; returns the exit code.

    Args:
        arguments: the command line that describes the run, for the command that is printed at its end; None if the run
            was frozen before.
        begun: the head start of the warm parent, if any.
    """
    console = Terminal()
    config = load(run)
    is_command = runs_command(config)
    again = None if arguments is None or is_command else resume_command(arguments, run, config.run.root)
    progress = Progress(run, console, again)
    before = run.newest_attempt()
    progress.tick()  # reports that the run starts, while the agent is imported
    from hpc_train.elastic.agent import AgentOptions, run_agent  # the submitter does not need its modules

    code = run_agent(run, AgentOptions(echo=is_command), on_tick=progress.tick, begun=begun)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the report
    progress.finish(failed=code not in (Exit.DONE, Exit.STOPPED))
    registered(RUN_ENDED)(run)
    if code != Exit.STOPPED:
        return code if run.newest_attempt() == before else command_exit_code(run) or code
    code = final_code(code, run)
    go_on = again or shlex.join(["python", "-m", "hpc_train", "resume", str(run.path)])
    print(f"{how_stopped(code, run)}:\n  {go_on}")
    return code
