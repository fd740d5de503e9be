"""Shows what a run trains, what its config changes compared with its parent, and the commands that reproduce it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.config.identity import flatten
from hpc_train.config.secrets import shown
from hpc_train.layout.sizes import parameter_count
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, commands, paragraphs, section, table
from hpc_train.run.directory import RunDirectory
from hpc_train.runs.comparison import UNCOMPARED
from hpc_train.runs.diagnosis import shown as shown_path
from hpc_train.runs.lookup import RunHandle

SIZES = ("dim", "n_layers", "n_heads", "vocab_size", "image_size", "patch_size", "sequence_length", "n_classes")


def trained(of_run: RunFacts) -> Html | None:
    """Returns the section that says what the run trains: model, data, batch, optimizer, length and code."""
    config = of_run.config
    if not config:
        return None
    optimizer = _group(config, "optim")
    train = _group(config, "train")
    project = _project(of_run.record)
    commit = str(project.get("commit") or "")
    changed = project.get("diff") or project.get("dirty")
    return section(
        "What it trains",
        block(
            "facts",
            (
                ("model", _described(_group(config, "model"))),
                ("parameters", _parameters(of_run)),
                ("data", _described(_group(config, "data"))),
                ("samples per optimizer step", _group(config, "batch").get("global_size")),
                ("optimizer", optimizer.get("_target_") or optimizer.get("name")),
                ("learning rate", optimizer.get("lr")),
                ("weight decay", optimizer.get("weight_decay")),
                ("epochs", train.get("epochs")),
                ("steps", None if train.get("epochs") else train.get("steps")),
                ("seed", train.get("seed")),
                ("precision", _group(config, "precision").get("name")),
                ("commit", f"{commit[:12]}, with uncommitted changes" if commit and changed else commit[:12]),
            ),
        ),
    )


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _described(group: Mapping[str, Any]) -> str:
    """Returns the class or kind of a model or data set, and its sizes or place."""
    name = group.get("_target_") or group.get("name_or_path") or group.get("kind") or group.get("name") or ""
    sizes = [f"{key} {group[key]}" for key in SIZES if group.get(key) is not None]
    place = [str(group["path"])] if group.get("path") else []
    return ", ".join([str(name), *place, *sizes])


def _parameters(of_run: RunFacts) -> str | None:
    """Returns the number of parameters of a model whose config tells it."""
    with suppress(Exception):  # a config of another version, or of a model that must be built to be counted
        count = parameter_count(of_run.found.config.model)
        return None if count is None else f"{count:,}"
    return None


def settings(of_run: RunFacts) -> Html | None:
    """Returns the section with the differences to the parent of a fork, and to earlier submissions; None without."""
    parts = []
    parent = of_run.record.get("forked_from")
    if parent:
        before = RunHandle(RunDirectory(Path(parent)), 0, {}).plain_config
        parts.append(_differences(f"the run {Path(parent).name}", before, of_run.config))
    changed = [
        event.message
        for event in of_run.of_event("warning")
        if event.message.startswith(("continues with changed settings", "continues with other code"))
    ]
    if changed:
        parts.append(block("bullets", changed))
    return section("Changed settings", *parts) if parts else None


def _differences(parent: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Html:
    if not before:
        return block("paragraph", f"It was forked from {parent}, whose config cannot be read.")
    old, new = dict(flatten(before)), dict(flatten(after))
    keys = [key for key in {**old, **new} if not key.startswith(UNCOMPARED)]
    rows = [[key, _value(key, old), _value(key, new)] for key in keys if old.get(key, "") != new.get(key, "")]
    if not rows:
        return block("paragraph", f"The config is that of {parent}, from which the run was forked.")
    return table(f"Compared with {parent}, from which it was forked", ("key", "before", "now"), rows)


def _value(key: str, values: Mapping[str, Any]) -> str:
    return str(shown(key, values[key])) if key in values else "absent"


def reproduce(of_run: RunFacts) -> Html:
    """Returns the section with the commands that start the same training again."""
    record = of_run.record
    lines = training_again(record)
    where = shown_path(of_run.run.path)
    lines += [f"python -m hpc_train resume {shlex.quote(where)}   continues this run itself"]
    versions = ((name, version) for name, version in (record.get("versions") or {}).items())
    notes = [f"The whole config is in {shown_path(of_run.run.config)} (SHA-256 {record.get('config_hash')})."]
    project = _project(record)
    if project.get("dirty") and not project.get("diff"):
        notes.append("The work tree had changes that are not in the commit.")
    return section(
        "Reproduce",
        commands(lines, "commands that reproduce the run"),
        paragraphs(notes),
        block("facts", versions),
    )


def training_again(record: Mapping[str, Any]) -> list[str]:
    """Returns the commands that get the code of a run with this ``record``, and that start it under another name."""
    project = _project(record)
    lines = []
    if project.get("commit"):
        lines.append(f"cd {shlex.quote(project['work_tree'])}")
        lines.append(f"git checkout {project['commit']}   the commit that it ran from")
    if project.get("diff"):
        lines.append(f"git apply {shlex.quote(project['diff'])}   changes that were not committed")
    if record.get("overrides") is not None:
        lines.append(_training(record))
    return lines


def _project(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns commit, diff and work tree of the user's project: from the snapshot, or without one as git told them.

    Records of earlier versions have no work tree beside the commit: theirs is the commit of hpc_train.
    """
    snapshot = record.get("snapshot")
    if snapshot:
        return snapshot
    code = record.get("code") or {}
    return code if code.get("work_tree") else {}


def _training(record: Mapping[str, Any]) -> str:
    """Returns the command of a run under another name; a fork starts from its parent again."""
    given = [each for each in record["overrides"] if not each.startswith(("run.name=", "run.fork="))]
    parent = record.get("forked_from")
    names = ["run.name=NEW"] if parent is None else [f"run.name={Path(parent).name}", "run.fork=NEW"]
    return shlex.join(["python", "-m", "hpc_train", *names, *given])
