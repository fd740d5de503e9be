"""Prints what a command would submit, with the results of all checks; starts nothing and writes nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig
from rich.console import Console

from hpc_train.config.arguments import expand, first_values, searches, swept
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.config.own_files import with_file
from hpc_train.config.roles import commands_of
from hpc_train.config.run_path import job_directory, run_directory
from hpc_train.config.translate import of_several_values, translate
from hpc_train.config.values import node_range, runs_own_code, saves_asynchronously
from hpc_train.errors import UserError, UserErrors
from hpc_train.launch.continued import with_frozen_defaults
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.job import Job, with_memory_note
from hpc_train.launch.request import check_job, notices_of
from hpc_train.layout.memory import host_copy_bytes
from hpc_train.layout.optimizers import describe_values
from hpc_train.layout.recomputation import node_bytes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted, format_bytes


@dataclass
class Findings:
    """Holds the results of a dry run.

    Attributes:
        plans: the descriptions of ``jobs``, which would be accepted.
        notes: the notices about the jobs; see ``notices_of``.
        submissions: the command line and batch script of each submission.
    """

    jobs: list[Job] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    submissions: list[tuple[str, str]] = field(default_factory=list)
    costs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.errors:
            return "refused"
        exceeds = any(job.memory is not None and job.memory.exceeds for job in self.jobs)
        return "can be submitted" + (", but will probably run out of memory" if exceeds else "")

    def refuse(self, mistake: UserError, jobs: Sequence[int] = ()) -> None:
        """Adds the mistakes for which ``jobs`` are refused, or all jobs."""
        for error in mistake.found if isinstance(mistake, UserErrors) else (mistake,):
            self.errors.append(UserError(error.what, where=error.where, fix=error.fix, jobs=jobs))

    def as_json(self) -> str:
        jobs = [_as_json(job, plan) for job, plan in zip(self.jobs, self.plans, strict=True)]
        submissions = [{"command": command, "script": script} for command, script in self.submissions]
        errors = [error.as_json() for error in self.errors]
        head = {"verdict": self.verdict, "jobs": jobs, "submissions": submissions}
        return json.dumps({**head, "costs": self.costs, "notes": self.notes, "errors": errors})


def dry_run(line: CommandLine, trust_owner: bool = False, results: TextIO | None = None) -> int:
    """Prints the jobs of ``line``, and to ``results`` a JSON object; returns exit code 2 if a job would be refused."""
    console = Terminal(soft_wrap=True)
    search = searches(line)
    jobs = [first_values(line.overrides)] if search else expand(line.overrides)
    if len(jobs) > 1 and not line.multirun:
        raise of_several_values(swept(line.overrides))
    if search:
        console.print("the sweeper chooses the values of each job during the search; the first values are checked here")
    with line.composer() as compose:
        configs = [_composed(compose, overrides) for overrides in jobs]
    valid = [config for config in configs if isinstance(config, DictConfig)]
    if not valid and isinstance(configs[0], Exception):
        raise configs[0]
    run_config = valid[0].run
    directory = Path(run_directory(run_config.root, run_config.name, run_config.fork))

    findings = Findings()
    plans: dict[str, int] = {}
    for number, (overrides, config) in enumerate(zip(jobs, configs, strict=True)):
        try:
            if isinstance(config, Exception):
                raise translate(config) or config
            run = RunDirectory(job_directory(directory, number, len(jobs)))
            job_config = with_frozen_defaults(typed(config), run, line, overrides)
            job = check_job(job_config, run, number=number, overrides=_submitted(overrides), trust_owner=trust_owner)
            job = with_memory_note(job)
            plan = _plan(job)
            text = _shortened(plan, number, plans)
            findings.jobs.append(job)
            findings.plans.append(plan)
        except UserError as error:
            mistake = with_file(error, line)
            findings.refuse(mistake, (number,))
            text = f"job {number}: {' '.join(_submitted(overrides))}\n  refused: {mistake}"
        console.print(text, markup=False, highlight=False)
    findings.notes = notices_of(findings.jobs, line)
    for text in findings.notes:
        console.print(text, markup=False, highlight=False)

    total = "nothing was written"
    if findings.errors:
        total = f"{counted(len(jobs), 'job', 'jobs')}, {len(jobs) - len(findings.jobs)} refused"
    elif not _show_submissions(findings, directory, console, line):
        total = f"{counted(len(jobs), 'job', 'jobs')}, {len(jobs)} refused"
    console.print(f"verdict: {findings.verdict}\ndry run: {total}", highlight=False)
    if results is not None:
        print(findings.as_json(), file=results)
    return Exit.REFUSED if findings.errors else Exit.DONE


def _show_submissions(findings: Findings, directory: Path, console: Console, line: CommandLine) -> bool:
    """Prints commands and scripts as they would be submitted and the maximum cost, or why the site refuses the jobs.

    Returns whether it accepts them: all or none, because jobs are submitted together.
    """
    executor = select_executor(findings.jobs[0].config.cluster)
    try:
        findings.costs = executor.check(findings.jobs)
    except UserError as error:
        mistake = with_file(error, line)
        findings.refuse(mistake)
        console.print(f"refused: {mistake}", markup=False, highlight=False)
        return False
    findings.costs += [f"to start sooner: {line}" for line in executor.earlier_starts(findings.jobs[0])]
    findings.submissions = executor.plan(findings.jobs, directory)
    # the name of the script is the last word of the command
    texts = [f"\n{command}\n\n{command.split()[-1]}:\n{script}" for command, script in findings.submissions]
    for text in (*texts, *findings.costs):
        console.print(text, markup=False, highlight=False)
    return True


def _as_json(job: Job, plan: str) -> dict[str, Any]:
    need = job.memory
    return {
        "job": job.number,
        "run": str(job.run.path),
        "overrides": [*job.overrides],
        "strategy": job.config.strategy.name,
        "nodes": job.shape.nodes,
        "workers": job.layout.world_size,
        "memory": None if need is None else need.rank.total,
        "fits": None if need is None or need.available is None else not need.exceeds,
        "plan": plan,
    }


def _submitted(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that the job would have without the dry run."""
    return [override for override in overrides if not override.lstrip("+").startswith("launch.dry_run=")]


def _composed(compose: Callable[[Sequence[str]], DictConfig], overrides: Sequence[str]) -> DictConfig | Exception:
    """Returns the composed job, or the error if a mistake of the user prevents its composition."""
    try:
        return compose(overrides)
    except Exception as error:
        if translate(error) is None:
            raise
        return error


def _shortened(plan: str, number: int, plans: dict[str, int]) -> str:
    """Returns the plan of a job, reduced to its overrides and directory if the rest equals one of ``plans``."""
    job, directory, rest = plan.split("\n", 2)
    same = plans.setdefault(rest, number)
    return plan if same == number else f"{job}\n{directory}\n  otherwise as job {same}"


def _plan(job: Job) -> str:
    config = job.config
    layout = job.layout
    executor = select_executor(config.cluster)
    nodes = counted(config.cluster.nodes, "node", "nodes")
    device = "CPU"
    if job.gpus:
        device = f"{counted(job.gpus, 'GPU', 'GPUs')} per node"
    lines = [
        f"job {job.number} to {executor.name}: {config.strategy.name}: {' '.join(job.overrides)}",
        f"  run directory: {job.run.path}{' (resumes)' if job.run.config.exists() else ''}",
        f"  layout: {layout}",
        f"  world: {counted(layout.world_size, 'worker', 'workers')} on {nodes} ({device})",
    ]
    if config.run.entry is not None:
        lines.append(f"  function: {config.run.entry}")
    elif runs_own_code(config):
        lines += [f"  {key}: {shlex.join(words)}" for key, words in commands_of(config).items()]
    else:
        samples = config.batch.global_size
        places = layout.dp * layout.micro_batches * layout.micro_size
        lines.append(
            f"  batch: {samples} samples per step = {counted(layout.dp, 'replica', 'replicas')} x "
            f"{counted(layout.micro_batches, 'micro-batch', 'micro-batches')} x {layout.micro_size}"
            + (f" ({places - samples} of them padding)" if places > samples else "")
        )
    lines += _memory(job)
    lines += [f"  note: {note}" for note in layout.notes]
    if job.choice is not None:
        lines += [f"  {line}" for line in job.choice.lines]
    return "\n".join(lines)


def _memory(job: Job) -> list[str]:
    """Returns lines with the estimated memory of a rank, the memory of a GPU if it is known, and the host memory of a
    node."""
    config = job.config
    lines = []
    need = job.memory
    if need is not None:
        fits = ""
        if job.gpus and need.available is not None:
            fits = f", with context and buffers {format_bytes(need.needed)} {'>' if need.exceeds else 'of'} the "
            fits += f"{format_bytes(need.available)} of a GPU"
        lines.append(f"  memory: a rank needs about {need.rank}{fits}")
        assumed = describe_values(config.optim)
        if assumed is not None:
            lines.append(f"  memory: the estimate assumes {assumed}")
    nodes = node_range(config.cluster)[0]
    offloaded = None if runs_own_code(config) else node_bytes(config, job.layout, nodes)
    if offloaded is not None:
        setting = f"train.activation_offload={config.train.activation_offload}"
        lines.append(f"  host memory: activations take about {format_bytes(offloaded)} per node ({setting})")
    if saves_asynchronously(config.checkpoint, job.gpus > 0):
        copied = host_copy_bytes(config, job.layout, nodes)
        if copied is not None:
            setting = f"checkpoint.asynchronous={str(config.checkpoint.asynchronous).lower()}"
            lines.append(f"  host memory: saves copy about {format_bytes(copied)} per node ({setting})")
    return lines
