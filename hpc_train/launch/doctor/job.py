"""The job that the overrides describe: whether it can start from here, and what it asks of Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.cluster.site import read_site
from hpc_train.config.arguments import CommandLine, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.directory import run_directory
from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import Config
from hpc_train.config.validate import check_values, validate
from hpc_train.launch.asked_gpus import asked_gpus
from hpc_train.launch.doctor.disk import check_sharing
from hpc_train.launch.doctor.finding import ERROR, Finding
from hpc_train.launch.doctor.slurm import check_accounting, check_job, check_partitions, check_tools
from hpc_train.launch.job import Job
from hpc_train.launch.place import choose, controller_answers
from hpc_train.launch.sbatch import NO_SITE, arguments, options
from hpc_train.run.directory import RunDirectory

NOT_FOR_A_CHECK = ("signal", "requeue", "no-requeue", "open-mode", "time", "time-min", "dependency", "begin", "no-kill")


@dataclass(frozen=True)
class Asked:
    """A composed config and its command line."""

    config: Config
    line: CommandLine


def composed(overrides: Sequence[str]) -> Asked:
    """Raises ConfigError where a value is wrong, whatever the machine."""
    line = CommandLine.parse(with_right_plus(list(overrides)))
    with line.composer() as compose:
        config = typed(compose(list(line.overrides)))
    check_values(config)
    return Asked(config, line)


def check_place(asked: Asked, submits: bool) -> Iterator[Finding]:
    """Slurm, and the job on it. ``submits``: jobs are submitted from here; else this is inside an allocation."""
    cluster = asked.config.cluster
    slurm = submits and cluster.kind != "local"
    site = None
    if slurm:
        yield check_tools(wanted=cluster.kind == "slurm")
        if controller_answers():
            site = read_site()
            yield check_accounting(site)
            yield from check_partitions(site)
            yield check_sharing(Path(asked.config.run.root))
    try:
        job = _job(asked)
    except ConfigError as error:
        yield Finding("job", ERROR, f"{error.what} ({error.where})", error.mend)
        return
    yield from check_job(job, site)


def resources(config: Config, overrides: Sequence[str]) -> list[str]:
    """sbatch's options for a short job on the nodes that a run with this config would get."""
    line = CommandLine.parse(with_right_plus(list(overrides)))
    site = read_site() if controller_answers() else NO_SITE
    gpus, workers = workers_per_node(config.cluster, visible=asked_gpus(config.cluster, site).count)
    nodes = config.cluster.nodes if isinstance(config.cluster.nodes, int) else 1
    layout = validate(config, nodes, workers)
    wanted = options(Job(0, line.overrides, config, layout, gpus, workers, _directory(config)), site)
    kept = {name: value for name, value in wanted.items() if name not in NOT_FOR_A_CHECK}
    return ["--ntasks=1" if str(kept.get("nodes")) == "1" else f"--ntasks={kept.get('nodes')}", *arguments(kept)]


def _job(asked: Asked) -> Job:
    config = asked.config
    nodes, gpus, workers = choose(config.cluster).shape(config.cluster)
    layout = validate(config, nodes, workers)
    return Job(0, asked.line.overrides, config, layout, gpus, workers, _directory(config))


def _directory(config: Config) -> RunDirectory:
    return RunDirectory(Path(run_directory(config.run.root, config.run.name, config.run.fork)))
