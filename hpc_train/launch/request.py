"""Turns a command line into a frozen run: compose, check, freeze.

``compose_job`` composes the typed config of a single job from a command line; for a training, Hydra itself composes the
jobs and calls the launcher. From there all commands take the same path: ``check_job`` chooses the layout of
``strategy=auto`` and refuses a config that cannot run, with all independent mistakes in one message. ``freeze_job``
writes the run directory. ``notices_of`` reports the keys that a user sets without effect, and that nothing is sent to
W&B.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from hpc_train.config.arguments import expand, own_files_checked, swept, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import LAUNCHER, SWEEPER, register, typed
from hpc_train.config.extensions import is_import_path
from hpc_train.config.roles import NodeGroup, check_roles, components_of
from hpc_train.config.run_path import run_directory
from hpc_train.config.schema import Config
from hpc_train.config.settings import TIMES, site_limits
from hpc_train.config.values import asked_nodes, parse_first, runs_command, runs_own_code, with_alternative
from hpc_train.errors import Mistakes, UserError
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.job import Choice, Job, alternative_named
from hpc_train.layout.float8 import architecture_of, check_gpus
from hpc_train.layout.layout import JobShape, Layout, Place
from hpc_train.layout.resolve import check_chosen, open_keys
from hpc_train.layout.techniques import AUTO, check_attention_device, check_compiler_device
from hpc_train.layout.validate import validate
from hpc_train.layout.without_effect import WithoutEffect, notices, user_keys, without_effect
from hpc_train.registration import CHOOSE_LAYOUT, FASTER_SETTINGS, MACHINE_OF_JOB, registered
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import check_freeze, freeze
from hpc_train.run.imported import with_imported_model
from hpc_train.run.owner import warn_if_open
from hpc_train.run.snapshot import code_note, snapshot_code
from hpc_train.schedulers.slurm.records import seconds
from hpc_train.telemetry.sinks.wandb import not_sent_notice

WANDB = "telemetry.wandb.mode"


@dataclass(frozen=True)
class ComposedJob:
    """The typed config of one job, and the command line from which it was composed.

    Attributes:
        overrides: the overrides of this job.
        count: the number of jobs of the command line.
    """

    line: CommandLine
    overrides: tuple[str, ...]
    config: Config
    count: int = 1

    @cached_property
    def directory(self) -> Path:
        """The directory of the run, or of the sweep that the job belongs to; without ``run.name`` a new one."""
        run = self.config.run
        return Path(run_directory(run.root, run.name, run.fork))


FAILURE_RATES = {"optuna": "max_failure_rate", "nevergrad": "optim.max_failure_rate"}  # keys of sweepers


def register_launcher() -> None:
    """Registers schema, launcher and sweeper with Hydra, whose search for plugins misses some editable installs.

    By default, the sweepers of Optuna and Nevergrad end a search at its first failed trial; here they continue.
    """
    register()
    for target in (LAUNCHER, SWEEPER):  # imported here, since Hydra must have searched for plugins before
        module, _, name = target.rpartition(".")
        Plugins.instance().register(getattr(importlib.import_module(module), name))
    sweepers: dict[str, Any] = ConfigStore.instance().repo.get("hydra", {}).get("sweeper", {})
    for name, key in FAILURE_RATES.items():
        if f"{name}.yaml" in sweepers:
            OmegaConf.update(sweepers[f"{name}.yaml"].node, key, 1.0)


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a training as Hydra requires them, with the overrides of an imported model.

    Raises UserError if an option or override is wrong.
    """
    register_launcher()
    return with_imported_model(with_right_plus(arguments))


def parse_line(arguments: Sequence[str]) -> CommandLine:
    """Parses the arguments of a training; raises UserError as ``complete_arguments``."""
    return CommandLine.parse(complete_arguments(arguments))


def compose_job(line: CommandLine, command: str, *, sweep: str = "", task: int | None = None) -> ComposedJob:
    """Composes the job of ``line``, or job ``task`` of the sweep that it describes.

    Raises UserError if the config is wrong, or ``line`` describes several jobs and no ``task`` is given.

    Args:
        command: the name of the command that needs a single job.
        sweep: the alternative for a sweep, as text of the fix.
    """
    jobs = expand(line.overrides)
    if task is None and (line.multirun or len(jobs) > 1):
        lists = " and ".join(swept(line.overrides))
        raise UserError(
            f"{command} takes one job, but {lists} make {len(jobs)}" if lists else f"{command} does not accept -m",
            where="the command line",
            fix=", or ".join(filter(None, ["give each key one value and drop -m", sweep])),
        )
    if task is not None and not 0 <= task < len(jobs):
        raise UserError(
            f"the sweep has {len(jobs)} jobs, so there is no job {task}",
            where="--task",
            fix=f"use 0 to {len(jobs) - 1}, e.g. with sbatch --array=0-{len(jobs) - 1}",
        )
    overrides = jobs[task or 0]
    with own_files_checked(line), line.composer() as compose:
        return ComposedJob(line, tuple(overrides), typed(compose(overrides)), len(jobs))


def check_job(
    config: Config,
    run: RunDirectory,
    shape: JobShape | None = None,
    *,
    number: int = 0,
    overrides: Sequence[str] = (),
    trust_owner: bool = False,
) -> Job:
    """Checks ``config`` and returns its job, which ``freeze_job`` can freeze; writes nothing.

    Raises UserError if a value is wrong, the job cannot run in ``shape``, or the run cannot be frozen. The message
    reports all independent mistakes.

    Args:
        shape: the shape of the job; None takes the shape that the executor of ``-m`` gives the job.
        trust_owner: whether the run, or the run to fork, may have files of other users.
    """
    shape = shape or select_executor(config.cluster).shape(config)
    if shape.place is Place.QUEUE and config.launch.chain <= 1 and config.cluster.first:
        config = replace(config, cluster=parse_first(config.cluster))
    mistakes = Mistakes()
    with mistakes.collected():
        is_auto = config.strategy.name == AUTO
        config, layout, choice = choose_and_check(config, run, shape)
        if shape.place is Place.QUEUE and config.launch.chain <= 1:
            _check_alternatives(config, is_auto)
    with mistakes.collected():
        trust_owner = check_freeze(config, run, trust_owner)
    mistakes.report()
    return Job(
        config,
        layout,
        shape,
        run,
        number=number,
        overrides=tuple(overrides),
        trust_owner=trust_owner,
        choice=choice,
    )


def _check_alternatives(config: Config, is_auto: bool) -> None:
    """Checks the jobs of ``cluster.first`` as ``check_config`` does.

    Raises UserError also if they need another scheduler than Slurm, or ``strategy=auto`` (``is_auto``) would have to
    choose a layout for each of them.
    """
    if config.cluster.first and is_import_path(config.cluster.kind):
        what = f"cluster.first needs Slurm, but cluster.kind={config.cluster.kind}"
        raise UserError(what, where="cluster.first", fix="remove cluster.first, or cluster=slurm")
    executor = select_executor(config.cluster)
    for number, changes in enumerate(config.cluster.first, start=1):
        of_layout = [name for name in ("nodes", "gpus_per_node", "gpu_type") if name in changes]
        if is_auto and of_layout:
            what = f"strategy=auto chooses one layout, but job {number} of cluster.first changes {of_layout[0]}"
            raise UserError(what, where="cluster.first", fix="a named strategy such as +strategy=zero2")
        with alternative_named(number):
            alternative = with_alternative(config, number)
            check_config(alternative, executor.shape(alternative))


def choose_and_check(config: Config, run: RunDirectory, shape: JobShape) -> tuple[Config, Layout, Choice | None]:
    """Returns ``config`` with the layout that ``strategy=auto`` chooses, the layout, and the choice.

    A run that continues keeps its choice if its inputs are the same. With another strategy the choice is None. Raises
    UserError as ``check_config`` does, or if ``strategy=auto`` does not know the machine or the size of the model, or
    if no layout is possible or fits.
    """
    if runs_own_code(config):
        check_chosen(config)
    if not open_keys(config) or runs_own_code(config):
        return config, check_config(config, shape), None
    choice: Choice = registered(CHOOSE_LAYOUT)(config, run, shape)
    config = choice.apply(config)
    return config, check_config(config, shape), choice


def check_config(config: Config, shape: JobShape) -> Layout:
    """Checks that ``config`` can run in ``shape``, and returns the layout for the largest number of nodes.

    Raises UserError if a value is wrong, there is no layout for the largest or the smallest number of nodes, or the
    GPUs do not support what the config requests. The message reports all independent mistakes.
    """
    mistakes = Mistakes()
    with mistakes.collected():
        check_site_limits(config)
    with mistakes.collected():
        of_roles = () if shape.components else components_of(config)
        is_other = len(of_roles) > 1 and shape.place in (Place.QUEUE, Place.ALLOCATION)
        if is_other or (of_roles and is_import_path(config.cluster.kind)):
            raise UserError(
                "roles ask for other nodes than the job, which requests all nodes with the values of cluster",
                where="partition, constraint, cpus and mem of run.roles",
                fix="cluster=slurm -m submits a heterogeneous job; or leave out these values",
            )
        check_roles(config, [NodeGroup(part.nodes, part.gpus) for part in shape.components or (shape,)], shape.nodes)
    with mistakes.collected():
        layout = validate(config, shape.nodes, shape.workers, shape.device_bytes)
        if shape.fewest_nodes < shape.nodes:
            validate(config, shape.fewest_nodes, shape.workers, shape.device_bytes)
    with mistakes.collected():
        check_compiler_device(config, shape.gpus)
    with mistakes.collected():
        architectures = {gpu: architecture_of(gpu) for gpu in sorted(shape.gpu_types)}
        if not shape.gpus:
            architectures = {"a CPU": "no GPU"}
        for gpu, architecture in architectures.items():
            if architecture is not None:
                check_attention_device(config.train.attention, gpu, architecture)
    if config.precision.fp8 is not None and shape.gpus:
        with mistakes.collected():
            types = shape.gpu_types
            machine = config.cluster.machine
            if not types and machine != "auto":
                types = frozenset({registered(MACHINE_OF_JOB)(machine, shape.gpus, types).device})
            check_gpus(config, types)
    mistakes.report()
    return layout


def check_site_limits(config: Config) -> None:
    """Raises UserError if a value exceeds a limit of the site file. The value null is not checked, since Slurm then
    decides."""
    mistakes = Mistakes()
    for settings in site_limits():
        for key, rule in settings.limits.items():
            value: Any = config
            for name in key.split("."):
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            if key == "cluster.nodes":
                value = asked_nodes(config)[1]  # with spares
            allowed = rule.get("one_of")
            if allowed is not None:
                is_within = value is None or value in allowed
                text = f"{key} is {value}, and the site allows {', '.join(map(str, allowed))}"
            else:
                is_within = value is None or _amount(key, value) <= _amount(key, rule["max"])
                text = f"{key} is {value}, and the site allows at most {rule['max']}"
            with mistakes.collected():
                if not is_within:
                    fix = f"{key}={allowed[0] if allowed else rule.get('max')}; {settings.path} sets this limit"
                    raise UserError(text, where=key, fix=fix)
    mistakes.report()


def _amount(key: str, value: Any) -> float:
    """Returns a number, or a Slurm time limit in seconds. An unlimited time is infinite, and auto is 0."""
    if key in TIMES:
        limit = seconds(str(value))
        return math.inf if limit is None else limit
    return 0 if isinstance(value, str) else float(value)


def freeze_job(job: Job, code_directory: Path, *, claim: bool = False) -> None:
    """Writes the run directory of ``job``, with a snapshot of the code in ``code_directory``, and prints the commit to
    standard error.

    With ``claim`` this process trains the run now, and no other command may train it.
    """
    code = snapshot_code([job.config], code_directory)
    if (note := code_note(code, [job.config])) is not None:
        print(note, file=sys.stderr)
    freeze(
        job.config,
        job.run,
        claim=claim,
        code=code,
        overrides=job.overrides,
        options=job.options,
        plan=job.plan,
        trust_owner=job.trust_owner,
    )
    warn_if_open(job.run, job.config)


def notices_of(jobs: Sequence[Job], line: CommandLine, reported: set[tuple[str, str]] | None = None) -> list[str]:
    """Returns the notices about keys that the user sets without effect in some of ``jobs``, about settings that make
    steps on GPUs slow, and for users of W&B if nothing is sent to W&B.

    ``reported`` holds the keys and reasons that earlier batches of the sweep have reported, which are not repeated. The
    keys and reasons of ``jobs`` are added to it.
    """
    reported = set() if reported is None else reported
    unread: dict[int, list[WithoutEffect]] = {}
    for job in jobs:
        keys = without_effect(job.config, job.layout, job.shape, user_keys(line, job.overrides))
        unread[job.number] = [key for key in keys if (key.key, key.reason) not in reported]
    for keys in unread.values():
        reported.update((key.key, key.reason) for key in keys)
    lines = [*_given_twice(line, reported), *notices(unread)]
    if not jobs:
        return lines
    if runs_command(jobs[0].config) and ("run.command", "output") not in reported:
        reported.add(("run.command", "output"))
        run = jobs[0].run
        name = os.path.relpath(run.path, Path(jobs[0].config.run.root).absolute())
        output = f"output in {run.logs}, `hpc-train logs {name}` prints it"
        restarts = "after a failure all processes start again, so a script without checkpoints starts over"
        lines.insert(0, f"run {name}: {output}; {restarts}")
    on_gpus = [job for job in jobs if job.gpus]
    speeds = {(job.config.precision.name, job.config.precision.tf32, job.config.train.compile): job for job in on_gpus}
    for job in speeds.values():
        for text in registered(FASTER_SETTINGS)(job.config, job.layout, job.shape):
            setting = text.partition(":")[0]
            if (setting, "slow") not in reported:
                reported.add((setting, "slow"))
                lines.append(text)
    unsent = not_sent_notice(jobs[0].config.telemetry.wandb, jobs[0].run.record().get("wandb"))
    if unsent is not None and (WANDB, unsent) not in reported and not runs_command(jobs[0].config):
        reported.add((WANDB, unsent))
        lines.append(unsent)
    return lines


def _given_twice(line: CommandLine, reported: set[tuple[str, str]]) -> Iterator[str]:
    """Yields a line for each key that the command line sets to two values, and adds it to ``reported``."""
    values: dict[str, str] = {}
    for override in line.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if values.setdefault(key, value).lower() != value.lower() and (key, "twice") not in reported:
            reported.add((key, "twice"))
            yield f"note: the command line sets {key} more than once; the last value is used"


def print_notices(job: Job, line: CommandLine) -> None:
    """Prints the lines of ``notices_of`` to standard error, since another program may read standard output."""
    for text in notices_of([job], line):
        print(text, file=sys.stderr)
