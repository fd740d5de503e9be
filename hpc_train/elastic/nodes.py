"""The nodes of a job: what each agent reports about its node when it joins, and which nodes have failed often."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.cluster.allocation import node_order
from hpc_train.fabric.facts import NodeFacts
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_text, line_end, patiently, read_lines

TOO_OFTEN = 2  # failures after which a node is used only if there are no others


@dataclass(frozen=True)
class Unfit:
    """Why a node can take part in no attempt, and the fix."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Node:
    """One node of the job.

    Attributes:
        number: Slurm's number, 0 for the batch host, whose agent runs the rendezvous server.
        address: the address at which other nodes reach it.
        switch: its position in the tree of switches; None if the site describes none.
        facts: its hardware and settings, read once per job.
        unfit: why it cannot take part; None if it can.
        refusal: the message of a config error, which no other node can make up for.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Node:
        facts, unfit = NodeFacts.from_json(value["facts"]), value.get("unfit")
        node = cls(**value | {"facts": facts, "unfit": None if unfit is None else Unfit(**unfit)})
        if not all(isinstance(count, int) for count in (node.number, node.gpus, node.workers)):
            raise TypeError("a node's number, GPUs and workers are integers")
        return node


def in_order_of_rank(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the nodes with network neighbours next to each other if the site describes them; otherwise in Slurm's
    order.
    """
    ordered = sorted(nodes, key=lambda node: node.number)
    switches = [node.switch for node in ordered if node.switch is not None]
    if len(switches) < len(ordered):
        return tuple(ordered)
    return tuple(ordered[index] for index in node_order(switches))


def why_unfit(nodes: Iterable[Node]) -> tuple[str, str]:
    """Returns the reasons of nodes that cannot take part, each once with its node names, and the fixes."""
    names: dict[Unfit, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.number):
        if node.unfit is not None:
            names.setdefault(node.unfit, []).append(node.name)
    reasons = [
        f"node {found[0]} cannot use its GPUs: {unfit.reason}"
        if len(found) == 1
        else f"nodes {', '.join(found)} cannot use their GPUs: {unfit.reason}"
        for unfit, found in names.items()
    ]
    return "; ".join(reasons), "; ".join(dict.fromkeys(unfit.fix for unfit in names))


@dataclass(frozen=True)
class NodeFailures:
    """Node failures over all jobs of a run: one line per failure in ``attempts/node-failures.jsonl``.

    A node that a preflight found slow counts one failure per partner with which it was slow, and ``TOO_OFTEN`` for a
    slow GPU and for any other problem for which the preflight dropped the node. Failures expire after ``expiry_s``.
    """

    run: RunDirectory
    expiry_s: float

    @property
    def _path(self) -> Path:
        return self.run.attempts / "node-failures.jsonl"

    def note(self, node: str, failure: str, times: int = 1) -> None:
        """Records a failure that counts ``times`` times."""
        line = {"time": time.time(), "node": node, "class": failure, "times": times}
        patiently(lambda: append_text(self._path, line_end(self._path) + json.dumps(line) + "\n"))

    def failing_nodes(self) -> frozenset[str]:
        """Returns the names of nodes that failed at least ``TOO_OFTEN`` times recently."""
        counts: Counter[str] = Counter()
        for line in self.recent():
            counts[line["node"]] += line.get("times", 1)
        return frozenset(name for name, count in counts.items() if count >= TOO_OFTEN)

    def recent(self) -> list[dict[str, Any]]:
        """Returns the failures that have not expired: ``time``, ``node`` and ``class`` of each."""
        since = time.time() - self.expiry_s
        lines = patiently(lambda: [*read_lines(self._path), *self._slow()])
        return [line for line in lines if line["time"] > since]

    def _slow(self) -> Iterator[dict[str, Any]]:
        """Yields nodes that rank 0 reported as slow or unfit in the event log."""
        for path in self.run.events.glob("rank-0000-*.jsonl"):
            for line in read_lines(path):
                if line["event"] == "slow_node":
                    for partner in line["partners"]:
                        yield {"time": line["time"], "node": line["node"], "class": f"slow with {partner}"}
                elif line["event"] == "slow_gpu":
                    slow = f"slow GPU {line['gpu']}"
                    yield {"time": line["time"], "node": line["node"], "class": slow, "times": TOO_OFTEN}
                elif line["event"] == "unfit_node":
                    yield {"time": line["time"], "node": line["node"], "class": line["reason"], "times": TOO_OFTEN}
