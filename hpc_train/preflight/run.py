"""Runs the preflight, which checks before the first step that the nodes agree and are fast.

On one node, it checks the GPUs and the links between them; a job on the CPUs of one node has no preflight. The
preflight runs in the first attempt on a set of nodes. Further attempts on the same nodes, or a subset of them, skip it
unless ``train.verify`` has found wrong numbers since.
"""

from __future__ import annotations

import hashlib
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.config.schema import Config
from hpc_train.config.values import preflight_actions
from hpc_train.errors import UserError
from hpc_train.machine.allocation import Allocation, current_allocation
from hpc_train.machine.network.facts import NodeFacts, by_machine
from hpc_train.machine.network.nccl_settings import recorded_versions
from hpc_train.machine.network.rails import judge_ports
from hpc_train.parallel.mesh import Mesh
from hpc_train.preflight.bandwidth import (
    SLOW,
    SLOW_ON_CPUS,
    Expected,
    ExpectedBandwidths,
    PairRate,
    SlowNode,
    expected_bandwidths,
    read_fabric,
    slow_nodes,
)
from hpc_train.preflight.checks import (
    ERROR,
    PreflightFinding,
    RankFacts,
    check_bandwidths,
    check_burn_in,
    check_clocks,
    check_config,
    check_copies,
    check_gemm,
    check_inside,
    check_models,
    check_shared_gpu,
    check_slow_nodes,
    check_transport,
    check_versions,
    drain,
    slow_devices,
)
from hpc_train.preflight.measure import Crew, Measured, effort, measure_all, paired_test, to_first
from hpc_train.preflight.nccl_log import NCCLLog, copied_warnings, log_transport, logged_transport
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import UnfitNode
from hpc_train.run.freeze import config_hash
from hpc_train.schedulers.slurm.site import node_features
from hpc_train.units import counted

clock = time.time  # seconds since the epoch on this node
KEY = "cluster.preflight_action"
LEAST_NODES = 3  # with fewer nodes, it is not possible to determine which node of a slow pair is slow


@contextmanager
def nccl_log(spec: WorkerSpec, config: Config, run: RunDirectory) -> Iterator[NCCLLog | None]:
    """Sets up NCCL's log before the ranks join; yields None if no preflight will read it.

    If the attempt fails, the log is written to a file. The file of the previous attempt is removed by its name: if
    every rank listed a folder with one file per rank, the load on the file system would grow with the square of the
    number of ranks.
    """
    if config.cluster.preflight == "off" or spec.checked or spec.gpus_per_node == 0 or spec.layout.world_size == 1:
        yield None
        return
    folder = run.logs / "nccl"
    name = f"{rank_writer(spec.rank)}.log"
    (folder / f"{spec.attempt - 1:03d}-{name}").unlink(missing_ok=True)
    log = log_transport()
    with nullcontext() if log is None else copied_warnings(log, folder / f"{spec.attempt:03d}-{name}"):
        yield log


def preflight(
    spec: WorkerSpec,
    config: Config,
    run: RunDirectory,
    mesh: Mesh,
    events: EventLog,
    log: NCCLLog | None,
    always: bool = False,
) -> None:
    """Runs the preflight and reports its findings. Collective. Only rank 0 reads ``fabric.json``.

    Args:
        log: the result of ``nccl_log``.
        always: whether to run even on the CPUs of one node.

    Raises:
        UnfitNode: an error names a node, and ``cluster.preflight_action`` is ``exclude`` for its class.
        UserError: there is another error whose action is not ``warn``.
    """
    mode = config.cluster.preflight
    if mode == "off" or spec.checked or (spec.nodes == 1 and spec.gpus_per_node == 0 and not always):
        return
    allocation = current_allocation()
    node = allocation.node_name
    crew = Crew(mesh, tuple(to_first(node, mesh)[:: spec.local_world_size]), spec.local_world_size)
    began = time.monotonic()  # all ranks are here
    actions = actions_of(config, spec, allocation)
    facts = read_fabric(run) if mesh.rank == 0 else ()
    expected = _broadcast(mesh, expected_bandwidths(facts, spec.gpus_per_node))
    chosen_effort = effort(mode, crew)
    local_facts = rank_facts(mesh.rank, node, config_hash(run), mesh.device)
    measured = measure_all(crew, local_facts, chosen_effort, lambda: logged_transport(log), clock)
    low = [*check_bandwidths(measured.bandwidths, expected)]
    pairs = tuple[PairRate, ...]()
    if crew.count >= LEAST_NODES and crew.agree(mode == "full" or bool(low)):
        pairs = paired_test(crew, measured.bandwidths.world or 0.0, chosen_effort)
    findings: Sequence[PreflightFinding] = ()
    if mesh.rank == 0:  # the events, which name the nodes to drop, are written before any rank fails
        slow = slow_nodes(pairs, SLOW if spec.gpus_per_node else SLOW_ON_CPUS)
        findings = [*_all_findings(measured, facts), *low, *check_slow_nodes(slow)]
        event = {
            "launch": allocation.launch_id,
            "mode": mode,
            "seconds": round(time.monotonic() - began, 3),
            "nodes": list(dict.fromkeys(rank.node for rank in measured.ranks)),
            "findings": [asdict(finding) for finding in findings],
            "left_out": measured.left_out,
            **_numbers(measured, pairs, expected),
        }
        events.write("preflight", **event)
        _print(event, findings, measured)
        _report_nodes(events, findings, measured, slow, actions)
    stop_for(_broadcast(mesh, findings), actions, node)


def actions_of(config: Config, spec: WorkerSpec, allocation: Allocation) -> dict[str, str]:
    """Returns the action after an error of each class. On one machine outside of Slurm, there is no other node, so
    ``exclude`` becomes ``warn``.
    """
    actions = preflight_actions(config.cluster)
    if spec.nodes > 1 or allocation.job_id is not None:
        return actions
    return {kind: "warn" if action == "exclude" else action for kind, action in actions.items()}


def _broadcast(mesh: Mesh, value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, 0, group=mesh.control)
    return values[0]


def _all_findings(measured: Measured, facts: Sequence[NodeFacts]) -> Iterator[PreflightFinding]:
    """Yields the findings on single ranks and nodes. ``facts`` describes the nodes of the run."""
    ranks = measured.ranks
    nodes = dict.fromkeys(rank.node for rank in ranks)
    yield from check_config(ranks)
    yield from check_versions(ranks)
    yield from check_shared_gpu(ranks)
    if len(nodes) > 1:
        rdma = {node.node: any(verdict.usable for verdict in judge_ports(node)) for node in facts if node.node}
        yield from check_transport(ranks, rdma)
    with_nvlink = set()
    for alike in by_machine(facts):
        links = [alike[0].link(a.name, b.name) or "" for a, b in combinations(alike[0].gpus, 2)]
        if links and all(link.startswith("NV") for link in links):
            with_nvlink |= {node.node for node in alike if node.node is not None}
    yield from check_inside(ranks, with_nvlink)
    yield from check_copies(ranks)
    yield from check_clocks(measured.clocks)
    yield from check_gemm(slow_devices(ranks))
    yield from check_burn_in(ranks)
    if len({rank.device for rank in ranks}) > 1:
        yield from check_models(ranks, node_features(nodes))


def _print(event: Mapping[str, Any], findings: Sequence[PreflightFinding], measured: Measured) -> None:
    """Prints the findings to the log of the node of rank 0."""
    world = ""
    if measured.bandwidths.world is not None:
        world = f", all-reduce {measured.bandwidths.world / 1e9:.3g} GB/s"
    nodes = counted(len(event["nodes"]), "node", "nodes")
    print(f"preflight ({event['mode']}) of {nodes} in {event['seconds']:.1f} s{world}: {len(findings)} findings")
    for finding in findings:
        print(f"preflight: {finding}")
    for stage in measured.left_out:
        print(f"preflight: skipped the bandwidth {stage} because earlier stages took too long")


def _report_nodes(
    events: EventLog,
    findings: Sequence[PreflightFinding],
    measured: Measured,
    slow: Sequence[SlowNode],
    actions: Mapping[str, str],
) -> None:
    """Writes an event for each slow node and GPU, and for each other node that the run drops."""
    reported = set()
    for node in slow:
        events.write(
            "slow_node", node=node.node, message=node.words, rate=node.rate, usual=node.usual,
            partners=node.partners, drain=drain(node.node, f"slow with {' and '.join(node.partners)}"),
        )  # fmt: skip
        reported.add(node.node)
    for device in slow_devices(measured.ranks):
        if device.bad and device.rank.gpu is not None:
            events.write(
                "slow_gpu", node=device.rank.node, gpu=device.rank.gpu, slow_rank=device.rank.rank,
                message=device.words, rate=device.rank.gemm, usual=device.usual, drain=device.drain,
            )  # fmt: skip
            reported.add(device.rank.node)
    for finding in findings:
        if finding.unfit is not None and actions[finding.kind] == "exclude" and finding.unfit not in reported:
            events.write("unfit_node", node=finding.unfit, message=finding.message, reason=finding.kind)


def _numbers(measured: Measured, pairs: Sequence[PairRate], expected: ExpectedBandwidths) -> Mapping[str, Any]:
    def gb(bus: float | None) -> float | None:
        if bus is None:
            return None
        return round(bus / 1e9, 4)

    def expectation_json(value: Expected | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"bus": gb(value.bus), "reason": value.reason}

    return {
        "bus_gb_per_s": {
            "nodes": {node: gb(bus) for node, bus in measured.bandwidths.nodes.items()},
            "rails": [gb(bus) for bus in measured.bandwidths.rails],
            "world": gb(measured.bandwidths.world),
        },
        "expected_gb_per_s": {name: expectation_json(getattr(expected, name)) for name in ("node", "rail", "world")},
        "pairs_gb_per_s": {" ".join(pair.nodes): gb(pair.rate) for pair in pairs},
        "copy_gb_per_s": [gb(rank.copy) for rank in measured.ranks],
        "gemm_tflops": [round(rank.gemm / 1e12, 4) for rank in measured.ranks],
        "burn_in": _burn_in_numbers(measured.ranks),
        "devices": sorted({rank.device for rank in measured.ranks}),
        "clock_offset_s": {offset.node: round(offset.offset_s, 6) for offset in measured.clocks},
        "versions": dict(measured.ranks[0].versions),
        "networks": sorted({name for rank in measured.ranks if rank.transport for name in rank.transport.networks}),
    }


def _burn_in_numbers(ranks: Sequence[RankFacts]) -> dict[str, dict[str, list[int]]]:
    """Returns the kind of device -> a hash of all results of the burn-in -> the ranks that have computed them."""
    numbers: dict[str, dict[str, list[int]]] = {}
    for rank in ranks:
        if rank.burn_in is not None:
            results = hashlib.sha256(repr([*rank.burn_in.hashes.items()]).encode()).hexdigest()[:16]
            numbers.setdefault(rank.burn_in.kind, {}).setdefault(results, []).append(rank.rank)
    return numbers


def stop_for(findings: Sequence[PreflightFinding], actions: Mapping[str, str], node: str) -> None:
    """Raises an exception for errors, as ``preflight`` describes; warnings are ignored.

    Args:
        actions: the action for each class of finding (``preflight_actions``).
        node: the node of this rank.
    """
    errors = [finding for finding in findings if finding.level == ERROR and actions[finding.kind] != "warn"]
    if not errors:
        return
    message = "the preflight found problems that would affect training:\n" + "\n".join(map(str, errors))
    if all(error.unfit is not None and actions[error.kind] == "exclude" for error in errors):
        raise UnfitNode(message, secondary=node not in {error.unfit for error in errors})
    kinds = dict.fromkeys(error.kind for error in errors)
    raise UserError(
        message,
        where=", ".join(f"{KEY}.{kind}={actions[kind]}" for kind in kinds),
        fix=f"apply the fixes above, or set {' '.join(f'{KEY}.{kind}=warn' for kind in kinds)} to train anyway",
    )


_CPUS = Path("/proc/cpuinfo")


def rank_facts(rank: int, node: str, config_hash: str, device: torch.device) -> RankFacts:
    """Returns the facts of this process, without measurements."""
    if device.type != "cuda":
        model = platform.machine()
        if _CPUS.exists():
            match = re.search(r"^model name\s*:\s*(.+)$", _CPUS.read_text(), re.MULTILINE)
            if match is not None:
                model = match[1].strip()
        return RankFacts(rank, node, config_hash, versions(cuda=False), model, None, gemm=0.0)
    gpu: Any = torch.cuda.get_device_properties(device)
    identity = str(gpu.uuid)
    if torch.version.hip is not None:  # some AMD GPUs have no UUID, so the PCI address is added
        places = [getattr(gpu, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        identity = f"{gpu.uuid} at {':'.join(f'{place:02x}' for place in places)}"
    return RankFacts(rank, node, config_hash, versions(cuda=True), gpu.name, identity, gemm=0.0)


def versions(cuda: bool) -> dict[str, str]:
    """Returns the versions that must be equal on all ranks."""
    installed = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        installed["hpc_train"] = version("hpc_train")
    if not cuda:
        return installed
    amd = torch.version.hip is not None
    installed["rccl" if amd else "nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = dict(recorded_versions(Path("/"))).get("amdgpu" if amd else "driver")
    return installed if driver is None else installed | {"driver": driver}
