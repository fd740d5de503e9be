"""Describes the roles of a run (``run.roles``): processes of different kinds in one job, such as a trainer and servers.

Each role is a separate run of its command in ``RUN/roles/NAME``, with its attempts, logs and events. Its config is that
of the job with the values of the role. ``hpc_train.elastic.roles`` runs once on each node of the job and starts the
agents of the roles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.values import command_text, command_words, node_range
from hpc_train.errors import Mistakes, UserError, nearest

ROLE = "HPC_TRAIN_ROLE"  # the variable with the name of the role of a process
PORT, OUTPUT, STARTED = "port", "output", "started"
RESTART, RESTART_ALL, END = "restart", "restart_all", "end"
NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
MOST_RESTARTS = 3  # of a role but the first, or of all roles, unless elastic.max_restarts is set
EXAMPLE = "+run.roles={trainer: {command: [python, train.py], nodes: 2}, judge: {command: [python, serve.py]}}"


@dataclass(frozen=True)
class Role:
    """Describes one kind of processes of a run.

    Attributes:
        nodes: the number of nodes on which it runs.
        per: one process per ``gpu``, or per ``node``.
        procs: processes per node of a role without GPUs; None for ``cluster.cpu_workers``.
        gpus: GPUs of each of its nodes, which it may share with other roles; None for whole nodes.
        ready: when the roles that wait for it start: ``started``, ``port`` (the port of the role), ``port:N``, or
            ``output:TEXT``.
        after: the roles that must be ready before it starts. By default the first role waits for all others, and each
            other one for those before it.
        on_failure: what follows a failure: ``restart`` of the role, ``restart_all``, or the ``end`` of the run.
    """

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    per: str = "gpu"
    procs: int | None = None
    gpus: int | None = None
    ready: str = STARTED
    after: tuple[str, ...] = ()
    on_failure: str = RESTART

    @property
    def fixed_port(self) -> int | None:
        """The port of ``ready=port:N``; None if a free port is chosen."""
        kind, _, number = self.ready.partition(":")
        return int(number) if kind == PORT and number else None


def roles_of(config: Config) -> tuple[Role, ...]:
    """Returns the roles of ``run.roles`` in order; empty without any. Raises UserError with all mistakes."""
    mistakes = Mistakes()
    roles = []
    names = list(config.run.roles)
    for index, (name, values) in enumerate(config.run.roles.items()):
        before = names[1:] if index == 0 else names[1:index]
        with mistakes.collected():
            roles.append(_parse(name, values, names, before))
    mistakes.report()
    _refuse_cycle(roles)
    return tuple(roles)


def _parse(name: str, values: Any, names: Sequence[str], before: Sequence[str]) -> Role:
    where = f"run.roles.{name}"
    if not NAME.fullmatch(str(name)):
        raise UserError(
            f"{name!r} cannot name a role, since variables such as HPC_TRAIN_ROLE_JUDGE_PORT contain the name",
            where="run.roles",
            fix="a lower-case letter, followed by lower-case letters, digits and _",
        )
    if not isinstance(values, Mapping):
        raise UserError(f"{where} is {values!r}, not the values of a role", where=where, fix=EXAMPLE)
    keys = [field.name for field in fields(Role) if field.name != "name"]
    for key in values:
        if key not in keys:
            raise UserError(f"{where}.{key} is unknown", where=f"{where}.{key}", fix=nearest(str(key), keys))
    if not values.get("command"):
        raise UserError(f"the role {name} has no command", where=f"{where}.command", fix=EXAMPLE)
    for key, least in (("nodes", 1), ("procs", 1), ("gpus", 0)):
        number = values.get(key)
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < least):
            what = f"{where}.{key} is {number!r}, but must be a whole number of at least {least}"
            raise UserError(what, where=f"{where}.{key}", fix=f"{key}: {max(1, least)}")
    for key, choices in (("per", ("gpu", "node")), ("on_failure", (RESTART, RESTART_ALL, END))):
        choice = values.get(key, choices[0])
        if choice not in choices:
            raise UserError(f"{where}.{key} is {choice!r}", where=f"{where}.{key}", fix=nearest(str(choice), choices))
    after = values.get("after", before)
    after = [after] if isinstance(after, str) else list(after or ())
    for other in after:
        if other not in names or other == name:
            others = [role for role in names if role != name]
            what = f"{where}.after names {other}, but the other roles are {', '.join(others) or 'none'}"
            raise UserError(what, where=f"{where}.after", fix=nearest(str(other), others))
    given = {key: value for key, value in values.items() if value is not None}
    role = Role(name, **given | {"command": tuple(command_words(values["command"], f"{where}.command"))})
    role = replace(role, after=tuple(after), ready=str(role.ready))
    kind, _, condition = role.ready.partition(":")
    is_port = kind == PORT and (not condition or (condition.isdecimal() and 0 < int(condition) < 1 << 16))
    if role.ready != STARTED and not is_port and not (kind == OUTPUT and condition):
        raise UserError(
            f"{where}.ready is {role.ready!r}",
            where=f"{where}.ready",
            fix='started, port, port:8000, or "output:TEXT" for a line of its output that contains TEXT',
        )
    return role


def _refuse_cycle(roles: Sequence[Role]) -> None:
    waiting = list(roles)
    while waiting:
        left = {role.name for role in waiting}
        blocked = [role for role in waiting if left.intersection(role.after)]
        if len(blocked) == len(waiting):
            names = ", ".join(role.name for role in blocked)
            raise UserError(
                f"the roles {names} wait for each other, so none of them starts",
                where="run.roles, after",
                fix="after: [] for one of them",
            )
        waiting = blocked


def commands_of(config: Config) -> dict[str, Sequence[str]]:
    """Returns the words of ``run.command``, or of the command of each role, by their keys. Raises UserError if one of
    them is wrong.
    """
    words = command_words(config.run.command)
    commands: dict[str, Sequence[str]] = {"run.command": words} if words else {}
    return commands | {f"run.roles.{role.name}.command": role.command for role in roles_of(config)}


def configs_of_roles(config: Config) -> dict[str, Config]:
    """Returns the config of each role's run. Raises UserError as ``roles_of`` does."""
    configs: dict[str, Config] = {}
    for role in roles_of(config):
        cluster = replace(config.cluster, nodes=role.nodes, health_check=None)
        if role.gpus is not None:
            cluster = replace(cluster, gpus_per_node=role.gpus)
        if role.procs is not None:
            cluster = replace(cluster, cpu_workers=role.procs)
        run = replace(config.run, command=command_text(role.command), per=role.per, roles={})
        elastic = config.elastic
        if role.on_failure != RESTART:  # its agents report the first failure
            elastic = replace(elastic, max_restarts=0)
        elif configs and elastic.max_restarts is None:  # whether a server makes progress is not known
            elastic = replace(elastic, max_restarts=MOST_RESTARTS)
        strategy = replace(config.strategy, name="dp", dp="fill")
        prometheus = config.telemetry.prometheus
        if prometheus.port is not None:
            prometheus = replace(prometheus, port="auto")
        if prometheus.file is not None:
            prometheus = replace(prometheus, file="auto")
        telemetry = replace(config.telemetry, prometheus=prometheus)
        configs[role.name] = replace(
            config, cluster=cluster, run=run, elastic=elastic, strategy=strategy, telemetry=telemetry
        )
    return configs


@dataclass(frozen=True)
class Placement:
    """The nodes of a role, by their number in the job, and the indices of its GPUs on each of them."""

    nodes: tuple[int, ...]
    gpus: tuple[range, ...]


def place(roles: Sequence[Role], gpus: int) -> dict[str, Placement]:
    """Returns the placement of each role on nodes with ``gpus`` GPUs.

    A role takes the next whole nodes. One with ``gpus`` takes that many GPUs of the first nodes that have them left
    over by other such roles; with ``gpus: 0`` it shares the first nodes with any role.

    Raises:
        UserError: a role needs more GPUs than a node has.
    """
    placements = {}
    used: list[int] = []  # GPUs of each node that roles have taken
    for role in roles:
        if role.gpus == 0:
            placements[role.name] = Placement(tuple(range(role.nodes)), (range(0),) * role.nodes)
            continue
        if role.gpus is not None and role.gpus > gpus:
            raise UserError(
                f"the role {role.name} needs {role.gpus} GPUs of a node, but a node of the job has {gpus}",
                where=f"run.roles.{role.name}.gpus",
                fix=f"gpus: {gpus}" if gpus else "gpus: 0, or nodes with GPUs",
            )
        needed = math.inf if role.gpus is None else role.gpus
        nodes = [node for node, count in enumerate(used) if count + needed <= gpus][: role.nodes]
        nodes += range(len(used), len(used) + role.nodes - len(nodes))
        used += [0] * (max(nodes) + 1 - len(used))
        taken = []
        for node in nodes:
            first = used[node]
            used[node] = gpus if role.gpus is None else first + role.gpus
            taken.append(range(first, used[node]))
        placements[role.name] = Placement(tuple(nodes), tuple(taken))
    return placements


def nodes_of_roles(roles: Sequence[Role], gpus: int) -> int:
    """Returns the number of nodes with ``gpus`` GPUs that ``roles`` need. Raises UserError as ``place`` does."""
    return max(max(placement.nodes) for placement in place(roles, gpus).values()) + 1


def check_roles(config: Config, nodes: int, gpus: int) -> None:
    """Raises UserError if ``run.roles`` cannot run on ``nodes`` nodes with ``gpus`` GPUs each."""
    run = config.run
    if not run.roles:
        return
    mistakes = Mistakes()
    with mistakes.collected():
        for key, value in (("entry", run.entry), ("command", run.command), ("progress_dir", run.progress_dir)):
            if value is not None:
                what = f"run.roles and run.{key} are both set"
                fix = f"leave out run.{key}; each role has a command"
                raise UserError(what, where=f"run.roles, run.{key}", fix=fix)
    with mistakes.collected():
        fewest, most = node_range(config.cluster)
        elastic = config.elastic
        if fewest < most or elastic.spares or elastic.min_nodes is not None or elastic.grow != "never":
            raise UserError(
                "the nodes of run.roles are fixed, so the run cannot continue on fewer or other nodes",
                where="cluster.nodes, elastic.spares, elastic.min_nodes, elastic.grow",
                fix="cluster.nodes=N, without elastic.spares, min_nodes and grow; a lost node requeues the job",
            )
    with mistakes.collected():
        roles = roles_of(config)
        for role in roles:
            if role.procs is not None and gpus and role.gpus != 0:
                raise UserError(
                    f"the role {role.name} has procs, but one process per GPU runs on nodes with GPUs",
                    where=f"run.roles.{role.name}.procs",
                    fix="gpus: 0 for processes without GPUs, or leave out procs",
                )
        needed = nodes_of_roles(roles, gpus)
        if needed > nodes:
            needs = ", ".join(f"{role.name} {role.nodes}" for role in roles)
            raise UserError(
                f"the roles need {needed} nodes ({needs}), but the job has {nodes}",
                where="run.roles, cluster.nodes",
                fix=f"cluster.nodes={needed}, or gpus: K for roles that share a node",
            )
    mistakes.report()
