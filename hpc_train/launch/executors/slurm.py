"""Runs jobs on Slurm through submitit's executor, with a batch script of hpc_train that starts one agent per node.

Jobs with the same resources are submitted as one array, or as several if they exceed the site's maximum array size. At
most ``launch.array_parallelism`` jobs of each array run at a time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from submitit.core.utils import FailedJobError, JobPaths
from submitit.slurm.slurm import SlurmExecutor

from hpc_train.config.removed import RENAMED
from hpc_train.config.roles import components_of, nodes_of_roles
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.secrets import file_mode
from hpc_train.config.values import fewest_nodes, node_range, with_alternative
from hpc_train.errors import UserError
from hpc_train.launch.executors.cost import confirm_cost, cost_lines, gpu_hours
from hpc_train.launch.gpus import asked_gpu_memory, asked_gpu_types, asked_gpus, depends_on_gpu_types
from hpc_train.launch.job import Job, alternative_named
from hpc_train.launch.sbatch import (
    NO_SITE,
    Options,
    command_line,
    components,
    earlier_starts,
    identity,
    options,
    options_of_components,
    output_file,
    segment_note,
    stop_note,
    survives_node_loss,
)
from hpc_train.launch.script import Script, chain_file, container_of, one_run, render, run_of_task
from hpc_train.launch.storage import check_room, check_shared
from hpc_train.layout.layout import JobShape, Place
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.allocation import workers_of_run
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_line, read_or, write_text
from hpc_train.run.lease import first_file, job_ids, started_first
from hpc_train.runs.job_status import JobStatuses, folded
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import (
    NO_CONFIGURATION,
    UNREACHABLE,
    Check,
    LostAnswer,
    Problem,
    SlurmError,
    on_clusters,
)
from hpc_train.schedulers.slurm.jobs import SlurmJobs
from hpc_train.schedulers.slurm.limits import check_limits, check_queue
from hpc_train.schedulers.slurm.queue_estimate import ESTIMATES, Estimate
from hpc_train.schedulers.slurm.site import Site, begun_site, other_clusters
from hpc_train.schedulers.slurm.variables import Receiver, notes_of_withheld, preset, reaches, withheld

# prefixes of node states; a suffix * means that a node does not respond
AWAY = ("down", "drain", "fail", "maint", "reboot", "unknown", "inval")


class ScriptExecutor(SlurmExecutor):
    """Submits the script and options of hpc_train with submitit's executor. The script file gets the permissions
    ``mode``."""

    def __init__(self, folder: Path, text: str, arguments: Sequence[str], mode: int) -> None:
        super().__init__(folder)
        self._text = text
        self._arguments = arguments
        self._mode = mode
        self._file: Path | None = None

    def submit_script(self) -> str:
        """Submits the script; returns the id of the job or the array.

        Raises SlurmError if sbatch fails or does not print an id.
        """
        JobPaths.get_first_id_independent_folder(self.folder).mkdir(parents=True, exist_ok=True)
        try:
            job = self._submit_command("")
            if self._file is not None:  # now a link to the file that is named after the job
                self._file.unlink(missing_ok=True)
            job.paths.submission_file.unlink(missing_ok=True)  # ``submit`` writes the script where users look for it
            return str(job.job_id)
        except FailedJobError as error:
            output = getattr(error.__cause__, "output", "")  # of a CalledProcessError
            raise client.failure("sbatch", str(error), output) from error

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return client.job_in_answer(string if isinstance(string, str) else string.decode(errors="replace"))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        # submitit has created the file and writes this text; changing the umask would change it for the job, too
        file = JobPaths.get_first_id_independent_folder(self.folder) / f".submission_file_{uid}.sh"
        self._file = file
        file.chmod(stat.S_IMODE(file.stat().st_mode) & self._mode)
        return self._text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [part for name in withheld(Receiver.SBATCH) for part in ("-u", name)]
        command = ["sbatch", "--parsable", *self._arguments, str(submission_file_path)]
        return ["env", *unset, *command] if unset else command


@dataclass(frozen=True)
class BatchScript:
    """A batch script and the options of sbatch. ``name`` is that of its copy in the run directory.

    Attributes:
        further: the options of the components of a heterogeneous job after the first.
    """

    name: str
    text: str
    options: Options
    further: Sequence[Options] = ()

    def command_line(self, more: Options | None = None) -> list[str]:
        """Returns the arguments of sbatch, with ``more`` options of the job."""
        return command_line([{**self.options, **(more or {})}, *self.further])


class SlurmJobExecutor:
    """The Slurm cluster that ``sbatch`` on this machine belongs to."""

    name = "Slurm"

    def __init__(self) -> None:
        self._outputs: dict[str, Path] = {}
        self._chains: dict[str, list[str]] = {}  # id of the first job -> all jobs of a chain or of cluster.first
        self._first: dict[str, tuple[RunDirectory, Path]] = {}  # with the run and the ``first_file`` of the latter
        self._expected: dict[int, float | None] = {}  # number of the first job of a submission -> expected start
        self._statuses = JobStatuses()
        self._jobs = SlurmJobs()

    @property
    def site(self) -> Site:
        """Returns the limits and partitions of this cluster."""
        return begun_site()()

    def shape(self, config: Config) -> JobShape:
        return slurm_shape(config, lambda: self.site)

    def at_once(self, jobs: Sequence[Job]) -> int:
        """Returns the number of jobs: Slurm queues them, and limits how many run."""
        return len(jobs)

    def check(self, jobs: Sequence[Job]) -> list[str]:
        """Checks the jobs against the limits of the site, and each shape with ``sbatch --test-only``."""
        check_queue(jobs, self.site)
        check_architecture(jobs[0].config.cluster, self.site)
        costliest = [part for job in jobs for part in components(self._costliest(job))]
        unit = "components" if len(costliest) > len(jobs) else "jobs"
        lines = [*cost_lines(costliest, self.site, unit), *dict.fromkeys(map(stop_note, jobs))]
        lines += [*check_room(jobs), *check_shared(jobs[0].run.path), *notes_of_withheld()]
        if self.site.has_blocks:
            topology = client.show_topology()
            lines += dict.fromkeys(note for job in jobs for note in segment_note(job, topology))
        for group in self._by_shape(jobs):
            alternatives = self._alternatives(group[0])
            starts = []
            for number, job in enumerate(alternatives):
                with alternative_named(number):
                    for part in components(job):
                        check_architecture(part.config.cluster, self.site)
                        check_limits(part, self.site)
                    first, *others = options_of_components(job, self.site)
                    result = _test_only(job, [{**first, **_array(group)}, *others])
                lines += result.lines
                starts.append(result.starts)
            self._expected[group[0].number] = starts[0]
            if len(alternatives) > 1:
                lines.append(
                    f"cluster.first: {len(alternatives)} jobs are submitted, and the first to start trains the run; "
                    "the cost above is that of the most expensive job"
                )
        return lines

    def earlier_starts(self, job: Job) -> list[str]:
        return earlier_starts(job, self.site)

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        confirm_cost([part for job in jobs for part in components(self._costliest(job))], console)

    def _alternatives(self, job: Job) -> list[Job]:
        """Returns ``job`` and the other jobs of ``cluster.first``, of which the first to start trains the run."""
        jobs = [job]
        if job.config.launch.chain > 1:
            return jobs
        for number in range(1, len(job.config.cluster.first) + 1):
            config = with_alternative(job.config, number)
            shape = self.shape(config)
            layout = resolve_layout(config, shape.nodes, shape.workers, shape.device_bytes)
            jobs.append(replace(job, config=config, shape=shape, layout=layout))
        return jobs

    def _costliest(self, job: Job) -> Job:
        return max(self._alternatives(job), key=lambda alternative: gpu_hours(components(alternative)))

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        """Returns the sbatch command line and the script of each submission, as ``submit`` would send them."""
        plans = []
        for group in self._by_shape(jobs):
            for script in self._scripts(group, _folder(group, sweep), sweep):
                plans.append((" \\\n    ".join(["sbatch", *script.command_line(), script.name]), script.text))
        return plans

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        self._jobs = SlurmJobs(other_clusters(jobs[0].config.cluster.clusters, self.site))
        submitted: list[str] = []  # the id of each submission; for a chain, the id of its first job
        ids: dict[int, str] = {}
        try:
            for group in self._by_shape(jobs):
                folder = _folder(group, sweep)
                scripts = self._scripts(group, folder, sweep)
                folder.mkdir(parents=True, exist_ok=True)
                if len(group) > 1:
                    write_text(folder / _listing(group), "".join(f"{job.run.path}\n" for job in group))
                main = self._submit_group(group, folder, scripts, submitted)
                submitted.append(main)
                tasks = [main]
                if len(group) > 1:
                    tasks = [f"{main}_{index}" for index in range(len(group))]
                self._record_estimate(group[0], tasks[0])
                for script in scripts:
                    file = group[0].run.path / script.name if len(group) == 1 else folder / f"{main}.sbatch"
                    write_text(file, script.text, file_mode(group[0].config), flush=False)  # for users to read
                for job, job_id in zip(group, tasks, strict=True):
                    ids[job.number] = job_id
                    pattern = str(scripts[0].options["output"]).rpartition("/")[2]
                    self._outputs[job_id] = folder / pattern.replace("%j", job_id).replace("%A_%a", job_id)
        except BaseException:  # also an interrupt
            self._withdraw(submitted)
            raise
        return [ids[job.number] for job in jobs]

    def _withdraw(self, ids: Sequence[str]) -> None:
        """Cancels jobs that no run has recorded yet, since no other command could cancel them."""
        if ids:
            print(f"cancelling the jobs that were submitted before: {', '.join(ids)}", file=sys.stderr)
            self.cancel(ids)

    def identity(self, job_id: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"job_id": job_id, "output": str(self._outputs[job_id])}
        if job_id in self._chains:
            fields["chain"] = self._chains[job_id]
        if self._jobs.clusters:
            fields["clusters"] = self._jobs.clusters
        return fields

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        statuses = self._statuses.of(self._all(ids), self._jobs)
        chains = {job_id: self._chains[job_id] for job_id in ids if job_id in self._chains}
        for job_id in chains:
            if (started := self._started(job_id)) is not None:
                chains[job_id] = [started]
        return folded(chains, statuses)

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        try:
            self._jobs.cancel(self._all(ids), save=save)
        except SlurmError as error:  # the caller continues to follow the jobs
            print(error.what, file=sys.stderr)

    def output(self, job: Job, job_id: str) -> Path:
        return self._outputs[job_id]

    def _record_estimate(self, job: Job, job_id: str) -> None:
        """Records the start time that Slurm expects for a submission; ``plan`` reports the usual error of such
        estimates."""
        expected = self._expected.get(job.number)
        cluster = job.config.cluster
        if expected is None or self._jobs.clusters or job_id in self._first:
            return
        if {"begin", "dependency"} & cluster.extra.keys():
            return
        estimate = Estimate(self.site.name, cluster.partition, job_id, time.time(), expected)
        with suppress(OSError):  # the root may belong to another user
            append_line(Path(job.config.run.root) / ESTIMATES, asdict(estimate))

    def _all(self, ids: Collection[str]) -> list[str]:
        """Returns ``ids`` with the other jobs of their chains and of ``cluster.first``."""
        return [chained for job_id in ids for chained in self._chains.get(job_id, [job_id])]

    def _submit_group(
        self, group: Sequence[Job], folder: Path, scripts: Sequence[BatchScript], submitted: Sequence[str]
    ) -> str:
        """Submits the scripts of a group, the only script ``launch.chain`` times; returns the id of the first job.

        ``submitted`` holds the ids of the earlier submissions for the same directory.
        """
        job = group[0]
        ids: list[str] = []
        count = job.config.launch.chain
        recorded = [entry for job in group for entry in job.run.record().get("submissions", [])]
        earlier = {str(job_id).partition("_")[0] for entry in recorded for job_id in job_ids(entry)}  # arrays as one

        def submit_one(script: BatchScript, more: Options) -> None:
            executor = ScriptExecutor(folder, script.text, script.command_line(more), file_mode(job.config))
            others = {*earlier, *self._all(submitted), *ids}
            comment = str(script.options["comment"])
            try:
                ids.append(client.submitted_job(executor.submit_script, comment, others, self._jobs.clusters))
            except LostAnswer:
                raise
            except SlurmError as error:
                raise refusal(error.said) from error

        try:
            for script in scripts:
                submit_one(script, {})
            for _ in range(count - 1):
                submit_one(scripts[0], {"dependency": f"afterany:{ids[-1]}"})
            if count > 1:
                write_text(chain_file(job.run), "".join(f"{job_id}\n" for job_id in ids))
            if len(scripts) > 1:
                first = first_file(job.run, len(recorded))  # to be made by the job that starts first
                self._first[ids[0]] = (job.run, first)
                write_text(first.with_name(f"{first.name}.jobs"), "".join(f"{job_id}\n" for job_id in ids))
        except BaseException:
            self._withdraw(ids)
            raise
        if len(ids) > 1:
            self._chains[ids[0]] = ids
        # a job that started before the file was written has not cancelled the others
        if len(scripts) > 1 and (started := self._started(ids[0])) is not None:
            with suppress(SlurmError):  # they exit when they start
                self._jobs.cancel([job_id for job_id in ids if job_id != started])
        return ids[0]

    def _started(self, job_id: str) -> str | None:
        """Returns the job of ``cluster.first`` that has started first; None if none has, or for other jobs."""
        if job_id not in self._first:
            return None
        run, file = self._first[job_id]
        return read_or(lambda: started_first(run, file), None)

    def _by_shape(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Returns groups of jobs that may share an array. No group exceeds the maximum size of an array."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            cluster = job.config.cluster
            key = [
                options(job, self.site),
                cluster.env,
                cluster.setup,
                cluster.teardown,
                cluster.python,
                job.config.run.on_event,
                container_of(job.config, job.gpus),
            ]
            if not job.overrides:  # a resubmitted run; other runs of its sweep may have newer code
                key.append(frozen_code(job.run))
            # tasks of an array cannot depend on or replace each other, or be heterogeneous jobs
            if job.config.launch.chain > 1 or cluster.first or job.shape.components:
                key.append(job.number)
            groups.setdefault(str(key), []).append(job)
        largest = self.site.max_array_size or len(jobs)
        return [group[first : first + largest] for group in groups.values() for first in range(0, len(group), largest)]

    def _scripts(self, group: list[Job], folder: Path, sweep: Path) -> list[BatchScript]:
        """Returns a script for each alternative of ``cluster.first``; for an array or another job a single script."""
        alternatives = self._alternatives(group[0])
        return [self._script(group, folder, sweep, number, job) for number, job in enumerate(alternatives)]

    def _script(self, group: list[Job], folder: Path, sweep: Path, number: int, job: Job) -> BatchScript:
        """Returns the script of ``job``, which is alternative ``number`` of the first job of ``group``."""
        chain = first = None
        agent_options = job.agent_options
        title = f"{job.config.strategy.name}: {job.layout}"
        directory = job.run.path
        name = "%j"
        run = one_run(directory)
        if len(group) > 1:
            title = f"{len(group)} runs of one shape"
            directory = sweep
            name = "%A_%a"
            run = run_of_task(folder / _listing(group))
        elif job.config.launch.chain > 1:
            chain = chain_file(job.run)
            name = chain.name
        elif job.config.cluster.first:
            first = first_file(job.run, len(job.run.record().get("submissions", [])))
            name = first.name
            agent_options = (*agent_options, f"--alternative={number}")
        of_job = identity(group, directory, output_file(folder, f"{name}.out"))
        first_part, *other_parts = (found | of_job for found in options_of_components(job, self.site))
        script = Script(
            title=f"hpc_train, {title}",
            cluster=job.config.cluster,
            run=run,
            header=(),
            components=1 + len(other_parts),
            code=frozen_code(job.run),
            chain=chain,
            first=first,
            container=container_of(job.config, job.gpus),
            notes=[stop_note(job)],
            survives_node_loss=survives_node_loss(job.config.elastic),
            agent_options=agent_options,
            on_event=job.config.run.on_event,
        )
        file_name = f"job-{number}.sbatch" if number else "job.sbatch"
        return BatchScript(file_name, render(script), {**first_part, **_array(group)}, other_parts)


def _folder(group: Sequence[Job], sweep: Path) -> Path:
    """Returns the directory for scripts and their output: the logs of a single run, or ``slurm`` in the sweep
    directory."""
    return group[0].run.logs if len(group) == 1 else sweep / "slurm"


def slurm_shape(config: Config, site: Callable[[], Site]) -> JobShape:
    """Returns the shape of a job that is submitted to Slurm.

    Args:
        site: returns the limits and partitions of the cluster. It is only called if the shape depends on them.

    Raises:
        UserError: the nodes do not have the requested GPUs, or ``elastic.min_nodes`` is larger than ``cluster.nodes``.
    """
    cluster = config.cluster
    nodes = node_range(cluster)[1]
    of_roles = components_of(config)
    if of_roles:
        parts = []
        for component in of_roles:
            cluster = component.cluster
            gpus, workers = workers_of_run(replace(config, cluster=cluster), visible=asked_gpus(cluster, site()).count)
            count = nodes_of_roles(component.roles, gpus)
            parts.append(JobShape(count, count, gpus, workers, Place.QUEUE, in_job=True))
        return replace(parts[0], nodes=nodes, fewest_nodes=nodes, components=tuple(parts))
    site_of_gpus = site() if cluster.gpus_per_node == "auto" else NO_SITE
    gpus, workers = workers_of_run(config, visible=asked_gpus(cluster, site_of_gpus).count)
    return JobShape(
        nodes=nodes,
        fewest_nodes=fewest_nodes(config),
        gpus=gpus,
        workers=workers,
        place=Place.QUEUE,
        in_job=True,
        device_bytes=asked_gpu_memory(cluster, site()) if nodes > 1 and gpus else None,
        gpu_types=asked_gpu_types(cluster, site()) if depends_on_gpu_types(config, gpus) else frozenset(),
    )


def check_architecture(cluster: ClusterConfig, site: Site, here: str = platform.machine()) -> None:
    """Raises UserError if the nodes cannot run the Python that submits, which is built for ``here``, as those of a
    partition of GH200 cannot run that of an x86 login node.
    """
    if cluster.python is not None or cluster.container.image is not None:
        return
    names = (cluster.partition or preset("partition") or "").split(",")
    if other_clusters(cluster.clusters, site) is not None:
        return
    for name in names:
        partition = site.partition(name or None)
        if partition is not None and partition.architectures and here not in partition.architectures:
            architecture = " or ".join(sorted(partition.architectures))
            raise UserError(
                f"the nodes of the partition {partition.name} are {architecture}, and this Python is built for {here}",
                where="cluster.partition, cluster.python",
                fix=f"cluster.python=PATH of an interpreter in an environment that was installed on {architecture}, or "
                "a container; conf/cluster/NAME.yaml with both keys is an option of cluster",
            )


def _array(group: Sequence[Job]) -> Options:
    """Returns the option for the array of the jobs ``group``; empty for a single job."""
    if len(group) == 1:
        return {}
    tasks = f"0-{len(group) - 1}"
    cap = group[0].config.launch.array_parallelism
    return {"array": f"{tasks}%{cap}" if isinstance(cap, int) else tasks}


def _listing(group: Sequence[Job]) -> str:
    """Returns the file name of the list of runs. It depends on the content, since earlier arrays still read their
    lists."""
    paths = "\n".join(str(job.run.path) for job in group)
    return f"runs-{group[0].number:05d}-{hashlib.sha256(paths.encode()).hexdigest()[:8]}"


def _test_only(job: Job, of_components: Sequence[Options]) -> Check:
    """Checks a shape with ``sbatch --test-only``. If the controller does not respond, the check passes.

    Slurm considers only nodes that are available now. If nodes are down or drained, this function returns a note
    instead of an error, since the job may wait for them.
    """
    try:
        return client.check_submission(command_line(of_components))
    except SlurmError as error:
        if error.problem is Problem.SILENT:
            return Check([], None)
        if TOO_FEW_NOW in error.said:
            selection = on_clusters(of_components[0].get("clusters"))
            partitions = [of_component.get("partition") for of_component in of_components]
            if all(partitions):
                selection.append(f"--partition={','.join(filter(None, partitions))}")
            nodes = client.node_states(selection, client.QUERY_S)
            away = {node.node for node in nodes if node.state.startswith(AWAY) or node.state.endswith("*")}
            if away:
                names = ", ".join(sorted(away))
                return Check([f"note: the job may have to wait for nodes that are down or drained now: {names}"], None)
        raise refusal(error.said) from error


AUTHENTICATION = re.compile(r"munge|authentication (error|plugin)|Invalid authentication", re.IGNORECASE)
TOO_FEW_NOW = "Requested node configuration is not available"  # also for impossible requests
NODES = "sinfo -o '%P %D %c %m %G %f' lists the nodes, cores, memory in MiB, GPUs and features of each partition"
GENERAL = "partition, account, qos, time, nodes, gpus_per_node"

# Maps an error text of Slurm to the keys that it concerns and the fix. The first match counts. The texts come from
# slurm_strerror(): https://github.com/SchedMD/slurm/blob/master/src/common/slurm_errno.c
KNOWN: Mapping[str, tuple[str, str]] = {
    TOO_FEW_NOW: ("nodes, gpus_per_node, cpus_per_gpu, mem, constraint", NODES),
    "Invalid feature specification": ("constraint", NODES),
    "Invalid generic resource": ("gpus_per_node, gpu_type", NODES),
    "Memory specification can not be satisfied": ("mem", NODES),
    "Memory required by task is not available": ("mem", NODES),
    "CPU count per node can not be satisfied": ("cpus_per_gpu", NODES),
    "Node count specification invalid": ("nodes", NODES),
    "Invalid node name": ("nodelist, exclude", "sinfo -N lists the names of the nodes"),
    "Invalid partition": ("partition", "sinfo -s lists the partitions"),
    "Invalid account": ("account, partition", "sacctmgr show assoc user=$USER lists your accounts and their QOS"),
    "Invalid qos": ("qos", "sacctmgr show assoc user=$USER lists your accounts and their QOS"),
    "Invalid wckey": ("extra.wckey", "sacctmgr show wckey user=$USER lists yours"),
    "Invalid license": ("extra.licenses", "scontrol show licenses lists the licenses"),
    "Requested time limit is invalid": ("time", "sinfo -s lists the time limit of each partition"),
    "Requested partition configuration": ("partition, nodes, time", "sinfo -s lists the limits of each partition"),
    "Requested reservation is invalid": ("extra.reservation", "scontrol show res lists the reservations"),
    "Job dependency problem": ("extra.dependency", "name jobs that squeue or sacct still know"),
    "Job violates accounting/QOS policy": (
        "time, nodes, qos",
        "wait until other jobs end, or request less: sacctmgr show qos lists the limits",
    ),
}
_OPTION = re.compile(r"--([a-z][a-z-]+)")
_KEYS = {field.name.replace("_", "-"): field.name for field in fields(ClusterConfig)}
_KEYS |= {name.removeprefix("cluster.extra."): name.removeprefix("cluster.") for name in RENAMED.values()}


def refusal(said: str) -> UserError:
    """Returns the error for a refused submission, with the full output of sbatch."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    words = "".join(f"\n  {line}" for line in lines)
    if len(lines) < 2:
        words = "".join(lines) or "no reason given"
    if AUTHENTICATION.search(said):
        return UserError(
            f"Slurm could not authenticate this user: {words}",
            where="munge on this machine",
            fix="this is a fault of the machine, not of the job: try again later or on another login node, and "
            "report it to the site's support",
        )
    if any(text in said for text in (*UNREACHABLE, NO_CONFIGURATION)):
        return UserError(
            f"no Slurm controller responds: {words}",
            where="cluster.kind",
            fix="submit from a login node when `scontrol ping` reports that the controller is up; or cluster=local",
        )
    named_options = dict.fromkeys(_OPTION.findall(said))
    keys = [_KEYS[option] for option in named_options if option in _KEYS]
    if keys:
        values = (f"{'+' if key.startswith('extra.') else ''}cluster.{key}=VALUE" for key in keys)
        fix = f"set the options that the message names: {', '.join(values)}"
    else:
        general = f"cluster.{GENERAL} as this cluster allows them"
        if len(lines) > 1:
            general = "the site explains the refusal in the lines above; the keys of cluster are sbatch's options"
        entries = (entry for text, entry in KNOWN.items() if text.lower() in said.lower())
        names, fix = next(entries, (GENERAL, general))
        keys = names.split(", ")
    where = ", ".join(f"cluster.{key}" for key in keys)
    named, others = shell_options(said)
    if named:
        where = ", ".join(f"{name} of this shell" for name in named)
        fix = f"unset {' '.join(named)}, or change the value to one that this cluster accepts"
    elif others:
        fix += f"; sbatch also reads {', '.join(others)} of this shell"
    return UserError(f"sbatch refused the job: {words}", where=where, fix=fix)


def shell_options(said: str) -> tuple[list[str], list[str]]:
    """Returns the variables of the shell that set options of sbatch: first those that a refusal concerns, then the
    others.

    sbatch refuses a wrong value of a variable even if its command line overrides it.
    """
    names = [name for name in os.environ if name.startswith("SBATCH_") and reaches(name, Receiver.SBATCH)]
    names += [name for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS") if os.environ.get(name)]
    named = sorted(name for name in names if _is_about(said, name, os.environ[name]))
    return named, sorted({*names} - {*named})


_LONG_OPTIONS = {"SBATCH_TIMELIMIT": "time", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_REQ_SWITCH": "switches"}


def _is_about(said: str, name: str, value: str) -> bool:
    """Returns whether the text of a refusal contains the value of a variable or its option."""
    option = _LONG_OPTIONS.get(name) or name.partition("_")[2].lower().replace("_", "-")
    by_value = value != "" and re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", said) is not None
    return by_value or re.search(rf"--{option}\b(?!-)|\binvalid {option}\b", said, re.IGNORECASE) is not None
