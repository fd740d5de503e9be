"""The order of nodes that keeps neighbours in rank under one switch.

Global rank counts tp fastest, then dp, then pp. A node holds consecutive ranks, so tp stays inside it. With the nodes
of a switch one after the other, the ranks of a data-parallel group are as near to each other as they can be, and what
crosses switches is the boundaries of pipeline stages, which carry the least.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from hpc_train.config.layout import Layout


def switch_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """This node's place in Slurm's tree, ``spine.rack1.n1``; None where the site describes no switches."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "")
    return address if "." in address else None


def node_order(addresses: Sequence[str]) -> tuple[int, ...]:
    """Indices of ``addresses`` in the order of rank: nodes of a switch together, at every level of the tree.

    The first stays first, and its switches come before others: it is where the ranks meet.
    """
    home = addresses[0].split(".")

    def place(index: int) -> list[tuple[bool, list[tuple[int, str]]]]:
        names = addresses[index].split(".")
        return [(name != own, _natural(name)) for name, own in zip(names, home, strict=False)]

    return tuple(sorted(range(len(addresses)), key=place))


def mapping(layout: Layout, nodes: Sequence[str], workers_per_node: int) -> list[str]:
    """For each node of ``nodes``, which are in the order of rank: its ranks and their places in the layout."""
    lines = []
    for position, node in enumerate(nodes):
        ranks = range(position * workers_per_node, min((position + 1) * workers_per_node, layout.world_size))
        if not ranks:
            continue
        places = {
            "pp": {rank // (layout.dp * layout.tp) for rank in ranks},
            "dp": {rank // layout.tp % layout.dp for rank in ranks},
            "tp": {rank % layout.tp for rank in ranks},
        }
        split = ", ".join(f"{axis} {_span(values)}" for axis, values in places.items())
        lines.append(f"{node}: ranks {_span(set(ranks))}: {split}")
    return lines


def _span(values: set[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _natural(name: str) -> list[tuple[int, str]]:
    """n9 before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
