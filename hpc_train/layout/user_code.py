"""Checks the user's code that a config names, and that the packages which the config needs are installed.

This process does not import the code. It reads the source, and it tries models and optimizers in another process, which
imports torch.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from operator import attrgetter
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
from hpc_train.config.roles import commands_of
from hpc_train.config.schema import (
    Config,
    CustomDataConfig,
    CustomModelConfig,
    ImagesDataConfig,
    ShardsDataConfig,
    StreamDataConfig,
)
from hpc_train.config.values import command_words, parse_hang_timeout, runs_command, runs_own_code
from hpc_train.errors import Mistakes, UserError
from hpc_train.layout.compatibility import EARLY_STOPPING
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import EMA, own_targets, parse_schedule

# keys that only the trainer and its engines implement, so that custom code (``run.entry``, ``run.command``) cannot use
# them
OF_TRAINER: dict[str, tuple[str, ...]] = {
    "strategy": (
        "async_tp", "stages_per_rank", "pp_split", "bucket_cap_mb", "comm", "compression",
        "compression_share", "compression_rank", "offload",
    ),
    "train": (
        "eval_every", "eval_samples", "activation_checkpointing", "activation_offload", "loss_chunks", "z_loss",
        "compile", "cuda_graphs", "nonfinite_limit", "spike_mads", "max_rollbacks", "debug", "reproducible", "check",
        "buffers",
    ),
    "telemetry.profile": ("steps", "ranks"),
}  # fmt: skip
OF_A_FUNCTION = ("optim", "precision", "batch", "checkpoint")  # groups that a command cannot read
NOTE_OF_ENTRY = (
    "run.entry: model, data, optim, precision, batch and train have only the effect that your function gives them"
)
NOTE_OF_COMMAND = (
    "run.command gets the variables of torchrun, and the script saves and loads its own checkpoints; settings of the "
    "trainer and the preflight do not apply"
)
HANGS = (
    "hang detection is off for a process until it touches $HPC_TRAIN_PROGRESS, because neither run.progress_dir nor "
    "elastic.hang_timeout_s (exec --hang-timeout) is set"
)
PYTHONS = ("python", "python3")  # names that are replaced by the interpreter of hpc_train
OBJECTS = ("args", "cfg", "conf", "config", "hparams", "options", "opt", "params")  # usual names of a config object
LIMIT_S = 180.0  # imports of torch from a busy network file system take up to a minute


def check_own_code(config: Config) -> None:
    """Checks ``run.entry``, ``run.command`` and the keys that belong to them.

    Both use the groups ``cluster``, ``elastic``, ``launch`` and ``run``, and ``strategy`` for the number and the
    arrangement of ranks. Keys that only the trainer implements are refused, and for a command also keys that no code
    could read. Raises UserError if a key has no effect, the function does not exist, or the command cannot be started.
    """
    run = config.run
    words = command_words(run.command)
    if run.entry is not None and words:
        what = "run.entry and run.command are both set"
        raise UserError(what, where="run.entry, run.command", fix="set one of them")
    if run.args and run.entry is None:
        fix = "run.entry=package.module:function"
        raise UserError("run.args is set without run.entry", where="run.args", fix=fix)
    if run.progress_dir is not None and not words:
        what = "run.progress_dir is set without run.command"
        raise UserError(what, where="run.progress_dir", fix="run.command=[python,train.py]")
    if not runs_own_code(config):
        return
    changed = [name for group, names in OF_TRAINER.items() for name in _changed(config, group, names)]
    if runs_command(config):
        changed += [name for group in OF_A_FUNCTION for name in _changed(config, group)]
    if changed:
        where = ", ".join(changed)
        has = "has" if len(changed) == 1 else "have"
        code = next(key for key in ("entry", "command", "roles") if getattr(run, key))
        what = f"{where} {has} no effect with run.{code}"
        raise UserError(what, where=where, fix=f"leave out {where}; custom code implements this itself")
    if run.entry is not None:
        check_call(run.entry, "run.entry", positional=1)
    elif config.cluster.container.image is None and not config.cluster.setup:  # either may provide the files
        for where, command in commands_of(config).items():
            _check_command(command, where)


def _changed(config: Config, group: str, names: tuple[str, ...] | None = None) -> Iterator[str]:
    """Yields the dotted names of the keys of ``group`` that differ from the defaults of the schema."""
    node: Any = attrgetter(group)(config)
    default = type(node)()
    for key in names or [field.name for field in fields(node)]:
        if getattr(node, key) != getattr(default, key):
            yield f"{group}.{key}"


def _check_command(words: Sequence[str], where: str) -> None:
    program = words[0]
    if program not in PYTHONS:
        if shutil.which(program) is None:
            raise UserError(
                f"{where} starts {program}, which is not an executable program",
                where=where,
                fix="the name of a program on PATH or its path; for a script of Python: python FILE",
            )
    elif len(words) > 1 and not words[1].startswith("-") and not Path(words[1]).is_file():
        what = f"{where} runs {words[1]}, which does not exist"
        raise UserError(what, where=where, fix="the path of the script")


def own_code_notes(config: Config) -> list[str]:
    """Returns notes on the parts of the config that do not apply to custom code, for the dry run and the log."""
    if config.run.entry is not None:
        return [NOTE_OF_ENTRY]
    if config.run.command is None:
        return []
    is_watched = config.run.progress_dir is not None or parse_hang_timeout(config.elastic.hang_timeout_s) is not None
    return [NOTE_OF_COMMAND] if is_watched else [NOTE_OF_COMMAND, HANGS]


def check_own_layout(config: Config, layout: Layout) -> None:
    """Raises UserError if ``run.command`` would get ranks that only a mesh distinguishes: other than data-parallel,
    or if ``strategy.ep`` would have no effect."""
    if runs_command(config) and layout.pp * layout.cp * layout.tp > 1:
        raise UserError(
            f"run.command gets no mesh, but strategy.pp is {layout.pp}, strategy.cp is {layout.cp} and strategy.tp is "
            f"{layout.tp}",
            where="strategy.pp, strategy.cp, strategy.tp",
            fix="+strategy=dp, which starts one process per GPU; the script arranges them",
        )
    if config.strategy.ep != 1:
        raise UserError(
            f"strategy.ep is {config.strategy.ep}, but custom code has no experts that hpc_train could divide",
            where="strategy.ep",
            fix="strategy.ep=1",
        )


def check_own_model(config: Config, stages: int) -> None:
    """Checks the signature of ``model._target_``, and that its class can be cut into ``stages`` pipeline stages.

    A model in a container is not checked, because its source is not available here. If the target is a function, its
    annotation determines the class. Raises UserError if the source shows that the model cannot be built or cut.
    """
    model = config.model
    if not isinstance(model, CustomModelConfig) or config.cluster.container.image is not None:
        return
    where = "model._target_"
    _refuse_object(find_definition(model._target_, where), model.args, where)
    bases = check_call(model._target_, where, arguments=model.args, arguments_key="model.args").bases
    if stages > 1 and bases and all(base.startswith("torch.nn.") for base in bases):
        raise UserError(
            f"{model._target_} is a torch.nn.Module, and only a hpc_train.models.model.Model can be cut into pipeline "
            "stages",
            where=f"strategy.pp={stages}, {where}",
            fix="strategy=single, dp, zero1, zero2, zero3 or hsdp, or derive the class from Model, as "
            "examples/own_pipeline_model.py does",
        )


def _refuse_object(definition: Definition, arguments: Collection[str], where: str) -> None:
    """Raises UserError if a constructor takes a config object, which a config of plain values cannot contain."""
    parameters = definition.parameters
    model = definition.statement
    if parameters is None or not isinstance(model, ast.ClassDef) or definition.tree is None:
        return
    if len(parameters.required) != 1:
        return
    (name,) = parameters.required
    if name not in OBJECTS or name in arguments:
        return
    classes = (node.name for node in definition.tree.body if isinstance(node, ast.ClassDef))
    kinds = [kind for kind in classes if kind.endswith("Config")]
    kinds.sort(key=lambda kind: not kind.startswith(model.name))
    kind = kinds[0] if kinds else "SimpleNamespace"
    raise UserError(
        f"{definition.path} takes one object, {name}, and model.args holds only values",
        where=f"{where}, {definition.place}",
        fix=f"write a subclass and name it in {where}: class Own{model.name}({model.name}): "
        f'def __init__(self, **values): super().__init__({kind}(**values)); the section "A constructor that takes a '
        'config object" of docs/howto/model.md shows one',
    )


def check_targets(config: Config, layout: Layout) -> None:
    """Raises UserError if a metric or hook does not exist or does not accept its arguments, or if a built-in hook
    refuses their values.
    """
    for group, batch in (("metrics", 2), ("hooks", 0)):
        for name, target in getattr(config, group).items():
            key = f"{group}.{name}"
            # a class gets only args; a metric function also gets outputs and targets
            where = f"{key}._target_"
            definition = find_definition(target._target_, where)
            positional = batch if isinstance(definition.statement, ast.FunctionDef) else 0
            args = target.args
            check_call(target._target_, where, positional=positional, arguments=args, arguments_key=f"{key}.args")
    for name, hook in config.hooks.items():
        if hook._target_ == EMA:
            _check_ema(hook.args, f"hooks.{name}.args")
        elif hook._target_ == EARLY_STOPPING:
            _check_early_stopping(hook.args, f"hooks.{name}.args", config)


def _check_ema(args: Mapping[str, Any], where: str) -> None:
    decay = args.get("decay", 0.0)
    if not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay < 1:
        what = f"{where}.decay is {decay!r}, but must be at least 0 and below 1"
        raise UserError(what, where=f"{where}.decay", fix=f"{where}.decay=0.999")


def _check_early_stopping(args: Mapping[str, Any], where: str, config: Config) -> None:
    monitor = args.get("monitor", "val_loss")
    if monitor != "loss":  # the training loss is also available at evaluations
        check_metric_name(monitor, config, f"{where}.monitor")
    highest_is_best(monitor, args.get("mode", "auto"), f"{where}.mode")
    patience = args.get("patience", 1)
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        what = f"{where}.patience is {patience!r}, but must be a number of evaluations, at least 1"
        raise UserError(what, where=f"{where}.patience", fix=f"{where}.patience=3")


def check_packages(config: Config) -> None:
    """Checks that the packages which the config and the user's modules need are installed.

    The check is skipped if the workers may have other packages than this process: in a container, after
    ``cluster.setup``, or if torch is not installed here.

    Raises:
        UserError: packages are missing. The message reports all of them.
    """
    if config.cluster.container.image is not None or config.cluster.setup or module_spec("torch") is None:
        return
    mistakes = Mistakes()
    for package, key, instead, *extra in _needed(config):
        with mistakes.collected():
            if module_spec(package) is None:
                what = f"{key} needs {package}, which is not installed here"
                fix = f"{how_to_install(package, *extra)}, or {instead}"
                raise UserError(what, where=key.partition("=")[0], fix=fix)
    for path, where in dict.fromkeys(_paths(config)):
        with mistakes.collected():
            check_imports(path, where)
    mistakes.report()


def _needed(config: Config) -> Iterator[tuple[str, ...]]:
    """Yields the package that a key needs, the key, the alternative, and sometimes the extra of hpc_train to
    install."""
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
        if config.data.decoder == "dali":
            yield "nvidia.dali", "data.decoder=dali", "data.decoder=pillow"


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the import paths of user code in a config, and their keys."""
    if isinstance(config.model, CustomModelConfig):
        yield config.model._target_, "model._target_"
    if isinstance(config.data, CustomDataConfig | StreamDataConfig):
        yield config.data._target_, "data._target_"
    if config.data.collate is not None:
        yield config.data.collate, "data.collate"
    for optimizer in own_targets(config.optim):
        assert optimizer.path is not None
        yield optimizer.path, f"{optimizer.where}._target_"
    schedule = parse_schedule(config.optim.schedule)
    if schedule.is_own:
        yield schedule.name, "optim.schedule"
    for group, targets in (("metrics", config.metrics), ("hooks", config.hooks)):
        for name, target in targets.items():
            yield target._target_, f"{group}.{name}._target_"


def check_built_model(config: Config) -> None:
    """Builds the model on the meta device in another process and compares it with its description. Raises UserError if
    they disagree, or the model cannot be built.
    """
    if importlib.util.find_spec("torch") is None:
        return  # the workers check the model if the login node has no torch
    given = json.dumps({"model": asdict(config.model), "data": asdict(config.data)}, default=str)
    problem = _answer("hpc_train.models.contract", given, "the model cannot be built")
    if problem:
        raise UserError(problem, where=location(config.model.kind), fix="make the description and the model agree")


def check_tried_optimizer(config: Config) -> None:
    """Tries the user's optimizer and schedule on small parameters in another process.

    Workers skip this trial because they build the optimizer themselves, and so do containers because their packages are
    not available here. Raises UserError if the optimizer or schedule cannot be imported or called, or its state cannot
    be saved.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_worker = distributed is not None and distributed.is_initialized()
    if is_worker or config.cluster.container.image is not None or importlib.util.find_spec("torch") is None:
        return
    # without lr, so that the jobs of a sweep over lr share a trial
    tried = ("name", "_target_", "args", "elementwise", "groups", "schedule")
    optim = {key: value for key, value in asdict(config.optim).items() if key in tried}
    given = {"model": asdict(config.model), "optim": optim, "steps": config.train.steps or 1}
    failed = "the optimizer cannot be tried"
    answer = _answer("hpc_train.train.optimizers.probe", json.dumps(given, default=str), failed)
    try:
        mistake = json.loads(answer.splitlines()[-1])  # the user's code may print before
    except (ValueError, IndexError):
        mistake = {"what": answer or failed, "where": "optim", "fix": "correct the code that optim names"}
    if mistake:
        raise UserError(mistake["what"], where=mistake["where"], fix=mistake["fix"])


@lru_cache(maxsize=64)
def _answer(module: str, configs: str, failed: str) -> str:
    try:
        done = run_module(module, given=configs.encode())
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{failed}: the trial on this machine did not end within {LIMIT_S:g} s",
            where="the load of this machine, or the code that the config names",
            fix="submit again when the machine is less busy, or correct code that does not end",
        ) from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace").strip()
    return f"{failed}:\n{done.stderr.decode(errors='replace').strip()[-2000:]}"


def run_module(module: str, *arguments: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Runs ``module``, which may import the user's code, in another process with the search path of this one and
    without GPUs. Its standard input is ``given``. Raises TimeoutExpired after ``LIMIT_S`` seconds."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    variables = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=given,
        capture_output=True,
        timeout=LIMIT_S,
        env={**os.environ, **variables},
        check=False,
    )
