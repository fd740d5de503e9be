"""Composes a typed config from overrides: registers the schema with Hydra, composes, and converts to dataclasses.

OmegaConf resolves the values of every ``Config``, and the dataclasses read them. A composed config and a frozen file
therefore pass the same checks. Only composition imports Hydra; agents and workers read frozen files without it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import omegaconf
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.conf_files import PRIMARY, config_directory, packaged
from hpc_train.config.extensions import (
    FAMILIES,
    IMAGES,
    SAMPLE_KEYS,
    SOURCES,
    TOKENS,
    is_import_path,
    load_family,
    load_source,
    location,
)
from hpc_train.config.run_path import default_root, run_directory
from hpc_train.config.schema import Config, TargetConfig
from hpc_train.config.secrets import leaves, refuse_secrets
from hpc_train.config.settings import CHOICES, Settings, read_settings
from hpc_train.config.translate import translate
from hpc_train.config.values import absolute, for_debugging, refuse_other_encodings
from hpc_train.errors import UserError, nearest

LAUNCHER = "hydra_plugins.hpc_train_launcher.launcher.HpcTrainLauncher"
SWEEPER = "hydra_plugins.hpc_train_launcher.sweeper.HpcTrainSweeper"


# An override that puts ``strategy: null`` into the Defaults List. ``override /strategy: NAME`` in a file requires it
# there; ``+strategy=NAME`` and ``/strategy: NAME`` exclude it. Below hydra/ it does not override a key of the job.
WITH_STRATEGY = "hydra/schema@_global_=with_strategy"


@dataclass
class ConfigWithStrategy(Config):
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"/strategy": None}])


def register() -> None:
    """Registers the schema in Hydra's ConfigStore and the resolvers in OmegaConf.

    Further calls change nothing, unless the settings of the site or of the user have changed. Raises UserError if these
    are wrong.
    """
    _register_schema(read_settings())
    if OmegaConf.has_resolver("hpc_train.directory"):
        return
    from hydra.core.config_store import ConfigStore

    from hpc_train.config.file_source import register_file_source

    register_file_source()
    store = ConfigStore.instance()
    for kind in FAMILIES:
        store.store(group="schema/model", name=kind, node=load_family(kind).schema)
    for kind in SOURCES:
        store.store(group="schema/data", name=kind, node=load_source(kind).schema)
    # conf/config.yaml names these, and must compose even if nothing is launched
    sweeper = {"_target_": SWEEPER, "max_batch_size": None, "params": None}
    store.store(group="hydra/launcher", name="hpc_train", node={"_target_": LAUNCHER}, provider="hpc_train")
    store.store(group="hydra/sweeper", name="hpc_train", node=sweeper, provider="hpc_train")
    # OmegaConf 2.3 has another method with the name register_resolver
    old = omegaconf.__version__.startswith("2.3")
    add: Callable[..., None] = OmegaConf.register_new_resolver if old else OmegaConf.register_resolver
    # cached, because Hydra resolves it several times and a name made from the time must not change
    add("hpc_train.directory", run_directory, use_cache=True)
    add("hpc_train.root", default_root)
    add("hpc_train.steps_unless", lambda epochs, steps: steps if epochs is None else None)


@lru_cache(maxsize=1)
def _register_schema(all_settings: tuple[Settings, ...]) -> None:
    """Registers the schema with the values of ``all_settings``, the weaker first, as its defaults, and the files that
    they choose.

    ``conf/run/default.yaml`` replaces their ``run.root`` by ``default_root``, which reads it.
    """
    from hydra.core.config_store import ConfigStore

    choices: dict[str, str] = {}
    for settings in all_settings:
        choices |= settings.choices
    for settings in all_settings:
        _refuse_shadowed(settings, choices)
    store = ConfigStore.instance()
    for name, schema in (("plain", Config), ("with_strategy", ConfigWithStrategy)):
        node: Any = schema
        for settings in all_settings:
            node = _with_settings(node, settings)
        store.store(group="hydra/schema", name=name, node=node, package="_global_")
    defaults = [{f"override /{group}": option} for group, option in choices.items()]
    store.store(group="hydra/settings", name="choices", node={"defaults": defaults}, package="_global_")


def _with_settings(schema: Any, settings: Settings) -> DictConfig:
    node: DictConfig = OmegaConf.structured(schema)
    try:
        node.merge_with(dict(settings.values))
    except OmegaConfBaseException as error:
        mistake = translate(error)
        if mistake is None:
            raise
        where = f"{mistake.where} in {settings.path}"
        raise UserError(mistake.what, where=where, fix=mistake.fix) from error
    return node


def _refuse_shadowed(settings: Settings, choices: Mapping[str, str]) -> None:
    """Raises UserError for a value without effect: the file that jobs use by default sets the same key."""
    for entry in packaged("config")["defaults"]:
        for group, option in entry.items() if isinstance(entry, dict) else ():
            chosen = choices.get(group, option)
            if group not in CHOICES or not (config_directory() / group / f"{chosen}.yaml").is_file():
                continue
            content = packaged(f"{group}/{chosen}")
            for name in reversed(group.split("/")):
                content = content if name in content else {name: content}
            for key in _keys_of_both(settings.values, content):
                fix = f"remove it; or choose another file of {group} under defaults, or set {key} on the command line"
                what = f"{key} has no effect in {settings.path}: conf/{group}/{chosen}.yaml sets it"
                raise UserError(what, where=f"{key} in {settings.path}", fix=fix)


def _keys_of_both(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in first.keys() & second.keys():
        if isinstance(first[name], Mapping) and isinstance(second[name], Mapping):
            yield from (f"{name}.{key}" for key in _keys_of_both(first[name], second[name]))
        else:
            yield name


def version_base() -> dict[str, str]:
    """Returns the argument ``version_base`` for the installed Hydra: 1.3 warns without it, 1.4 with it."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}


@contextmanager
def initialized(directory: Path | None = None, added: Path | None = None) -> Iterator[None]:
    """Initializes Hydra's compose API with ``directory``, or with the packaged ``conf/``. ``added`` is a further
    directory that may hold the primary config, which is not searched in ``hydra.searchpath``."""
    import hydra
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra.core.global_hydra import GlobalHydra

    register()
    with hydra.initialize_config_dir(
        config_dir=str(directory or config_directory()), job_name="hpc_train", **version_base()
    ):
        loader = GlobalHydra.instance().config_loader()
        if added is not None and isinstance(loader, ConfigLoaderImpl):
            path = loader.get_search_path()
            path.prepend("command-line", f"file://{added}", "schema")  # the schema must be the last one
            loader.repository = ConfigRepository(path)
        yield


def compose(overrides: Sequence[str], config_name: str = PRIMARY) -> DictConfig:
    """Composes one job without running Hydra's application. It writes nothing. Raises hydra.errors.HydraException or
    OmegaConfBaseException for an unknown group, option or key, or a wrong type."""
    import hydra

    with initialized():
        return hydra.compose(config_name, list(overrides))


def typed(node: DictConfig) -> Config:
    """Resolves ``node`` and converts it to dataclasses, ``model`` and ``data`` by their ``kind``.

    Relative paths become absolute, so that a frozen config means the same in every working directory. Raises UserError
    if a value is missing or has the wrong type, a key or kind is unknown, or a value is a secret.
    """
    node = _completed(node)
    unresolved = plain(node, resolve=False)
    refuse_secrets(unresolved)
    values = _resolved(node, unresolved)
    refuse_secrets(values)
    return for_debugging(_config(values))


def converted(node: DictConfig) -> Config:
    """Converts a config that ``typed`` has accepted before, such as a frozen one."""
    node = _completed(node)
    return _config(_resolved(node, plain(node, resolve=False)))


def _completed(node: DictConfig) -> DictConfig:
    """Adds what ``conf/`` does not list: keys of a user's description, sources of a mixture, and sizes of the data."""
    return _with_vocabulary(_with_sources(_with_extension_schemas(node)))


def _resolved(node: DictConfig, unresolved: dict[str, Any]) -> dict[str, Any]:
    """Replaces the interpolations in ``unresolved``, the values of each group of ``node``, and returns it."""
    _check_kinds(node)
    _check_missing(unresolved)
    try:
        _resolve(node, unresolved)
    except OmegaConfBaseException as error:
        raise translate(error) or error from error
    return unresolved


def _resolve(node: Any, values: Any) -> None:
    """Replaces the interpolations in ``values``, the unresolved values of ``node``.

    OmegaConf would resolve all values, which takes three times as long as copying them, and few are interpolations.
    """
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, str) and "${" in value:
            resolved = node[key]
            if OmegaConf.is_config(resolved):
                resolved = OmegaConf.to_container(resolved, resolve=True, throw_on_missing=True)
            values[key] = resolved
        elif isinstance(value, dict | list) and any("${" in text for _, text in leaves(value)):
            _resolve(node[key], value)


def _config(values: dict[str, Any]) -> Config:
    """Converts resolved values. Each group is converted by itself, since the jobs of a sweep share most groups, which
    are converted once.
    """
    kinds = values["model"]["kind"], values["data"]["kind"]
    schema = _schema(*kinds)
    try:
        if set(values) != set(schema):
            OmegaConf.merge(schema, escaped(values))  # raises the error for the unknown group
        groups = {name: pickle.loads(_group(name, *kinds, pickle.dumps(value))) for name, value in values.items()}
    except OmegaConfBaseException as error:
        raise translate(error) or error from error
    config = Config(**groups)
    config.metrics = _targets("metrics", config.metrics)
    config.hooks = _targets("hooks", config.hooks)
    refuse_other_encodings(values)
    return absolute(config)


def _targets(group: str, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``metrics`` or ``hooks`` as ``TargetConfig``.

    Configs of earlier versions name classes of ``hpc_train.metrics`` and ``hpc_train.hooks``.
    """
    targets = {}
    for name, value in named.items():
        where = f"{group}.{name}"
        if not str(name).isidentifier():
            raise UserError(f"{name!r} is not a name", where=where, fix="use letters, digits and underscores")
        if not isinstance(value, dict) or not isinstance(value.get("_target_"), str):
            fix = f"+{where}._target_=package.module.Name, or +{group}=NAME for a built-in one"
            raise UserError(f"{where} has no _target_", where=where, fix=fix)
        unknown = [key for key in value if key not in ("_target_", "args")]
        if unknown:
            what = f"{where}.{unknown[0]} is not a config key; the arguments of {value['_target_']} are below args"
            raise UserError(what, where=where, fix=f"+{where}.args.{unknown[0]}=VALUE")
        if not isinstance(value.get("args", {}), dict):
            raise UserError(f"{where}.args is not a table", where=where, fix=f"+{where}.args.NAME=VALUE")
        target = re.sub(rf"^hpc_train\.{group}\.", f"hpc_train.train.{group}.", value["_target_"])
        targets[str(name)] = TargetConfig(**{**value, "_target_": target})
    return targets


@lru_cache(maxsize=256)
def _group(name: str, model: str, data: str, values: bytes) -> bytes:
    """Converts the pickled ``values`` of one group to its pickled dataclass; ``model`` and ``data`` are the kinds."""
    schema, defaults = _group_schema(name, model, data)
    changed = _without_defaults({name: escaped(pickle.loads(values))}, defaults)
    group: Any = OmegaConf.to_object(OmegaConf.unsafe_merge(pickle.loads(schema), changed))
    return pickle.dumps(group[name])


@cache
def _group_schema(name: str, model: str, data: str) -> tuple[bytes, Mapping[str, Any]]:
    """Returns the pickled schema of one group, below its name, so that errors contain the full key, and its values."""
    schema = OmegaConf.create({name: _schema(model, data)[name]})
    return pickle.dumps(schema), plain(schema, resolve=False)


def _without_defaults(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of ``values`` that differ from ``defaults``. OmegaConf takes most of its time for each value that
    it merges.
    """
    changed = {}
    for key, value in values.items():
        default = defaults.get(key, "???")
        if isinstance(value, dict) and isinstance(default, dict):
            if nested := _without_defaults(value, default):
                changed[key] = nested
        elif value != default or type(value) is not type(default):
            changed[key] = value
    return changed


@cache
def _schema(model: str, data: str) -> DictConfig:
    schema: DictConfig = OmegaConf.structured(Config)
    schema.model = load_family(model).schema
    schema.data = load_source(data).schema
    return schema


def _check_missing(values: dict[str, Any]) -> None:
    """Reports all missing values at once, before an interpolation of one fails with a message about another key."""
    missing = [key for key, value in leaves(values) if value == "???"]
    if missing:
        verb = "have" if len(missing) > 1 else "has"
        raise UserError(
            f"{' and '.join(missing)} {verb} no value",
            where=", ".join(missing),
            fix=" ".join(f"{key}=VALUE" for key in missing),
        )


def plain(node: Any, resolve: bool = True) -> dict[str, Any]:
    """Returns the values of a ``DictConfig``. ``resolve`` states whether interpolations are resolved, and a missing
    value is an error."""
    values = OmegaConf.to_container(node, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def escaped(value: Any) -> Any:
    """Escapes every ``${`` that is left after resolution, which OmegaConf would otherwise resolve again."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | ListConfig):
        return [escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


MODELS = {TOKENS: "model=gpt_tiny", IMAGES: "model=vit_tiny"}  # examples for messages
DATA = {TOKENS: "data=text", IMAGES: "data=cifar100"}


def _with_extension_schemas(node: DictConfig) -> DictConfig:
    """Adds the keys and defaults of descriptions from a user's package, which no file of ``conf/`` lists."""
    for group, load, kinds in (("model", load_family, FAMILIES), ("data", load_source, SOURCES)):
        kind = OmegaConf.select(node, f"{group}.kind") if OmegaConf.is_dict(node.get(group)) else None
        if kind is None:
            names = " | ".join(kinds)
            raise UserError(
                f"{group} is not the name of a file in conf/{group}, or that file sets no kind",
                where=group,
                fix=f"{group}=NAME of a file in conf/{group} that sets kind: {names} | package.module:NAME",
            )
        if kind in kinds:
            continue
        if not is_import_path(str(kind)):
            fix = nearest(kind, [*kinds])
            raise UserError(f"{group}.kind is {kind!r}, which is unknown", where=f"{group}.kind", fix=fix)
        schema = OmegaConf.create({group: load(str(kind)).schema})
        try:
            merged = OmegaConf.select(OmegaConf.merge(schema, {group: node[group]}), group)
        except OmegaConfBaseException as error:
            raise translate(error) or error from error
        node = node.copy()
        OmegaConf.set_struct(node, False)
        node[group] = merged
    return node


def _with_vocabulary(node: DictConfig) -> DictConfig:
    """Sets ``data.vocab_size``, to which a model may refer, to the size of ``data.tokenizer`` if it is null."""
    vocabulary = load_source(str(node.data.kind)).vocabulary
    if vocabulary is None or OmegaConf.is_missing(node.data, "tokenizer") or node.data.vocab_size is not None:
        return node
    node = node.copy()
    OmegaConf.set_struct(node, False)
    node.data.vocab_size = vocabulary(str(node.data.tokenizer))
    return node


def _with_sources(node: DictConfig) -> DictConfig:
    """Adds the defaults of the sources of a mixture, and to the mixture the sizes that a model may refer to."""
    if str(node.data.kind) != "mixture":
        return node
    values = plain(node.data, resolve=False)
    values["sources"] = {
        str(name): _source(f"data.sources.{name}", source) for name, source in (values.get("sources") or {}).items()
    }
    for key, common in COMMON_SIZES.items():
        sizes = [source[key] for source in values["sources"].values() if isinstance(source.get(key), int)]
        if values.get(key) is None:
            values.pop(key, None)  # a model that refers to a size that no source has is then refused by name
            if sizes:
                values[key] = common(sizes)
    node = node.copy()
    OmegaConf.set_struct(node, False)
    node.data = OmegaConf.create(values)
    return node


COMMON_SIZES: dict[str, Callable[[list[int]], int]] = {
    "sequence_length": min, "image_size": min, "channels": min, "vocab_size": max, "n_classes": max
}  # fmt: skip


def _source(key: str, values: Any) -> dict[str, Any]:
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind not in SOURCES and not is_import_path(str(kind)):
        fix = f"+data@{key}=SOURCE; {nearest(kind, [*SOURCES])}"
        raise UserError(f"{key}.kind is {kind!r}, which is unknown", where=key, fix=fix)
    try:
        return plain(OmegaConf.merge(OmegaConf.structured(load_source(str(kind)).schema), values), resolve=False)
    except OmegaConfBaseException as error:
        mistake = translate(error)
        if mistake is None:
            raise
        raise UserError(mistake.what, where=key, fix=mistake.fix) from error


def _check_kinds(node: DictConfig) -> None:
    """Raises UserError if the model cannot learn from the samples, or one of its sizes refers to a missing key of the
    data, before interpolations such as ``${data.vocab_size}`` are resolved.
    """
    model = str(node.model.kind)
    data = str(node.data.kind)
    source = load_source(data)
    gives = source.sample_kind(node.data)
    takes = load_family(model).learns_from
    if gives is not None and takes is not None and gives != takes:
        other = DATA.get(takes, f"data that provides {takes}")
        if data == "synthetic":
            other = f"data.task={takes}"
        raise UserError(
            f"the model {model} requires {takes} as samples, but data={data} provides {gives}",
            where="model, data",
            fix=f"{other}, or {MODELS.get(gives, f'a model that accepts {gives}')}",
        )
    names = {field.name for field in fields(source.schema)}
    missing = [name for name in SAMPLE_KEYS.get(gives or "", ()) if name not in names]
    if missing:
        raise UserError(
            f"the data source {data} provides {gives}, but its schema {source.schema.__name__} has no key "
            f"{', '.join(missing)}",
            where=location(data),
            fix=f"add {', '.join(missing)} to the schema",
        )
    for key, value in leaves(OmegaConf.to_container(node.model, resolve=False)):
        reference = re.fullmatch(r"\$\{data\.(\w+)\}", value)
        if reference and reference[1] not in node.data.keys():  # noqa: SIM118 - a missing value is not `in` the node
            raise UserError(
                f"model.{key} refers to data.{reference[1]}, but the data source {data} has no such key",
                where=f"model.{key}",
                fix=f"model.{key}=VALUE",
            )
