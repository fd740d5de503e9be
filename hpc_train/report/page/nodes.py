"""Maps the nodes and their ranks, with those that were slow or failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, section
from hpc_train.run.events import Event
from hpc_train.units import counted

LEVELS = ("bad", "warn", "good")
SHOWN = 128  # nodes


@dataclass
class NodeMark:
    """Counts what happened on a node: how often each event, and to which ranks."""

    ranks: Sequence[int] = ()
    failed: Counter[str] = field(default_factory=Counter)
    slow: Counter[str] = field(default_factory=Counter)

    @property
    def level(self) -> str:
        return "bad" if self.failed else "warn" if self.slow else "good"


def nodes(facts: RunFacts) -> Html:
    """Returns the section with the nodes of all attempts."""
    marks = _marks(facts)
    if not marks:
        return section("Nodes and ranks", block("paragraph", "No node has started the run."))
    order = sorted(
        marks, key=lambda name: (LEVELS.index(marks[name].level), min(marks[name].ranks, default=1 << 30), name)
    )
    shown = block("nodes", [_cell(name, marks[name]) for name in order[:SHOWN]])
    more = block("paragraph", f"{len(order) - SHOWN} more nodes had no problem.") if len(order) > SHOWN else None
    return section("Nodes and ranks", block("paragraph", _words(marks)), shown, more)


def _marks(facts: RunFacts) -> dict[str, NodeMark]:
    marks: dict[str, NodeMark] = defaultdict(NodeMark)
    for event in facts.of_event("started"):
        for name in event.get("nodes") or [event["node"]]:
            marks[name].ranks = ()
    for name, ranks in _ranks(facts).items():
        marks[name].ranks = ranks
    for event in facts.events:
        if event.node and event.kind.node_failed:
            marks[event.node].failed[_what(event, event.kind.node_failed)] += 1
        elif event.node and event.kind.node_slow:
            marks[event.node].slow[_what(event, event.kind.node_slow)] += 1
    return marks


def _what(event: Event, words: str) -> str:
    if event.failure and event.name == "worker_failed":
        words = f"{words} ({event.failure})"
    return words if event.rank is None else f"rank {event.rank} {words}"


def _ranks(facts: RunFacts) -> dict[str, Sequence[int]]:
    """Returns the ranks on each node in the newest attempt; nodes have consecutive ranks, in the order of the event."""
    started = facts.of_event("started")
    if not started:
        return {}
    names = started[-1].get("nodes") or [started[-1]["node"]]
    world: Any = started[-1].get("world_size", 0)
    each = facts.newest_attempt.get("workers_per_node") or -(-world // len(names))
    return {name: range(index * each, min(world, (index + 1) * each)) for index, name in enumerate(names)}


def _cell(name: str, mark: NodeMark) -> tuple[str, str, str, list[str]]:
    """Returns the name of a node, its level, its ranks, and what happened on it."""
    ranks = mark.ranks
    if not ranks:
        which = "not in the newest attempt"
    elif len(ranks) == 1:
        which = f"rank {ranks[0]}"
    else:
        which = f"ranks {ranks[0]} to {ranks[-1]}"
    problems = [what + (f", {count} times" if count > 1 else "") for what, count in (mark.failed + mark.slow).items()]
    return name, mark.level, which, problems or ["ok"]


def _words(marks: Mapping[str, NodeMark]) -> str:
    levels = Counter(mark.level for mark in marks.values())
    if levels["good"] == len(marks):
        return f"{counted(len(marks), 'node', 'nodes')}; none was slow and none failed."
    found = [f"{levels['bad']} had failures"] if levels["bad"] else []
    found += [f"{levels['warn']} {'was' if levels['warn'] == 1 else 'were'} slow"] if levels["warn"] else []
    return f"{counted(len(marks), 'node', 'nodes')}, of which {' and '.join(found)}."
