"""Decides which network variables a job exports. It exports as few as possible, each with its reason.

Only variables that NCCL's guide calls system configuration are set. Its debugging variables come only from a site
profile (``conf/cluster/fabric``), never from detection. Variables that are already set take precedence. Common
variables that are not set are reported with a reason as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.environment import Variable
from hpc_train.config.schema import FabricConfig
from hpc_train.fabric import rccl
from hpc_train.fabric.facts import NodeFacts
from hpc_train.fabric.nccl_settings import Setting
from hpc_train.fabric.rails import FLAPS, PortVerdict, judge_ports
from hpc_train.fabric.versions import Version

LARGE_JOB_GPUS = 1000  # in larger jobs some link always flaps
GID_CHOSEN_BY_NCCL: Version = (2, 21)  # from this version on, the default -1 chooses per connection


@dataclass(frozen=True)
class UnsetVariable:
    """A common variable that was not set, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class FabricJob:
    """The job that the environment is decided for.

    Attributes:
        nccl: the version of NCCL; None if unknown.
        profile: variables requested by the site profile, and their reasons.
    """

    nodes: int
    gpus_per_node: int
    nccl: Version | None = None
    profile: tuple[Variable, ...] = ()


@dataclass(frozen=True)
class FabricDecision:
    """The exported variables, common variables that are not set, and decisions that missing facts prevented."""

    fabric: str
    variables: tuple[Variable, ...]
    not_set: tuple[UnsetVariable, ...]
    unknown: tuple[str, ...]


def decide(nodes: Sequence[NodeFacts], job: FabricJob, found: Mapping[str, Setting]) -> FabricDecision:
    """Decides the environment of all ranks from the facts of all nodes, because different NIC lists hang on
    connection.
    """
    fabric = _fabric(nodes, job)
    wanted = [*job.profile, *_of_fabric(fabric, nodes, job), *_general(nodes, job)]
    variables: dict[str, Variable] = {}
    left: dict[str, UnsetVariable] = {}
    if rccl.on_amd(nodes):
        wanted = [*job.profile, *rccl.variables(fabric, found), *rccl.read_by_rccl(wanted)]
    for variable in wanted:
        if (setting := found.get(variable.name)) is not None:
            where = f"already set to {setting.value} by {setting.source}, which takes precedence"
            left.setdefault(variable.name, UnsetVariable(variable.name, where))
        else:
            variables.setdefault(variable.name, variable)
    for alone in _not_set(fabric, nodes, job):
        if alone.name not in variables:
            left.setdefault(alone.name, alone)
    return FabricDecision(fabric, tuple(variables.values()), tuple(left.values()), tuple(_unknown(nodes, fabric, job)))


def _fabric(nodes: Sequence[NodeFacts], job: FabricJob) -> str:
    """Returns the network in use: ``cpu one_node efa slingshot infiniband roce ethernet unknown``."""
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
        or any(not nic.ports for facts in nodes for nic in facts.nics),  # NICs without any port information
        "ethernet": bool(interfaces),
    }
    return next((name for name, there in found.items() if there), "unknown")


def _general(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    yield from _interfaces(nodes, job)
    yield Variable("TORCH_FR_BUFFER_SIZE", "2000", "records the last collectives of each rank, for diagnosing hangs")
    if job.gpus_per_node:
        yield Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "numbers GPUs as nvidia-smi does")
        yield Variable("NCCL_DEBUG", "WARN", "makes NCCL report only the reason of a failure")
        yield Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "dumps the flight recorder when a collective times out")


def _interfaces(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    """Sets an interface only if the automatic choice is wrong on some node and one name is right on all nodes."""
    if job.nodes == 1:
        yield Variable(
            "GLOO_SOCKET_IFNAME",
            "lo",
            "the job has a single node, and the hostname may resolve to an interface that is down",
        )
        return
    route = _route(nodes)
    wrong = [f"{facts.automatic or 'none'} on {facts.node}" for facts in nodes if facts.automatic != route]
    if route is None or not wrong:
        return
    reason = f"it leads to the rendezvous node, but the hostname resolves to {', '.join(wrong[:4])}"
    yield Variable("GLOO_SOCKET_IFNAME", route, reason)
    yield Variable("TP_SOCKET_IFNAME", route, reason)
    if job.gpus_per_node:
        yield Variable("NCCL_SOCKET_IFNAME", f"={route}", reason)


def _route(nodes: Sequence[NodeFacts]) -> str | None:
    """Returns the interface that leads to the other nodes, if it has the same name on all of them. The rendezvous node
    may reach itself over loopback.
    """
    routes = _routes(nodes)
    return routes.pop() if len(routes) == 1 else None


def _routes(nodes: Sequence[NodeFacts]) -> set[str]:
    return {facts.route for facts in nodes if facts.route not in (None, "lo")}


def _of_fabric(fabric: str, nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    if fabric in ("infiniband", "roce"):
        yield from _nic_list(nodes)
        yield from _retry_settings(nodes, job)
    if fabric == "roce":
        yield from _gid_index(nodes, job)
    if fabric == "slingshot":
        yield Variable("FI_MR_CACHE_MONITOR", "userfaultfd", "the default monitor deadlocks with NCCL on Slingshot")
        yield Variable(
            "NCCL_SOCKET_IFNAME", "hsn", "selects the high-speed interfaces instead of the management network"
        )
    if fabric == "ethernet":
        yield from _sockets(nodes)
    files = {facts.topology_file for facts in nodes}
    if job.nodes > 1 and len(files) == 1 and (file := files.pop()) is not None:
        yield Variable("NCCL_TOPO_FILE", file, "describes the PCI tree, which this virtual machine hides")


def _nic_list(nodes: Sequence[NodeFacts]) -> Iterator[Variable]:
    """Lists NICs only if an active port must be excluded. Names are exact, because mlx5_1 alone would also match
    mlx5_10.
    """
    wanted = {_nic_names(judge_ports(facts)) for facts in nodes}
    out = {
        f"{verdict.nic}: {verdict.reason}"
        for facts in nodes
        for verdict in judge_ports(facts)
        if verdict.usable is False and verdict.port.active
    }
    if out and len(wanted) == 1 and (names := wanted.pop()):
        yield Variable(
            "NCCL_IB_HCA",
            "=" + ",".join(names),
            f"excludes active ports that do not serve training: {'; '.join(sorted(out))}",
        )


def _nic_names(verdicts: Sequence[PortVerdict]) -> tuple[str, ...]:
    """Returns the NICs with a usable port; with the port number if another port of the NIC must not be used."""
    names = []
    for verdict in verdicts:
        if verdict.usable:
            others = [other for other in verdicts if other.nic == verdict.nic and other is not verdict]
            exact = any(other.usable is False and other.port.active for other in others)
            names.append(f"{verdict.nic}:{verdict.port.number}" if exact else verdict.nic)
    return tuple(dict.fromkeys(names))


def _retry_settings(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    flapping = sorted(
        f"{facts.node + ' ' if facts.node else ''}{verdict.nic} went down {verdict.port.link_downed} times"
        for facts in nodes
        for verdict in judge_ports(facts)
        if verdict.usable and (verdict.port.link_downed or 0) >= FLAPS
    )
    large = job.nodes * job.gpus_per_node >= LARGE_JOB_GPUS
    if large or flapping:
        why = f"{job.nodes * job.gpus_per_node} GPUs, so some link always flaps" if large else "; ".join(flapping[:4])
        yield Variable("NCCL_IB_TIMEOUT", "22", f"{why}; NCCL then waits 4 us x 2^22 = 17 s for a lost packet")
        yield Variable("NCCL_IB_RETRY_CNT", "7", f"{why}; 7 is the maximum of the standard")


def _gid_index(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    if job.nccl is None or job.nccl >= GID_CHOSEN_BY_NCCL:
        return
    indices = {verdict.port.roce_v2_gid for facts in nodes for verdict in judge_ports(facts) if verdict.usable}
    if len(indices) == 1 and (index := indices.pop()) is not None:
        yield Variable(
            "NCCL_IB_GID_INDEX",
            str(index),
            f"selects the RoCE v2 address, which NCCL {_version_text(job.nccl)} does not find itself",
        )


def _sockets(nodes: Sequence[NodeFacts]) -> Iterator[Variable]:
    if 25 <= (speed := _ethernet_gbps(nodes)) <= 100:
        reason = f"one TCP stream does not saturate {speed:g} Gb/s Ethernet; 4 x 4 of at most 64 streams are used"
        yield Variable("NCCL_SOCKET_NTHREADS", "4", reason)
        yield Variable("NCCL_NSOCKS_PERTHREAD", "4", reason)


def _not_set(fabric: str, nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[UnsetVariable]:
    if fabric == "cpu":
        yield UnsetVariable("NCCL_*", "there is no GPU, so all traffic uses gloo")
        return
    debugging = "NCCL's guide recommends it for debugging only"
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"):
        yield UnsetVariable(name, f"{debugging}; NCCL chooses by message size")
    yield UnsetVariable("NCCL_P2P_DISABLE", f"{debugging}; it makes the GPUs of a node communicate through host memory")
    yield UnsetVariable("NCCL_P2P_LEVEL", f"{debugging}; NCCL detects the same topology")
    yield UnsetVariable("NCCL_SHM_DISABLE", f"{debugging}; enlarge /dev/shm if it is too small")
    if rccl.on_amd(nodes):
        yield from (UnsetVariable(*pair) for pair in rccl.not_set(fabric))
    else:
        yield UnsetVariable("NCCL_NVLS_ENABLE", "NCCL detects it")
    yield UnsetVariable("NCCL_IGNORE_CPU_AFFINITY", "NCCL already respects the affinity masks")
    if fabric == "one_node":
        yield UnsetVariable("NCCL_SOCKET_IFNAME", "the job has a single node, so no traffic crosses a network")
        return
    yield UnsetVariable("NCCL_IB_DISABLE", _why_no_ib_disable(fabric, nodes))
    yield UnsetVariable("NCCL_NET_GDR_LEVEL", f"{debugging}; NCCL uses GPUDirect if NIC and GPU are close")
    if fabric in ("infiniband", "roce"):
        yield UnsetVariable("NCCL_IB_HCA", "no active port must be excluded")
        yield UnsetVariable(
            "NCCL_IB_TIMEOUT",
            f"the job has fewer than {LARGE_JOB_GPUS} GPUs and no flapping link, so NCCL's default is sufficient",
        )
        yield UnsetVariable(
            "NCCL_IB_QPS_PER_CONNECTION", f"{debugging}; a site with adaptive routing may set it in a profile"
        )
        yield UnsetVariable(
            "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL decides it; for virtual machines set it in a site profile"
        )
        yield UnsetVariable(
            "NCCL_CROSS_NIC", "NCCL decides it; if rails are separate networks, set 0 in a site profile"
        )
    if fabric == "roce":
        yield UnsetVariable("NCCL_IB_GID_INDEX", _why_no_gid(job.nccl))
        yield UnsetVariable("NCCL_IB_TC", "the traffic class cannot be detected from a host; set it in a site profile")
    if fabric == "efa":
        yield UnsetVariable("FI_PROVIDER", "the plugin selects efa since version 1.5")
        yield UnsetVariable("FI_EFA_USE_DEVICE_RDMA", "libfabric enables it if the NIC supports it")
        yield UnsetVariable("FI_EFA_FORK_SAFE", "only old kernels and libraries need it")
        yield UnsetVariable("RDMAV_FORK_SAFE", "only old kernels and libraries need it")
    yield UnsetVariable("NCCL_SOCKET_IFNAME", "the automatic choice leads to the other nodes")
    yield UnsetVariable("NCCL_MNNVL_ENABLE", "NCCL detects NVLink between nodes")


def _unknown(nodes: Sequence[NodeFacts], fabric: str, job: FabricJob) -> Iterator[str]:
    if job.nccl is None and fabric == "roce":
        yield "the version of NCCL; before 2.21 NCCL_IB_GID_INDEX is needed"
    if fabric == "unknown":
        yield "the network between the nodes; no active port was found"
    if job.nodes > 1 and len(_routes(nodes)) > 1:
        yield "one network interface for all nodes; the interfaces that lead to the other nodes have different names"
    if fabric == "efa":
        yield "whether the plugin aws-ofi-nccl is loaded; without it NCCL silently falls back to TCP"
    lists = {_nic_names(judge_ports(facts)) for facts in nodes}
    if fabric in ("infiniband", "roce") and len(lists) > 1:
        yield "one list of NICs for all nodes; the lists differ"


def _ethernet_gbps(nodes: Sequence[NodeFacts]) -> float:
    """Returns the rate of the node with the slowest interface (the one to the other nodes, if known); 0 if unknown."""
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
    return "it disables the fast network, and has no effect without one"


def _why_no_gid(nccl: Version | None) -> str:
    if nccl is None:
        return "the version of NCCL is unknown; since 2.21 it chooses per connection"
    if nccl >= GID_CHOSEN_BY_NCCL:
        return f"NCCL {_version_text(nccl)} chooses per connection"
    return "the ports have no common RoCE v2 entry"


def _version_text(version: Version) -> str:
    return ".".join(map(str, version))


def site_profile(fabric: FabricConfig) -> tuple[Variable, ...]:
    reason = f"the site profile {fabric.name}" + (f": {fabric.source}" if fabric.source else "")
    return tuple(Variable(name, value, reason) for name, value in fabric.variables.items())
