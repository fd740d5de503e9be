"""Describes the nodes of a job: what each agent reports about its node when it joins, and which nodes have failed
often."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.machine.gpus import KEY as GPUS_KEY
from hpc_train.machine.network.facts import NodeFacts, distance
from hpc_train.machine.placement import node_order, with_nvlink_domain
from hpc_train.run.directory import RANK_0, RunDirectory
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.files import BackgroundCall, patiently
from hpc_train.run.rows import check_fields

HEALTH_CHECK_KEY = "cluster.health_check"
NO_COMMAND = (126, 127)  # exit codes of bash: the command cannot be executed, or does not exist
MOST_WORKERS = 4096  # of a node; more is an error
TOO_OFTEN = 2  # failures after which a node is used only if there are no others


@dataclass(frozen=True)
class Unfit:
    """Describes why a node cannot take part in any attempt, and the fix. ``key`` is the key whose check found it."""

    reason: str
    fix: str
    key: str = GPUS_KEY

    def words(self, names: Sequence[str]) -> str:
        nodes = f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names)}"
        if self.key == HEALTH_CHECK_KEY:
            return f"the health check of {nodes} failed: {self.reason}"
        return f"{nodes} cannot use {'its' if len(names) == 1 else 'their'} GPUs: {self.reason}"


def check_health(cluster: ClusterConfig) -> Unfit | None:
    """Runs ``cluster.health_check`` on this node; returns None if it succeeds or none is set.

    Raises:
        UserError: the command does not exist or cannot be executed.
    """
    command = cluster.health_check
    limit = cluster.health_check_timeout_s
    if command is None:
        return None
    fix = f"run `{command}` on the node, or cluster.exclude=NODE"
    call = subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = call.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {limit:g} s ({HEALTH_CHECK_KEY}_timeout_s)"
        return Unfit(reason, fix, HEALTH_CHECK_KEY)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(call.pid, signal.SIGKILL)  # including processes that it has left running
        call.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    if call.returncode in NO_COMMAND:
        raise UserError(
            f"the health check cannot be run: {lines[-1] if lines else command}",
            where=HEALTH_CHECK_KEY,
            fix=f"{HEALTH_CHECK_KEY}=COMMAND with a command that exists on all nodes",
        )
    if call.returncode == 0:
        return None
    print("\n".join((f"output of {HEALTH_CHECK_KEY}:", *lines)), file=sys.stderr, flush=True)
    return Unfit(lines[-1] if lines else f"exit code {call.returncode}", fix, HEALTH_CHECK_KEY)


@dataclass(frozen=True)
class Node:
    """Describes one node of the job.

    Attributes:
        number: Slurm's number, 0 for the batch host, whose agent runs the rendezvous server.
        address: the address at which other nodes reach it.
        switch: its position in the network as Slurm describes it; None if the site describes none.
        facts: its hardware and settings, read once per job.
        unfit: why it cannot take part; None if it can.
        refusal: the message of a config error, which applies to all nodes.
        gpu_memory: the bytes of its smallest GPU; None if unknown, or if the layout does not depend on it.
        job_end: one more than the highest number of a node of its job. A joiner may start with fewer nodes than it
            was submitted for.
    """

    number: int
    name: str
    address: str
    switch: str | None
    gpus: int
    workers: int
    facts: NodeFacts = field(default_factory=NodeFacts, compare=False, repr=False)
    unfit: Unfit | None = None
    refusal: str | None = None
    gpu_memory: float | None = None
    job_end: int = 0

    @property
    def position(self) -> str | None:
        """Returns the node's position in the network, with its NVLink domain; None if unknown."""
        return with_nvlink_domain(self.switch, self.name, self.facts.nvlink_domain)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Node:
        """Reads what an agent has sent.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it does not describe a node.
        """
        facts = NodeFacts.from_json(value["facts"])
        unfit = value.get("unfit")
        node = cls(**value | {"facts": facts, "unfit": None if unfit is None else Unfit(**unfit)})
        check_fields(node)
        one_process = node.workers == 1  # ``run.per=node``
        if not 0 <= node.gpus <= MOST_WORKERS or not 0 <= node.workers <= MOST_WORKERS:
            raise ValueError(f"a node cannot have {node.gpus} GPUs and {node.workers} workers")
        if (node.gpus > node.workers and not one_process) or (node.can_train and node.workers == 0):
            raise ValueError(f"a node cannot have {node.gpus} GPUs and {node.workers} workers")
        for path_type in {link.path_type for link in facts.links}:
            distance(path_type)
        return node

    @property
    def can_train(self) -> bool:
        return self.unfit is None and self.refusal is None


def in_order_of_rank(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the nodes with network neighbors next to each other if the site describes them; otherwise in Slurm's
    order.
    """
    ordered = sorted(nodes, key=lambda node: node.number)
    positions = [node.position for node in ordered if node.position is not None]
    if len(positions) < len(ordered):
        return tuple(ordered)
    return tuple(ordered[index] for index in node_order(positions))


def why_unfit(nodes: Iterable[Node]) -> tuple[str, str]:
    """Returns the reasons of nodes that cannot take part, each once with its node names, and the fixes."""
    names: dict[Unfit, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.number):
        if node.unfit is not None:
            names.setdefault(node.unfit, []).append(node.name)
    reasons = [unfit.words(node_names) for unfit, node_names in names.items()]
    return "; ".join(reasons), "; ".join(dict.fromkeys(unfit.fix for unfit in names))


def have_been_checked(run: RunDirectory, launch: str, nodes: Sequence[str]) -> bool:
    """Returns whether a preflight of an earlier attempt of this start of the job has checked all of ``nodes``, and
    ``train.verify`` has not found wrong numbers since."""
    events = [*run.events_of(RANK_0)]
    corrupted = max((event.time for event in events if event.name == "corruption"), default=0.0)
    checks = [event for event in events if event.name == "preflight" and event.time > corrupted]
    return any(set(nodes) <= set(check.get("nodes", ())) for check in checks if check.get("launch") == launch)


READ_S = 4.0  # the rendezvous server waits meanwhile


def _writer() -> FileWriter:
    return FileWriter("the list of node failures")


@dataclass(frozen=True)
class NodeFailures:
    """Records node failures over all jobs of a run, as one line per failure in ``attempts/node-failures.jsonl``.

    A node that a preflight found slow counts one failure per partner with which it was slow, and ``TOO_OFTEN`` for a
    slow GPU and for any other problem for which the preflight dropped the node. Wrong numbers (``train.verify``) count
    one failure per independent finding. Failures expire after ``expiry_s``.
    """

    run: RunDirectory
    expiry_s: float
    _noted: list[dict[str, Any]] = field(default_factory=list, init=False, compare=False)  # by this object
    _writer: FileWriter = field(default_factory=_writer, init=False, compare=False, repr=False)
    _reading: BackgroundCall[list[dict[str, Any]]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        reading = BackgroundCall(lambda: patiently(self._read, READ_S / 2))
        object.__setattr__(self, "_reading", reading)

    @property
    def _path(self) -> Path:
        return self.run.attempts / "node-failures.jsonl"

    def note(self, node: str, failure: str, times: int = 1) -> None:
        """Records a failure that counts ``times`` times. A failing file system does not raise."""
        line = {"time": time.time(), "node": node, "class": failure, "times": times}
        self._noted.append(line)
        self._writer.append(self._path, line)

    def failing_nodes(self) -> frozenset[str]:
        """Returns the names of nodes that failed at least ``TOO_OFTEN`` times recently."""
        counts: Counter[str] = Counter()
        for line in self.recent():
            counts[line["node"]] += line.get("times", 1)
        return frozenset(name for name, count in counts.items() if count >= TOO_OFTEN)

    def recent(self) -> list[dict[str, Any]]:
        """Returns the failures that have not expired: ``time``, ``node`` and ``class`` of each.

        If the file system does not respond, these are the failures that this object has noted.
        """
        since = time.time() - self.expiry_s
        try:
            lines = self._reading.poll(READ_S)
        except OSError:
            lines = []
        return [line for line in [*lines, *(line for line in self._noted if line not in lines)] if line["time"] > since]

    def _read(self) -> list[dict[str, Any]]:
        return [*self.run.follow(self._path).read(), *self._slow()]

    def _slow(self) -> Iterator[dict[str, Any]]:
        """Yields nodes that rank 0 reported as slow, wrong or unfit in the event log."""
        for event in self.run.events_of(RANK_0):
            line = {"time": event.time, "node": event.node}
            if event.name == "slow_node":
                yield from (line | {"class": f"slow with {partner}"} for partner in event.partners)
            elif event.name == "slow_gpu":
                yield line | {"class": f"slow GPU {event['gpu']}", "times": TOO_OFTEN}
            elif event.name in ("corruption", "replayed") and event.node is not None:
                yield line | {"class": "wrong numbers", "times": event.steps}
            elif event.name == "unfit_node":
                yield line | {"class": event.reason, "times": TOO_OFTEN}
