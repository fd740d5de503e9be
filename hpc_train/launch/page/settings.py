"""Shows what the config of a run changes compared with that of its parent, and the commands that reproduce the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.config.identity import flatten
from hpc_train.config.secrets import shown
from hpc_train.launch.diagnosis import shown as shown_path
from hpc_train.launch.lookup import RunHandle
from hpc_train.launch.page.facts import RunFacts
from hpc_train.launch.page.markup import Html, commands, facts, listed, section, table, tag
from hpc_train.run.comparison import UNCOMPARED
from hpc_train.run.directory import RunDirectory


def settings(of_run: RunFacts) -> Html | None:
    """Returns the section with the differences to the parent of a fork, and to earlier submissions; None without."""
    parts = []
    parent = of_run.record.get("forked_from")
    if parent:
        before = RunHandle(RunDirectory(Path(parent)), 0, {}).plain_config
        parts.append(_differences(f"the run {Path(parent).name}", before, of_run.config))
    changed = [
        event["message"]
        for event in of_run.of_event("warning")
        if str(event.get("message", "")).startswith(("continues with changed settings", "continues with other code"))
    ]
    if changed:
        parts.append(listed(changed))
    return section("Changed settings", *parts) if parts else None


def _differences(parent: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Html:
    if not before:
        return tag("p", f"It was forked from {parent}, whose config cannot be read.")
    old, new = dict(flatten(before)), dict(flatten(after))
    keys = [key for key in {**old, **new} if not key.startswith(UNCOMPARED)]
    rows = [[key, _value(key, old), _value(key, new)] for key in keys if old.get(key, "") != new.get(key, "")]
    if not rows:
        return tag("p", f"The config is that of {parent}, from which the run was forked.")
    return table(f"Compared with {parent}, from which it was forked", ("key", "before", "now"), rows)


def _value(key: str, values: Mapping[str, Any]) -> str:
    return str(shown(key, values[key])) if key in values else "absent"


def reproduce(of_run: RunFacts) -> Html:
    """Returns the section with the commands that start the same training again."""
    record = of_run.record
    code, snapshot = record.get("code") or {}, record.get("snapshot") or {}
    lines = training_again(record)
    where = shown_path(of_run.run.path)
    lines += [f"python -m hpc_train resume {shlex.quote(where)}   continues this run itself"]
    versions = ((name, version) for name, version in (record.get("versions") or {}).items())
    notes = [f"The whole config is in {shown_path(of_run.run.config)} (SHA-256 {record.get('config_hash')})."]
    notes += ["The work tree had changes that are not in the commit."] * bool(
        code.get("dirty") and not snapshot.get("diff")
    )
    return section(
        "Reproduce",
        commands(lines, "commands that reproduce the run"),
        *(tag("p", note) for note in notes),
        facts(versions),
    )


def training_again(record: Mapping[str, Any]) -> list[str]:
    """Returns the commands that get the code of a run with this ``record``, and that start it under another name."""
    code, snapshot = record.get("code") or {}, record.get("snapshot") or {}
    lines = []
    if code.get("commit"):
        tree = snapshot.get("work_tree")
        lines += [f"cd {shlex.quote(tree)}"] if tree else []
        lines += [f"git checkout {code['commit']}   the commit that it ran from"]
        if snapshot.get("diff"):
            lines.append(f"git apply {shlex.quote(snapshot['diff'])}   changes that were not committed")
    return lines + ([_training(record)] if record.get("overrides") is not None else [])


def _training(record: Mapping[str, Any]) -> str:
    """Returns the command of a run under another name; a fork starts from its parent again."""
    given = [each for each in record["overrides"] if not each.startswith(("run.name=", "run.fork="))]
    parent = record.get("forked_from")
    names = ["run.name=NEW"] if parent is None else [f"run.name={Path(parent).name}", "run.fork=NEW"]
    return shlex.join(["python", "-m", "hpc_train", *names, *given])
