"""``python -m hpc_train script +strategy=hybrid > job.sbatch`` prints a self-contained batch script.

The script trains the same run and requests the same resources as ``-m``. The command writes no files and also works
on a machine without Slurm, where the defaults of the partition are unknown.
"""

from __future__ import annotations

from pathlib import Path

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.config.arguments import CommandLine, expand, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.run_path import run_directory
from hpc_train.config.schema import Config
from hpc_train.config.values import fewest_nodes, node_range
from hpc_train.errors import UserError
from hpc_train.launch.container import container_of
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.executors.select import controller_answers
from hpc_train.launch.gpus import asked_gpus
from hpc_train.launch.launcher import register_launcher
from hpc_train.launch.sbatch import NO_SITE, goes_on_without_a_node, options, stop_note
from hpc_train.launch.script import Script, freezing, render
from hpc_train.plan.validate import validate
from hpc_train.run.directory import RunDirectory
from hpc_train.slurm.site import read_site


def main(arguments: list[str]) -> int:
    """Prints the script of the run that the overrides describe.

    Raises:
        UserError: the config is wrong, lists several jobs, or is for this machine only.
    """
    register_launcher()
    line = CommandLine.parse(with_right_plus(arguments))
    if line.multirun or len(expand(line.overrides)) > 1:
        raise UserError(
            "script prints one job, but the overrides describe a sweep",
            where="the command line",
            fix="give each key one value and drop -m; launch.dry_run=true -m shows the scripts of a sweep",
        )
    with line.composer() as compose:
        config = typed(compose(line.overrides))
    print(_batch_script(config, line), end="")
    return 0


def _batch_script(config: Config, line: CommandLine) -> str:
    cluster = config.cluster
    if cluster.kind == "local":
        raise UserError("a batch script needs Slurm, got cluster.kind=local", where="cluster.kind", fix="cluster=slurm")
    if config.launch.chain > 1:
        raise UserError(
            f"script prints one job, but launch.chain={config.launch.chain} makes a chain of jobs",
            where="launch.chain",
            fix="launch.chain=1, or submit the chain with -m",
        )
    site = read_site() if controller_answers() else NO_SITE
    asked = asked_gpus(cluster, site)
    gpus, workers = workers_per_node(cluster, visible=asked.count)
    layout, *_ = [validate(config, nodes, workers) for nodes in (node_range(cluster)[1], fewest_nodes(config))]
    directory = RunDirectory(Path(run_directory(config.run.root, config.run.name, config.run.fork)))
    job = Job(0, line.overrides, config, layout, gpus, workers, directory)
    name = config.run.name or config.strategy.name
    comment = {"comment": cluster.comment} if cluster.comment else {}
    header = {
        "job-name": cluster.job_name or f"hpc_train-{name}",
        "output": "%x-%j.out",
        **comment,
        **options(job, site),
    }
    overrides = [*line.overrides, *([f"--config-dir={line.config_directory}"] if line.config_directory else [])]
    container = container_of(config, gpus)
    run = freezing(cluster, overrides, container)
    title = f"hpc_train, {config.strategy.name}: {layout}"
    notes = [stop_note(job), *([asked.note] if asked.note else [])]
    script = Script(
        title,
        cluster,
        run,
        header,
        container=container,
        notes=notes,
        goes_on_without_a_node=goes_on_without_a_node(config.elastic),
    )
    return render(script)
