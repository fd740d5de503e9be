"""Builds the options of ``sbatch`` for a job.

They are passed on the command line, where they take precedence over ``SBATCH_*`` variables of the shell or the site.
``#SBATCH`` lines would not.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.space import StopTime, stop_time
from hpc_train.config.extensions import is_import_path
from hpc_train.config.roles import components_of
from hpc_train.config.schema import ClusterConfig, ElasticConfig
from hpc_train.config.values import asked_nodes, node_range
from hpc_train.errors import UserError
from hpc_train.launch.job import Job
from hpc_train.layout.validate import validate
from hpc_train.machine.placement import group_nodes, parse_switch_sizes
from hpc_train.run.requests import ANNOUNCING
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.limits import cores, memory
from hpc_train.schedulers.slurm.queue_estimate import starts_of
from hpc_train.schedulers.slurm.records import clock, gpus_of, seconds
from hpc_train.schedulers.slurm.site import Site, other_clusters
from hpc_train.schedulers.slurm.variables import preset
from hpc_train.units import format_duration

Options = Mapping[str, str | None]  # long option names without dashes; the value of a flag is None

NO_SITE = Site("")
EXPEDITE = "expedite"  # value of cluster.requeue and of sbatch --requeue


def options(job: Job, site: Site = NO_SITE) -> dict[str, str | None]:
    """Returns the options for the resources of ``job``. Jobs with equal options may share an array.

    Raises UserError if ``cluster.extra`` has an option that another key sets, if Slurm is too old for an option, or as
    ``refuse_other_scheduler`` does.
    """
    cluster = job.config.cluster
    refuse_other_scheduler(cluster)
    partition = site.partition(cluster.partition or preset("partition"))
    fewest, most = asked_nodes(job.config)
    gpus = None
    if job.gpus and not gpus_of(cluster.gres or ""):
        gpus = ":".join(filter(None, [cluster.gpu_type, str(job.gpus)]))
    requeue: bool | str = True
    if job.config.launch.chain <= 1 and cluster.requeue == EXPEDITE:
        client.require_version((25, 11), "cluster.requeue=expedite")
        requeue = EXPEDITE
    values: dict[str, Any] = {
        "clusters": other_clusters(cluster.clusters, site),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": most if fewest == most else f"{fewest}-{most}",
        "ntasks-per-node": 1,
        "gres": cluster.gres,
        "gpus-per-node": gpus,
        "cpus-per-task": cores(job, partition),
        "mem": memory(job, partition),
        "exclusive": cluster.exclusive,
        "constraint": cluster.constraint,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "time": cluster.time,
        "time-min": cluster.time_min,
        "signal": f"USR2@{signal_lead(job).seconds:g}",
        "no-requeue" if job.config.launch.chain > 1 else "requeue": requeue,
        "no-kill": survives_node_loss(job.config.elastic),
        "open-mode": "append",
    }
    for name in {"mem-per-cpu", "mem-per-gpu"}.intersection(cluster.extra):
        if cluster.mem is not None or cluster.mem_per_gpu != "auto":
            key = "cluster.mem_per_gpu" if cluster.mem is None else "cluster.mem"
            raise UserError(
                f"cluster.extra has {name} and {key} is set, but sbatch accepts only one size of memory",
                where=f"cluster.extra, {key}",
                fix=f"remove {name} from cluster.extra, or {key}",
            )
        values["mem"] = None
    for name in cluster.extra:
        key = name.replace("-", "_")
        if name in values or key in ("array", "comment", "output", "gpus_per_node"):
            setter = f"cluster.{key}" if hasattr(cluster, key) else "the value that hpc_train sets"
            raise UserError(
                f"cluster.extra has the sbatch option {name}, which another key sets",
                where="cluster.extra",
                fix=f"remove it from cluster.extra and use {setter}",
            )
    given = {name: value for name, value in {**values, **cluster.extra}.items() if value is not None}
    return {name: None if value is True else str(value) for name, value in given.items() if value is not False}


def components(job: Job) -> list[Job]:
    """Returns a job with the nodes of each component of ``run.roles``; ``job`` alone without components.

    Raises UserError unless the GPUs of a role divide its cores.
    """
    jobs = []
    for component, shape in zip(components_of(job.config), job.shape.components, strict=False):
        cluster = replace(component.cluster, nodes=shape.nodes)
        role = component.roles[0]
        if role.cpus is not None:
            of_gpu, rest = divmod(role.cpus, max(1, shape.gpus))
            if rest:
                what = f"a role with {shape.gpus} GPUs per node has {role.cpus} cores, not a multiple"
                raise UserError(what, where=f"run.roles.{role.name}.cpus", fix=f"cpus: {shape.gpus * max(1, of_gpu)}")
            cluster = replace(cluster, cpus_per_gpu=of_gpu)
        jobs.append(replace(job, config=replace(job.config, cluster=cluster), shape=shape))
    return jobs or [job]


def options_of_components(job: Job, site: Site = NO_SITE) -> list[dict[str, str | None]]:
    """Returns the options for the resources of each component of ``job`` (``components``).

    Raises UserError as ``options`` does, or if only some components have ``mem``, because sbatch would use it for all.
    """
    found = [options(part, site) for part in components(job)]
    if 0 < sum("mem" in of_component for of_component in found) < len(found):
        raise UserError(
            "the memory of some roles is set, and sbatch would request it for the nodes of all roles",
            where="run.roles: mem, cluster.mem",
            fix="mem of each role, or cluster.mem for the others (exec: --mem)",
        )
    return found


WITHOUT_EFFECT = ("signal", "requeue", "no-requeue", "no-kill", "open-mode", "mail-user", "mail-type")


def shape_options(job: Job, site: Site) -> tuple[str, ...]:
    """Returns the arguments of sbatch that determine when ``job`` starts. Raises UserError as ``options`` does."""
    return tuple(arguments({name: value for name, value in options(job, site).items() if name not in WITHOUT_EFFECT}))


SOON_S = 300.0


def earlier_starts(job: Job, site: Site) -> list[str]:
    """Returns lines with changes of the config with which ``job`` would start at least ``SOON_S`` seconds earlier.

    Slurm is asked when the job would start (``sbatch --test-only``). Unless that is within ``SOON_S`` seconds, it is
    also asked about half the nodes, a half and a quarter of the time, and that quarter as ``cluster.time_min``. Returns
    nothing if Slurm does not respond.
    """
    cluster = job.config.cluster
    nodes = node_range(cluster)[1] // 2
    limit_s = seconds(cluster.time) or 0
    changes: list[tuple[str, Any]] = []
    if nodes >= (job.config.elastic.min_nodes or 1):
        changes.append(("nodes", nodes))
    changes += [("time", clock(limit_s // part)) for part in (2, 4) if limit_s >= part * 60]
    if cluster.time_min is None and limit_s >= 4 * 60:
        changes.append(("time_min", clock(limit_s // 4)))
    lines = []
    try:
        (start,) = starts_of([shape_options(job, site)]).values()
        if start.at is None or start.at - time.time() < SOON_S:
            return []
        for key, value in changes:
            config = replace(job.config, cluster=replace(cluster, **{key: value}))
            with suppress(UserError):  # no layout for half the nodes
                if key == "nodes":
                    validate(config, nodes, job.workers, job.shape.device_bytes)
                (changed,) = starts_of([shape_options(replace(job, config=config), site)]).values()
                if changed.at is not None and start.at - changed.at >= SOON_S:
                    sooner = format_duration(start.at - changed.at)
                    when = time.strftime("%m-%d %H:%M", time.localtime(changed.at))
                    lines.append(f"cluster.{key}={value}: Slurm expects a start about {when}, {sooner} earlier")
    except client.SlurmError:
        return []
    return lines


def refuse_other_scheduler(cluster: ClusterConfig) -> None:
    """Raises UserError if ``cluster.kind`` names another scheduler, for commands that only Slurm runs as jobs."""
    if is_import_path(cluster.kind):
        raise UserError(
            f"only Slurm runs this command as a job, got cluster.kind={cluster.kind}",
            where="cluster.kind",
            fix="omit --submit, and run the command on a node; or cluster=slurm",
        )


REASONS = {  # of options that no key of the same name sets
    "job-name": "the name of the run",
    "output": "the output of this script and of the agents",
    "comment": "hpc_train finds the job of a run by its comment",
    "ntasks-per-node": "one agent per node, which starts the workers",
    "gpus-per-node": "cluster.gpus_per_node, of the type cluster.gpu_type",
    "cpus-per-task": "cluster.cpus_per_gpu, for all GPUs of the node",
    "mem": "cluster.mem, or cluster.mem_per_gpu for all GPUs of the node",
    "signal": "early enough to save a checkpoint before the limit cluster.time",
    "requeue": "the job may be requeued and then continues from its checkpoint",
    "no-requeue": "launch.chain continues the run in its next job",
    "no-kill": "elastic.spares or elastic.min_nodes: the job survives the loss of a node",
    "open-mode": "a requeued job appends to the output",
}


def reason_of(name: str) -> str:
    """Returns the purpose of an sbatch option of a job, or the key that sets it."""
    return REASONS.get(name) or _key(name)


def survives_node_loss(elastic: ElasticConfig) -> bool:
    """Returns whether a job keeps its other nodes when one is lost (``--no-kill``)."""
    return elastic.spares > 0 or elastic.min_nodes is not None


def identity(jobs: Sequence[Job], directory: Path, output: str) -> dict[str, str | None]:
    """Returns name, comment and output file of a submission; the comment identifies the run directory."""
    config = jobs[0].config
    comment = f"hpc_train:{directory} {config.cluster.comment or ''}".rstrip()
    name = str(config.cluster.extra.get("job-name") or directory.name)
    return {"job-name": name, "comment": comment, "output": output}


def output_file(folder: Path, name: str) -> str:
    """Returns the value of ``--output`` for a file in ``folder``; Slurm replaces patterns (``%j``) in ``name`` only.

    Raises UserError if the path has a backslash, which Slurm removes.
    """
    if "\\" in f"{folder}":
        raise UserError(
            f"the path {folder} has a backslash, which Slurm removes from the path of a job's output",
            where="run.root",
            fix="run.root=DIR with a path without backslashes",
        )
    return f"{str(folder).replace('%', '%%')}/{name}"


def command_line(of_components: Sequence[Options]) -> list[str]:
    """Returns the arguments of sbatch for a job with these components. Raises UserError as ``arguments`` does."""
    words = arguments(of_components[0])
    for sbatch_options in of_components[1:]:
        words += [":", *arguments(sbatch_options)]
    return words


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def arguments(sbatch_options: Options) -> list[str]:
    """Returns options as command-line arguments, each of which may also be a ``#SBATCH`` line.

    Raises UserError if a name cannot be the name of an option, or a value has a control character.
    """
    for name, value in sbatch_options.items():
        if not _NAME.fullmatch(name):
            raise UserError(
                f"cluster.extra has {name!r}, which is not the long name of an sbatch option",
                where="cluster.extra",
                fix="a name without leading dashes, such as hint: nomultithread",
            )
        if value is not None and not value.isprintable():
            raise UserError(
                f"the sbatch option --{name} is {value!r}, which has a line break or another control character",
                where=_key(name),
                fix="write it as one line of printable characters",
            )
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in sbatch_options.items()]


def stop_note(job: Job) -> str:
    """Returns a line with the time at which Slurm signals the job to stop, and the reason."""
    lead = signal_lead(job)
    return (
        f"Slurm will signal the job {lead.seconds:g} to {lead.seconds + 60:g} s before its time limit, to save a "
        f"checkpoint: {lead.reason}"
    )


def segment_note(job: Job, topology: str) -> list[str]:
    """Returns a line that proposes ``--segment`` if the job needs several blocks and a group of ranks fits into one.

    Args:
        topology: the output of ``scontrol show topology``.
    """
    block = max(parse_switch_sizes(topology).values(), default=0)
    fewest, nodes = asked_nodes(job.config)
    group = group_nodes(job.layout, job.workers)
    is_asked = not {"segment", "switches"}.isdisjoint(job.config.cluster.extra)
    if is_asked or fewest != nodes or nodes <= block or not 1 < group <= block or nodes % group:
        return []
    kind = "pipeline stage"
    if job.layout.shard > 1:
        kind = "shard group"
    return [
        f"note: a block of this cluster has {block} nodes, and the job needs {nodes}: +cluster.extra.segment={group} "
        f"keeps the {group} nodes of each {kind} in one block"
    ]


def signal_lead(job: Job) -> StopTime:
    """Returns how many seconds before the time limit Slurm signals the job: long enough to save, at most a third of the
    limit."""
    cluster = job.config.cluster
    limit_s = seconds(cluster.time_min or cluster.time) or 0
    lead = stop_time(job.config, job.run, node_range(cluster)[0])
    if limit_s and lead.seconds > limit_s / 3:
        reason = f"a third of the limit, though {lead.seconds:g} s are recommended: {lead.reason}"
        return StopTime(max(1, limit_s // 3), reason)
    return StopTime(max(1, int(lead.seconds)), lead.reason)


SIGNAL = re.compile(r"#SBATCH\s.*?--signal[=\s]\s*[\"']?(?:([BR]+):)?(\w+)(?:@(\d+))?", re.IGNORECASE)
DEFAULT_LEAD_S = 60  # of sbatch if the option has no @SECONDS
AGENT_SIGNALS = (signal.SIGUSR2.name, *ANNOUNCING)


@dataclass(frozen=True)
class AskedSignal:
    """The signal before the time limit that the ``#SBATCH`` lines of a script request.

    Attributes:
        text: the value in the script, such as ``B:USR1@60``.
        name: the name of the signal without ``SIG``, such as ``USR1``.
        lead_s: seconds before the limit.
        to_shell: whether only the batch script gets the signal (``B:``).
    """

    text: str
    name: str
    lead_s: int
    to_shell: bool


def script_signal(script: str) -> AskedSignal | None:
    """Returns the signal that the ``#SBATCH`` lines of a script request; None if they request none."""
    header = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.splitlines())
    matches = [match for match in map(SIGNAL.match, header) if match is not None]
    if not matches:
        return None
    flags, name, lead = matches[-1].groups()
    text = (f"{flags}:" if flags else "") + name + (f"@{lead}" if lead else "")
    if name.isdigit():
        name = next((member.name for member in signal.Signals if member == int(name)), name)
    to_shell = "B" in (flags or "").upper()
    return AskedSignal(text, name.upper().removeprefix("SIG"), int(lead or DEFAULT_LEAD_S), to_shell)


def check_script_signal(script: str, needed: StopTime) -> str | None:
    """Returns a warning if a script requests its signal before the limit too late for the final checkpoint. Raises
    UserError if the signal does not make its agents save.

    The agents treat USR2, and near the time limit also USR1 and TERM, as the announcement of the limit. If Slurm sends
    USR1 or USR2 to the batch script alone (``B:``), ``job.sh`` passes it on to them.
    """
    asked = script_signal(script)
    if asked is None:
        return None
    if asked.to_shell:
        heard = asked.name in ("USR1", "USR2") and "job.sh" in script
        loss = "the batch script alone, which does not pass it on to the agents"
    else:
        heard = f"SIG{asked.name}" in AGENT_SIGNALS
        loss = "the agents, which do not treat it as an announcement of the limit"
    if not heard:
        raise UserError(
            f"#SBATCH --signal={asked.text} sends {asked.name} to {loss}: the run would end at its time limit without "
            "a save and a requeue",
            where="the batch script",
            fix=f"#SBATCH --signal=USR2@{max(asked.lead_s, math.ceil(needed.seconds))}",
        )
    if asked.lead_s >= needed.seconds:
        return None
    return (
        f"warning: #SBATCH --signal requests the signal {asked.lead_s} s before the time limit, but saving may take "
        f"{needed.seconds:g} s: {needed.reason}\n"
        f"  fix: #SBATCH --signal=USR2@{math.ceil(needed.seconds)} in the script, or sbatch --signal=USR2@"
        f"{math.ceil(needed.seconds)}, which overrides the line and is not visible here"
    )


def _key(option: str) -> str:
    """Returns the config keys that may set an option of sbatch."""
    keys = {"comment": "cluster.comment or run.root", "output": "run.root", "gpus-per-node": "cluster.gpu_type"}
    key = option.replace("-", "_")
    return keys.get(option) or (f"cluster.{key}" if hasattr(ClusterConfig(), key) else "cluster.extra")
