"""Translates the errors of Hydra and OmegaConf into ``UserError``: what is wrong, where it was set and the fix."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hpc_train.config.conf_files import PRIMARY, config_groups
from hpc_train.config.removed import removed_value, replacement_of
from hpc_train.config.run_path import NAME, invalid_name, relative
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import keys
from hpc_train.config.settings import ABSENT, default_of
from hpc_train.errors import UserError, closest, nearest

if TYPE_CHECKING:
    from hydra.errors import OverrideParseException


def translate(error: BaseException) -> UserError | None:
    """Returns the ``UserError`` for ``error``; None if the user did not cause it.

    OmegaConf drops the cause of its errors, so a ``UserError`` that a resolver raised is found as the context.
    """
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException  # only after an error

    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for link in chain:
        if isinstance(link, UserError):
            return link
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return _of_python(error)
    for link in chain:
        if isinstance(link, MissingConfigException) and link.options:
            group, _, option = str(link.missing_cfg_file or "").rpartition("/")
            return _unknown_option(group, option, list(link.options))
        if isinstance(link, OmegaConfBaseException):
            deletes = "does not support deletion" in (link.msg or "")  # a key of a schema
            return of_deletion(str(link.full_key)) if deletes else _of_omegaconf(link, str(error))
    if isinstance(error, OverrideParseException):
        return _of_override(error)
    return _of_hydra(str(error).strip())


def _of_hydra(text: str) -> UserError:
    where = "the command line or conf/"
    if match := re.match(r"Multiple values for (\S+)\. To override a value use 'override (\S+): (\S+)'", text):
        what = f"{match[1]} is chosen twice: the config already chooses a file of this group"
        group = match[2]
        name = match[3]
        fix = f"{group}={name} without +; in the defaults of a file: override {group}: {name}"
        return UserError(what, where=where, fix=fix)
    if match := re.match(r"Could not override '(\S+)'\. No match in the defaults list.*\s.*use (\+\S+)", text):
        return UserError(f"{match[1]} has no choice that could be overridden", where=match[1], fix=match[2])
    if match := re.match(r"Ambiguous value for argument '(.*)'", text):
        return of_several_values([match[1]])
    if match := re.search(r"Either remove \+ prefix: '(.*)'", text):
        key = match[1].partition("=")[0]
        return UserError(f"+{key} adds a key that exists already", where=key, fix=f"{match[1]} without +")
    if match := re.match(r"Could not delete from config\. (?:The value of )?'(.*?)' (is|does not exist)", text):
        return of_deletion(match[1], exists=match[2] == "is")
    if match := re.match(r"Could not delete '(.*)'\. No match in the defaults list", text):
        what = f"~{match[1]} removes the choice of a file that nothing in this config chooses"
        return UserError(what, where=match[1], fix=f"remove ~{match[1]} from the command line")
    if match := re.match(r"Cannot find primary config '(.+?)'", text):
        fix = f"-cd DIR -cn {match[1]} with a file DIR/{match[1]}.yaml; `python -m hpc_train help` explains both"
        return UserError(f"there is no config file {match[1]}.yaml", where="--config-name", fix=fix)
    return _of_defaults(text) or UserError(text, where=where, fix="python -m hpc_train --help lists groups and keys")


def of_several_values(overrides: Sequence[str]) -> UserError:
    """Returns the error for ``overrides`` that list several values without ``-m``."""
    key, _, values = overrides[0].partition("=")
    fix = f"add -m for a sweep, or give one value; a list is {key}=[{values}]"
    if re.fullmatch(r"0,\d+", values):
        fix = f"{key}={values.replace(',', '.')}, if the comma is a decimal one; else {fix}"
    verb = "lists" if len(overrides) == 1 else "list"
    return UserError(f"{' and '.join(overrides)} {verb} several values", where=key, fix=fix)


def _of_defaults(text: str) -> UserError | None:
    """Returns the error of a Defaults List, or of the class that a setting of Hydra names; None for others."""
    if match := re.match(r"Could not override '(\S+)@(\S+)'\.\s+Did you mean .*\s.*use \+\S+=(\S+)", text):
        group, package, name = match.groups()
        adds = package.startswith(("eval_sets.", "data.sources."))
        fix = f"{'+' if adds else ''}{group}{f'@{package}' if adds else ''}={name}"
        what = f"{group}@{package} has no choice that could be overridden"
        return UserError(what, where=f"{group}@{package}", fix=fix)
    if match := re.match(r"In '?(.+?)'?: Override '(\S+) : (.+)' is defined before '(.+)'", text):
        file, group, name, later = match.groups()
        what = f"the Defaults List of {file} has `override {group}: {name}` before `{later}`"
        return UserError(what, where=f"{file}.yaml", fix="move the lines with override to the end of the list")
    if match := re.match(r"In '(.+)': Could not (?:load|find) '(.+)'\.", text):
        group, _, option = match[2].rpartition("/")
        options = config_groups().get(group)
        if match[1] == PRIMARY and options is not None:  # a list on the command line: +metrics=[f1,acc]
            return _unknown_option(group, option, options)
        fix = "a file of that directory, or -cd DIR instead of -cp DIR, which adds the directory to conf/"
        return UserError(
            f"{match[1]}.yaml includes {match[2]}, which does not exist", where=f"{match[1]}.yaml", fix=fix
        )
    if match := re.match(r"Error (?:locating|loading) '?(?:target )?'?([\w.]+)'.*full_key: (\S+)", text, re.DOTALL):
        fix = f"{match[2]}._target_=package.module.Name of a class that can be imported here"
        return UserError(f"{match[1]} cannot be imported", where=match[2], fix=fix)
    return None


def of_deletion(key: str, exists: bool = True) -> UserError:
    """Returns the error for ``~key``: every config has the keys of the schema. ``exists`` states whether the composed
    config has the key."""
    if not exists and default_of(key) is ABSENT:  # Hydra takes null for a missing key
        what = f"~{key} removes a key that does not exist"
        return UserError(what, where=key, fix=f"remove ~{key} from the command line")
    other = f"set another one with {key}=VALUE"
    if "." not in key:
        other = f"choose another file with {key}=NAME" if key in config_groups() else f"set {key}.KEY=VALUE"
    fix = f"remove ~{key} to keep the value of the config, or {other}"
    return UserError(f"{key} cannot be removed: it is a key that every config has", where=key, fix=fix)


def _of_override(error: OverrideParseException) -> UserError:
    override = str(error.override)
    key, _, value = override.partition("=")
    fix = "python -m hpc_train --help lists groups and keys"
    if "=" not in override:
        fix = f"KEY=VALUE, or 'KEY=\"VALUE\"' if the value has spaces; {fix}"
        return UserError(f"{override!r} is not an override: it has no '='", where=override, fix=fix)
    is_name = key in ("run.name", "run.fork")
    if is_name and not NAME.fullmatch(value):
        return invalid_name(value, key)
    if not re.fullmatch(r"[+~]*[\w$/@:-]+(\.[\w$/@:-]+)*", key):
        fix = f"a key has letters, digits, dots and underscores, as in optim.lr=VALUE; {fix}"
        return UserError(f"{key!r} is not a key of the config", where=override, fix=fix)
    # the first kind of bracket that the value opens more often than it closes
    bracket = next((pair[0] for pair in ("[]", "{}", "()") if value.count(pair[0]) > value.count(pair[1])), None)
    if bracket is not None:
        fix = f"close the {bracket}, or put a value with special characters in quotes: '{key}=\"...\"'"
    elif (quote := next((mark for mark in "'\"" if value.count(mark) % 2), None)) is not None:
        fix = f"close the quote {quote}, which the shell removes unless other quotes are around it: '{key}=\"...\"'"
    elif isinstance(default_of(key.lstrip("+")), dict):
        fix = f"+{key.lstrip('+')}.NAME=VALUE"
    elif value.startswith("="):
        fix = f"{key}={value.lstrip('= ')}, with one equals sign"
    elif re.fullmatch(r"\([^()]*\)", value.strip()):
        fix = f"a list is {key}=[{value.strip()[1:-1]}]"
    elif re.search(r"^,|,\s*,|,\s*$", value.strip()):
        fix = f"a comma only between two values: {key}={','.join(part for part in value.split(',') if part.strip())}"
    elif value.strip() and value.strip()[0] not in "'\"":
        quoted = value.replace('"', r"\"")
        fix = f"put a value with special characters in quotes: '{key}=\"{quoted}\"'"
    return UserError(f"Hydra cannot parse the override {override}", where=override, fix=fix)


def _of_python(error: BaseException) -> UserError | None:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return _of_yaml(error)
    # Hydra raises it for group=null
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):
        return UserError(str(error), where="the command line", fix="GROUP=NAME, with a file of conf/GROUP")
    if isinstance(error, ValueError) and str(error).startswith("Only one of --run"):  # so does Hydra's command line
        return UserError(
            "-m and an option that only shows something are both given", where="the command line", fix="remove -m"
        )
    return _of_system(error) if isinstance(error, OSError) else None


def _of_system(error: OSError) -> UserError | None:
    if isinstance(error, PermissionError) and error.filename:
        fix = "run.root=DIR with a directory that you may write; for a shared run its owner must set run.group=GROUP"
        return UserError(
            f"you have no permission to access {error.filename}", where="the permissions of the file", fix=fix
        )
    if error.errno == errno.EROFS:
        what = f"{error.filename} is on a file system that is read-only here"
        return UserError(what, where="the path", fix="run.root=DIR with a directory that you may write")
    if error.errno == errno.EFBIG:
        fix = "`ulimit -f unlimited` in the shell that starts the run, or in cluster.setup"
        return UserError("a file would be larger than the limit of this shell", where="ulimit -f", fix=fix)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free some space, or set another run.root or TMPDIR; python -m hpc_train doctor shows which disk is full"
        where = "run.root or TMPDIR"
        if not error.filename:
            where += ", or the file of a redirected output"
        return UserError(f"the disk or quota is full ({error.strerror})", where=where, fix=fix)
    return None


def _of_yaml(error: yaml.MarkedYAMLError) -> UserError:
    mark = error.problem_mark
    if error.context_mark is not None and (error.context or "").startswith("while scanning"):
        mark = error.context_mark  # the start of the construct that is not closed
    assert mark is not None
    where = relative(Path(mark.name))
    problem = (error.problem or "invalid YAML").replace("could not find expected", "expected")
    fix = "write each line as KEY: VALUE, with spaces for indentation, and put text with special characters in quotes"
    return UserError(f"{where}:{mark.line + 1}: {problem}", where=where, fix=fix)


KINDS_OF_NODES: dict[type, tuple[str, str]] = {  # what such a value must be, and how to write it in a file
    yaml.MappingNode: ("NAME: VALUE pairs", "one line NAME: VALUE for each, indented below the key"),
    yaml.SequenceNode: ("a list of lines", "one line `- TEXT` for each, indented below the key"),
}


def _of_omegaconf(error: OmegaConfBaseException, text: str) -> UserError:
    """Returns the mistake behind an error of OmegaConf. ``text`` is the message of Hydra's error around it."""
    key = str(error.full_key or "")
    if isinstance(error, ConfigAttributeError | ConfigKeyError) and (replacement := replacement_of(key)):
        return UserError(f"{key} is a key of earlier versions that no longer exists", where=key, fix=replacement)
    if isinstance(error, ConfigAttributeError | ConfigKeyError) and (fix := _fix_of_unknown(error, key, text)):
        return UserError(f"{key} is not a config key", where=key, fix=fix)
    if isinstance(error, MissingMandatoryValue):
        return UserError(f"{key} has no value", where=key, fix=f"{key}=VALUE on the command line")
    group = key.split(".", maxsplit=1)[0]
    first = (error.msg or str(error)).strip().splitlines()[0]
    if (mistake := _of_value(key, first)) is not None:
        return mistake
    package = f" --package {group}" if group else ""
    fix = f"python -m hpc_train --cfg job{package} shows the current values"
    return UserError(first, where=key or "the config", fix=fix)


def _of_value(key: str, first: str) -> UserError | None:
    """Returns the error of a value of the wrong kind, or of a resolver; None for others."""
    wrong = re.match(r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)", first)
    if wrong:
        given, kind = wrong.groups()
        removed = removed_value(key, given)
        if removed is not None:
            return removed
        if kind in _KINDS:
            is_whole = re.fullmatch(r"-?\d+\.0", given)  # 1e3 is a float
            value = given.removesuffix(".0") if is_whole else "VALUE"
            fix = f"{key}=true or {key}=false" if kind == "bool" else f"{key}={value}"
            return UserError(f"{key} is {given!r}, but must be {_KINDS[kind]}", where=key, fix=fix)
    if listed := re.match(r"Cannot convert '(?:list|dict)' to string: '(.*)'$", first):
        what = f"{key} must be text, but without quotes Hydra reads {listed[1]} as a list or a table"
        return UserError(what, where=key, fix=f"""'{key}="TEXT"', with both kinds of quotes""")
    if "is not Optional" in first:
        return UserError(f"{key} is null, but must have a value", where=key, fix=f"{key}=VALUE, or remove the override")
    if "is not a ListConfig" in first:
        if not key.startswith("cluster."):
            return UserError(f"{key} must be a list", where=key, fix=f"{key}=[A,B]")
        must, in_file = KINDS_OF_NODES[yaml.SequenceNode]
        fix = f"'{key}=[\"TEXT\"]', or in a file {in_file}"
        return UserError(f"{key or 'a key'} must be {must}", where=key or "the config", fix=fix)
    if re.search(r"Cannot merge DictConfig with ListConfig|Cannot assign \w+ to Dict", first):
        must, in_file = KINDS_OF_NODES[yaml.MappingNode]
        fix = f"+{key or 'KEY'}.NAME=VALUE, or in a file {in_file}"
        return UserError(f"{key or 'a key'} must be {must}", where=key or "the config", fix=fix)
    if unset := re.search(r"Environment variable '(\w+)' not found", first):
        fix = f"export {unset[1]}=VALUE, or ${{oc.env:{unset[1]},DEFAULT}}"
        return UserError(f"{key} refers to the environment variable {unset[1]}, which is not set", where=key, fix=fix)
    if unknown := re.match(r"Interpolation key '(.+)' not found", first):
        what = f"{key} refers to ${{{unknown[1]}}}, which is not a key of the config"
        return UserError(what, where=key, fix=f"{key}=VALUE, or ${{GROUP.KEY}} with the full name of a key")
    if "HydraConfig was not set" in first:
        what = f"{key} refers to ${{hydra:...}}, which is known only while Hydra runs the command"
        return UserError(what, where=key, fix="the value itself, or ${KEY} of another key of the config")
    if is_dataclass(group := default_of(key)):
        names = " | ".join(field.name for field in fields(group))
        return UserError(f"{key} is a group of keys and has no value", where=key, fix=f"{key}.KEY=VALUE, with {names}")
    return None


def _fix_of_unknown(error: OmegaConfBaseException, key: str, text: str) -> str:
    """Returns the fix for a key that does not exist; empty if the keys of its group are not known."""
    group, _, rest = key.partition(".")
    append = re.search(r"To append to your config use (\+.*)", text)
    override = append[1].strip().rstrip("'") if append else f"+{key}=VALUE"
    if group in ("model", "data") and rest.split(".")[0] in ("_target_", "args"):
        if is_dataclass(error.object_type):
            return f"add {group}=custom, to which {key} belongs"
        return override
    if instead := instead_of_key(key):
        return instead
    parent = error.parent_node
    names = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    if is_dataclass(error.object_type):
        names = [field.name for field in fields(error.object_type)]
    if group in ("metrics", "hooks") and "args" in names:
        return f"+{key.removesuffix(f'.{error.key}')}.args.{error.key}=VALUE, or without + if the file sets it"
    if not names:
        if not isinstance(parent, DictConfig):
            return ""
        if group in ("model", "data") and "." not in rest:  # ~data on the command line
            return f"{group}=NAME, which chooses a file"
        return f"put + before the override: {override}"  # in a table of any keys
    if "args" in names and isinstance(parent, DictConfig) and parent.get("_target_") is not None:
        return f"{nearest(error.key, names)}; an argument of a custom class is +{group}.args.{error.key}=VALUE"
    value = override.partition("=")[2] if override.startswith(f"+{key}=") else "VALUE"
    return meant(key, value, names) or nearest(error.key, names)


# words with which other tools name a key, and which are not the last part of a key here
OTHER_KEYS = {
    "accumulate_grad_batches": "batch.micro_batches",
    "batch_size": "batch.global_size",
    "block_size": "data.sequence_length",
    "d_model": "model.dim",
    "dataset": "data",
    "dim": "model.dim",
    "gpus": "cluster.gpus_per_node",
    "gradient_accumulation_steps": "batch.micro_batches",
    "gradient_clip_val": "optim.clip_norm",
    "hidden_size": "model.dim",
    "iterations": "train.steps",
    "learning_rate": "optim.lr",
    "max_epochs": "train.epochs",
    "max_length": "data.sequence_length",
    "max_steps": "train.steps",
    "n_heads": "model.n_heads",
    "n_layers": "model.n_layers",
    "name": "run.name",
    "num_layers": "model.n_layers",
    "num_nodes": "cluster.nodes",
    "num_workers": "batch.loader_workers",
    "optimizer": "optim",
    "per_device_train_batch_size": "batch.micro_size",
    "scheduler": "optim.schedule",
    "seq_len": "data.sequence_length",
    "sequence_length": "data.sequence_length",
    "wandb": "telemetry.wandb.mode",
    "walltime": "cluster.time",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup_steps",
    "workers": "cluster.cpu_workers",
}


def meant(key: str, value: str, names: Sequence[str] = ()) -> str:
    """Returns the override that the user probably means by an override of an unknown key; empty if there is none.

    It sets a key with the same last part, such as ``optim.lr`` for ``lr`` or ``train.lr``, or a key that has this name
    in other tools. For a word without a group it may also set a key with nearly the same letters. ``names`` are the
    keys of the same group. A word that is similar to one of these is not compared with other groups."""
    group, _, word = key.replace("-", "_").rpartition(".")
    if OTHER_KEYS.get(word, key) != key:
        return f"{OTHER_KEYS[word]}={value}"
    if group in ("model", "data"):
        return ""  # the key of another kind of model or data
    by_word: dict[str, list[str]] = {"model": ["model"], "data": ["data"]}
    for name, _, _ in keys(Config()):
        by_word.setdefault(name.rpartition(".")[2], []).append(name)
    if word not in by_word and not group and closest(word, names) is None:
        word = next(iter(get_close_matches(word, by_word, n=1, cutoff=0.85)), word)
    candidates = by_word.get(word, [])
    depth = min((name.count(".") for name in candidates), default=0)
    return " or ".join(f"{name}={value}" for name in candidates if name.count(".") == depth)


_KINDS = {"Float": "a number", "Integer": "an integer", "bool": "true or false", "String": "text"}


def _unknown_option(group: str, option: str, options: Sequence[str]) -> UserError:
    name = f"{group}/{option}".lstrip("/")
    if instead := instead_of(group, option):
        return UserError(f"{group}={option} is not installed", where=group, fix=instead)
    fix = nearest(option, options)
    if Path("conf", f"{name}.yaml").is_file():  # as `init` makes it
        fix = f"-cd conf {group}={option}, which reads conf/{name}.yaml of this directory"
    elif group:
        fix += f"; your own file DIR/{name}.yaml needs -cd DIR"
    return UserError(f"{name} does not exist", where=group or "the defaults", fix=fix)


REPLACED = {
    "submitit_slurm": "remove it; cluster=slurm -m submits to Slurm, with cluster.partition=P cluster.time=T",
    "submitit_local": "remove it; cluster=local -m runs the jobs on this machine",
    "joblib": "remove it; with cluster=local -m as many jobs run at once as there are GPUs or cores for",
}
SWEEPERS = {  # name -> package
    "optuna": "hydra-optuna-sweeper",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
}
# hydra.launcher.KEY of the submitit launcher -> the key that replaces it, if cluster has no key of this name
SUBMITIT_KEYS = {
    "additional_parameters": "cluster.extra",
    "array_parallelism": "launch.array_parallelism",
    "mail_type": "cluster.extra",
    "mail_user": "cluster.extra",
    "max_num_timeout": "elastic.max_requeues",
    "mem_gb": "cluster.mem",
    "n_jobs": "launch.array_parallelism",  # of the joblib launcher
    "submitit_folder": "run.root",
    "timeout_min": "cluster.time",
}


def instead_of(group: str, option: str) -> str | None:
    """Returns what replaces a launcher that is not installed, or how to install a sweeper; None for unknown names."""
    if group == "hydra/launcher":
        return REPLACED.get(option)
    if group == "hydra/sweeper" and option in SWEEPERS:
        return f"pip install {SWEEPERS[option]}; its trials then run through the launcher of hpc_train"
    return None


def instead_of_key(key: str) -> str | None:
    """Returns what replaces ``hydra.launcher.NAME`` of the submitit launcher or a variable of Hydra; else None."""
    group, _, name = key.rpartition(".")
    if group == "hydra.job.env_set":
        return f"+cluster.env.{name}=VALUE"
    if group != "hydra.launcher":
        return None
    replacement = SUBMITIT_KEYS.get(name, f"cluster.{name}")
    if default_of(replacement) is not ABSENT:
        return f"{replacement}=VALUE"
    return "remove it; the groups cluster and launch configure the jobs"
