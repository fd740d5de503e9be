"""Checks a run of the user's own code before it is submitted: a function in the workers (``run.entry``) or a command
that knows nothing of hpc_train (``run.command``).

Both use the groups ``cluster``, ``elastic``, ``launch`` and ``run``, and ``strategy`` for the number and the
arrangement of ranks. A function gets the whole config, so the settings of the model, the data and the optimizer are
those that it reads. What only the trainer implements is refused, and for a command also what nothing could read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpc_train.config.import_path import check_call
from hpc_train.config.schema import Config
from hpc_train.config.values import command_words, runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout

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
