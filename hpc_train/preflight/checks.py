"""Compares the measurements of a preflight with expected values and yields findings with fixes. It does not import
torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hpc_train.machine.network.libfabric import NO_GPU_DIRECT
from hpc_train.preflight.bandwidth import ExpectedBandwidths, SlowNode
from hpc_train.preflight.nccl_log import Transport

WARNING, ERROR = "warning", "error"
# classes of findings, which are the keys of cluster.preflight_action
TCP, NVLINK, SHARED_GPU, SLOW_DEVICE, CONFIG = "tcp", "nvlink", "shared_gpu", "slow_device", "config"
VERSIONS, NETWORK, CLOCK, WRONG_NUMBERS = "versions", "network", "clock", "wrong_numbers"
SKEW_WARN_S, SKEW_ERROR_S = 0.1, 1.0  # munge rejects more than 300 s
GEMM_WARN, GEMM_ERROR = 0.95, 0.85  # shares of the median of the GPUs of one model
COPY_WARN = 0.7  # share of the median; a PCIe link with half of its lanes or one generation lower reaches 0.5
GEMM_CPU = 0.5  # share of the median; CPUs of one model run at different clocks
WARN, FAIL = 0.9, 0.8  # shares of the expected bandwidth: 0.83 and 0.74 of the line rate
LEAST_BUS = 0.1e9  # bytes/s: gigabit Ethernet, the slowest network between nodes
SEE_LINKS = "run `bench collectives` for all sizes and operations, and `doctor` for the links"
MAY_DIFFER = ("driver",)  # drivers are compatible within a major version of CUDA


@dataclass(frozen=True)
class BurnIn:
    """Holds hashes of what a device computes from fixed inputs.

    Attributes:
        kind: what determines the bits of the results besides the inputs: the device and the versions of its libraries.
        hashes: the name of each computation -> the different hashes of its results, in the order in which they first
            occurred. A device that works has one for each.
        known: the hashes of the results that are the same on all devices, because they need no rounding.
    """

    kind: str
    hashes: Mapping[str, tuple[str, ...]]
    known: Mapping[str, str]


@dataclass(frozen=True)
class RankFacts:
    """Holds the facts that one rank reports.

    Attributes:
        versions: versions of python, torch, nccl, driver and hpc_train, if present.
        device: the model of its GPU or CPU.
        gpu: the UUID of its GPU; None on the CPU.
        gemm: FLOP/s of a matrix product.
        transport: the transports in NCCL's log; None without NCCL or if the user has redirected its log.
        copy: bytes/s from pinned host memory to the GPU, while all ranks copy; None on the CPU.
        burn_in: None before it was measured.
    """

    rank: int
    node: str
    config_hash: str
    versions: Mapping[str, str]
    device: str
    gpu: str | None
    gemm: float
    transport: Transport | None = None
    copy: float | None = None
    burn_in: BurnIn | None = None


@dataclass(frozen=True)
class ClockOffset:
    """Holds the seconds by which the clock of ``node`` is ahead of the clock of rank 0. The error is at most half the
    round trip."""

    node: str
    offset_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Bandwidths:
    """All-reduce bus bandwidths in bytes/s: in each node, over each rail with all rails at once, and over all ranks."""

    nodes: Mapping[str, float] = field(default_factory=dict)
    rails: tuple[float, ...] = ()
    world: float | None = None


@dataclass(frozen=True)
class PreflightFinding:
    """Describes a problem and its fix.

    Attributes:
        kind: its class. ``cluster.preflight_action`` defines the action after an error of this class.
        unfit: the node that the run should drop; None if the problem is not limited to one node.
    """

    kind: str
    level: str
    message: str
    fix: str
    unfit: str | None = None

    def __str__(self) -> str:
        return f"{self.level}: {self.message}: {self.fix}"


def check_config(ranks: Sequence[RankFacts]) -> Iterator[PreflightFinding]:
    usual, others = _minority(ranks, lambda rank: rank.config_hash)
    for value, nodes in others.items():
        yield PreflightFinding(
            CONFIG,
            ERROR,
            f"the config on {nodes} ({value[:12]}) differs from the config on the other nodes ({usual[:12]})",
            "its file system shows an old copy of config.yaml: set a run.root that all nodes share and submit again",
        )


def check_versions(ranks: Sequence[RankFacts]) -> Iterator[PreflightFinding]:
    for name in dict.fromkeys(name for rank in ranks for name in rank.versions):
        usual, others = _minority(ranks, lambda rank, name=name: rank.versions.get(name, "absent"))  # type: ignore[misc]
        for value, nodes in others.items():
            yield PreflightFinding(
                VERSIONS,
                WARNING if name in MAY_DIFFER else ERROR,
                f"{name} is {value} on {nodes}, and {usual} on the other nodes",
                "use one environment for all nodes (cluster.python, cluster.container.image), or "
                f"cluster.exclude={nodes.replace(', ', ',')}",
            )


def check_shared_gpu(ranks: Sequence[RankFacts]) -> Iterator[PreflightFinding]:
    users: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.gpu is not None:
            users.setdefault(f"{rank.gpu} on {rank.node}", []).append(rank.rank)
    for gpu, numbers in users.items():
        if len(numbers) > 1:
            yield PreflightFinding(
                SHARED_GPU,
                ERROR,
                f"ranks {', '.join(map(str, numbers))} share the GPU {gpu}",
                "set cluster.gpus_per_node to the GPUs that the job has, and remove --gpus-per-task and --gpu-bind, "
                "which hide GPUs",
            )


def check_transport(ranks: Sequence[RankFacts], rdma: Mapping[str, bool]) -> Iterator[PreflightFinding]:
    """Checks that NCCL uses RDMA and GPUDirect where available. ``rdma`` states for each node whether it has an active
    port for training; unknown nodes are absent."""
    logged = [rank for rank in ranks if rank.transport is not None]
    sockets = [rank for rank in logged if rank.transport and rank.transport.over_sockets and rdma.get(rank.node)]
    for nodes, unfit in _unfit_nodes(sockets, logged).items():
        yield PreflightFinding(
            TCP,
            ERROR,
            f"NCCL sends over TCP (NET/Socket) on {nodes}, although RDMA ports are active there",
            "run `doctor` on that node; the usual causes are NCCL_IB_DISABLE or NCCL_NET in the environment, a missing "
            "plugin (aws-ofi-nccl) or libibverbs, a container without /dev/infiniband, or a small memlock limit",
            unfit,
        )
    staged = _nodes(rank for rank in logged if rank.transport and rank.transport.gpu_direct is False
                    and not rank.transport.over_sockets)  # fmt: skip
    if not staged:
        return
    library = "NCCL"
    fix = "ask the site to load nvidia_peermem, or for a driver and kernel with DMA-BUF; GPUDirect is up to 3 x faster"
    if any("rccl" in rank.versions for rank in ranks):
        library = "RCCL"
        fix = NO_GPU_DIRECT
    yield PreflightFinding(
        TCP, WARNING, f"{library} stages data in host memory on {staged}: its log has no GDRDMA", fix
    )


def check_inside(ranks: Sequence[RankFacts], nvlink: Container[str]) -> Iterator[PreflightFinding]:
    """Checks that NCCL uses NVLink inside nodes. ``nvlink`` are the nodes in which NVLink connects all GPUs."""
    logged = [rank for rank in ranks if rank.transport and rank.transport.inside]
    copying = [rank for rank in logged if rank.transport and "P2P" not in rank.transport.inside and rank.node in nvlink]
    for nodes, unfit in _unfit_nodes(copying, logged).items():
        yield PreflightFinding(
            NVLINK,
            ERROR,
            f"NCCL copies through host memory (SHM) in {nodes}, although the GPUs have NVLink",
            "remove NCCL_P2P_DISABLE, --gpus-per-task and --gpu-bind; set cluster.visible_gpus=all if a driver or a "
            "container refuses access to GPUs that a rank does not see; `nvidia-smi nvlink -s` on the node shows links "
            "that are down",
            unfit,
        )


def _unfit_nodes(affected: Sequence[RankFacts], logged: Sequence[RankFacts]) -> dict[str, str | None]:
    """Returns the names of nodes for a message -> the node that is unfit.

    If at least half of the nodes of ``logged`` are affected, they share one message and none is unfit: the cause is not
    in single nodes.
    """
    nodes = dict.fromkeys(rank.node for rank in affected)
    if nodes and 2 * len(nodes) >= len({rank.node for rank in logged}):
        return {", ".join(nodes): None}
    return {node: node for node in nodes}


def check_copies(ranks: Sequence[RankFacts]) -> Iterator[PreflightFinding]:
    """Compares the bandwidth from host to GPU with the median for the same model of GPU."""
    for same_model in _by([rank for rank in ranks if rank.copy is not None], lambda rank: rank.device).values():
        usual = median(rank.copy or 0.0 for rank in same_model)
        for rank in same_model:
            rate = rank.copy or 0.0
            if rate < COPY_WARN * usual:
                yield PreflightFinding(
                    SLOW_DEVICE,
                    WARNING,
                    f"rank {rank.rank} on {rank.node} (GPU {rank.gpu}) receives {rate / 1e9:.3g} GB/s from the host, "
                    f"{rate / usual:.0%} of the median of {rank.device}",
                    "compare the width and generation of its PCIe link with the other GPUs (nvidia-smi -q), "
                    f"and check that its rank is bound to near CPUs; {drain(rank.node, f'slow PCIe of {rank.gpu}')}",
                )


@dataclass(frozen=True)
class SlowDevice:
    """Describes a rank that computes slowly.

    Attributes:
        usual: the median FLOP/s of the same model of device.
        bad: whether the run would be faster without the node of this rank.
        words: a sentence that describes the problem.
        drain: the command with which the site's staff can drain the node.
    """

    rank: RankFacts
    usual: float
    bad: bool
    words: str
    drain: str


def slow_devices(ranks: Sequence[RankFacts]) -> tuple[SlowDevice, ...]:
    """Compares each rank with the median for its model of device; returns the slow ranks."""
    slow = []
    for same_model in _by(ranks, lambda rank: rank.device).values():
        usual = median(rank.gemm for rank in same_model)
        for rank in same_model:
            warn = GEMM_CPU
            error = GEMM_CPU
            name = ""
            device = "CPU"
            if rank.gpu is not None:
                warn = GEMM_WARN
                error = GEMM_ERROR
                name = f" (GPU {rank.gpu})"
                device = f"GPU {rank.gpu}"
            share = rank.gemm / usual
            if share < warn:
                words = (
                    f"rank {rank.rank} on {rank.node}{name} reaches {rank.gemm / 1e12:.3g} TFLOP/s in matrix "
                    f"products, {share:.0%} of the median of {rank.device}"
                )
                slow.append(SlowDevice(rank, usual, share < error, words, drain(rank.node, f"slow {device}")))
    return tuple(slow)


def check_gemm(slow: Sequence[SlowDevice]) -> Iterator[PreflightFinding]:
    """Yields findings on slow devices. A device that is clearly slow makes its node unfit."""
    for device in slow:
        node = device.rank.node
        look = "check its clocks and temperature (nvidia-smi -q -d PERFORMANCE)"
        if device.rank.gpu is None:
            look = "other processes may use its cores (cluster.exclusive=true), or its clock is low"
        fix = f"cluster.exclude={node}; {look}; {device.drain}"
        if device.bad:
            yield PreflightFinding(SLOW_DEVICE, ERROR, device.words, fix, node)
        else:
            yield PreflightFinding(SLOW_DEVICE, WARNING, device.words, fix)


def check_burn_in(ranks: Sequence[RankFacts]) -> Iterator[PreflightFinding]:
    """Yields findings on devices whose results differ from the right ones: see ``_right_result``.

    Devices of different kinds are not compared, since their kernels may round differently.
    """
    burn_ins = {rank.rank: rank.burn_in for rank in ranks if rank.burn_in is not None}
    for kind in dict.fromkeys(burn_in.kind for burn_in in burn_ins.values()):
        same_kind = {rank: burn_in for rank, burn_in in burn_ins.items() if burn_in.kind == kind}
        first = next(iter(same_kind.values()))
        wrong: dict[int, list[str]] = {}
        undecided = []
        for name in first.hashes:
            results = {rank: burn_in.hashes[name] for rank, burn_in in same_kind.items()}
            right = _right_result([*results.values()], first.known.get(name))
            if right is None:
                undecided.append(name)
                continue
            for rank, result in results.items():
                if result != (right,):
                    wrong.setdefault(rank, []).append(name)
        if undecided:
            yield PreflightFinding(
                WRONG_NUMBERS,
                WARNING,
                f"devices of one kind differ in {', '.join(undecided)}, and no majority shows which are right ({kind})",
                "repeat `doctor --measure` on each node, also with others of its kind, and compare the hashes",
            )
        for facts in ranks:
            if facts.rank not in wrong:
                continue
            name = f" (GPU {facts.gpu})" if facts.gpu is not None else ""
            yield PreflightFinding(
                WRONG_NUMBERS,
                ERROR,
                f"rank {facts.rank} on {facts.node}{name} computes wrong numbers: {', '.join(wrong[facts.rank])}",
                f"cluster.exclude={facts.node}; {drain(facts.node, 'wrong numbers')}",
                facts.node,
            )


def _right_result(results: Sequence[tuple[str, ...]], known: str | None) -> str | None:
    """Returns the right hash of a computation on devices of one kind: that of most devices.

    ``known`` counts as one more device, and decides between two devices that contradict each other. The result is
    None if there is no majority, if most devices differ from repetition to repetition, or if most contradict
    ``known``, since such differences come from the kernels.
    """
    steady = [result[0] for result in results if len(result) == 1]
    votes = Counter(steady)
    if known is not None:
        votes[known] += 1
        return known if votes[known] == max(votes.values()) else None
    if 2 * len(steady) < len(results):
        return None
    right, count = votes.most_common(1)[0]
    return right if 2 * count > len(steady) else None


def check_models(ranks: Sequence[RankFacts], features: Mapping[str, frozenset[str]]) -> Iterator[PreflightFinding]:
    """Checks that all ranks have the same model of device, since the slowest rank determines the speed. ``features``
    holds the features of each node in Slurm."""
    by_model = _by(ranks, lambda rank: rank.device)
    nodes = {model: {rank.node for rank in same_model} for model, same_model in by_model.items()}
    if len(nodes) < 2:
        return
    listed = "; ".join(f"{model} on {', '.join(sorted(names))}" for model, names in nodes.items())
    most = max(nodes.values(), key=len)
    # a feature of all nodes with the most common model, and of no other node
    common = frozenset.intersection(*(features.get(node, frozenset()) for node in most))
    common = common.difference(*(features[node] for node in features.keys() - most))
    fix = "cluster.constraint=FEATURE or cluster.gpu_type=MODEL; sinfo -o '%N %f %G' lists the features and GPUs"
    if common:
        fix = f"cluster.constraint={min(common)}"
    yield PreflightFinding(SLOW_DEVICE, WARNING, f"the ranks have different device models: {listed}", fix)


def check_clocks(offsets: Sequence[ClockOffset]) -> Iterator[PreflightFinding]:
    for offset in offsets:
        certain = abs(offset.offset_s) - offset.round_trip_s / 2
        if certain > SKEW_WARN_S:
            side = "ahead of" if offset.offset_s > 0 else "behind"
            yield PreflightFinding(
                CLOCK,
                ERROR if certain > SKEW_ERROR_S else WARNING,
                f"the clock of {offset.node} is {abs(offset.offset_s):.3g} s {side} the clock of rank 0's node",
                f"timestamps of logs and files are misleading; ask the site to fix chrony there, and until then set "
                f"cluster.exclude={offset.node}",
            )


def check_bandwidths(bandwidths: Bandwidths, expected: ExpectedBandwidths) -> Iterator[PreflightFinding]:
    """Compares bandwidths with the expected values of the fabric or, if they are unknown, with the slowest network of
    any cluster."""
    measured = [
        *((f"in {node}", bus, expected.node) for node, bus in bandwidths.nodes.items()),
        *((f"over rail {rail}", bus, expected.rail) for rail, bus in enumerate(bandwidths.rails)),
    ]
    if bandwidths.world is not None:
        measured.append(("over all ranks", bandwidths.world, expected.world))
    for where, bus, expected_bus in measured:
        if expected_bus is not None and bus < WARN * expected_bus.bus:
            yield PreflightFinding(
                NETWORK,
                ERROR if bus < FAIL * expected_bus.bus else WARNING,
                f"an all-reduce {where} reaches {bus / 1e9:.3g} GB/s (bus bandwidth), {bus / expected_bus.bus:.0%} of "
                f"the expected bandwidth of {expected_bus.reason}",
                SEE_LINKS,
            )
    if expected.world is None and bandwidths.world is not None and bandwidths.world < LEAST_BUS:
        rate = f"an all-reduce over all ranks reaches {bandwidths.world / 1e9:.3g} GB/s (bus bandwidth)"
        yield PreflightFinding(NETWORK, WARNING, f"{rate}, less than gigabit Ethernet", SEE_LINKS)


def check_slow_nodes(slow: Sequence[SlowNode]) -> Iterator[PreflightFinding]:
    for node in slow:
        fix = drain(node.node, f"slow with {' and '.join(node.partners)}")
        yield PreflightFinding(
            NETWORK, ERROR, f"the network of {node.words}", f"cluster.exclude={node.node}; {fix}", node.node
        )


def drain(node: str, reason: str) -> str:
    """Returns the command with which the site's staff can drain the node."""
    return f"for the staff: scontrol update nodename={node} state=drain reason='{reason}'"


def _minority(ranks: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> tuple[str, dict[str, str]]:
    """Returns the most common value of the ranks, and a mapping from each other value to the nodes that have it."""
    usual = Counter(value(rank) for rank in ranks).most_common(1)[0][0]
    others = _by([rank for rank in ranks if value(rank) != usual], value)
    return usual, {other: _nodes(group) for other, group in others.items()}


def _by(ranks: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> dict[str, list[RankFacts]]:
    groups: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(value(rank), []).append(rank)
    return groups


def _nodes(ranks: Sequence[RankFacts] | Iterator[RankFacts]) -> str:
    return ", ".join(dict.fromkeys(rank.node for rank in ranks))
