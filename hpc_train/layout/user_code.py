"""Checks a user's model, optimizer and schedule, and that the packages of a config are installed.

This process does not import them: it reads their source, and tries them in another process where torch is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_train.config.evaluation import check_metric_name, highest_is_best
from hpc_train.config.extensions import location
from hpc_train.config.import_path import (
    Definition,
    check_call,
    check_imports,
    find_definition,
    how_to_install,
    module_spec,
)
from hpc_train.config.schema import (
    Config,
    CustomDataConfig,
    CustomModelConfig,
    ImagesDataConfig,
    ShardsDataConfig,
    StreamDataConfig,
    TargetConfig,
)
from hpc_train.config.values import command_words, runs_own_code
from hpc_train.errors import Mistakes, UserError
from hpc_train.layout.compatibility import EARLY_STOPPING
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import EMA, own_targets, parse_schedule


def check_own_model(config: Config, stages: int) -> None:
    """Checks the signature of ``model._target_``, and that its class can be cut if there are pipeline stages.

    The class of a model in a container is not known here, and that of a function only from its annotation.

    Raises:
        UserError: the source shows that the model cannot be built or cut.
    """
    model = config.model
    if not isinstance(model, CustomModelConfig) or config.cluster.container.image is not None:
        return
    where = "model._target_"
    _refuse_object(find_definition(model._target_, where), list(model.args), where)
    bases = check_call(model._target_, where, arguments=model.args, arguments_key="model.args").bases
    if stages > 1 and bases and all(base.startswith("torch.nn.") for base in bases):
        raise UserError(
            f"{model._target_} is a torch.nn.Module, and only a hpc_train.models.model.Model can be cut into pipeline "
            "stages",
            where=f"strategy.pp={stages}, {where}",
            fix="strategy=single, dp, zero1, zero2, zero3 or hsdp, or derive the class from Model, as "
            "examples/own_pipeline_model.py does",
        )


OBJECTS = ("args", "cfg", "conf", "config", "hparams", "options", "opt", "params")  # names of parameters for an object


def _refuse_object(found: Definition, arguments: list[str], where: str) -> None:
    """Raises UserError if a constructor takes one object with all values, which no config can hold."""
    known, defined = found.parameters, found.statement
    required = () if known is None else tuple(known.required)
    if not isinstance(defined, ast.ClassDef) or found.tree is None or len(required) != 1:
        return
    (name,) = required
    if name not in OBJECTS or name in arguments:
        return
    kinds = [each.name for each in found.tree.body if isinstance(each, ast.ClassDef) and each.name.endswith("Config")]
    kind = next((each for each in kinds if each.startswith(defined.name)), kinds[0] if kinds else "SimpleNamespace")
    raise UserError(
        f"{found.path} takes one object, {name}, and model.args holds only values",
        where=f"{where}, {found.place}",
        fix=f"write a subclass and name it in {where}: class Own{defined.name}({defined.name}): "
        f'def __init__(self, **values): super().__init__({kind}(**values)); the section "A constructor that takes a '
        'config object" of docs/howto/model.md shows one',
    )


def check_packages(config: Config) -> None:
    """Checks that the packages which the config and the modules of the user need are installed.

    Nothing is checked if the workers may have other packages than this process: in a container, after
    ``cluster.setup``, or if torch is not installed here.

    Raises:
        UserError: packages are missing. The message reports all.
    """
    if config.cluster.container.image is not None or config.cluster.setup or module_spec("torch") is None:
        return
    mistakes = Mistakes()
    for package, key, instead, *extra in _needed(config):
        with mistakes.collected():
            if module_spec(package) is None:
                what, how = f"{key} needs {package}, which is not installed here", how_to_install(package, *extra)
                raise UserError(what, where=key.partition("=")[0], fix=f"{how}, or {instead}")
    for path, where in dict.fromkeys(_paths(config)):
        with mistakes.collected():
            check_imports(path, where)
    mistakes.report()


def _needed(config: Config) -> Iterator[tuple[str, ...]]:
    """Yields the packages that keys need, the keys, what the user can set instead, and maybe the extra to install."""
    if config.telemetry.tensorboard:
        yield "tensorboard", "telemetry.tensorboard=true", "telemetry.tensorboard=false"
    for key in ("file", "port"):
        if (value := getattr(config.telemetry.prometheus, key)) is not None:
            where = f"telemetry.prometheus.{key}"
            yield "prometheus_client", f"{where}={value}", f"{where}=null"
    if config.telemetry.otlp:
        for package in ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http"):
            yield package, "telemetry.otlp=true", "telemetry.otlp=false"
    if config.telemetry.mlflow.uri is not None:
        yield "mlflow", f"telemetry.mlflow.uri={config.telemetry.mlflow.uri}", "telemetry.mlflow.uri=null"
    if config.precision.fp8 is not None:
        yield "torchao", f"precision.fp8={config.precision.fp8}", "precision.fp8=null", "fp8"
    if isinstance(config.data, ImagesDataConfig | ShardsDataConfig):
        yield "PIL", f"data={config.data.kind}", "data=cifar100, which needs no extra package"


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the import paths of the user in a config, and their keys."""
    if isinstance(config.model, CustomModelConfig):
        yield config.model._target_, "model._target_"
    if isinstance(config.data, CustomDataConfig | StreamDataConfig):
        yield config.data._target_, "data._target_"
    if config.data.collate is not None:
        yield config.data.collate, "data.collate"
    for target in own_targets(config.optim):
        assert target.path is not None
        yield target.path, f"{target.where}._target_"
    schedule = parse_schedule(config.optim.schedule)
    if schedule.is_own:
        yield schedule.name, "optim.schedule"
    for group, targets in (("metrics", config.metrics), ("hooks", config.hooks)):
        for name, each in targets.items():
            yield each._target_, f"{group}.{name}._target_"


LIMIT_S = 180.0  # imports of torch from a busy network file system take up to a minute


def check_built_model(config: Config) -> None:
    """Builds the model on the meta device in another process and compares it with its description.

    Raises:
        UserError: they disagree, or the model cannot be built.
    """
    if importlib.util.find_spec("torch") is None:
        return  # the workers check the model if the login node has no torch
    given = json.dumps({"model": asdict(config.model), "data": asdict(config.data)}, default=str)
    problem = _answer("hpc_train.models.contract", given, "the model cannot be built")
    if problem:
        raise UserError(problem, where=location(config.model.kind), fix="make the description and the model agree")


def check_tried_optimizer(config: Config) -> None:
    """Tries the user's optimizer and schedule on small parameters in another process.

    A worker builds them itself, and what is installed in a container is not known here.

    Raises:
        UserError: they cannot be imported or called, or their state cannot be saved.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_worker = distributed is not None and distributed.is_initialized()
    if is_worker or config.cluster.container.image is not None or importlib.util.find_spec("torch") is None:
        return
    # without lr, so that the jobs of a sweep over it share a trial
    tried = ("name", "_target_", "args", "elementwise", "groups", "schedule")
    optim = {key: value for key, value in asdict(config.optim).items() if key in tried}
    given = {"model": asdict(config.model), "optim": optim, "steps": config.train.steps or 1}
    failed = "the optimizer cannot be tried"
    answer = _answer("hpc_train.train.optimizers.probe", json.dumps(given, default=str), failed)
    try:
        mistake = json.loads(answer.splitlines()[-1])  # after what the user's code prints
    except (ValueError, IndexError):
        mistake = {"what": answer or failed, "where": "optim", "fix": "correct the code that optim names"}
    if mistake:
        raise UserError(mistake["what"], where=mistake["where"], fix=mistake["fix"])


@lru_cache(maxsize=64)
def _answer(module: str, configs: str, failed: str) -> str:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=configs,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{failed}: it took longer than {LIMIT_S:g} s"
    if done.returncode == 0:
        return done.stdout.strip()
    return f"{failed}:\n{done.stderr.strip()[-2000:]}"


# What only the trainer and its engines implement.
OF_TRAINER: dict[str, tuple[str, ...]] = {
    "strategy": (
        "stages_per_rank",
        "pp_split",
        "bucket_cap_mb",
        "compression",
        "compression_share",
        "compression_rank",
        "async_tp",
        "offload",
    ),
    "train": (
        "eval_every",
        "eval_samples",
        "activation_checkpointing",
        "activation_offload",
        "loss_chunks",
        "z_loss",
        "compile",
        "cuda_graphs",
        "nonfinite_limit",
        "spike_mads",
        "max_rollbacks",
        "debug",
        "reproducible",
        "check",
        "buffers",
    ),
    "telemetry.profile": ("steps", "ranks"),
}
OF_A_FUNCTION = ("optim", "precision", "batch", "checkpoint")  # groups that a command cannot read
NOTE_OF_ENTRY = (
    "run.entry: model, data, optim, precision, batch and train have only the effect that your function gives them"
)
NOTES_OF_COMMAND = (
    "run.command: model, data, optim, precision, batch, train, checkpoint, the preflight, and telemetry except for "
    "prometheus and otlp do not apply; "
    "the script saves and loads its own checkpoints",
)
HANGS = "hang detection is off for a process until it touches $HPC_TRAIN_PROGRESS, because run.progress_dir is not set"


def check_own_code(config: Config) -> None:
    """Checks ``run.entry``, ``run.command`` and the keys that belong to them.

    Raises:
        UserError: a key has no effect, the function does not exist, or the command cannot be started.
    """
    run, words = config.run, command_words(config)
    if run.entry is not None and words:
        raise _conflict("run.entry and run.command are both set", "run.entry, run.command", "set one of them")
    if run.args and run.entry is None:
        raise _conflict("run.args is set without run.entry", "run.args", "run.entry=package.module:function")
    if run.progress_dir is not None and not words:
        what = "run.progress_dir is set without run.command"
        raise _conflict(what, "run.progress_dir", "run.command=[python,train.py]")
    if not runs_own_code(config):
        return
    _refuse_without_effect(config)
    if run.entry is not None:
        check_call(run.entry, "run.entry", positional=1)
    else:
        elsewhere = config.cluster.container.image is not None or bool(config.cluster.setup)
        _check_command(words, elsewhere)


def own_code_notes(config: Config) -> list[str]:
    """Returns what of the config does not apply to custom code, for the dry run and the log."""
    if config.run.entry is not None:
        return [NOTE_OF_ENTRY]
    if config.run.command is None:
        return []
    return [*NOTES_OF_COMMAND, *([] if config.run.progress_dir is not None else [HANGS])]


def check_own_layout(config: Config, layout: Layout) -> None:
    """Checks that the ranks of ``run.command`` are data-parallel only.

    Raises:
        UserError: ``run.command`` is to have pipeline, context-parallel or tensor-parallel ranks, which only a mesh
            tells apart.
    """
    if config.run.command is not None and layout.pp * layout.cp * layout.tp > 1:
        raise UserError(
            f"run.command gets no mesh, but strategy.pp is {layout.pp}, strategy.cp is {layout.cp} and strategy.tp is "
            f"{layout.tp}",
            where="strategy.pp, strategy.cp, strategy.tp",
            fix="+strategy=dp, which starts one process per GPU; the script arranges them",
        )


def _refuse_without_effect(config: Config) -> None:
    kind = "run.command" if config.run.command is not None else "run.entry"
    changed = [name for group, names in OF_TRAINER.items() for name in _changed(config, group, names)]
    if kind == "run.command":
        changed += [name for group in OF_A_FUNCTION for name in _changed(config, group)]
    if changed:
        where = ", ".join(changed)
        raise UserError(
            f"{where} {'has' if len(changed) == 1 else 'have'} no effect with {kind}",
            where=where,
            fix=f"leave out {where}; custom code implements this itself",
        )


def _changed(config: Config, group: str, names: tuple[str, ...] | None = None) -> Iterator[str]:
    """Yields the dotted names of the keys of ``group`` that differ from the defaults of the schema."""
    node: Any = config
    for part in group.split("."):
        node = getattr(node, part)
    default = type(node)()
    for each in fields(node):
        if (names is None or each.name in names) and getattr(node, each.name) != getattr(default, each.name):
            yield f"{group}.{each.name}"


def _check_command(words: list[str], elsewhere: bool) -> None:
    """Checks program and script, unless a container or ``cluster.setup`` provides them ``elsewhere``."""
    program = words[0]
    if not elsewhere and program not in PYTHONS and shutil.which(program) is None:
        raise UserError(
            f"run.command starts {program}, which is not an executable program",
            where="run.command",
            fix="the name of a program on PATH or its path, such as run.command=[python,train.py]",
        )
    script = words[1] if program in PYTHONS and len(words) > 1 and not words[1].startswith("-") else None
    if script is not None and not elsewhere and not Path(script).is_file():
        raise UserError(
            f"run.command runs {script}, which does not exist", where="run.command", fix="the path of the script"
        )


PYTHONS = ("python", "python3")  # replaced by the interpreter of hpc_train


def _conflict(what: str, where: str, fix: str) -> UserError:
    return UserError(what, where=where, fix=fix)


def check_targets(config: Config, layout: Layout) -> None:
    """Checks the import paths and the arguments of all metrics and hooks.

    Raises:
        UserError: a metric or hook cannot be found or does not take its arguments, or a built-in hook cannot use them.
    """
    for name, metric in config.metrics.items():
        _check_target(metric, f"metrics.{name}", batch=2)
    for name, hook in config.hooks.items():
        _check_target(hook, f"hooks.{name}", batch=0)
    for name, hook in config.hooks.items():
        check = _CHECKS.get(hook._target_)
        if check is not None:
            check(hook.args, f"hooks.{name}.args", config, layout)


def _check_target(target: TargetConfig, where: str, batch: int) -> None:
    """Checks a class, which is built from ``args``, or a function, which also gets ``batch`` arguments by position."""
    function = find_definition(target._target_, f"{where}._target_").is_function
    positional = batch if function else 0
    args, key = target.args, f"{where}.args"
    check_call(target._target_, f"{where}._target_", positional=positional, arguments=args, arguments_key=key)


def _check_ema(args: Mapping[str, Any], where: str, config: Config, layout: Layout) -> None:
    decay = args.get("decay", 0.0)
    if not _is_number(decay) or not 0 <= decay < 1:
        what = f"{where}.decay is {decay!r}, but must be at least 0 and below 1"
        raise UserError(what, where=f"{where}.decay", fix=f"{where}.decay=0.999")


def _check_early_stopping(args: Mapping[str, Any], where: str, config: Config, layout: Layout) -> None:
    monitor = args.get("monitor", "val_loss")
    if monitor != "loss":  # the training loss, which is known at evaluations as well
        check_metric_name(monitor, config, f"{where}.monitor")
    highest_is_best(monitor, args.get("mode", "auto"), f"{where}.mode")
    patience = args.get("patience", 1)
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        what = f"{where}.patience is {patience!r}, but must be a number of evaluations, at least 1"
        raise UserError(what, where=f"{where}.patience", fix=f"{where}.patience=3")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CHECKS = {
    EMA: _check_ema,
    EARLY_STOPPING: _check_early_stopping,
}
