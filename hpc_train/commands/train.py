"""Trains: in the foreground, or with ``-m`` through the launcher. The only command that is a Hydra application."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hpc_train.cluster.allocation import refuse_misplaced, refuse_several_nodes
from hpc_train.config.arguments import CommandLine, wants_dry_run, with_right_plus
from hpc_train.config.compose import PRIMARY, config_directory, typed, version_base
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import local_shape
from hpc_train.launch.executors.select import controller_answers, in_allocation
from hpc_train.launch.launcher import register_launcher
from hpc_train.plan.validate import validate
from hpc_train.run.code import snapshot_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import check_freeze, freeze


def main(arguments: list[str]) -> int:
    """Hands the command line to Hydra; a run directory alone goes to the agent (``srun python -m hpc_train RUN_DIR``).

    Returns:
        The exit code of the training; that of a submission the launcher gives by leaving with it.

    Raises:
        UserError, hydra.errors.HydraException, OmegaConfBaseException: a user's mistake.
    """
    refuse_misplaced()
    if len(arguments) == 1 and RunDirectory(Path(arguments[0])).config.is_file():
        from hpc_train.commands.agent import main as run_agent_of

        return run_agent_of(arguments)
    register_launcher()
    arguments = with_right_plus(arguments)
    line = CommandLine.parse(arguments)
    if line.runs:
        refuse_several_nodes()
    if line.runs and wants_dry_run(line.overrides):
        from hpc_train.launch.dry_run import dry_run

        return dry_run(line)
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        hydra.main(config_path=str(config_directory()), config_name=PRIMARY, **version_base())(task)()
    finally:
        sys.argv = before
    return 0


def task(node: DictConfig) -> None:
    """One training in the foreground: what Hydra calls. Leaves by SystemExit where the exit code is not 0."""
    run = RunDirectory(Path(HydraConfig.get().runtime.output_dir))
    try:
        config = typed(node)
        _check_foreground(config)
        validate(config, *_nodes_and_workers(config))
        check_freeze(config, run)
        freeze(config, run, claim=True, code=snapshot_code([config], run.code))
    except UserError as error:
        _leave_nothing(run.path, Path(node.run.root).expanduser().absolute())
        print(error, file=sys.stderr)  # raised through Hydra it would come with Hydra's own words around it
        sys.exit(Exit.REFUSED)
    from hpc_train.launch.executors.allocation import run_in_foreground  # the other doors have no use for it

    exit_code = run_in_foreground(run)
    if exit_code:
        sys.exit(exit_code)


def _leave_nothing(path: Path, root: Path) -> None:
    """Removes the run directory, which Hydra has made, and what it lies in up to ``root``: as far as it is empty."""
    with contextlib.suppress(OSError):
        for directory in (path, *path.parents):
            directory.rmdir()
            if directory == root or not directory.is_relative_to(root):
                break


def _check_foreground(config: Config) -> None:
    if config.cluster.kind == "slurm":
        raise UserError(
            "a run on Slurm is submitted, this command trains in the foreground",
            where="cluster.kind",
            fix="-m to submit it, cluster=local to train here, launch.dry_run=true to see what it would be",
        )
    if config.cluster.kind == "auto" and not in_allocation() and controller_answers():
        raise UserError(
            "this is a login node of a Slurm cluster, where training in the foreground is in other people's way",
            where="cluster.kind",
            fix="-m submits it to Slurm; cluster=local trains here all the same",
        )


def _nodes_and_workers(config: Config) -> tuple[int, int]:
    nodes, _, workers = local_shape(config.cluster)
    return nodes, workers
