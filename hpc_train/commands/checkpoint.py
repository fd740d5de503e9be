"""``python -m hpc_train checkpoint`` lists, verifies, exports, promotes, releases and imports checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from hpc_train.checkpoint.listing import (
    NEWEST,
    Listed,
    choose,
    choose_by_name,
    find_run,
    inspect_present,
    list_checkpoints,
    list_set_aside,
)
from hpc_train.checkpoint.manifest import METADATA, BadCheckpoint
from hpc_train.checkpoint.store import CheckpointStore, Kept, best_step
from hpc_train.commands import COMMANDS
from hpc_train.config.evaluation import LOWEST_LOSS, BestMetric, best_metric
from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import default_root
from hpc_train.layout.layout import Layout
from hpc_train.opening import DamagedFile, read_file
from hpc_train.report.registry import REGISTRIES
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import refuse_existing
from hpc_train.run.freeze import load
from hpc_train.run.owner import TRUST, check_owner, files_below, open_run, output_directory
from hpc_train.run.processes import without_collector
from hpc_train.telemetry.sinks.tracker import Identity
from hpc_train.telemetry.terminal import Terminal, text_table, wide
from hpc_train.units import format_bytes, format_duration, format_metric

_EPILOG = """\
examples:
  python -m hpc_train checkpoint list mine
  python -m hpc_train checkpoint verify outputs/mine
  python -m hpc_train checkpoint export mine --to llama --dtype bfloat16
  python -m hpc_train checkpoint export mine --to mine.pt --checkpoint best
  python -m hpc_train checkpoint export mine --to ema.pt --weights ema
  python -m hpc_train checkpoint import Llama-2-7b-hf --to llama2
  python -m hpc_train checkpoint promote mine --checkpoint best --as production
  python -m hpc_train checkpoint import wandb:team/project/mine:production --to mine2
  python -m hpc_train checkpoint release mine --to llama --serve 'vllm serve $MODEL'
  python -m hpc_train checkpoint export mine --to llama --submit --sbatch='--partition=cpu --time=2:00:00'
"""
TRIES = 5  # attempts while the run removes old checkpoints
DTYPES = ["float64", "float32", "bfloat16", "float16"]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if getattr(options, "submit", False):
        return _submit(arguments, options)
    functions = {
        "list": _list,
        "verify": _verify,
        "export": _export,
        "promote": _promote,
        "release": _release,
        "import": _import,
    }
    return functions[options.action](options)


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m hpc_train checkpoint",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(COMMANDS["checkpoint"].actions))
    listed = actions.add_parser("list", help="list steps, ages, sizes and layouts; check file names and sizes")
    verified = actions.add_parser("verify", help="check every byte against its checksum; exit with 1 on damage")
    exported = actions.add_parser("export", help="export the model in Hugging Face's format or as one .pt file")
    promoted = actions.add_parser("promote", help="verify a checkpoint and store it in a model registry")
    released = actions.add_parser("release", help="evaluate, export, describe, promote and serve a checkpoint")
    imported = actions.add_parser("import", help="import published weights or a promoted checkpoint as a run")
    for action in (listed, verified, exported, promoted, released):
        action.add_argument("run", metavar="RUN", help="a run directory, or its name")
    verified.add_argument("--step", type=int, metavar="N", help="the step (default: all)")
    either = exported.add_mutually_exclusive_group()
    either.add_argument("--step", dest="checkpoint", default=NEWEST, help=argparse.SUPPRESS)  # its name in version 0.1
    exported.add_argument("--to", type=Path, required=True, metavar="PATH", help="a directory (hf) or a file (pt)")
    exported.add_argument(
        "--format",
        choices=["hf", "merged", "pt"],
        help="merged: adapters merged into their base model (default: pt for a PATH that ends in .pt or a model that "
        "transformers does not have, otherwise hf)",
    )
    exported.add_argument(
        "--weights", metavar="HOOK", help="export the weights of this hook, such as ema, instead of those of the model"
    )
    for group in (either, promoted, released):
        group.add_argument(
            "--checkpoint",
            default=NEWEST,
            metavar="newest|best|STEP",
            help="best: by checkpoint.keep_best, or by val_loss without it (default: %(default)s)",
        )
    for action in (promoted, released):
        action.add_argument("--name", help="the name of the model (default: the name of the run)")
        action.add_argument(
            "--as", dest="aliases", action="append", default=[], metavar="ALIAS", help="set an alias, e.g. production"
        )
    promoted.add_argument("--to", choices=REGISTRIES, default=REGISTRIES[0], help="the registry (default: %(default)s)")
    released.add_argument("--to", type=Path, required=True, metavar="DIR", help="the directory of the release")
    for action in (exported, released):
        action.add_argument("--dtype", choices=DTYPES, help="dtype of the exported tensors (default: as stored)")
    released.add_argument(
        "--registry", choices=(*REGISTRIES, "none"), default=REGISTRIES[0], help="default: %(default)s"
    )
    released.add_argument(
        "--serve", metavar="COMMAND", help="what bash then runs, with the directory in $MODEL; with --submit as a job"
    )
    released.add_argument("--serve-sbatch", default="", metavar="OPTIONS", help="additional sbatch options of that job")
    imported.add_argument(
        "source",
        metavar="DIR|REFERENCE",
        help="directory with config.json and safetensors files, or mlflow:NAME@ALIAS, wandb:ENTITY/PROJECT/NAME:ALIAS",
    )
    imported.add_argument(
        "--to", required=True, metavar="NAME", help="name of the new run; train with run.name=NAME run.fork=NEW"
    )
    imported.add_argument(
        "--dtype", choices=DTYPES[:2], default="float32", help="float64 for runs with precision=fp64 (default: float32)"
    )
    for action in (verified, exported, promoted, released, imported):
        action.add_argument("--submit", action="store_true", help="run as a Slurm job with the run's cluster config")
        action.add_argument("--sbatch", default="", metavar="OPTIONS", help="additional sbatch options for that job")
        action.add_argument(TRUST, action="store_true", help="use a directory that belongs to another user")
    for action in (listed, verified, exported, promoted, released, imported):
        action.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _submit(arguments: list[str], options: argparse.Namespace) -> int:
    """Submits the same command without ``--submit`` as a job and follows its output to the end."""
    from hpc_train.config.compose import compose, typed
    from hpc_train.launch.command_job import follow, submit, without_submission

    if options.action == "import":
        _check_source(options)
        config = typed(compose([]))
        folder = _root()
    else:
        run = find_run(options.run, _root(), f"checkpoint {options.action}", options.trust_owner)
        open_run(run, "checkpoint verify --submit", options.trust_owner)
        config = load(run) if run.config.exists() else typed(compose([]))
        folder = output_directory(run.path) / "logs"
    words = ["checkpoint", *without_submission(arguments, ("--serve", "--serve-sbatch"))]
    job = submit(words, config, folder / "slurm", shlex.split(options.sbatch))
    if getattr(options, "serve", None) is not None:
        after = [f"--dependency=afterok:{job.job_id}", "--kill-on-invalid-dep=yes"]
        program = ["env", f"MODEL={options.to.absolute()}", "bash", "-c", options.serve]
        extra = [*after, *shlex.split(options.serve_sbatch)]
        served = submit(["serve"], config, folder / "slurm", extra, program)
        where = f"Slurm job {served.job_id} begins if the release succeeds, output in {served.log}"
        print(where, file=sys.stderr)
    return follow(job)


def _root() -> Path:
    return Path(default_root())


def _list(options: argparse.Namespace) -> int:
    run = find_run(options.run, _root(), "checkpoint list")
    _show(list_checkpoints(run) + list_set_aside(run), "sizes", options.json, _ranking_metric(run))
    return Exit.DONE


def _verify(options: argparse.Namespace) -> int:
    run = find_run(options.run, _root(), "checkpoint verify")
    verified: list[Listed] = []
    for _ in range(TRIES):
        listed = list_checkpoints(run)
        if options.step is not None:
            chosen = choose(run, options.step)
            listed = [item for item in listed if item.checkpoint == chosen]
        verified = _verified(run, listed)
        if verified or not listed:  # otherwise the run has replaced all of them meanwhile
            break
    _show(verified, "all bytes", options.json, _ranking_metric(run))
    return Exit.FAILED if any(item.problem for item in verified) else Exit.DONE


def _verified(run: RunDirectory, listed: list[Listed]) -> list[Listed]:
    """Returns the state of those checkpoints that the run has not removed meanwhile, after a check of every byte."""
    store = CheckpointStore(run.checkpoints)
    verified = []
    total = sum(item.manifest.size for item in listed if item.manifest is not None)
    with _bar("verifying", total) as advance:
        for item in listed:
            checked = inspect_present(store, item.checkpoint, full=True, on_bytes=advance)
            if checked is None:
                step = item.checkpoint.step
                print(f"the run has removed its checkpoint of step {step} meanwhile", file=sys.stderr)
            else:
                verified.append(_with_metadata(checked))
    return verified


def _with_metadata(item: Listed) -> Listed:
    """Returns ``item`` with the problem of its metadata if a run would refuse it, e.g. because it refers to code."""
    if item.problem is not None or item.manifest is None:
        return item
    from hpc_train.checkpoint.reader import read_metadata  # imports torch

    folder = item.checkpoint.path
    try:
        content = read_file(folder / METADATA, folder, item.manifest.files[METADATA].size)
        read_metadata(content, item.manifest)
    except (BadCheckpoint, DamagedFile, OSError) as error:
        return replace(item, problem=str(error))
    return item


def _export(options: argparse.Namespace) -> int:
    run = find_run(options.run, _root(), "checkpoint export", options.trust_owner)
    refuse_existing(options.to, "--to")
    step = None
    if options.checkpoint != NEWEST:
        step = choose_by_name(run, options.checkpoint, _ranking_metric(run)).step
    choose(run, step)
    with without_collector():  # the garbage collector takes a sixth of the time of the import of torch
        from hpc_train.checkpoint.transfer import export

    format = options.format
    if format is None and options.to.suffix in (".pt", ".pth"):
        format = "pt"
    result = export(run, step, options.to, format, options.dtype, _bar, options.weights)
    hint = f"transformers.AutoModelForCausalLM.from_pretrained({str(options.to)!r})"
    if (options.to / "adapter_config.json").exists():
        hint = f"peft.PeftModel.from_pretrained(base, {str(options.to)!r})"
    if result["format"] == "pt":
        hint = f"torch.load({str(options.to)!r}, mmap=True)"
    print(json.dumps(result) if options.json else f"step {result['step']}, {format_bytes(result['bytes'])}: {hint}")
    return Exit.DONE


def _ranking_metric(run: RunDirectory) -> BestMetric:
    settings = run.plain_config().get("checkpoint", {})
    return best_metric(settings.get("keep_best"), settings.get("best_mode", "auto")) or LOWEST_LOSS


def _promote(options: argparse.Namespace) -> int:
    from hpc_train.report.registry import promote

    run = find_run(options.run, _root(), "checkpoint promote", options.trust_owner)
    config = load(run)
    name = options.name or Identity.of(config, run).name.replace("/", "-")
    metric = _ranking_metric(run)
    result = promote(run, config, options.to, options.checkpoint, metric, name, options.aliases, _bar)
    if options.json:
        print(json.dumps(result))
        return Exit.DONE
    aliases = f" as {', '.join(result['aliases'])}" if result["aliases"] else ""
    print(f"step {result['step']} is version {result['version']} of {name}{aliases}; to import it:")
    print(f"  python -m hpc_train checkpoint import {result['reference']} --to NEW")
    return Exit.DONE


def _release(options: argparse.Namespace) -> int:
    """Evaluates a checkpoint, exports it with a model card, promotes it, and runs the command that serves it."""
    from hpc_train.report.registry import lineage, model_card, promote, registry_of, shared_config

    run = find_run(options.run, _root(), "checkpoint release", options.trust_owner)
    config = load(run)
    refuse_existing(options.to, "--to")
    if options.registry != "none":
        registry_of(options.registry, config)  # raises now if it cannot be used
    chosen = choose_by_name(run, options.checkpoint, _ranking_metric(run))
    step = str(chosen.step)
    name = options.name or Identity.of(config, run).name.replace("/", "-")
    evaluate = [sys.executable, "-m", "hpc_train", "evaluate", str(run.path), "--checkpoint", step, "--json"]
    done = subprocess.run([*evaluate, *[TRUST] * options.trust_owner], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return done.returncode
    evaluated = json.loads(done.stdout)
    with without_collector():
        from hpc_train.checkpoint.transfer import export
    options.to.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".release-", dir=options.to.absolute().parent) as temporary:
        made = Path(temporary) / "model"
        result = export(run, chosen.step, made, None, options.dtype, _bar)
        if result["format"] == "pt":
            made.rename(made.with_suffix(".pt"))
            made.mkdir()
            made.with_suffix(".pt").rename(made / "model.pt")
        about = lineage(run, config, chosen.manifest())
        card = model_card(name, about, evaluated, shared_config(config), made)
        (made / "README.md").write_text(card, encoding="utf-8")
        made.rename(options.to)
    promoted = None
    if options.registry != "none":
        metric = _ranking_metric(run)
        promoted = promote(run, config, options.registry, step, metric, name, options.aliases, _bar)
    row = {"step": chosen.step, "path": str(options.to), "format": result["format"], "metrics": evaluated["metrics"]}
    reference = None if promoted is None else promoted["reference"]
    version = "" if promoted is None else f" and is {reference}"
    print(
        json.dumps(row | {"reference": reference})
        if options.json
        else f"step {step} of {run.path} is in {options.to}{version}",
        flush=True,
    )
    if options.serve is None:
        return Exit.DONE
    environment = os.environ | {"MODEL": str(options.to.absolute())}
    to = sys.stderr if options.json else None
    return subprocess.run(["bash", "-c", options.serve], check=False, env=environment, stdout=to).returncode


def _import(options: argparse.Namespace) -> int:
    from hpc_train.report.registry import import_reference, is_reference

    if is_reference(options.source):
        from hpc_train.config.compose import compose, typed

        result = import_reference(options.source, options.to, _root(), typed(compose([])))
        about = f"step {result['step']} of {result['lineage']['run']} is in {result['path']}"
        print(json.dumps(result) if options.json else f"{about}; train from it with run.name={options.to} run.fork=NEW")
        return Exit.DONE
    _check_source(options)
    with without_collector():
        from hpc_train.checkpoint.transfer import import_hf

    result = import_hf(Path(options.source), options.to, _root(), options.dtype, _bar)
    if options.json:
        print(json.dumps(result))
        return Exit.DONE
    print(f"imported {result['parameters']:,} parameters into {result['path']}; to train from them:")
    print(f"  python -m hpc_train run.name={options.to} run.fork=NEW …")
    return Exit.DONE


def _check_source(options: argparse.Namespace) -> None:
    """Raises UserError if files to be imported belong to a user whom the caller does not trust."""
    from hpc_train.report.registry import is_reference

    source = Path(options.source)
    if not is_reference(options.source):
        check_owner(files_below(source), source, options.trust_owner)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on standard error, or prints lines in a job; yields the function that adds bytes done."""
    if "SLURM_JOB_ID" in os.environ and not sys.stderr.isatty():
        done = 0

        def advance(count: int) -> None:  # prints a line after each tenth
            nonlocal done
            tenths = 10 * done // max(1, total)
            done += count
            if 10 * done // max(1, total) > tenths:
                print(f"{what}: {format_bytes(done)} of {format_bytes(total)}", file=sys.stderr, flush=True)

        yield advance
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Terminal(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


def _show(listed: list[Listed], compared: str, as_json: bool, metric: BestMetric) -> None:
    if as_json:
        print(json.dumps([_as_json(item, compared) for item in listed]))
    elif listed:
        wide(Terminal()).print(_table(listed, compared, metric), highlight=False)
    else:
        print("the run has no checkpoint yet")


def _as_json(item: Listed, compared: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": item.checkpoint.step,
        "path": str(item.checkpoint.path),
        "time": None,
        "bytes": None,
        "layout": None,
        "metrics": {},
        "compared": compared,
        "problem": item.problem,
        "proved": item.proved,
        "foreign": list(item.foreign),
    }
    manifest = item.manifest
    if manifest is not None:
        row |= {"time": manifest.time, "bytes": manifest.size, "layout": dict(manifest.layout)}
        row["metrics"] = dict(manifest.metrics)
    return row


def _table(listed: list[Listed], compared: str, metric: BestMetric) -> Table:
    """Returns the table; it has a column for ``metric`` if a checkpoint was evaluated, with the best one marked."""
    intact = [Kept(item.checkpoint.step, item.manifest.metrics) for item in listed if item.manifest]
    best = best_step(intact, metric)
    numbers = ["step", "age", "size"]
    is_evaluated = any(checkpoint.metrics.get(metric.name) is not None for checkpoint in intact)
    if is_evaluated:
        numbers.append(metric.name)
    rows = []
    for item in listed:
        age = ""
        size = ""
        layout = ""
        result = ""
        value = None
        manifest = item.manifest
        if manifest is not None:
            age = format_duration(time.time() - manifest.time)
            size = format_bytes(manifest.size)
            layout = _layout(dict(manifest.layout))
            value = manifest.metrics.get(metric.name)
        if value is not None:
            result = format_metric(value)
            if item.checkpoint.step == best and len(listed) > 1:
                result += " (best)"
        state = item.problem or f"intact ({compared} checked)"
        if item.proved:
            state += ", proved"
        if item.foreign:
            state += f"; files that do not belong to it: {', '.join(item.foreign)}"
        row = [str(item.checkpoint.step), age, size]
        if is_evaluated:
            row.append(result)
        rows.append((*row, layout, state))
    return text_table((*numbers, "layout", "state"), rows, numbers, ["state"])


def _layout(values: dict[str, Any]) -> str:
    """Returns the parallel layout as text; imported weights have no layout, and a damaged one is unknown."""
    if not values:
        return "imported"
    try:
        return str(Layout(**values)).partition(")")[0] + ")"
    except (TypeError, ValueError, ZeroDivisionError):
        return "unknown"
