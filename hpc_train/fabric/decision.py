"""The environment that suits what was found: almost nothing, each variable with its reason.

Only what NCCL's guide calls system configuration is set. Its debugging variables may come from a named site profile,
and never from detection alone. What is set already wins, and what is left alone is told with a reason as well.

The variables that the profile of a site asks for (``conf/cluster/fabric``), with where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.environment import Variable
from hpc_train.config.schema import FabricConfig
from hpc_train.fabric.facts import NodeFacts
from hpc_train.fabric.nccl_settings import Setting
from hpc_train.fabric.rails import FLAPS, PortVerdict, judge_ports
from hpc_train.fabric.versions import Version

LARGE_JOB_GPUS = 1000  # from here on some link always flaps
GID_CHOSEN_BY_NCCL: Version = (2, 21)  # -1, the default since, chooses per connection


@dataclass(frozen=True)
class LeftAlone:
    """A variable that is often set and was not, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class FabricJob:
    """What the environment depends on besides the machines.

    Attributes:
        nccl: its version; None where it is not known.
        profile: variables that the named profile of a site asks for, and their reasons.
    """

    nodes: int
    gpus_per_node: int
    nccl: Version | None = None
    profile: tuple[Variable, ...] = ()


@dataclass(frozen=True)
class FabricDecision:
    """What is exported, what is left alone, and what could not be decided for want of facts."""

    fabric: str
    variables: tuple[Variable, ...]
    left_alone: tuple[LeftAlone, ...]
    unknown: tuple[str, ...]


def decide(nodes: Sequence[NodeFacts], job: FabricJob, found: Mapping[str, Setting]) -> FabricDecision:
    """The environment of all ranks, from the facts of all nodes: different lists of cards hang when they connect."""
    fabric = _fabric(nodes, job)
    wanted = [*job.profile, *_of_fabric(fabric, nodes, job), *_general(nodes, job)]
    variables: dict[str, Variable] = {}
    left: dict[str, LeftAlone] = {}
    for variable in wanted:
        if (setting := found.get(variable.name)) is not None:
            where = f"set to {setting.value} by {setting.place}, which wins"
            left.setdefault(variable.name, LeftAlone(variable.name, where))
        else:
            variables.setdefault(variable.name, variable)
    for alone in _left_alone(fabric, nodes, job):
        if alone.name not in variables:
            left.setdefault(alone.name, alone)
    return FabricDecision(fabric, tuple(variables.values()), tuple(left.values()), tuple(_unknown(nodes, fabric, job)))


def _fabric(nodes: Sequence[NodeFacts], job: FabricJob) -> str:
    """What carries the traffic: ``cpu one_node efa slingshot infiniband roce ethernet unknown``."""
    if job.gpus_per_node == 0:
        return "cpu"
    return "one_node" if job.nodes == 1 else _between_nodes(nodes)


def _between_nodes(nodes: Sequence[NodeFacts]) -> str:
    kinds = {nic.kind for facts in nodes for nic in facts.nics}
    interfaces = {interface.name for facts in nodes for interface in facts.interfaces}
    layers = {verdict.port.link_layer for facts in nodes for verdict in judge_ports(facts) if verdict.usable}
    found = {
        "efa": "efa" in kinds,
        "slingshot": "slingshot" in kinds or any(name.startswith("hsn") for name in interfaces),
        "infiniband": "InfiniBand" in layers,
        "roce": "Ethernet" in layers,
        "unknown": any(verdict.usable is None for facts in nodes for verdict in judge_ports(facts))
        or any(not nic.ports for facts in nodes for nic in facts.nics),  # cards, but nothing of their ports
        "ethernet": bool(interfaces),
    }
    return next((name for name, there in found.items() if there), "unknown")


def _general(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    yield from _interfaces(nodes, job)
    yield Variable("TORCH_FR_BUFFER_SIZE", "2000", "the last collectives of each rank can be told after a hang")
    if job.gpus_per_node:
        yield Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPUs are numbered as nvidia-smi numbers them")
        yield Variable("NCCL_DEBUG", "WARN", "NCCL says why it failed, and nothing else")
        yield Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "they are written down when a collective times out")


def _interfaces(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    """Only where the automatic choice would be wrong on some node, and one name is right on all."""
    if job.nodes == 1:
        yield Variable("GLOO_SOCKET_IFNAME", "lo", "one node: the host's name may lead to an interface that is down")
        return
    route = _route(nodes)
    wrong = [f"{facts.automatic or 'none'} on {facts.node}" for facts in nodes if facts.automatic != route]
    if route is None or not wrong:
        return
    reason = f"the way to the node where ranks meet; that of the host's name is {', '.join(wrong[:4])}"
    yield Variable("GLOO_SOCKET_IFNAME", route, reason)
    yield Variable("TP_SOCKET_IFNAME", route, reason)
    if job.gpus_per_node:
        yield Variable("NCCL_SOCKET_IFNAME", f"={route}", reason)


def _route(nodes: Sequence[NodeFacts]) -> str | None:
    """The interface that leads to the other nodes, where it is called the same on all. The node where ranks meet may
    reach itself over the loopback."""
    routes = _routes(nodes)
    return routes.pop() if len(routes) == 1 else None


def _routes(nodes: Sequence[NodeFacts]) -> set[str]:
    return {facts.route for facts in nodes if facts.route not in (None, "lo")}


def _of_fabric(fabric: str, nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    if fabric in ("infiniband", "roce"):
        yield from _list_of_cards(nodes)
        yield from _patience(nodes, job)
    if fabric == "roce":
        yield from _gid_index(nodes, job)
    if fabric == "slingshot":
        yield Variable("FI_MR_CACHE_MONITOR", "userfaultfd", "the default monitor deadlocks with NCCL on Slingshot")
        yield Variable("NCCL_SOCKET_IFNAME", "hsn", "the high-speed interfaces, and not the management network")
    if fabric == "ethernet":
        yield from _sockets(nodes)
    files = {facts.topology_file for facts in nodes}
    if job.nodes > 1 and len(files) == 1 and (file := files.pop()) is not None:
        yield Variable("NCCL_TOPO_FILE", file, "this virtual machine hides its PCI tree; the file has it")


def _list_of_cards(nodes: Sequence[NodeFacts]) -> Iterator[Variable]:
    """Only where an active port must be left out. Names are exact: mlx5_1 alone would also mean mlx5_10."""
    wanted = {_cards(judge_ports(facts)) for facts in nodes}
    out = {
        f"{verdict.nic}: {verdict.reason}"
        for facts in nodes
        for verdict in judge_ports(facts)
        if verdict.usable is False and verdict.port.active
    }
    if out and len(wanted) == 1 and (names := wanted.pop()):
        yield Variable(
            "NCCL_IB_HCA", "=" + ",".join(names), f"active ports that are not for training: {'; '.join(sorted(out))}"
        )


def _cards(verdicts: Sequence[PortVerdict]) -> tuple[str, ...]:
    """Cards with a usable port; with the port's number where another port of the card must not be used."""
    names = []
    for verdict in verdicts:
        if verdict.usable:
            others = [other for other in verdicts if other.nic == verdict.nic and other is not verdict]
            exact = any(other.usable is False and other.port.active for other in others)
            names.append(f"{verdict.nic}:{verdict.port.number}" if exact else verdict.nic)
    return tuple(dict.fromkeys(names))


def _patience(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    flapping = sorted(
        f"{facts.node + ' ' if facts.node else ''}{verdict.nic} went down {verdict.port.link_downed} times"
        for facts in nodes
        for verdict in judge_ports(facts)
        if verdict.usable and (verdict.port.link_downed or 0) >= FLAPS
    )
    large = job.nodes * job.gpus_per_node >= LARGE_JOB_GPUS
    if large or flapping:
        why = f"{job.nodes * job.gpus_per_node} GPUs: some link always flaps" if large else "; ".join(flapping[:4])
        yield Variable("NCCL_IB_TIMEOUT", "22", f"{why}; 4 us x 2^22 are 17 s of patience for a lost packet")
        yield Variable("NCCL_IB_RETRY_CNT", "7", f"{why}; the most that the standard has")


def _gid_index(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    if job.nccl is None or job.nccl >= GID_CHOSEN_BY_NCCL:
        return
    indices = {verdict.port.roce_v2_gid for facts in nodes for verdict in judge_ports(facts) if verdict.usable}
    if len(indices) == 1 and (index := indices.pop()) is not None:
        yield Variable(
            "NCCL_IB_GID_INDEX", str(index), f"RoCE v2, and NCCL {_text(job.nccl)} does not look for it itself"
        )


def _sockets(nodes: Sequence[NodeFacts]) -> Iterator[Variable]:
    if 25 <= (speed := _ethernet_gbps(nodes)) <= 100:
        reason = f"{speed:g} Gb/s Ethernet: one TCP stream does not fill it; 4 x 4 of at most 64"
        yield Variable("NCCL_SOCKET_NTHREADS", "4", reason)
        yield Variable("NCCL_NSOCKS_PERTHREAD", "4", reason)


def _left_alone(fabric: str, nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[LeftAlone]:
    if fabric == "cpu":
        yield LeftAlone("NCCL_*", "no GPU: gloo carries everything")
        return
    debugging = "NCCL's guide: for debugging, and not to be kept in scripts"
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"):
        yield LeftAlone(name, f"{debugging}; NCCL measures and chooses by size")
    yield LeftAlone("NCCL_P2P_DISABLE", f"{debugging}; without it GPUs of a node talk through memory")
    yield LeftAlone("NCCL_P2P_LEVEL", f"{debugging}; NCCL sees the same ways as the matrix")
    yield LeftAlone("NCCL_SHM_DISABLE", f"{debugging}; where /dev/shm is small, enlarge it")
    yield LeftAlone("NCCL_NVLS_ENABLE", "found by NCCL itself")
    yield LeftAlone("NCCL_IGNORE_CPU_AFFINITY", "NCCL keeps within the masks already")
    if fabric == "one_node":
        yield LeftAlone("NCCL_SOCKET_IFNAME", "one node: nothing crosses a network")
        return
    yield LeftAlone("NCCL_IB_DISABLE", _why_no_ib_disable(fabric, nodes))
    yield LeftAlone("NCCL_NET_GDR_LEVEL", f"{debugging}; NCCL uses GPUDirect where card and GPU are near")
    if fabric in ("infiniband", "roce"):
        yield LeftAlone("NCCL_IB_HCA", "no active port has to be left out")
        yield LeftAlone(
            "NCCL_IB_TIMEOUT", f"fewer than {LARGE_JOB_GPUS} GPUs, and no link is known to flap; NCCL waits long enough"
        )
        yield LeftAlone(
            "NCCL_IB_QPS_PER_CONNECTION", f"{debugging}; a site with adaptive routing may know better: a profile"
        )
        yield LeftAlone("NCCL_IB_PCI_RELAXED_ORDERING", "automatic; in virtual machines a profile of the site sets it")
        yield LeftAlone("NCCL_CROSS_NIC", "automatic; 0 only where rails are separate networks: a profile of the site")
    if fabric == "roce":
        yield LeftAlone("NCCL_IB_GID_INDEX", _why_no_gid(job.nccl))
        yield LeftAlone("NCCL_IB_TC", "the traffic class is the site's and cannot be seen from a host: a profile")
    if fabric == "efa":
        yield LeftAlone("FI_PROVIDER", "the plugin chooses efa since 1.5")
        yield LeftAlone("FI_EFA_USE_DEVICE_RDMA", "on by itself where the card can")
        yield LeftAlone("FI_EFA_FORK_SAFE", "only old kernels and libraries needed it")
        yield LeftAlone("RDMAV_FORK_SAFE", "only old kernels and libraries needed it")
    yield LeftAlone("NCCL_SOCKET_IFNAME", "the automatic choice leads to the other nodes")
    yield LeftAlone("NCCL_MNNVL_ENABLE", "NVLink between nodes is found by NCCL itself")


def _unknown(nodes: Sequence[NodeFacts], fabric: str, job: FabricJob) -> Iterator[str]:
    if job.nccl is None and fabric == "roce":
        yield "NCCL's version: before 2.21 NCCL_IB_GID_INDEX would be needed"
    if fabric == "unknown":
        yield "what connects the nodes: no port is seen to be active"
    if job.nodes > 1 and len(_routes(nodes)) > 1:
        yield "one network interface for all nodes: the way to the others is called differently"
    if fabric == "efa":
        yield "whether the plugin aws-ofi-nccl is loaded: without it NCCL silently falls back to TCP"
    lists = {_cards(judge_ports(facts)) for facts in nodes}
    if fabric in ("infiniband", "roce") and len(lists) > 1:
        yield "one list of cards for all nodes: they differ"


def _ethernet_gbps(nodes: Sequence[NodeFacts]) -> float:
    """Of the node with the slowest interface, the one to the other nodes where that is known; 0 where nothing is."""
    fastest = []
    for facts in nodes:
        up = [interface for interface in facts.interfaces if interface.up]
        routed = [interface for interface in up if interface.name == facts.route]
        fastest.append(max((interface.speed_gbps or 0.0 for interface in routed or up), default=0.0))
    return min(fastest, default=0.0)


def _why_no_ib_disable(fabric: str, nodes: Sequence[NodeFacts]) -> str:
    speed = _ethernet_gbps(nodes)
    if fabric == "ethernet" and speed:
        return f"there is no faster network; {speed:g} Gb/s Ethernet carries at most {speed / 8:.3g} GB/s per node"
    return "it turns the fast network off; without such a network it changes nothing"


def _why_no_gid(nccl: Version | None) -> str:
    if nccl is None:
        return "NCCL's version is not known; since 2.21 it chooses per connection"
    if nccl >= GID_CHOSEN_BY_NCCL:
        return f"NCCL {_text(nccl)} chooses per connection"
    return "no single RoCE v2 entry that all ports share"


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def site_profile(fabric: FabricConfig) -> tuple[Variable, ...]:
    reason = f"the site profile {fabric.name}" + (f": {fabric.source}" if fabric.source else "")
    return tuple(Variable(name, value, reason) for name, value in fabric.variables.items())
