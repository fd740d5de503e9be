"""Freezing writes the resolved config to the run directory once; agents and workers read only that file.

Freezing again is idempotent. Free keys (layout, steps, telemetry) may change, and the previous config is kept as
``config-NNN.yaml``; identity keys, which define what makes a run the same run, may not change after the first step that
is recorded. ``run.json`` records which code and which package versions a run was started with. A run may start from
another run or from imported weights, a directory next to the runs that holds one checkpoint and no optimizer state
(``run.fork``).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hpc_train.config.roles import configs_of_roles
from hpc_train.config.run_path import fork_source
from hpc_train.config.schema import Config
from hpc_train.config.secrets import file_mode, shown, shown_override
from hpc_train.config.values import runs_command
from hpc_train.errors import UserError
from hpc_train.run.code import FrozenCode, git
from hpc_train.run.directory import PIPELINE_SPLIT, RunDirectory, parsed_config
from hpc_train.run.event_log import EventLog
from hpc_train.run.file_lock import exclusive
from hpc_train.run.files import (
    concurrently,
    group_id,
    is_present,
    keep_others_from_writing,
    patiently,
    share,
    share_one,
    write_for_group,
    write_text,
)
from hpc_train.run.imported import PUBLISHED, check_start, imported_model, published
from hpc_train.run.lease import refuse_live
from hpc_train.run.owner import open_run
from hpc_train.run.processes import this_process
from hpc_train.run.record import RECORD
from hpc_train.units import counted
from hpc_train.version import __version__


def freeze(
    config: Config,
    run: RunDirectory,
    *,
    claim: bool = False,
    code: FrozenCode | None = None,
    overrides: Sequence[str] = (),
    options: Sequence[str] = (),
    plan: str | None = None,
    trust_owner: bool = False,
) -> None:
    """Writes ``config.yaml`` and ``run.json`` of ``run``.

    Args:
        claim: whether this process will work on the run; while it lives, no other process may freeze the run.
        code: the snapshot from which agents and workers start.
        overrides: the overrides on the command line, which ``run.json`` records.
        options: the options on the command line that choose config files, which it also records.
        plan: the text of ``plan.json``, if ``strategy=auto`` has chosen the layout of ``config``.
        trust_owner: whether the run, or the run to fork, may have files of other users.

    Raises:
        UserError: the run is live, an identity key differs from the frozen one, the run to fork does not exist, or one
            of them has files of a user whom the caller does not trust.
    """
    _set_umask(config)
    _freeze(config, run, claim, code, overrides, options, plan, trust_owner)


def freeze_all(
    runs: Sequence[tuple[Config, RunDirectory, Sequence[str], Sequence[str], str | None, bool]], code: FrozenCode | None
) -> Iterator[None]:
    """Freezes the runs of a sweep, several at a time, and claims them; yields after each.

    Args:
        runs: the arguments ``config``, ``run``, ``overrides``, ``options``, ``plan`` and ``trust_owner`` of ``freeze``.

    Raises:
        UserError: as ``freeze``.
    """
    _set_umask(runs[0][0])  # run.group has one value in a sweep
    return concurrently(lambda job: _freeze(job[0], job[1], True, code, *job[2:]), runs)


def _set_umask(config: Config) -> None:
    if config.run.group is not None:
        group_id(config.run.group)
        write_for_group()
    else:
        keep_others_from_writing()


def _freeze(
    config: Config,
    run: RunDirectory,
    claim: bool,
    code: FrozenCode | None,
    overrides: Sequence[str],
    options: Sequence[str],
    plan: str | None,
    trust_owner: bool,
) -> None:
    if config.launch.dry_run:
        raise UserError(
            "launch.dry_run=true is set in a config file",
            where="launch.dry_run",
            fix="pass launch.dry_run=true on the command line",
        )
    config, source = _resolve_fork(config, run)
    _check_access(run, source, trust_owner)  # before anything is written there
    try:
        run.create()
    except OSError as error:
        raise UserError(
            f"cannot create {error.filename or run.path}: {error.strerror}",
            where="run.root",
            fix="set run.root to a writable directory",
        ) from error
    _check_access(run, source, trust_owner)  # another user may have made the directory meanwhile
    with exclusive(run.path / ".locks" / "freeze"):  # two commands with one run.name must not both find the run free
        _check_can_freeze(config, run, source)
        record = run.record()
        facts: dict[str, Any] = {
            "run_id": record.get("run_id") or secrets.token_hex(4),
            "created": record.get("created") or time.time(),
            "code": project_version(code, Path.cwd()),
            "snapshot": None if code is None else asdict(code),
            "versions": environment_versions(),
            "claimed_by": this_process() if claim else {},
            "stop_requested": 0.0,
            "submissions": record.get("submissions", []),
            # the key of the user's code that runs instead of the trainer
            "own_code": "command" if runs_command(config) else "entry" if config.run.entry is not None else None,
            "overrides": [shown_override(override) for override in overrides],
            "options": [*options],
        }
        if source is not None:
            facts |= {"forked_from": str(source.path), PUBLISHED: published(source)}
        if plan is not None:
            write_text(run.plan, plan, file_mode(config))
        _write(config, run, facts)
        for role, role_config in configs_of_roles(config).items():
            _freeze(role_config, run.of_role(role), False, code, overrides, options, None, trust_owner)
        if config.run.group is not None:  # the group gets the run, the code, and the directories up to run.root
            if code is not None:
                share(Path(code.snapshot).parent, config.run.group)
            share(run.path, config.run.group)
            for parent in run.path.parents:
                if parent == Path(config.run.root) or not parent.is_relative_to(config.run.root):
                    break
                share_one(parent, config.run.group)


def check_freeze(config: Config, run: RunDirectory, trust_owner: bool = False) -> bool:
    """Raises UserError if ``freeze`` would; writes nothing.

    Returns:
        Whether the run has files of other users, whom the caller trusts: its agents need ``--trust-owner``.
    """
    unforked, source = _resolve_fork(config, run)
    is_foreign = _check_access(run, source, trust_owner)
    if config.run.group is not None:
        group_id(config.run.group)
    if is_present(run.path):
        _check_can_freeze(unforked, run, source)
    above = RunDirectory(run.path.parent)
    if not is_present(run.config) and is_present(above.config) and is_present(above.path / RECORD):
        raise UserError(  # such as a job of a sweep
            f"{above.path} is a run, so {run.path} cannot be created inside it",
            where="run.name",
            fix="another run.name, which neither is a run nor lies inside one",
        )
    return is_foreign


def _check_access(run: RunDirectory, source: RunDirectory | None, trust_owner: bool) -> bool:
    """Checks the owners of a run in which the caller trains, and of the run whose weights it starts from."""
    is_foreign = open_run(run, "train", trust_owner)
    return (source is not None and open_run(source, "train", trust_owner)) or is_foreign


def load(run: RunDirectory) -> Config:
    """Returns the frozen config of ``run``.

    Raises:
        UserError: the config does not exist, is damaged, was changed after the run was frozen, or is one of another
            version of hpc_train.
    """
    if not is_present(run.config):
        raise UserError(
            f"{run.path} is not a run directory: it has no config.yaml",
            where="the run directory",
            fix="create one with `python -m hpc_train freeze …`, which prints its path",
        )
    from omegaconf import DictConfig, OmegaConf  # workers get the config from the agent and need no OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from hpc_train.config.compose import converted, escaped
    from hpc_train.config.removed import without_removed
    from hpc_train.config.translate import translate

    data = _unchanged(run)
    try:
        values = parsed_config(data.decode())
        if isinstance(values, dict):
            values = without_removed(values, run.record())
        node = OmegaConf.create(escaped(values))
    except (ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise _damaged(run, f"{run.config} cannot be read: {error}") from error
    if not isinstance(node, DictConfig) or not node:
        raise _damaged(run, f"{run.config} is not a config")
    try:
        return converted(node)
    except (UserError, OmegaConfBaseException) as error:
        refusal = translate(error)
        if refusal is None or not refusal.what.endswith("is not a config key"):
            raise
        raise UserError(
            f"{run.config} was frozen by another version of hpc_train: here {refusal.what}",
            where=str(run.path),
            fix="use the version that froze it, or start a new run with another run.name",
        ) from error


SETTLE_S = 2.0  # a reader may see the config before a freeze and the record after it


def _unchanged(run: RunDirectory) -> bytes:
    """Returns the bytes of ``config.yaml``, after comparing them with ``run.json``.

    Raises:
        UserError: they differ, or there is no record.
    """
    until = time.monotonic() + SETTLE_S
    while True:
        record = run.record()
        data = patiently(run.config_bytes)
        if not record:
            raise _damaged(run, f"{run.path} has a config.yaml but no {RECORD}, which identifies the run")
        frozen = {record.get("config_hash"), record.get("next_config_hash")} - {None}
        if not frozen or _hash(data) in frozen:
            return data
        if time.monotonic() >= until:
            raise _damaged(run, f"{run.config} was changed after the run was frozen (its SHA-256 differs)")
        time.sleep(0.1)


def _damaged(run: RunDirectory, what: str) -> UserError:
    return UserError(
        what,
        where=str(run.path),
        fix="restore the file, or start a new run with another run.name (run.fork=NEW continues from the newest "
        "checkpoint). Settings are changed on the command line, with the same run.name",
    )


def _resolve_fork(config: Config, run: RunDirectory) -> tuple[Config, RunDirectory | None]:
    """Returns the config under the fork's own name, and the run it starts from (None without a fork)."""
    if config.run.fork is None:
        return config, None
    assert config.run.name is not None  # run_directory rejects a fork without a source
    source = RunDirectory(fork_source(config.run.root, config.run.name, config.run.fork, run.path))
    if not source.config.exists() and imported_model(source) is None:
        raise UserError(
            f"the run to fork does not exist: {source.path}",
            where="run.name",
            fix="set run.name to the name of an existing run",
        )
    if not any(source.checkpoints.glob("step-*")):
        raise UserError(
            f"{source.path} has no checkpoint yet",
            where="run.fork",
            fix="fork it after its first checkpoint, or start a new run with run.name=NEW",
        )
    check_start(config, source)
    return replace(config, run=replace(config.run, name=config.run.fork, fork=None)), source


def claim_run(run: RunDirectory) -> None:
    """Records that this process will work on the frozen ``run``; while it lives, no other process may.

    Raises:
        UserError: the run is live, perhaps because another command has claimed it a moment ago.
    """
    with exclusive(run.path / ".locks" / "freeze"):
        refuse_live(run)
        run.update_record(claimed_by=this_process(), stop_requested=0.0)


def _check_can_freeze(config: Config, run: RunDirectory, source: RunDirectory | None) -> None:
    refuse_live(run)
    if imported_model(run) is not None:
        raise UserError(
            f"{run.path} holds imported weights, not a run",
            where="run.name",
            fix=f"start a run from them with run.name={config.run.name} run.fork=NEW",
        )
    if not is_present(run.config):
        inside = len(list(run.path.glob("*/config.yaml")))
        if inside:
            runs = counted(inside, "run", "runs")
            raise UserError(
                f"{run.path} has {runs} of a sweep or group, which a run of this name would hide",
                where="run.name",
                fix=f"another run.name, such as run.name={run.path.name}/NAME",
            )
        recorded = run.record().get("config_hash")
        if has_begun(run) and recorded is not None and recorded != _hash(text_of(config).encode()):
            raise _damaged(run, f"{run.config} is missing, and the run was started with another config than this one")
        return
    if source is not None and run.record().get("forked_from") != str(source.path):
        raise UserError(
            f"{run.path} exists and was not forked from {source.path}", where="run.fork", fix="set another run.fork"
        )
    if has_begun(run):
        check_identity(load(run), config)


def has_begun(run: RunDirectory) -> bool:
    """Returns whether a checkpoint or the metrics of a step exist, which only a config of equal identity continues.

    Otherwise a first start that was refused may be corrected under the same name.
    """
    if is_present(run.checkpoints) and run.checkpoints.is_dir() and any(run.checkpoints.iterdir()):
        return True
    return next(run.read_all_metrics(), None) is not None


def _write(config: Config, run: RunDirectory, record: dict[str, Any]) -> None:
    """Writes ``config.yaml`` and ``run.json``.

    The record comes first and names both configs until the new one is written, so that ``load`` accepts what an
    interrupted freeze leaves.
    """
    text = text_of(config)
    after = _hash(text.encode())
    if not is_present(run.config):
        run.update_record(**record, config_hash=after, next_config_hash=None)
        write_text(run.config, text, file_mode(config))
        return
    before = config_hash(run)
    if before != after:
        different = changes(flat(load(run)), flat(config))
        if not has_begun(run):
            (run.path / PIPELINE_SPLIT).unlink(missing_ok=True)  # the tokenizer of another model
        number = len(list(run.path.glob("config-*.yaml")))
        shutil.copy(run.config, run.path / f"config-{number:03d}.yaml")
        if different:  # and not only the keys of another version
            # The file name holds host and pid, so that two submitters never append to one file. The event belongs to
            # the attempt that follows: as one of the last attempt, it would prolong that one until now.
            EventLog.open(run, f"submitter-{os.uname().nodename}-{os.getpid()}", run.newest_attempt() + 1).write(
                "warning", message="continues with changed settings: " + "; ".join(different)
            )
        run.update_record(config_hash=before, next_config_hash=after)
        write_text(run.config, text, file_mode(config))
    run.update_record(**record, config_hash=after, next_config_hash=None)


def config_hash(run: RunDirectory) -> str:
    """Returns the SHA-256 of the frozen config, which ranks compare and which names a configuration."""
    return _hash(run.config_bytes())


def _hash(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()


_FORM: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 120}


def text_of(config: Config) -> str:
    """Returns the frozen form: plain YAML without interpolations. Equal configs give equal text."""
    return "".join(_yaml(pickle.dumps({name: values})) for name, values in asdict(config).items())


@lru_cache(maxsize=256)
def _yaml(group: bytes) -> str:
    """Returns a pickled group as YAML. Most runs of a sweep share most groups, and most keys of the other groups."""
    ((name, values),) = pickle.loads(group).items()
    if not isinstance(values, dict) or not values:
        return yaml.safe_dump({name: values}, **_FORM)
    return f"{name}:\n" + "".join(_yaml_of_key(pickle.dumps(item)) for item in values.items())


@lru_cache(maxsize=4096)
def _yaml_of_key(item: bytes) -> str:
    key, value = pickle.loads(item)
    return yaml.safe_dump({"group": {key: value}}, **_FORM).partition("\n")[2]


VERSION_S = 10.0  # how long git may take
PACKAGES = ("hpc_train", "torch", "hydra-core", "omegaconf", "submitit", "numpy", "wandb")


def project_version(code: FrozenCode | None, directory: Path) -> dict[str, Any]:
    """Returns the git commit of the user's project, whether its tracked files differ from it, and its work tree.

    The project is the work tree that ``code`` was copied from, or without a copy the one that holds ``directory``. All
    three are None outside of git.
    """
    if code is None:
        return _version_of_tree(directory)
    return {"commit": code.commit, "dirty": code.diff is not None, "work_tree": code.work_tree}


@cache
def _version_of_tree(directory: Path) -> dict[str, Any]:
    """Returns the version of a work tree; cached per process, since a sweep freezes a thousand runs."""
    ask = partial(git, directory, timeout_s=VERSION_S)
    work_tree = ask("rev-parse", "--show-toplevel")
    if not work_tree:
        return {"commit": None, "dirty": None, "work_tree": None}
    status = ask("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": (ask("rev-parse", "--verify", "HEAD") or "").strip() or None,
        "dirty": None if status is None else bool(status),
        "work_tree": work_tree.strip(),
    }


@cache
def environment_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages from their metadata, without importing them.

    If hpc_train runs from a git checkout, its version ends with the commit, as in ``0.9.0+35e5daae``.
    """
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / ".git").exists():
        commit = _version_of_tree(checkout)["commit"]
        versions["hpc_train"] = f"{__version__}+{commit[:8]}" if commit else __version__
    return versions


# keys of optim that decide how an update is computed and stored, but not its value
_HOW_OPTIMIZED = ("moments", "elementwise", "state_per_parameter", "in_backward")


def identity(config: Config) -> dict[str, Any]:
    """Returns the identity keys, flat: model, data, global batch, optimizer, seed, reproducibility, z-loss, and the
    user's function. A command counts only as set or not, since its arguments may contain the length of training.
    """
    nested = {
        "model": asdict(config.model),
        "data": {key: value for key, value in asdict(config.data).items() if key != "decoder"},  # only rounds pixels
        "optim": {key: value for key, value in asdict(config.optim).items() if key not in _HOW_OPTIMIZED},
        "batch": {"global_size": config.batch.global_size, "logical_micro_batches": config.batch.logical_micro_batches},
        "train": {key: getattr(config.train, key) for key in ("seed", "reproducible", "z_loss")},
        "run": {"entry": config.run.entry, "command": "set" if runs_command(config) else None},
    }
    return dict(flatten(nested))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns ``key: old -> new`` for each key that differs, without the values of ``cluster.env``."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {shown(key, before.get(key, 'absent'))} -> {shown(key, after.get(key, 'absent'))}"
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]


def check_identity(old: Config, new: Config) -> None:
    """Raises UserError if an identity key of ``new`` differs from the run's frozen config ``old``."""
    different = changes(identity(old), identity(new))
    if different:
        raise UserError(
            f"the run {new.run.name} was started with a different configuration: " + "; ".join(different),
            where=", ".join(change.split(":")[0] for change in different),
            fix="use the old values to continue this run, run.fork=NEWNAME to start a new run from its newest "
            "checkpoint, or another run.name to begin at step 0",
        )


def flat(config: Config) -> dict[str, Any]:
    """Returns all keys of a config as dotted names."""
    return dict(flatten(asdict(config)))


def flatten(nested: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings with their dotted names; an empty mapping is a value."""
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value
