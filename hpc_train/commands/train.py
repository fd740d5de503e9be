"""Trains in the foreground, or with ``-m`` through the launcher, as a Hydra application. This is the default."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hpc_train.config.arguments import own_files_checked, wants_dry_run
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import WITH_STRATEGY, typed, version_base
from hpc_train.config.conf_files import PRIMARY, config_directory
from hpc_train.config.own_files import with_file
from hpc_train.config.schema import Config
from hpc_train.config.translate import translate
from hpc_train.elastic.warm_parent.head_start import HeadStart
from hpc_train.errors import UserError
from hpc_train.launch.continued import with_frozen_defaults
from hpc_train.launch.gpus import gpus_of_this_job
from hpc_train.launch.job import local_shape
from hpc_train.launch.launcher import Ended, JobFailed
from hpc_train.launch.request import check_job, complete_arguments, freeze_job, print_notices
from hpc_train.layout.layout import Place
from hpc_train.machine.allocation import refuse_misplaced, refuse_several_nodes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.owner import TRUST
from hpc_train.run.requests import record_stop_request
from hpc_train.run.streams import stdout_for_results
from hpc_train.runs.job_status import outcome, view_at_end
from hpc_train.schedulers.slurm.client import check_shell, in_allocation, uses_slurm

JSON = "--json"
ORIGINS = "--origins"


def main(arguments: list[str], begun: HeadStart | None = None) -> int:
    """Trains, or runs the agent if the only argument is a run directory.

    With ``--json``, standard output gets only one JSON object per run at the end. ``--trust-owner`` allows a run
    directory that belongs to another user. Raises UserError, hydra.errors.HydraException or OmegaConfBaseException
    for a user's mistake.

    Args:
        begun: the head start of the warm parent, for a run in the foreground.

    Returns:
        The exit code of training. The launcher of a submission exits the process with its own code.
    """
    refuse_misplaced()
    others = [argument for argument in arguments if argument not in (JSON, TRUST)]
    trust_owner = TRUST in arguments
    if len(others) == 1 and RunDirectory(Path(others[0])).config.is_file():
        from hpc_train.commands.agent import start_agent

        return start_agent(arguments, begun)
    ended = Ended()
    if JSON not in arguments:
        return _train(others, ended, begun, trust_owner, None)
    with stdout_for_results() as results:
        try:
            return _train(others, ended, begun, trust_owner, results)
        finally:
            for run, view in ended.runs:
                print(outcome(run, view), file=results)


def _train(
    arguments: list[str], ended: Ended, begun: HeadStart | None, trust_owner: bool, results: TextIO | None
) -> int:
    """Passes the command line to Hydra, adds its runs to ``ended``, and prints the JSON of a dry run to ``results``."""
    shows_origins = ORIGINS in arguments
    arguments = complete_arguments([argument for argument in arguments if argument != ORIGINS])
    line = CommandLine.parse(arguments)
    if shows_origins:
        if line.runs or "job" not in arguments:
            raise UserError(f"{ORIGINS} shows nothing by itself", where=ORIGINS, fix=f"--cfg job {ORIGINS}")
        from hpc_train.config.origins import origins  # other commands do not need it

        with own_files_checked(line):
            print("\n".join(map(str, origins(line))))
        return 0
    if line.runs:
        refuse_several_nodes()
    with own_files_checked(line):
        if line.runs and wants_dry_run(line.overrides):
            from hpc_train.launch.dry_run import dry_run

            return dry_run(line, trust_owner, results)
        before = sys.argv
        sys.argv = [before[0], *arguments]
        try:
            hydra.main(config_path=str(config_directory()), config_name=PRIMARY, **version_base())(
                Training(ended, line, begun, trust_owner)
            )()
        except SystemExit as error:
            if line.runs or error.code != 1:
                raise
            return Exit.REFUSED  # Hydra has printed the reason
        except JobFailed as error:  # a sweeper has read the result of a failed job
            print(error, file=sys.stderr)
            return error.code
        finally:
            sys.argv = before
            if ended.trials is not None:
                ended.trials.report()
    return 0


@dataclass(frozen=True)
class Training:
    """Implements Hydra's task function. The launcher of ``-m`` does not call it and uses only its attributes."""

    ended: Ended
    line: CommandLine
    begun: HeadStart | None = None
    trust_owner: bool = False

    def __call__(self, node: DictConfig) -> None:
        """Trains in the foreground. Raises SystemExit with the exit code unless that is 0."""
        run = RunDirectory(Path(HydraConfig.get().runtime.output_dir))
        try:
            exit_code = task(node, run, self.line, self.begun, self.trust_owner)
        except KeyboardInterrupt:  # the agent does not yet watch signals, or the user has pressed Ctrl-C twice
            if run.config.exists():
                record_stop_request(run, "Ctrl-C")
            raise
        self.ended.runs.append((run, view_at_end(run, exit_code)))
        if exit_code:
            sys.exit(exit_code)


def task(
    node: DictConfig, run: RunDirectory, line: CommandLine, begun: HeadStart | None = None, trust_owner: bool = False
) -> int:
    """Trains in the foreground; returns the exit code. Raises SystemExit if the run is refused."""
    try:
        overrides = list(HydraConfig.get().overrides.task)
        config = with_frozen_defaults(typed(node), run, line, overrides)
        _check_foreground(config)
        shape = local_shape(config, Place.FOREGROUND)
        job = check_job(config, run, shape, overrides=overrides, trust_owner=trust_owner)
        print_notices(job, line)
        freeze_job(replace(job, options=line.options), run.code, claim=True)
        if job.choice is not None:
            print(f"{job.choice.lines[0]}; table: {run.plan}")
    except (UserError, OSError) as error:
        mistake = translate(error)
        if mistake is None:
            raise
        root = Path(node.run.root).expanduser().absolute()
        with contextlib.suppress(OSError):  # removes empty directories below run.root, which Hydra has created
            for directory in (run.path, *run.path.parents):
                if directory == root or not directory.is_relative_to(root):
                    break
                directory.rmdir()
        mistake = with_file(mistake, line)
        print(mistake, file=sys.stderr)  # Hydra would wrap a raised error into its own message
        raise SystemExit(Exit.REFUSED) from mistake
    from hpc_train.launch.executors.allocation import run_in_foreground  # other commands do not need this import

    arguments = [argument for argument in sys.argv[1:] if argument != WITH_STRATEGY]
    return run_in_foreground(run, arguments, begun)


def _check_foreground(config: Config) -> None:
    kind = config.cluster.kind
    if kind not in ("auto", "local"):
        raise UserError(
            f"cluster.kind={kind} needs -m: without it this command trains in the foreground",
            where="cluster.kind",
            fix="add -m to submit the run, cluster=local to train here, or launch.dry_run=true to preview it",
        )
    check_shell(config.cluster)
    if config.cluster.kind == "auto" and not in_allocation() and uses_slurm():
        raise UserError(
            "this is a login node of a Slurm cluster: refusing to train in the foreground",
            where="cluster.kind",
            fix="add -m to submit the run to Slurm, or cluster=local (exec: --standalone) to run here anyway",
        )
    # salloc's shell on a login node does not have the GPUs of the job
    outside = in_allocation() and "SLURMD_NODENAME" not in os.environ
    if outside and config.cluster.kind == "auto" and config.cluster.gpus_per_node != 0:
        gpus = gpus_of_this_job().per_node
        if gpus:
            raise UserError(
                f"the nodes of this job have {gpus} GPUs each, but this shell does not run on them",
                where="cluster.kind",
                fix="add -m to train on the nodes of the job, or cluster=local (exec: --standalone) to run here anyway",
            )
