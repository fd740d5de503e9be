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
from graphlib import CycleError, TopologicalSorter
from typing import Any

from hpc_train.config.schema import ClusterConfig, Config
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
        partition, constraint, mem: values of the keys of ``cluster`` for its nodes; None for those of the job.
        cpus: cores of each of its nodes; None as for other jobs.
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
    partition: str | None = None
    constraint: str | None = None
    cpus: int | None = None
    mem: str | None = None
    ready: str = STARTED
    after: tuple[str, ...] = ()
    on_failure: str = RESTART

    @property
    def fixed_port(self) -> int | None:
        """The port of ``ready=port:N``; None if a free port is chosen."""
        kind, _, number = self.ready.partition(":")
        return int(number) if kind == PORT and number else None

    @property
    def resources(self) -> tuple[str | int | None, ...]:
        """The values that its nodes have in common with those of other roles of the same component."""
        return self.partition, self.constraint, self.cpus, self.mem


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
    try:
        TopologicalSorter({role.name: role.after for role in roles}).prepare()
    except CycleError as error:
        raise UserError(
            f"the roles {', '.join(error.args[1][:-1])} wait for each other, so none of them starts",
            where="run.roles, after",
            fix="after: [] for one of them",
        ) from error
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
    for key, least in (("nodes", 1), ("procs", 1), ("gpus", 0), ("cpus", 1)):
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
    given |= {key: str(given[key]) for key in ("partition", "constraint", "mem") if key in given}
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
        cluster = replace(_cluster_of(config.cluster, [role]), nodes=role.nodes, health_check=None)
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
class Component:
    """Describes roles whose nodes have the same resources.

    A job whose roles form several components is a heterogeneous job of Slurm.

    Attributes:
        cluster: the config of these nodes, without their number and ``Role.cpus``.
    """

    roles: tuple[Role, ...]
    cluster: ClusterConfig


def components_of(config: Config) -> tuple[Component, ...]:
    """Returns the components of ``run.roles``, the one of the first role first; empty if no role sets resources.

    Raises UserError as ``roles_of`` does.
    """
    alike: dict[tuple[str | int | None, ...], list[Role]] = {}
    for role in roles_of(config):
        alike.setdefault(role.resources, []).append(role)
    if not any(map(any, alike)):
        return ()
    return tuple(Component(tuple(roles), _cluster_of(config.cluster, roles)) for roles in alike.values())


def _cluster_of(cluster: ClusterConfig, roles: Sequence[Role]) -> ClusterConfig:
    """Returns ``cluster`` with the values of ``roles``, whose nodes have the same resources."""
    role = roles[0]
    if not any(role.resources):
        return cluster
    if role.partition is not None:  # these keys describe nodes of the partition of the job
        cluster = replace(cluster, gpus_per_node="auto", gpu_type=None, gres=None, constraint=None, nodelist=None)
    counts = [role.gpus for role in roles if role.gpus is not None]
    if len(counts) == len(roles):
        cluster = replace(cluster, gpus_per_node=sum(counts), gres=None)
    given: dict[str, Any] = {"partition": role.partition, "constraint": role.constraint, "mem": role.mem}
    return replace(cluster, **{key: value for key, value in given.items() if value is not None})


def config_of_node(config: Config, sizes: Sequence[int], node: int) -> Config:
    """Returns ``config`` with the cluster of the component that ``node`` of the job belongs to.

    Args:
        sizes: the numbers of nodes of the components of the job; empty if all nodes are alike.
    """
    components = components_of(config)
    if len(components) != max(1, len(sizes)):
        return config  # the roles share the nodes
    for component, size in zip(components, sizes or (math.inf,), strict=True):
        if node < size:
            return replace(config, cluster=component.cluster)
        node -= int(size)
    return config


@dataclass(frozen=True)
class NodeGroup:
    """Describes the nodes of a component, or of a job whose nodes are all alike. ``gpus`` is the number per node."""

    nodes: int
    gpus: int


@dataclass(frozen=True)
class Placement:
    """The nodes of a role, by their number in the job, and the indices of its GPUs on each of them."""

    nodes: tuple[int, ...]
    gpus: tuple[range, ...]


def place(config: Config, groups: Sequence[NodeGroup]) -> dict[str, Placement]:
    """Returns the placement of each role on the nodes of ``groups``, which are numbered throughout.

    Each group has the roles of a component. A single group has all roles.

    Raises:
        UserError: a role needs more GPUs than a node has.
    """
    placements = {}
    first = 0
    for roles, group in zip(_roles_of_groups(config, groups), groups, strict=True):
        for name, placement in _place(roles, group.gpus).items():
            placements[name] = replace(placement, nodes=tuple(first + node for node in placement.nodes))
        first += group.nodes
    return placements


def _roles_of_groups(config: Config, groups: Sequence[NodeGroup]) -> list[tuple[Role, ...]]:
    if len(groups) == 1:
        return [roles_of(config)]
    return [component.roles for component in components_of(config)]


def _place(roles: Sequence[Role], gpus: int) -> dict[str, Placement]:
    """Returns the placement of each role on nodes with ``gpus`` GPUs.

    A role takes the next whole nodes. One with ``gpus`` takes that many GPUs of the first nodes that have them left
    over by other such roles; with ``gpus: 0`` it shares the first nodes with any role.
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
    return max(max(placement.nodes) for placement in _place(roles, gpus).values()) + 1


def check_roles(config: Config, groups: Sequence[NodeGroup], nodes: int) -> None:
    """Raises UserError if ``run.roles`` cannot run on the nodes of ``groups``.

    Args:
        nodes: the number of nodes of the job.
    """
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
        if len(groups) > 1 and (config.launch.chain > 1 or config.cluster.first):
            raise UserError(
                "roles with different resources run in a heterogeneous job, which cannot be one of several jobs",
                where="run.roles, launch.chain, cluster.first",
                fix="leave out launch.chain and cluster.first",
            )
    with mistakes.collected():
        roles = roles_of(config)
        needed = 0
        for roles_of_group, group in zip(_roles_of_groups(config, groups), groups, strict=True):
            for role in roles_of_group:
                if role.procs is not None and group.gpus and role.gpus != 0:
                    raise UserError(
                        f"the role {role.name} has procs, but one process per GPU runs on nodes with GPUs",
                        where=f"run.roles.{role.name}.procs",
                        fix="gpus: 0 for processes without GPUs, or leave out procs",
                    )
            needed += nodes_of_roles(roles_of_group, group.gpus)
        if needed > nodes or (len(groups) > 1 and needed < nodes):
            needs = ", ".join(f"{role.name} {role.nodes}" for role in roles)
            raise UserError(
                f"the roles need {needed} nodes ({needs}), but the job has {nodes}",
                where="run.roles, cluster.nodes",
                fix=f"cluster.nodes={needed}, or gpus: K for roles that share a node",
            )
    mistakes.report()
