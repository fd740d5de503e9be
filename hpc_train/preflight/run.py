"""Runs the preflight, which checks before the first step that the nodes agree and are fast.

On one node it checks the GPUs and the links between them; a job on the CPUs of one node has no preflight. It runs in
the first attempt on a set of nodes. Further attempts on the same nodes, or a subset, skip it.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Container, Iterator, Mapping, Sequence
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
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.machines import by_machine
from hpc_train.machine.network.rails import judge_ports
from hpc_train.parallel.mesh import Mesh
from hpc_train.preflight.bandwidth import SLOW, SLOW_ON_CPUS, PairRate, SlowNode, slow_nodes
from hpc_train.preflight.checks import (
    ERROR,
    PreflightFinding,
    RankFacts,
    check_bandwidths,
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
from hpc_train.preflight.expected import Expected, ExpectedBandwidths, expected_bandwidths, read_fabric
from hpc_train.preflight.measure import Crew, Measured, effort, fitting, measure_all, paired_test, to_first
from hpc_train.preflight.nccl_log import NCCLLog, copied_warnings, log_transport, logged_transport
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import UnfitNode
from hpc_train.run.freeze import config_hash
from hpc_train.schedulers.slurm.site import node_features

clock = time.time  # seconds since the epoch on this node
KEY = "cluster.preflight_action"
LEAST_NODES = 3  # fewer nodes do not show which node of a slow pair is slow


@contextmanager
def nccl_log(spec: WorkerSpec, config: Config, run: RunDirectory) -> Iterator[NCCLLog | None]:
    """Sets up NCCL's log before the ranks join; yields None if no preflight will read it.

    The log is kept in a file if the attempt fails. That of the previous attempt is removed by its name: listing a
    folder with one file per rank on every rank costs the file system the square of their number.
    """
    if config.cluster.preflight == "off" or spec.checked or spec.gpus_per_node == 0 or spec.layout.world_size == 1:
        yield None
        return
    folder = run.logs / "nccl"
    name = f"rank-{spec.rank:04d}.log"
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
        always: also on the CPUs of one node.

    Raises:
        UnfitNode: an error names a node, and ``cluster.preflight_action`` is ``exclude`` for its class.
        UserError: another error was found whose action is not ``warn``.
    """
    mode = config.cluster.preflight
    if mode == "off" or spec.checked or (spec.nodes == 1 and spec.gpus_per_node == 0 and not always):
        return
    allocation = current_allocation()
    crew = _crew(spec, mesh, allocation.node_name)
    began = time.monotonic()
    actions = actions_of(config, spec, allocation)
    facts = read_fabric(run) if mesh.rank == 0 else ()
    expected = _broadcast(crew, expected_bandwidths(facts, spec.gpus_per_node))
    chosen_effort = fitting(effort(mode, mesh.device.type == "cuda"), crew)
    local_facts = rank_facts(mesh.rank, allocation.node_name, config_hash(run), mesh.device)
    measured = measure_all(crew, local_facts, chosen_effort, lambda: logged_transport(log), clock)
    low = [*check_bandwidths(measured.bandwidths, expected)]
    pairs = tuple[PairRate, ...]()
    if crew.count >= LEAST_NODES and crew.agree(mode == "full" or bool(low)):
        pairs = paired_test(crew, measured.bandwidths.world or 0.0, chosen_effort)
    findings: Sequence[PreflightFinding] = ()
    if mesh.rank == 0:  # the events are written before any rank fails: they name the nodes to drop
        slow = slow_nodes(pairs, SLOW if spec.gpus_per_node else SLOW_ON_CPUS)
        findings = _judge(measured, low, slow, facts)
        head = {"launch": allocation.launch_id, "mode": mode, "seconds": round(time.monotonic() - began, 3)}
        reported = _report(events, head, findings, measured, slow, _numbers(measured, pairs, expected))
        _report_unfit(events, findings, actions, reported)
    stop_for(_broadcast(crew, findings), actions)


def actions_of(config: Config, spec: WorkerSpec, allocation: Allocation) -> dict[str, str]:
    """Returns what follows an error of each class. On one machine outside of Slurm no other node can be had, so
    ``exclude`` becomes ``warn``.
    """
    actions = preflight_actions(config.cluster)
    if spec.nodes > 1 or allocation.job_id is not None:
        return actions
    return {kind: "warn" if action == "exclude" else action for kind, action in actions.items()}


def _crew(spec: WorkerSpec, mesh: Mesh, node: str) -> Crew:
    names: list[str] = to_first(node, mesh)
    return Crew(mesh, tuple(names[:: spec.local_world_size]), spec.local_world_size)


def _broadcast(crew: Crew, value: Any) -> Any:
    """Returns the value of rank 0 on every rank."""
    values = [value]
    dist.broadcast_object_list(values, 0, group=crew.mesh.control)
    return values[0]


def _judge(
    measured: Measured, low: Sequence[PreflightFinding], slow: Sequence[SlowNode], facts: Sequence[NodeFacts]
) -> list[PreflightFinding]:
    rdma = {node.node: any(verdict.usable for verdict in judge_ports(node)) for node in facts if node.node is not None}
    mixed = len({rank.device for rank in measured.ranks}) > 1
    features = {}
    if mixed:
        features = node_features(dict.fromkeys(rank.node for rank in measured.ranks))
    return [
        *check_config(measured.ranks),
        *check_versions(measured.ranks),
        *check_shared_gpu(measured.ranks),
        *(check_transport(measured.ranks, rdma) if len({rank.node for rank in measured.ranks}) > 1 else ()),
        *check_inside(measured.ranks, _with_nvlink(facts)),
        *check_copies(measured.ranks),
        *check_clocks(measured.clocks),
        *check_gemm(slow_devices(measured.ranks)),
        *check_models(measured.ranks, features),
        *low,
        *check_slow_nodes(slow),
    ]


def _with_nvlink(nodes: Sequence[NodeFacts]) -> set[str]:
    """Returns the names of the nodes all of whose GPUs are connected by NVLink."""
    able = [alike for alike in by_machine(nodes) if _all_nvlink(alike[0])]
    return {facts.node for alike in able for facts in alike if facts.node is not None}


def _all_nvlink(facts: NodeFacts) -> bool:
    links = [facts.link(a.name, b.name) or "" for a, b in combinations(facts.gpus, 2)]
    return bool(links) and all(link.startswith("NV") for link in links)


def _report(
    events: EventLog,
    head: Mapping[str, Any],
    findings: Sequence[PreflightFinding],
    measured: Measured,
    slow: Sequence[SlowNode],
    numbers: Mapping[str, Any],
) -> frozenset[str]:
    """Writes the findings to the event log and prints them to the log of rank 0's node; returns the slow nodes."""
    nodes = list(dict.fromkeys(rank.node for rank in measured.ranks))
    events.write(
        "preflight", **head, nodes=nodes, findings=[asdict(finding) for finding in findings],
        left_out=measured.left_out, **numbers,
    )  # fmt: skip
    world = ""
    if measured.bandwidths.world is not None:
        world = f", all-reduce {measured.bandwidths.world / 1e9:.3g} GB/s"
    of = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} in {head['seconds']:.1f} s"
    print(f"preflight ({head['mode']}) of {of}{world}: {len(findings)} findings")
    for finding in findings:
        print(f"preflight: {finding}")
    for stage in measured.left_out:
        print(f"preflight: skipped the bandwidth {stage} because earlier stages took too long")
    for node in slow:
        command = drain(node.node, f"slow with {' and '.join(node.partners)}")
        events.write(
            "slow_node", node=node.node, message=node.words, rate=node.rate, usual=node.usual,
            partners=node.partners, drain=command,
        )  # fmt: skip
    gpus = [device for device in slow_devices(measured.ranks) if device.bad and device.rank.gpu is not None]
    for device in gpus:
        events.write(
            "slow_gpu", node=device.rank.node, gpu=device.rank.gpu, slow_rank=device.rank.rank,
            message=device.words, rate=device.rank.gemm, usual=device.usual, drain=device.drain,
        )  # fmt: skip
    return frozenset({node.node for node in slow} | {device.rank.node for device in gpus})


def _report_unfit(
    events: EventLog, findings: Sequence[PreflightFinding], actions: Mapping[str, str], reported: Container[str]
) -> None:
    """Records the nodes that the run drops, without those that other events have ``reported``."""
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
        "devices": sorted({rank.device for rank in measured.ranks}),
        "clock_offset_s": {offset.node: round(offset.offset_s, 6) for offset in measured.clocks},
        "versions": dict(measured.ranks[0].versions),
        "networks": sorted({name for rank in measured.ranks if rank.transport for name in rank.transport.networks}),
    }


def stop_for(findings: Sequence[PreflightFinding], actions: Mapping[str, str]) -> None:
    """Raises for errors, as described in ``preflight``; warnings are ignored.

    Args:
        actions: by class of finding (``preflight_actions``).
    """
    errors = [finding for finding in findings if finding.level == ERROR and actions[finding.kind] != "warn"]
    if not errors:
        return
    message = "the preflight found problems that would affect training:\n" + "\n".join(map(str, errors))
    if all(error.unfit is not None and actions[error.kind] == "exclude" for error in errors):
        raise UnfitNode(message)
    kinds = dict.fromkeys(error.kind for error in errors)
    raise UserError(
        message,
        where=", ".join(f"{KEY}.{kind}={actions[kind]}" for kind in kinds),
        fix=f"apply the fixes above, or set {' '.join(f'{KEY}.{kind}=warn' for kind in kinds)} to train anyway",
    )


_DRIVER, _CPUS = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")


def rank_facts(rank: int, node: str, config_hash: str, device: torch.device) -> RankFacts:
    """Returns the facts of this process, without measurements."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return RankFacts(
        rank=rank,
        node=node,
        config_hash=config_hash,
        versions=versions(cuda=gpu is not None),
        device=cpu_model() if gpu is None else gpu.name,
        gpu=None if gpu is None else _identity(gpu),
        gemm=0.0,
    )


def _identity(gpu: Any) -> str:
    """Returns the UUID of a GPU. Some AMD GPUs have none, so the PCI address is added there."""
    if torch.version.hip is None:
        return str(gpu.uuid)
    places = [getattr(gpu, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return f"{gpu.uuid} at {':'.join(f'{place:02x}' for place in places)}"


def versions(cuda: bool) -> dict[str, str]:
    """Returns the versions that must be equal on all ranks."""
    installed = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        installed["hpc_train"] = version("hpc_train")
    if cuda:
        installed["nccl" if torch.version.hip is None else "rccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = None
        if _DRIVER.exists():
            driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _DRIVER.read_text())
        if driver is not None:
            installed["driver"] = driver[1]
        if torch.version.hip is not None and _AMD_DRIVER.exists():
            installed["driver"] = _AMD_DRIVER.read_text().strip()
    return installed


def cpu_model() -> str:
    match = None
    if _CPUS.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", _CPUS.read_text(), re.MULTILINE)
    if match:
        return match[1].strip()
    return platform.machine()
