"""Parses config values that have their own grammar, such as ``checkpoint.every`` and ``cluster.nodes``."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from hpc_train.config.schema import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    MlflowConfig,
    ProfileConfig,
    PrometheusConfig,
    StrategyConfig,
)
from hpc_train.config.secrets import leaves
from hpc_train.errors import UserError, nearest
from hpc_train.units import counted, parse_bytes

PREFLIGHT_ACTIONS = ("warn", "stop", "exclude")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_range(text: str) -> tuple[int, int] | None:
    """Returns the first and the last number of ``N`` or ``N-M``; None if ``text`` is neither, or the range is empty or
    begins below 1."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        return None
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class SaveEvery:
    """Holds the checkpoint interval. If nothing is set, a run saves only on a stop request and at the end."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False


def parse_save_every(text: str) -> SaveEvery:
    """Parses ``checkpoint.every``. Raises UserError if ``text`` is not a number of steps, a time or auto."""
    if text == "auto":
        return SaveEvery(auto=True)
    if re.fullmatch(r"\d+", text):
        return SaveEvery(steps=int(text))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match and float(match[1]) > 0:
        return SaveEvery(seconds=float(match[1]) * _SECONDS[match[2]])
    raise UserError(
        f"checkpoint.every is {text!r}, which is neither a number of steps nor a time",
        where="checkpoint.every",
        fix="a number of steps such as 500, a time such as 30m or 2h, auto, or 0 to save only on a stop request and at "
        "the end",
    )


def saves_asynchronously(config: CheckpointConfig, on_gpus: bool) -> bool:
    """Returns whether ``checkpoint.asynchronous`` requests asynchronous saves, if host memory allows; auto requests
    them on GPUs."""
    return on_gpus if isinstance(config.asynchronous, str) else config.asynchronous


@dataclass(frozen=True)
class Profiled:
    """Holds the steps to profile, ``first`` to ``last`` as numbered in the metrics, and the ranks; None: all ranks."""

    first: int
    last: int
    ranks: frozenset[int] | None

    def has(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    @property
    def name(self) -> str:
        """Returns the name of the profile's files, without a suffix."""
        return f"steps-{self.first}-{self.last}"


def parse_profile(config: ProfileConfig) -> Profiled | None:
    """Returns the steps and ranks to profile; None if nothing is profiled. Raises UserError if the steps or the ranks
    cannot be parsed.
    """
    if config.steps is None:
        return None
    steps = parse_range(config.steps.strip())
    if steps is None:
        raise UserError(
            f"telemetry.profile.steps is {config.steps!r}, which is neither a step nor a range of steps",
            where="telemetry.profile.steps",
            fix="one step such as 10, or a range such as 10-12",
        )
    if config.ranks == "all":
        return Profiled(*steps, None)
    ranks = list(config.ranks) if isinstance(config.ranks, list) else [config.ranks]
    if ranks and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
        return Profiled(*steps, frozenset(ranks))
    raise UserError(
        f"telemetry.profile.ranks is {config.ranks!r}, which is neither a rank nor a list of ranks",
        where="telemetry.profile.ranks",
        fix="a rank such as 0, a list such as [0,3], or all",
    )


def check_prometheus(config: PrometheusConfig) -> None:
    """Raises UserError if keys of the HTTP endpoint are set and there is none."""
    for name in ("targets_dir", "token_file"):
        if config.port is None and (value := getattr(config, name)) is not None:
            raise UserError(
                f"telemetry.prometheus.{name} is {value}, but telemetry.prometheus.port is not set: the run serves no "
                "metrics",
                where=f"telemetry.prometheus.{name}",
                fix="telemetry.prometheus.port=auto",
            )


def check_profiled_steps(config: ProfileConfig, world_size: int) -> None:
    """Raises UserError if the profile cannot be parsed, or names a rank that does not exist."""
    profiled = parse_profile(config)
    if profiled is None or profiled.ranks is None:
        return
    beyond = min((rank for rank in profiled.ranks if rank >= world_size), default=None)
    if beyond is not None:
        raise UserError(
            f"telemetry.profile.ranks contains rank {beyond}, but the world size is {world_size}",
            where="telemetry.profile.ranks",
            fix=f"ranks 0 to {world_size - 1}, or all",
        )


def parse_hang_timeout(text: str) -> float | None:
    """Returns the time limit of a step in seconds; 0 for no limit; None if it is derived from the steps. Raises
    UserError if ``text`` is neither auto nor a number of seconds.
    """
    if text == "auto":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if 0 <= seconds < float("inf"):
        return seconds
    raise UserError(
        f"elastic.hang_timeout_s is {text!r}, which is not a number of seconds",
        where="elastic.hang_timeout_s",
        fix="auto, a number of seconds, or 0 for no limit",
    )


DEBUG_STEPS = 20  # counted from the newest checkpoint; learning rate and data are not changed


def for_debugging(config: Config) -> Config:
    """Returns the config that ``train.debug=true`` uses instead of ``config``.

    It logs every step, and disables compilation, loader processes, intermediate checkpoints and W&B. The layout
    replaces a data-parallel kind that cannot be debugged; see ``DataParallelKind.debugged_as``.
    """
    if not config.train.debug:
        return config
    return replace(
        config,
        strategy=replace(config.strategy, async_tp=False),
        train=replace(config.train, compile=False),
        batch=replace(config.batch, loader_workers=0),
        checkpoint=replace(config.checkpoint, every="0", asynchronous=False),
        telemetry=replace(config.telemetry, log_every=1, wandb=replace(config.telemetry.wandb, mode="disabled")),
    )


def with_all_workers(config: Config, workers: int) -> Config:
    """Makes all ``workers`` replicas, whatever strategy is configured, for checks and measurements of the nodes."""
    return replace(
        config,
        strategy=StrategyConfig(name="dp", dp="fill"),
        batch=BatchConfig(global_size=workers),
        train=replace(config.train, reproducible=None),
    )


def node_range(cluster: ClusterConfig) -> tuple[int, int]:
    """Returns the fewest and the most nodes of ``cluster.nodes``: ``4`` or ``2-4``. Raises UserError if the value is
    neither a number nor a range, or the range is empty.
    """
    numbers = parse_range(str(cluster.nodes))
    if numbers is None:
        raise UserError(
            f"cluster.nodes is {cluster.nodes}, but must be a number from 1 or a range",
            where="cluster.nodes",
            fix="cluster.nodes=N, or on Slurm a range such as cluster.nodes=2-4",
        )
    return numbers


def asked_nodes(config: Config) -> tuple[int, int]:
    """Returns the fewest and the most nodes that a job requests, including spares."""
    fewest, most = node_range(config.cluster)
    return fewest + config.elastic.spares, most + config.elastic.spares


def fewest_nodes(config: Config) -> int:
    """Returns the smallest number of nodes on which the run must fit, at its start or after it loses nodes. Raises
    UserError if ``elastic.min_nodes`` is larger than ``cluster.nodes``.
    """
    fewest = node_range(config.cluster)[0]
    least = config.elastic.min_nodes
    if least is not None and least > fewest:
        raise UserError(
            f"elastic.min_nodes is {least}, but cluster.nodes allows the run to start with "
            f"{counted(fewest, 'node', 'nodes')}",
            where="elastic.min_nodes",
            fix=f"elastic.min_nodes={fewest} or fewer, or more cluster.nodes",
        )
    return fewest if least is None else least


# keys of cluster that an entry of cluster.first may change
JOB_KEYS = (
    "account", "constraint", "cpus_per_gpu", "exclude", "exclusive", "extra", "gpu_type", "gpus_per_node", "gres",
    "mem", "mem_per_gpu", "nodelist", "nodes", "partition", "qos", "time", "time_min",
)  # fmt: skip


def parse_first(cluster: ClusterConfig) -> ClusterConfig:
    """Returns ``cluster`` with the values of ``cluster.first`` converted to the types of their keys.

    Jobs that differ only in their partition become one job that requests several, since Slurm starts it in the first
    that has room. Raises UserError if an entry changes no keys, other keys than ``JOB_KEYS``, or to a wrong type.
    """
    from omegaconf import OmegaConf  # workers need no OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    jobs: list[dict[str, Any]] = [{"partition": cluster.partition}]
    for number, entry in enumerate(cluster.first):
        where = f"cluster.first[{number}]"
        if not isinstance(entry, dict) or not entry:
            what = f"{where} is {entry}, but must be a table of keys"
            raise UserError(what, where="cluster.first", fix="cluster.first=[{account: NAME}]")
        unknown = next((str(name) for name in entry if name not in JOB_KEYS), None)
        if unknown is not None:
            what = f"{where} sets {unknown}, which must be the same for all jobs of a run"
            raise UserError(what, where="cluster.first", fix=nearest(unknown, JOB_KEYS))
        try:
            typed = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(ClusterConfig), entry))
        except OmegaConfBaseException as error:
            what = f"{where}: {str(error).splitlines()[0]}"
            raise UserError(what, where="cluster.first", fix="a value of the type of the key") from error
        assert isinstance(typed, dict)
        job = {"partition": cluster.partition} | {name: typed[name] for name in entry}
        alike = next((other for other in jobs if {**other, "partition": None} == {**job, "partition": None}), None)
        if alike is None or not alike["partition"] or not job["partition"]:
            jobs.append(job)
        else:
            partitions = dict.fromkeys([*alike["partition"].split(","), *job["partition"].split(",")])
            alike["partition"] = ",".join(partitions)
    configured, *first = jobs
    return replace(cluster, partition=configured["partition"], first=first)


def with_alternative(config: Config, number: int) -> Config:
    """Returns the config of one of the jobs of ``cluster.first``, counted from 1; ``config`` for 0."""
    if number == 0:
        return config
    changes = dict(config.cluster.first[number - 1])
    changes["extra"] = {**config.cluster.extra, **changes.get("extra", {})}
    return replace(config, cluster=replace(config.cluster, **changes))


def growing_nodes(config: Config) -> int | None:
    """Returns ``elastic.max_nodes`` of a run that grows by itself; None for another run. Raises UserError if it is not
    set.
    """
    if config.elastic.grow == "never":
        return None
    if config.elastic.max_nodes is None:
        what = f"elastic.grow={config.elastic.grow} does not say up to how many nodes the run grows"
        raise UserError(what, where="elastic.max_nodes", fix="elastic.max_nodes=N, or elastic.grow=never")
    return config.elastic.max_nodes


def bucket_mb(strategy: StrategyConfig, device_type: str) -> float:
    """Returns the size of a gradient bucket in MB. The links of GPUs reach their bandwidth with larger messages."""
    if strategy.bucket_cap_mb is not None:
        return strategy.bucket_cap_mb
    return 25.0 if device_type == "cpu" else 100.0


def check_divides(divisor: int, number: int, key: str, what: str, instead: str = "") -> None:
    """Raises UserError if ``divisor``, the value of ``key``, does not divide ``number``, the value of ``what``.

    Args:
        instead: another fix.
    """
    if number % divisor:
        fix = f"{key}={max(n for n in range(1, divisor) if number % n == 0)}"
        if what.endswith(".sequence_length"):  # which, unlike a size of the model, is easy to change
            fix += f", or {what}={number + -number % divisor}"
        fix += f", or {instead}" if instead else ""
        raise UserError(f"{key}={divisor} does not divide {what}={number}", where=key, fix=fix)


RECOMPUTATION_MODES = ("auto", "none", "full", "selective", "ops")
SELECTIVE_EVERY = 2  # layers, if ``selective`` has no number
LayerMode: TypeAlias = Literal["none", "ops", "full"]


@dataclass(frozen=True)
class Recomputation:
    """Describes what layers recompute in the backward pass (``train.activation_checkpointing``).

    Attributes:
        every: every ``every``-th layer recomputes, by global number; 0 means no layer.
        keep_products: whether results of matrix products and attention are kept, and only the rest is recomputed.
        budget: the bytes that the layers of a rank may keep, from which ``plan.recomputation`` derives ``chosen``.
        chosen: the mode of each layer under a budget.
    """

    every: int = 0
    keep_products: bool = False
    budget: int | None = None
    chosen: tuple[LayerMode, ...] = ()

    def mode(self, layer: int) -> LayerMode:
        """Returns what ``layer``, by global number, recomputes: nothing, cheap operations (``ops``) or all."""
        if self.chosen:
            return self.chosen[layer]
        if not self.every or layer % self.every:
            return "none"
        return "ops" if self.keep_products else "full"

    @property
    def recomputes(self) -> bool:
        return self.every > 0 or any(mode != "none" for mode in self.chosen)


def parse_recomputation(text: str) -> Recomputation:
    """Parses the value of ``train.activation_checkpointing``. Raises UserError if ``text`` is neither in
    ``RECOMPUTATION_MODES``, ``selective:N`` nor a size.
    """
    budget = parse_bytes(text)
    if budget is not None:
        return Recomputation(budget=budget)
    selective = re.fullmatch(r"selective(?::([1-9]\d*))?", text)
    if selective:
        return Recomputation(int(selective[1] or SELECTIVE_EVERY))
    if text in RECOMPUTATION_MODES:
        return Recomputation(0 if text in ("auto", "none") else 1, keep_products=text == "ops")
    raise UserError(
        f"train.activation_checkpointing is {text!r}, which is unknown",
        where="train.activation_checkpointing",
        fix="none, full, selective (every second layer), selective:N (every N-th), ops (all but matrix products "
        "and attention), or the bytes that a rank may keep, such as 8GiB",
    )


def preflight_actions(cluster: ClusterConfig) -> dict[str, str]:
    """Returns the action for each class of errors that the preflight finds: warn, stop or exclude. Raises UserError if
    ``cluster.preflight_action`` names an unknown class or action.
    """
    default: dict[str, str] = ClusterConfig().preflight_action
    actions = cluster.preflight_action
    where = "cluster.preflight_action"
    if isinstance(actions, str):
        return dict.fromkeys(default, actions)
    for name, action in actions.items():
        if name not in default:
            raise UserError(f"{where}.{name} is unknown", where=where, fix=nearest(name, list(default)))
        if action not in PREFLIGHT_ACTIONS:
            fix = nearest(str(action), PREFLIGHT_ACTIONS)
            raise UserError(f"{where}.{name} is {action!r}", where=f"{where}.{name}", fix=fix)
    return default | actions


def runs_own_code(config: Config) -> bool:
    """Returns whether workers run the user's function or command instead of the trainer."""
    return config.run.entry is not None or runs_command(config)


def runs_command(config: Config) -> bool:
    """Returns whether workers run the user's command (``run.command``), or the commands of ``run.roles``."""
    return config.run.command is not None or bool(config.run.roles)


def runs_per_node(config: Config) -> bool:
    """Returns whether one process runs on each node: ``run.command`` with ``run.per=node``, or what starts
    ``run.roles``.
    """
    return bool(config.run.roles) or (config.run.command is not None and config.run.per == "node")


def command_words(command: Any, where: str = "run.command") -> list[str]:
    """Returns the program and the arguments of ``command``, the value of the key ``where``; empty for None. Raises
    UserError if it is neither a text nor a list of words.
    """
    if command is None:
        return []
    words = command
    fix = f"{where}=[python,train.py,--lr,0.1], or '{where}=\"...\"'"
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError as error:
            what = f"{where} cannot be split into words: {error}"
            raise UserError(what, where=where, fix=fix) from None
    if not isinstance(words, list | tuple) or not words or any(isinstance(word, list | dict) for word in words):
        what = f"{where} is {command!r}, not a program with its arguments"
        raise UserError(what, where=where, fix=fix)
    return [str(word).lower() if isinstance(word, bool) or word is None else str(word) for word in words]


def command_text(words: Sequence[str]) -> str:
    """Returns the text of ``run.command`` from which ``command_words`` gets ``words``. It has no ``${``, which would be
    an interpolation, and it is never ``???``, which would be a missing value.
    """
    return shlex.join(words).replace("${", "$''{")


_DATA_PATHS = ("path", "validation_path", "tokenizer", "chat_template", "cache")
PROMETHEUS_PATHS = ("file", "token_file", "targets_dir")


def absolute(config: Config) -> Config:
    sources = [vars(config.data), *getattr(config.data, "sources", {}).values()]
    for source in sources:
        _make_absolute(source, _DATA_PATHS if source.get("kind") == "sft" else ("path",))
    name = getattr(config.model, "name_or_path", None)
    if name is not None and Path(name).expanduser().is_dir():  # otherwise a name on the hub
        _make_absolute(vars(config.model), ("name_or_path",))
    _make_absolute(vars(config.run), ("root", "progress_dir"))
    if config.run.command is not None:
        config.run.command = _absolute_command(config.run.command, "run.command")
    for name, role in config.run.roles.items():
        if isinstance(role, dict) and role.get("command"):
            role["command"] = _absolute_command(role["command"], f"run.roles.{name}.command")
    prometheus = config.telemetry.prometheus
    _make_absolute(vars(prometheus), ("token_file", "targets_dir") if prometheus.file == "auto" else PROMETHEUS_PATHS)
    return config


def _absolute_command(command: Any, where: str) -> str:
    words = []
    for word in command_words(command, where):
        is_script = word.endswith(".py") and Path(word).is_file()
        words.append(str(Path(word).absolute()) if is_script else word)
    return command_text(words)


def _make_absolute(values: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if values.get(key) is not None:
            values[key] = str(Path(values[key]).expanduser().absolute())


def refuse_other_encodings(values: dict[str, Any]) -> None:
    """Raises UserError if a value of a config or the working directory has bytes that are not UTF-8.

    Python reads them as lone surrogates, which neither YAML nor a batch script can hold.
    """
    refuse_other_encoding("the working directory", str(Path.cwd()))
    for key, text in leaves(values):
        refuse_other_encoding(key, text)


def refuse_other_encoding(key: str, text: str) -> None:
    """Raises UserError if ``text``, the value of ``key``, has bytes that are not UTF-8."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        shown = text.encode("utf-8", "backslashreplace").decode()
        what = f"{key} is {shown} in the encoding {encoding} of this shell, which has no such character"
        fix = "export LC_ALL=C.UTF-8, and unset PYTHONUTF8"
        if encoding == "utf-8":
            what = f"{key} is {shown}, which is not UTF-8"
            fix = "rename the file or directory with UTF-8 characters, e.g. with convmv, or use another path"
        raise UserError(what, where=key, fix=fix) from None


def server_uri(settings: MlflowConfig) -> str:
    """Returns the address of the MLflow server. Raises UserError if it is not set or names no server."""
    uri = settings.uri if settings.uri not in (None, "auto") else os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UserError(
            "the address of the MLflow server is not set",
            where="telemetry.mlflow.uri, MLFLOW_TRACKING_URI",
            fix="telemetry.mlflow.uri=http://HOST:5000, or export MLFLOW_TRACKING_URI",
        )
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https") or uri.startswith("databricks"):
        return uri
    why = "a database needs a server in front of it, since nodes cannot lock a file of SQLite on a shared file system"
    if scheme in ("", "file"):
        why = "MLflow no longer writes to its file store"
    raise UserError(
        f"the MLflow address {uri!r} is not the address of a server: {why}",
        where="telemetry.mlflow.uri, MLFLOW_TRACKING_URI",
        fix="start `mlflow server --backend-store-uri sqlite:///mlflow.db --host HOST`, and set http://HOST:5000",
    )


ANSWER_S = 5.0


def check_answers(uri: str) -> None:
    """Raises UserError if no server accepts connections at ``uri``; MLflow's client itself tries for minutes."""
    address = urlsplit(uri)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"the MLflow server {address.hostname}:{port} does not respond: {error}",
            where="telemetry.mlflow.uri, MLFLOW_TRACKING_URI",
            fix="start the server, or run the command on a machine with a route to it",
        ) from error
