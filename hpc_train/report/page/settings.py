"""Shows what a run trains, what its config changes compared with its parent, and the commands that reproduce it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.config.run_path import relative
from hpc_train.config.secrets import shown
from hpc_train.layout.sizes import parameter_count
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, commands, paragraphs, section, table
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import flatten
from hpc_train.runs.comparison import UNCOMPARED

SIZES = ("dim", "n_layers", "n_heads", "vocab_size", "image_size", "patch_size", "sequence_length", "n_classes")


def trained(facts: RunFacts) -> Html | None:
    """Returns the section that describes what the run trains: model, data, batch, optimizer, length and code."""
    config = facts.config
    if not config:
        return None
    optimizer = _group(config, "optim")
    train = _group(config, "train")
    steps = None
    if not train.get("epochs"):
        steps = train.get("steps")
    parameters = None
    with suppress(Exception):  # a config of another version, or of a model that must be built to be counted
        parameters = parameter_count(facts.handle.config.model)
    project = _project(facts.record)
    commit = str(project.get("commit") or "")[:12]
    if commit and (project.get("diff") or project.get("dirty")):
        commit += ", with uncommitted changes"
    elif project and not commit:
        commit = "none yet"
    return section(
        "What it trains",
        block(
            "facts",
            (
                ("model", _described(_group(config, "model"))),
                ("parameters", None if parameters is None else f"{parameters:,}"),
                ("data", _described(_group(config, "data"))),
                ("images decoded by", facts.record.get("image_decoder")),
                ("samples per optimizer step", _group(config, "batch").get("global_size")),
                ("optimizer", optimizer.get("_target_") or optimizer.get("name")),
                ("learning rate", optimizer.get("lr")),
                ("weight decay", optimizer.get("weight_decay")),
                ("epochs", train.get("epochs")),
                ("steps", steps),
                ("seed", train.get("seed")),
                ("precision", _group(config, "precision").get("name")),
                ("commit", commit),
            ),
        ),
    )


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _described(group: Mapping[str, Any]) -> str:
    """Returns the class or kind of a model or data set, and its sizes, place and arguments."""
    words = [str(group.get("_target_") or group.get("name_or_path") or group.get("kind") or group.get("name") or "")]
    if group.get("path"):
        words.append(str(group["path"]))
    words += [f"{key} {group[key]}" for key in SIZES if group.get(key) is not None]
    words += [f"{key} {value}" for key, value in _group(group, "args").items() if isinstance(value, str | int | float)]
    return ", ".join(words)


def settings(facts: RunFacts) -> Html | None:
    """Returns the section with the differences from the parent of a fork and from earlier submissions, or None."""
    parts = []
    parent = facts.record.get("forked_from")
    if parent:
        before = RunDirectory(Path(parent)).plain_config()
        parts.append(_differences(f"the run {Path(parent).name}", before, facts.config))
    changed = [
        event.message
        for event in facts.of_event("warning")
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
        return block("paragraph", f"The config equals that of {parent}, from which the run was forked.")
    return table(f"Compared with {parent}, from which it was forked", ("key", "before", "now"), rows)


def _value(key: str, values: Mapping[str, Any]) -> str:
    return str(shown(key, values[key])) if key in values else "absent"


def reproduce(facts: RunFacts) -> Html:
    record = facts.record
    run = facts.handle.run
    lines = training_again(record)
    lines.append(f"python -m hpc_train resume {shlex.quote(relative(run.path))}   continues this run itself")
    notes = [f"The whole config is in {relative(run.config)} (SHA-256 {record.get('config_hash')})."]
    project = _project(record)
    if project.get("dirty") and not project.get("diff"):
        notes.append("The work tree had changes that are not in the commit.")
    if project.get("snapshot") and not project.get("commit"):
        copy = relative(Path(project["snapshot"]))
        notes.append(f"The code had no commit yet; the run started from the copy in {copy}.")
    return section(
        "Reproduce",
        commands(lines, "commands that reproduce the run"),
        paragraphs(notes),
        block("facts", (record.get("versions") or {}).items()),
    )


def training_again(record: Mapping[str, Any]) -> list[str]:
    """Returns the commands that get the code of a run with this ``record``, and that start it under another name."""
    project = _project(record)
    lines = []
    if project:
        lines.append(f"cd {shlex.quote(project['work_tree'])}")
    if project.get("commit"):
        lines.append(f"git checkout {project['commit']}   the commit that it ran from")
    if project.get("diff"):
        lines.append(f"git apply {shlex.quote(project['diff'])}   uncommitted changes; needs a clean work tree")
    if project.get("paths"):
        directory = os.path.relpath(project["paths"][0], project["snapshot"])
        if directory != ".":
            lines.append(f"cd {shlex.quote(directory)}")
    if record.get("overrides") is not None:
        overrides = [text for text in record["overrides"] if not text.startswith(("run.name=", "run.fork="))]
        names = ["run.name=NEW"]
        parent = record.get("forked_from")
        if parent is not None:  # a fork starts from its parent again
            names = [f"run.name={Path(parent).name}", "run.fork=NEW"]
        lines.append(shlex.join(["python", "-m", "hpc_train", *record.get("options", []), *names, *overrides]))
    return lines


def _project(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns commit, diff and work tree of the user's project: from the snapshot, or without one from git.

    In records of earlier versions, a commit without a work tree is the commit of hpc_train, so it is left out.
    """
    code: Mapping[str, Any] = record.get("snapshot") or record.get("code") or {}
    return code if code.get("work_tree") else {}
