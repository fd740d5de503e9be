"""Evaluates a checkpoint of a run on any validation data and under any layout; imports torch in the workers only.

A group that the command line chooses, such as ``data=text`` or ``+strategy=dp``, replaces the group of the run. All
other groups keep the values of the run, except for ``cluster``: an evaluation uses the workers of the machine or the
Slurm step that it is started on. ``key=value`` changes a key of the result, and ``~key`` deletes it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hpc_train.bench.request import WorkerRequest, write_result
from hpc_train.config.arguments import expand, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import escaped, typed
from hpc_train.config.conf_files import PRIMARY
from hpc_train.config.evaluation import MAIN
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, nearest
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag

OF_RUN = (
    *("model", "strategy", "optim", "precision", "batch", "data", "train", "checkpoint", "elastic"),
    *("metrics", "eval_sets"),
)
# Settings that only affect backward passes, and may not fit the layout and the batch of an evaluation.
WITHOUT_BACKWARD = {
    "optim.in_backward": False,
    "train.activation_checkpointing": "none",
    "train.activation_offload": "none",
    "train.cuda_graphs": False,
    "train.reproducible": None,
    "precision.weights": "fp32",
}
TRAINING_ONLY = re.compile(r"[+~]*(?:(?:optim|checkpoint|hooks|launch)[=.]|train\.(?:steps|epochs)=)")


def evaluation_config(run: Config, arguments: Sequence[str]) -> Config:
    """Returns the config under which a checkpoint of ``run`` is evaluated. ``arguments`` are overrides, and Hydra's
    ``-cd``. Raises UserError if the arguments are invalid, describe a sweep, or choose another model, and
    hydra.errors.HydraException or OmegaConfBaseException for an unknown group, option or key, or a wrong type."""
    line = CommandLine.parse(with_right_plus(arguments))
    _check(line)
    overrides = OverridesParser.create().parse_overrides(list(line.overrides))
    choices = [override for override in overrides if "." not in override.key_or_group]
    with line.composer() as compose:
        node = compose([choice.input_line or "" for choice in choices])

    groups = {field.name for field in fields(Config)} | {"hydra"}
    chosen = set()
    for choice in choices:
        group = re.split(r"[./]", choice.package or choice.key_or_group)[0]  # eval_sets of +data@eval_sets.a=text
        if group not in groups:  # such as an experiment, whose keys the groups of the run would replace
            raise UserError(
                f"{choice.input_line} has no effect: {group} is not a group of the config, and the settings of "
                "the run are used",
                where="the command line",
                fix="give the settings of that file themselves, e.g. precision=bf16 batch.micro_size=2",
            )
        chosen.add(group)

    values = OmegaConf.to_container(node)
    assert isinstance(values, dict)
    settings = asdict(run)
    node = OmegaConf.create(values | {group: escaped(settings[group]) for group in OF_RUN if group not in chosen})
    for key, value in WITHOUT_BACKWARD.items():
        OmegaConf.update(node, key, value)
    for override in overrides:
        if "." in override.key_or_group:
            _apply(node, override)
    return typed(node)


def _check(line: CommandLine) -> None:
    if line.multirun or len(expand(line.overrides)) > 1:
        raise UserError(
            "one checkpoint is used under one config, but the overrides describe a sweep",
            where="the command line",
            fix="give each key one value and drop -m",
        )
    if (line.config_name, line.config_path) != (PRIMARY, None):
        raise UserError(
            "another primary config has no effect: the settings of the run are used",
            where="-cn, -cp",
            fix="give the settings that differ as overrides, e.g. precision=bf16",
        )
    for override in line.overrides:
        if re.match(r"[+~]*model(?![^.=])", override):
            raise UserError(
                f"{override} changes the model, but a checkpoint fits only the model that was trained",
                where="the command line",
                fix="leave it out; the model of the run is used",
            )
        if TRAINING_ONLY.match(override):
            raise UserError(
                f"{override} has no effect: it is a setting of training, and the checkpoint is already trained",
                where="the command line",
                fix="leave it out; data, strategy, batch and precision can be changed",
            )


def _apply(node: DictConfig, override: Override) -> None:
    """Deletes a key, or sets one that exists or that a ``+`` adds. Raises UserError if the config has no such key, or a
    deletion names another value."""
    key = override.key_or_group
    value = override.value()
    adds = bool(override.is_add() or override.is_force_add())
    before = OmegaConf.select(node, key, default=node)
    group, _, name = key.rpartition(".")
    if before is node and not adds:
        names = sorted(map(str, node.get(key.partition(".")[0], node)))
        raise UserError(f"there is no key {key}", where="the command line", fix=nearest(name, names))
    if not override.is_delete():
        OmegaConf.update(node, key, value, merge=True, force_add=adds)
        return
    if value not in (None, before):
        raise UserError(f"{key} is {before}, not {value}", where="the command line", fix=f"~{key}")
    del OmegaConf.select(node, group)[name]


@dataclass(frozen=True)
class EvaluationRequest(WorkerRequest):
    """Requests an evaluation of the checkpoint of ``step`` in the directory ``checkpoint``. ``weights`` is the name of
    a hook whose weights to use, such as ema; None uses those of the model."""

    checkpoint: str
    step: int
    weights: str | None


def evaluate_checkpoint(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Evaluates the checkpoint that the request names as rank ``spec.rank``; rank 0 writes the result. Raises UserError
    if the config does not fit the data, or the checkpoint is damaged, does not fit the model or has no weights of the
    hook."""
    from hpc_train.checkpoint.restoring import load_weights, open_weights
    from hpc_train.checkpoint.store import Checkpoint
    from hpc_train.models.hf.lora import check_base
    from hpc_train.parallel.build import build_engine
    from hpc_train.parallel.pipeline.balance import plan_split
    from hpc_train.train.evaluation import build_evaluation
    from hpc_train.train.guard import check_evaluation_padding
    from hpc_train.train.processes import answer_requests, join, leave
    from hpc_train.train.step import Control

    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    request = EvaluationRequest.read(run)
    heartbeat = Heartbeat.of(spec.heartbeat)
    answer_requests(spec)
    mesh = join(spec, config)
    evaluation = build_evaluation(config, mesh, spec.ranks_on_cores)
    plan = plan_split(config, mesh, evaluation.feeds[MAIN].dataset)
    source = open_weights(Checkpoint(request.step, Path(request.checkpoint)), mesh)
    manifest = source.manifest
    check_base(config.model, manifest.extra, request.checkpoint)
    engine = build_engine(config, mesh, plan.layers if plan is not None else None, source.parameters)
    load_weights(source, engine, mesh, request.weights)
    check_evaluation_padding(config, mesh, engine, evaluation)
    began = time.monotonic()
    with heartbeat.during(Phase.EVALUATION, manifest.step):
        metrics = evaluation.run(engine, Control(mesh), stop)
    if metrics is not None and mesh.rank == 0:
        result = {
            "metrics": {name: value for name, value in metrics.items() if value is not None},
            "samples": {name or "validation": len(feed.dataset) for name, feed in evaluation.feeds.items()},
            "data": config.data.kind,
            "precision": config.precision.name,
            "layout": str(mesh.layout),
            "device": mesh.device.type,
            "seconds": time.monotonic() - began,
        }
        write_result(run, result)
    leave(mesh)
    return Exit.STOPPED if metrics is None else Exit.DONE
