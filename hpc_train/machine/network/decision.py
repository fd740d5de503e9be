"""Decides which network variables a job exports: as few as possible, each with its reason.

Only variables that NCCL's guide calls system configuration are set. NCCL's debugging variables come only from a site
profile (``conf/cluster/fabric``), never from detection, except on Slingshot, whose vendor publishes them
(``libfabric``). Variables that are already set take precedence. Common variables that are not set are also reported
with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.config.schema import FabricConfig
from hpc_train.machine.environment import Variable
from hpc_train.machine.network import libfabric
from hpc_train.machine.network.facts import FLAPS, NodeFacts, Setting
from hpc_train.machine.network.nccl_settings import Version
from hpc_train.machine.network.rails import beyond_gpu_direct, judge_ports, match, port_filter, several_node_nvlink

LARGE_JOB_GPUS = 1000  # in a job of this size, some link always flaps
# All versions of torch read this name; torch 2.9 ignores expandable_segments under its new name (pytorch#183387).
ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
GROWING_SEGMENTS = "expandable_segments:True"
OTHER_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GID_CHOSEN_BY_NCCL: Version = (2, 21)  # from this version on, the default -1 chooses an address for each connection


@dataclass(frozen=True)
class UnsetVariable:
    """A common variable that was not set, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class FabricJob:
    """Describes the job whose environment is decided.

    Attributes:
        nccl: the version of NCCL; None if unknown.
        profile: variables requested by the site profile, and their reasons.
        has_stages: whether the layout has several pipeline ranks.
    """

    nodes: int
    gpus_per_node: int
    nccl: Version | None = None
    profile: tuple[Variable, ...] = ()
    has_stages: bool = False


@dataclass(frozen=True)
class FabricDecision:
    """The exported variables, the common variables that are not set, and the decisions that were not possible because
    facts are missing."""

    fabric: str
    variables: tuple[Variable, ...]
    not_set: tuple[UnsetVariable, ...]
    unknown: tuple[str, ...]


def decide(nodes: Sequence[NodeFacts], job: FabricJob, settings: Mapping[str, Setting]) -> FabricDecision:
    """Decides the environment of all ranks from the facts of all nodes, because NCCL hangs while connecting if nodes
    have different NIC lists.
    """
    fabric = _fabric(nodes, job)
    amd = libfabric.on_amd(nodes)
    if amd and fabric == "slingshot":
        detected = libfabric.rccl_variables(settings)
    else:
        detected = _of_fabric(fabric, nodes, job, settings)
    candidates = [*job.profile, *detected, *_general(nodes, job, settings)]
    variables: dict[str, Variable] = {}
    left: dict[str, UnsetVariable] = {}
    for variable in libfabric.read_by_rccl(candidates) if amd else candidates:
        if (setting := settings.get(variable.name)) is not None:
            where = f"already set to {setting.value} by {setting.source}, which takes precedence"
            left.setdefault(variable.name, UnsetVariable(variable.name, where))
        else:
            variables.setdefault(variable.name, variable)
    for alone in _not_set(fabric, nodes, job):
        if alone.name not in variables:
            left.setdefault(alone.name, alone)
    return FabricDecision(
        fabric, tuple(variables.values()), tuple(left.values()), tuple(_unknown(nodes, fabric, job, settings))
    )


def _fabric(nodes: Sequence[NodeFacts], job: FabricJob) -> str:
    """Returns the network in use: ``cpu``, ``one_node``, ``efa``, ``slingshot``, ``infiniband``, ``roce``, ``ethernet``
    or ``unknown``."""
    if job.gpus_per_node == 0:
        return "cpu"
    if job.nodes == 1:
        return "one_node"
    kinds = {nic.kind for facts in nodes for nic in facts.nics}
    interfaces = {interface.name for facts in nodes for interface in facts.interfaces}
    verdicts = [verdict for facts in nodes for verdict in judge_ports(facts)]
    layers = {verdict.port.link_layer for verdict in verdicts if verdict.usable}
    without_ports = any(not nic.ports for facts in nodes for nic in facts.nics)
    detected = {
        "efa": "efa" in kinds,
        "slingshot": "slingshot" in kinds or any(name.startswith("hsn") for name in interfaces),
        "infiniband": "InfiniBand" in layers,
        "roce": "Ethernet" in layers,
        "unknown": without_ports or any(verdict.usable is None for verdict in verdicts),
        "ethernet": bool(interfaces),
    }
    return next((name for name, is_detected in detected.items() if is_detected), "unknown")


def _general(nodes: Sequence[NodeFacts], job: FabricJob, settings: Mapping[str, Setting]) -> Iterator[Variable]:
    yield from _interfaces(nodes, job)
    yield Variable("TORCH_FR_BUFFER_SIZE", "2000", "records the last collectives of each rank, for diagnosing hangs")
    if job.gpus_per_node:
        yield Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "numbers GPUs as nvidia-smi does")
        yield Variable(
            "TORCH_NCCL_ENABLE_TIMING", "1", "records when a GPU begins a collective, which names a late GPU"
        )
        yield Variable("NCCL_DEBUG", "WARN", "makes NCCL report only the reason of a failure")
        yield Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "dumps the flight recorder when a collective times out")
        if job.has_stages:
            reason = "a rank has more streams than the default of 8 queues: compute, copies, one per communicator"
            yield Variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", reason)
            reason = "all ranks send the messages between stages in one order, so they need no batches"
            yield Variable("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false", reason)
        if not any(name in settings for name in OTHER_ALLOCATOR_SETTINGS):
            reason = "expandable segments reduce fragmentation; unset it to share CUDA tensors between processes"
            yield Variable(ALLOCATOR_SETTINGS, GROWING_SEGMENTS, reason)


def _interfaces(nodes: Sequence[NodeFacts], job: FabricJob) -> Iterator[Variable]:
    """Yields variables for the interface, only if the automatic choice is wrong on some node and one name is right on
    all nodes."""
    if job.nodes == 1:
        reason = "the job has a single node, and the hostname may resolve to an interface that is down"
        yield Variable("GLOO_SOCKET_IFNAME", "lo", reason)
        return
    routes = _routes(nodes)
    if len(routes) != 1:
        return
    (route,) = routes
    wrong = [f"{facts.automatic or 'none'} on {facts.node}" for facts in nodes if facts.automatic != route]
    if not wrong:
        return
    reason = f"it leads to the rendezvous node, but the hostname resolves to {', '.join(wrong[:4])}"
    yield Variable("GLOO_SOCKET_IFNAME", route, reason)
    yield Variable("TP_SOCKET_IFNAME", route, reason)
    if job.gpus_per_node:
        yield Variable("NCCL_SOCKET_IFNAME", f"={route}", reason)


def _routes(nodes: Sequence[NodeFacts]) -> set[str]:
    """Returns the interfaces that lead to the other nodes. The rendezvous node may reach itself over loopback."""
    return {facts.route for facts in nodes if facts.route not in (None, "lo")}


def _of_fabric(
    fabric: str, nodes: Sequence[NodeFacts], job: FabricJob, settings: Mapping[str, Setting]
) -> Iterator[Variable]:
    used = [(facts, verdict) for facts in nodes for verdict in judge_ports(facts) if verdict.usable]
    if fabric in ("infiniband", "roce"):
        out = port_filter(nodes)
        if out.excluded:  # only if an active port must be excluded
            yield Variable("NCCL_IB_HCA", out.value, f"excludes active ports that do not serve training: {out.reason}")
        flapping = sorted(
            f"{facts.node + ' ' if facts.node else ''}{verdict.nic} went down {verdict.port.link_downed} times"
            for facts, verdict in used
            if (verdict.port.link_downed or 0) >= FLAPS
        )
        gpus = job.nodes * job.gpus_per_node
        if gpus >= LARGE_JOB_GPUS:
            flapping = [f"{gpus} GPUs, so some link always flaps"]
        if flapping:
            reason = f"{'; '.join(flapping[:4])}; NCCL then waits 4 us x 2^22 = 17 s for a lost packet"
            yield Variable("NCCL_IB_TIMEOUT", "22", reason)
    if fabric == "roce" and job.nccl is not None and job.nccl < GID_CHOSEN_BY_NCCL:
        indices = {verdict.port.roce_v2_gid for _, verdict in used}
        if len(indices) == 1 and (index := indices.pop()) is not None:
            nccl = ".".join(map(str, job.nccl))
            reason = f"selects the RoCE v2 address, which NCCL {nccl} does not find itself"
            yield Variable("NCCL_IB_GID_INDEX", str(index), reason)
    if fabric in libfabric.FABRICS and not libfabric.on_amd(nodes):
        yield from libfabric.variables(fabric, nodes, settings)
    if fabric == "ethernet" and not _has_cloud_sockets(nodes) and 25 <= (speed := _ethernet_gbps(nodes)) <= 100:
        reason = f"one TCP stream does not saturate {speed:g} Gb/s Ethernet; 4 x 4 of at most 64 streams are used"
        yield Variable("NCCL_SOCKET_NTHREADS", "4", reason)
        yield Variable("NCCL_NSOCKS_PERTHREAD", "4", reason)
    files = {facts.topology_file for facts in nodes}
    if job.nodes > 1 and len(files) == 1 and (file := files.pop()) is not None:
        yield Variable("NCCL_TOPO_FILE", file, "describes the PCI tree, which this virtual machine hides")


def _has_cloud_sockets(nodes: Sequence[NodeFacts]) -> bool:
    """Returns whether NCCL itself chooses the number of sockets and threads for the NICs of this cloud."""
    return any(facts.site in ("aws", "gcp") for facts in nodes)


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
    if libfabric.on_amd(nodes):
        yield from (UnsetVariable(*pair) for pair in libfabric.not_set_for_rccl(fabric))
    else:
        yield UnsetVariable("NCCL_NVLS_ENABLE", "NCCL detects it")
    if fabric == "slingshot":
        yield UnsetVariable("CXI_FORK_SAFE", libfabric.FORK_SAFE)
    yield UnsetVariable("NCCL_IGNORE_CPU_AFFINITY", "NCCL already respects the affinity masks")
    if fabric == "one_node":
        yield UnsetVariable("NCCL_SOCKET_IFNAME", "the job has a single node, so no traffic crosses a network")
        return

    yield UnsetVariable("NCCL_IB_DISABLE", _why_no_ib_disable(fabric, nodes))
    yield UnsetVariable("NCCL_NET_GDR_LEVEL", f"{debugging}; {_gpu_direct(nodes)}")
    if fabric in ("infiniband", "roce"):
        unprofiled = {
            "NCCL_IB_HCA": "; ".join(port_filter(nodes).disputed) or "no active port must be excluded",
            "NCCL_IB_TIMEOUT": (
                f"the job has fewer than {LARGE_JOB_GPUS} GPUs and no flapping link, so NCCL's default is sufficient"
            ),
            "NCCL_IB_RETRY_CNT": "NCCL's default of 7 is the maximum of the standard",
            "NCCL_IB_QPS_PER_CONNECTION": f"{debugging}; a site with adaptive routing may set it in a profile",
            "NCCL_IB_PCI_RELAXED_ORDERING": "NCCL decides it; for virtual machines set it in a site profile",
            "NCCL_CROSS_NIC": "NCCL decides it; if rails are separate networks, set 0 in a site profile",
        }
        yield from (UnsetVariable(name, why) for name, why in unprofiled.items())
        used = [(facts.node, verdict.nic) for facts in nodes for verdict in judge_ports(facts) if verdict.usable]
        if len(set(used)) < len(used):
            separate = "if they are separate networks, set 0 in a site profile"
            yield UnsetVariable("NCCL_IB_MERGE_NICS", f"NCCL merges the ports of a NIC into one device; {separate}")
    if fabric == "ethernet" and _has_cloud_sockets(nodes):
        yield UnsetVariable("NCCL_SOCKET_NTHREADS", "NCCL chooses the values for the NICs of this cloud itself")
    if fabric == "roce":
        yield UnsetVariable("NCCL_IB_GID_INDEX", _why_no_gid(job.nccl))
        yield UnsetVariable("NCCL_IB_TC", "the traffic class cannot be detected from a host; set it in a site profile")
    if fabric == "efa":
        yield UnsetVariable("FI_PROVIDER", "the plugin selects efa since version 1.5")
        yield UnsetVariable("FI_EFA_USE_DEVICE_RDMA", "libfabric enables it if the NIC supports it")
        yield UnsetVariable("FI_EFA_FORK_SAFE", "only old kernels and libraries need it")
        yield UnsetVariable("RDMAV_FORK_SAFE", "only old kernels and libraries need it")
    if fabric == "slingshot":
        option = "the Slurm option --network=disable_rdzv_get"
        yield UnsetVariable("FI_CXI_RDZV_PROTO", f"it needs {option}: set both if the site offers it")
    yield UnsetVariable("NCCL_SOCKET_IFNAME", _why_no_interface(nodes))
    yield UnsetVariable("NCCL_MNNVL_ENABLE", _why_no_mnnvl(nodes))


def _unknown(nodes: Sequence[NodeFacts], fabric: str, job: FabricJob, settings: Mapping[str, Setting]) -> Iterator[str]:
    amd = libfabric.on_amd(nodes)
    if job.nccl is None and fabric == "roce" and not amd:
        yield "the version of NCCL; before 2.21 NCCL_IB_GID_INDEX is needed"
    if fabric == "unknown":
        yield "the network between the nodes; no active port was found"
    if job.nodes > 1 and len(_routes(nodes)) > 1:
        yield "one network interface for all nodes; the interfaces that lead to the other nodes have different names"
    networks = [
        setting.value for setting in (settings.get("NCCL_NET"), *job.profile) if setting and setting.name == "NCCL_NET"
    ]
    if fabric in libfabric.FABRICS and not amd:
        yield from libfabric.unknown(nodes, networks[0] if networks else None)
    # Google's machines of the A3, A4 or A4X series: https://docs.cloud.google.com/ai-hypercomputer/docs/nccl
    # (NCCL/gIB v1.1.2, May 2026), and https://github.com/GoogleCloudPlatform/cluster-toolkit (A3 Mega)
    models = [gpu.model or "" for facts in nodes if facts.site == "gcp" for gpu in facts.gpus]
    needs_google = any(re.search(r"H[12]00|B[23]00", model) for model in models)
    of_google = re.compile(r"NCCL_(NET_PLUGIN|FASTRAK_\w+|GPUDIRECTTCPX_\w+)$")
    if job.nodes > 1 and needs_google and not networks and not any(map(of_google.match, settings)):
        yield (
            "the settings of Google's NCCL plugin, without which NCCL uses TCP: source its script in cluster.setup and "
            "select a profile: /usr/local/gib/scripts/set_nccl_env.sh and cluster/fabric=gcp_gib (A3 Ultra, A4, A4X), "
            "/var/lib/tcpxo/lib64/nccl-env-profile.sh and cluster/fabric=gcp_tcpxo (A3 Mega)"
        )
    if job.nodes > 1 and any(facts.imex_channels == 0 for facts in nodes if several_node_nvlink(facts)):
        yield f"whether NVLink connects the nodes; {_why_no_mnnvl(nodes)}"
    if fabric in ("infiniband", "roce"):
        yield from port_filter(nodes).disputed


def _gpu_direct(nodes: Sequence[NodeFacts]) -> str:
    """Describes whether NCCL uses GPUDirect by default, according to the paths between GPUs and NICs."""
    if any(facts.topology_file or facts.site == "aws" for facts in nodes):
        return "NCCL reads the distance between GPU and NIC from a topology file"
    far = [matched for facts in nodes for matched in beyond_gpu_direct(facts)]
    if far:
        paths = sorted({str(matched.path_type) for matched in far})
        level = "SYS" if paths == ["SYS"] else "PHB"
        grace = "" if all(gpu.model for facts in nodes for gpu in facts.gpus) else " except on Grace"
        return f"GPU and NIC are {'/'.join(paths)} here, where NCCL does not use GPUDirect{grace}: measure with {level}"
    if all(matched.path_type for facts in nodes for matched in match(facts)) and any(facts.gpus for facts in nodes):
        return "NCCL uses GPUDirect, because GPU and NIC are close"
    return "NCCL uses GPUDirect if GPU and NIC are close; their paths are unknown"


def _why_no_mnnvl(nodes: Sequence[NodeFacts]) -> str:
    """Describes what is known about NVLink between nodes, which needs an IMEX channel on each node and a common
    clique."""
    able = [facts for facts in nodes if several_node_nvlink(facts)]
    if not able:
        return "NCCL uses NVLink between nodes only in systems such as GB200 NVL72"
    without = [facts.node or "?" for facts in able if facts.imex_channels == 0]
    if without:
        return f"{', '.join(without[:4])} cannot open /dev/nvidia-caps-imex-channels/channel*, so NCCL uses the network"
    domains = {facts.nvlink_domain for facts in able}
    if len(domains - {None}) > 1:
        return f"NCCL detects NVLink between nodes; these are in {len(domains)} NVLink domains"
    if any(facts.imex_channels is None for facts in able):
        return "NCCL detects NVLink between nodes; whether IMEX is set up is not known"
    return "NCCL detects NVLink between nodes, and each has an IMEX channel"


def _ethernet_gbps(nodes: Sequence[NodeFacts]) -> float:
    """Returns the rate in Gb/s of the slowest node's interface to the other nodes (or its fastest, if that is unknown);
    0 if no rate is known."""
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
        return f"NCCL {'.'.join(map(str, nccl))} chooses per connection"
    return "the ports have no common RoCE v2 entry"


def _why_no_interface(nodes: Sequence[NodeFacts]) -> str:
    if any(facts.route is None or facts.automatic is None for facts in nodes):
        return "it is not known which interface leads to the other nodes"
    if len(_routes(nodes)) > 1:
        return "the interfaces that lead to the other nodes have different names"
    return "the automatic choice leads to the other nodes"


def site_profile(fabric: FabricConfig) -> tuple[Variable, ...]:
    reason = f"the site profile {fabric.name}"
    return tuple(Variable(name, value, reason) for name, value in fabric.variables.items())
