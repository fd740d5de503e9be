"""Places ranks on nodes: orders the nodes, and checks whether the network between them suits the layout.

Nodes are ordered so that neighboring ranks are neighbors in the network. In the global rank, tp varies fastest, then
cp, then dp, then pp, and a node holds consecutive ranks. Therefore tp stays inside a node, and so does cp if it fits.
Data-parallel groups are as close as possible, and mainly the light traffic between pipeline stages crosses switches.

SLURM_TOPOLOGY_ADDR contains the position of a node (get_node_addr in the plugins of Slurm 26.05): ``spine.rack1.n1`` in
a tree of switches, ``b8.n1`` in a block, ``t1:0:3:2.n1`` in a 3D torus.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.layout.layout import Layout
from hpc_train.machine.allocation import expand
from hpc_train.machine.sysfs import natural

TORUS = re.compile(r"(?P<name>.+):(?P<x>\d+):(?P<y>\d+):(?P<z>\d+)\..+")


def switch_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the position of this node in the network, such as ``spine.rack1.n1``; None if Slurm knows only its
    name."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "")
    named_only = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN") == "node"  # the name may contain dots
    if "." in address and not named_only:
        return address
    return None


def with_nvlink_domain(address: str | None, name: str, domain: str | None) -> str | None:
    """Returns the position of a node with its NVLink domain inserted below the switch, since a domain is within a
    rack."""
    if domain is None:
        return address
    above, _, last = (address or name).rpartition(".")
    return ".".join(part for part in (above, domain, last) if part)


def node_order(addresses: Sequence[str]) -> tuple[int, ...]:
    """Returns the indices of ``addresses`` in the order of ranks.

    In a tree or in blocks, the nodes of a switch are adjacent at every level. In a torus, the order follows a path
    along neighboring coordinates. The first node stays first, and its switches precede the others, because it hosts the
    rendezvous.
    """
    tori = [TORUS.fullmatch(address) for address in addresses]
    coordinates = [matches for matches in tori if matches is not None]
    if len(coordinates) == len(addresses):
        return _torus_order(coordinates)
    home = addresses[0].split(".")

    def sort_key(index: int) -> list[tuple[bool, list[tuple[int, str]]]]:
        names = addresses[index].split(".")
        return [
            (name != home_name, natural(name)) for name, home_name in itertools.zip_longest(names, home, fillvalue="")
        ]

    return tuple(sorted(range(len(addresses)), key=sort_key))


def _torus_order(nodes: Sequence[re.Match[str]]) -> tuple[int, ...]:
    """Returns the indices along a path that reverses at the end of each row and starts at the first node."""

    def position(index: int) -> tuple[bool, list[tuple[int, str]], int, int, int]:
        name = nodes[index]["name"]
        (x, y, z) = (int(nodes[index][axis]) for axis in "xyz")
        turned_y, turned_z = -y if x % 2 else y, -z if (x + y) % 2 else z
        return name != nodes[0]["name"], natural(name), x, turned_y, turned_z

    path = sorted(range(len(nodes)), key=position)
    home = sum(node["name"] == nodes[0]["name"] for node in nodes)
    start = path.index(0)
    return (*path[start:home], *path[:start], *path[home:])


def mapping(layout: Layout, nodes: Sequence[str], workers_per_node: int) -> list[str]:
    """Describes for each node (in rank order) its ranks and their positions in the layout."""
    lines = []
    replica = layout.replica
    for position, node in enumerate(nodes):
        ranks = range(position * workers_per_node, min((position + 1) * workers_per_node, layout.world_size))
        if not ranks:
            continue
        axes = {
            "pp": {rank % replica.world_size // replica.stage_ranks for rank in ranks},
            "dp": {
                rank // replica.world_size * replica.dp + rank // (layout.cp * layout.tp) % replica.dp for rank in ranks
            },
            **({"cp": {rank // layout.tp % layout.cp for rank in ranks}} if layout.cp > 1 else {}),
            "tp": {rank % layout.tp for rank in ranks},
        }
        line = f"{node}: ranks {_span(set(ranks))}"
        if layout.micro_batches or layout.world_size > layout.dp:  # custom code may know only its ranks
            line += ": " + ", ".join(f"{axis} {_span(values)}" for axis, values in axes.items())
        lines.append(line)
    return lines


def _span(values: set[int]) -> str:
    low, high = min(values), max(values)
    if low == high:
        return str(low)
    return f"{low}-{high}"


def parse_switch_sizes(text: str) -> dict[str, int]:
    """Returns the number of nodes of each lowest switch or block in the output of ``scontrol show topology``."""
    lines = re.findall(r"^(?:SwitchName=(\S+) Level=0|BlockName=(\S+)).*?\bNodes=(\S+)", text, flags=re.MULTILINE)
    return {switch or block: len(expand(nodes)) for switch, block, nodes in lines}


@dataclass(frozen=True)
class Network:
    """The lowest switch (or block) of each node in rank order, and the number of nodes that a switch holds."""

    switches: tuple[str, ...]
    size: int

    @property
    def needed(self) -> int:
        """Returns the smallest number of switches that hold all nodes."""
        return -(-len(self.switches) // self.size)


def network_of(addresses: Sequence[str], sizes: Mapping[str, int]) -> Network | None:
    """Returns the switches of nodes in rank order; None if they are in a torus, or all on one switch. ``sizes`` holds
    the number of nodes of each switch of the cluster. If it is unknown, a switch holds as many nodes as the fullest
    switch in ``addresses``."""
    if any(TORUS.fullmatch(address) for address in addresses):
        return None
    switches = tuple(address.rpartition(".")[0].rpartition(".")[2] for address in addresses)
    used = Counter(switches)
    if len(used) < 2:
        return None
    sizes_of_used = [sizes[name] for name in used if name in sizes]
    return Network(switches, max(*used.values(), *sizes_of_used))


def has_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether Slurm describes the network as blocks."""
    return environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").startswith("block.")


def group_nodes(layout: Layout, workers_per_node: int) -> int:
    """Returns the nodes of a group of ranks that exchange the most: those that shard one copy of the state or, without
    sharding, those of a pipeline stage."""
    ranks = layout.replica.stage_ranks
    if layout.shard > 1:
        ranks = layout.shard * layout.tp
    return -(-ranks // workers_per_node)


def segment(layout: Layout, workers_per_node: int, nodes: int, block: int) -> int:
    """Returns the largest value of ``--segment`` that divides such a group and, as sbatch requires, the nodes of the
    job. ``block`` is the number of nodes of a block."""
    group = group_nodes(layout, workers_per_node)
    return max(size for size in range(1, min(group, block) + 1) if group % size == 0 and nodes % size == 0)


def judge(network: Network, layout: Layout, workers_per_node: int, *, blocks: bool, switches: str | None) -> list[str]:
    """Returns a line for each problem with the placement of ``layout``; the last line suggests an improvement.

    Args:
        blocks: whether the site has a block topology, in which ``--segment`` replaces ``--switches``.
        switches: the value of ``cluster.extra.switches``.
    """
    kind = "blocks" if blocks else "switches"
    used = Counter(network.switches)
    nodes = len(network.switches)
    problems = []
    if len(used) > network.needed + 1 or (network.size == 1 and nodes > 2):
        spread = ", ".join(f"{name} {count}" for name, count in used.items())
        enough = f", although {network.needed} could hold them" if network.size > 1 else ""
        problems.append(f"the {nodes} nodes are scattered over {len(used)} {kind} ({spread}){enough}")
    problems += _straddling(network, layout, workers_per_node)
    if not problems:
        return []
    if blocks:
        size = segment(layout, workers_per_node, nodes, network.size)
        fix = f"+cluster.extra.segment={size} requests that many nodes of one block at a time"
    elif switches is None:
        fewer = min(network.needed, len(used) - 1) if network.size > 1 else 1
        on = "one switch" if fewer == 1 else f"{fewer} switches"
        fix = f"+cluster.extra.switches={fewer}@00:30:00 waits up to 30 minutes for nodes on {on}"
    else:
        fix = (
            f"+cluster.extra.switches={switches} did not help: a longer waiting time, if the site permits it "
            "(max_switch_wait)"
        )
    return [*problems, fix]


def _straddling(network: Network, layout: Layout, workers_per_node: int) -> list[str]:
    """Returns a line for each data-parallel group that is on several switches, although one switch could hold it."""
    problems = []
    ranks = layout.replica.stage_ranks
    for first in range(0, layout.world_size, ranks):
        last = first + ranks - 1
        stage = first // ranks % layout.pp
        group = network.switches[first // workers_per_node : last // workers_per_node + 1]
        names = list(dict.fromkeys(group))
        if len(names) > 1 and len(group) <= network.size and layout.dp_cp > 1:
            of_stage = f" of pipeline rank {stage}" if layout.pp > 1 else ""
            problems.append(
                f"the data-parallel group{of_stage} ({len(group)} nodes) straddles {' and '.join(names)}, so its "
                "collectives cross the switches above"
            )
    return problems
