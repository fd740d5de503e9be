"""Prints what a command would submit, with the results of all checks; starts nothing and writes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from hpc_train.config.arguments import expand, first_values, searches
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.config.own_files import with_file
from hpc_train.config.run_path import job_directory, run_directory
from hpc_train.config.schema import Config
from hpc_train.config.translate import translate
from hpc_train.config.values import command_words, node_range, runs_own_code, saves_asynchronously
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.job import Job, MemoryNeed, memory_need, with_memory_note
from hpc_train.launch.request import check_job, notices_of
from hpc_train.layout.memory import host_copy_bytes
from hpc_train.layout.optimizers import describe_values
from hpc_train.layout.recomputation import node_bytes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted, format_bytes


def dry_run(line: CommandLine, trust_owner: bool = False) -> int:
    """Prints the jobs of ``line``; returns exit code 2 if one of them would be refused."""
    console = Terminal(soft_wrap=True)
    search = searches(line)
    jobs = [first_values(line.overrides)] if search else expand(line.overrides)
    if len(jobs) > 1 and not line.multirun:
        raise UserError(
            f"the command line describes {len(jobs)} jobs",
            where="the command line",
            fix="-m for a sweep, or one value per key; a list is KEY=[A,B]",
        )
    if search:
        console.print("the sweeper chooses the values of each job during the search; the first values are checked here")
    refused, accepted = 0, []
    plans: dict[str, int] = {}
    with line.composer() as compose:
        configs = [_composed(compose, overrides) for overrides in jobs]
    valid = [config for config in configs if isinstance(config, DictConfig)]
    if not valid and isinstance(configs[0], Exception):
        raise configs[0]
    directory = _directory(valid[0])
    for number, (overrides, config) in enumerate(zip(jobs, configs, strict=True)):
        try:
            if isinstance(config, Exception):
                raise translate(config) or config
            run = RunDirectory(job_directory(directory, number, len(jobs)))
            job = check_job(typed(config), run, number=number, overrides=overrides, trust_owner=trust_owner)
            job = with_memory_note(job)
            text = _shortened(_plan(job), number, plans)
            accepted.append(job)
        except UserError as error:
            refused += 1
            text = f"job {number}: {' '.join(overrides)}\n  refused: {with_file(error, line)}"
        console.print(text, markup=False, highlight=False)
    for text in notices_of(accepted, line):
        console.print(text, markup=False, highlight=False)
    if not refused:
        refused = _show_submissions(accepted, directory, console, line)
    total = f"{counted(len(jobs), 'job', 'jobs')}, {refused} refused" if refused else "nothing was written"
    verdict = "refused" if refused else "can be submitted"
    if not refused and any((need := _need(job)) is not None and need.exceeds for job in accepted):
        verdict += ", but will probably run out of memory"
    console.print(f"verdict: {verdict}\ndry run: {total}", highlight=False)
    return Exit.REFUSED if refused else Exit.DONE


def _composed(compose: Callable[[Sequence[str]], DictConfig], overrides: Sequence[str]) -> DictConfig | Exception:
    """Returns the composed job, or the error of the user's mistake because of which it cannot be composed."""
    try:
        return compose(overrides)
    except Exception as error:
        if translate(error) is None:
            raise
        return error


def _shortened(plan: str, number: int, plans: dict[str, int]) -> str:
    """Returns the plan of a job, only with its overrides and directory if the rest is that of one of ``plans``."""
    job, directory, rest = plan.split("\n", 2)
    same = plans.setdefault(rest, number)
    return plan if same == number else f"{job}\n{directory}\n  otherwise as job {same}"


def _directory(config: DictConfig) -> Path:
    run = config.run
    return Path(run_directory(run.root, run.name, run.fork))


def _show_submissions(jobs: list[Job], directory: Path, console: Console, line: CommandLine) -> int:
    """Prints commands and scripts as they would be submitted and the maximum cost, or why the site refuses the jobs.

    All jobs are submitted or none: returns how many are refused.
    """
    executor = select_executor(jobs[0].config.cluster)
    try:
        found = executor.check(jobs)
    except UserError as error:
        console.print(f"refused: {with_file(error, line)}", markup=False, highlight=False)
        return len(jobs)
    for command, script in executor.plan(jobs, directory):
        console.print(f"\n{command}\n\njob.sbatch:\n{script}", markup=False, highlight=False)
    for text in found:
        console.print(text, markup=False, highlight=False)
    return 0


def _plan(job: Job) -> str:
    config, layout, executor = job.config, job.layout, select_executor(job.config.cluster)
    nodes = config.cluster.nodes
    device = f"{counted(job.gpus, 'GPU', 'GPUs')} per node" if job.gpus else "CPU"
    lines = [
        f"job {job.number} to {executor.name}: {config.strategy.name}: {' '.join(job.overrides)}",
        f"  run directory: {job.run.path}{' (resumes)' if job.run.config.exists() else ''}",
        f"  layout: {layout}",
        f"  world: {counted(layout.world_size, 'worker', 'workers')} on {counted(nodes, 'node', 'nodes')} ({device})",
        *([_own_code(config)] if runs_own_code(config) else [_batch(job)]),
        *_memory(job),
        *_host_memory(job),
        *(f"  note: {note}" for note in layout.notes),
        *(f"  {line}" for line in (job.choice.lines if job.choice is not None else ())),
    ]
    return "\n".join(lines)


def _own_code(config: Config) -> str:
    """Returns the line with the function or the command that runs instead of the trainer."""
    if config.run.entry is not None:
        return f"  function: {config.run.entry}"
    return f"  command: {shlex.join(command_words(config))}"


def _batch(job: Job) -> str:
    layout, samples = job.layout, job.config.batch.global_size
    places = layout.dp * layout.micro_batches * layout.micro_size
    padding = f" ({places - samples} of them padding)" if places > samples else ""
    return (
        f"  batch: {samples} samples per step = {counted(layout.dp, 'replica', 'replicas')} x "
        f"{counted(layout.micro_batches, 'micro-batch', 'micro-batches')} x {layout.micro_size}{padding}"
    )


def _need(job: Job) -> MemoryNeed | None:
    return memory_need(job.config, job.layout, job.shape)


def _memory(job: Job) -> list[str]:
    """Returns the estimated memory of a rank, and that of a GPU if known."""
    need = _need(job)
    if need is None:
        return []
    fits = ""
    if job.gpus and need.available is not None:
        fits = f", with context and buffers {format_bytes(need.needed)} {'>' if need.exceeds else 'of'} the "
        fits += f"{format_bytes(need.available)} of a GPU"
    assumed = describe_values(job.config.optim)
    note = [] if assumed is None else [f"  memory: the estimate assumes {assumed}"]
    return [f"  memory: a rank needs about {need.rank}{fits}", *note]


def _host_memory(job: Job) -> list[str]:
    """Returns the estimated host memory of a node for activations and for asynchronous saves."""
    return [*_offloaded(job), *_saved_copies(job)]


def _offloaded(job: Job) -> list[str]:
    config = job.config
    if runs_own_code(config):
        return []
    needed = node_bytes(config, job.layout, node_range(config.cluster)[0])
    asked = f"train.activation_offload={config.train.activation_offload}"
    return (
        [] if needed is None else [f"  host memory: activations take about {format_bytes(needed)} per node ({asked})"]
    )


def _saved_copies(job: Job) -> list[str]:
    config = job.config
    if not saves_asynchronously(config.checkpoint, job.gpus > 0):
        return []
    needed = host_copy_bytes(config, job.layout.dp_cp, node_range(config.cluster)[0])
    asked = f"checkpoint.asynchronous={str(config.checkpoint.asynchronous).lower()}"
    return [] if needed is None else [f"  host memory: saves copy about {format_bytes(needed)} per node ({asked})"]
