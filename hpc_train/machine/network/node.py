"""Reads the facts of this node for the agent and ``doctor``, or the facts of a recorded node, and derives a report.

No privileges are needed, and missing facts are not fatal. If ``/sys`` is hidden, NVIDIA's management library (NVML), a
part of the driver, provides the facts. It respects the control group of the job and knows MIG slices.
"""

from __future__ import annotations

import codecs
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from hpc_train.errors import UserError
from hpc_train.machine.gpus import job_gpus, visible_devices
from hpc_train.machine.health.gpu_health import GpuReading, problems, read_nvml
from hpc_train.machine.network.decision import FabricDecision, FabricJob, decide
from hpc_train.machine.network.discovery import discover, merge, read_tree, recorded_tree
from hpc_train.machine.network.facts import Gpu, NodeFacts, Setting, format_cpu_list
from hpc_train.machine.network.libfabric import find_plugin
from hpc_train.machine.network.nccl_settings import (
    read_versions,
    recorded_versions,
    settings_of_communication,
    warnings,
)
from hpc_train.machine.network.rails import Match, PortVerdict, judge_ports, match, port_warnings, several_node_nvlink
from hpc_train.machine.network.rank_binding import Mask, cpu_masks, unknown_cores
from hpc_train.machine.network.rdma import parse_rdma_text
from hpc_train.machine.network.smi import (
    NVLINK_QUERY,
    is_rocm_smi,
    parse_matrix,
    parse_nvlink_domain,
    parse_showtopo,
)
from hpc_train.machine.sysfs import output_of, read_text

# for the ND series, whose GPUs have NVLink; the images contain these files on every machine. Azure's health checks also
# use the H100 file for the H200 (azurehpc-health-checks, nd96isr_h200_v5). The H200 NVL is a PCIe card.
AZURE_TOPOLOGIES = (
    (r"A100-SXM", "/opt/microsoft/ndv4-topo.xml"),
    (r"H100 80GB HBM3|H200(?! NVL)", "/opt/microsoft/ndv5-topo.xml"),
)


def this_node(name: str, rendezvous_host: str | None, environment: Mapping[str, str] = os.environ) -> NodeFacts:
    """Returns all facts that other nodes and the network decision need.

    Args:
        name: the node's name in Slurm.
        rendezvous_host: the rendezvous host; None if the job has one node.
    """
    visible = visible_devices(environment)
    facts = _of_job(discover())
    matrix = output_of(["nvidia-smi", "topo", "-m"], 60) if visible else ""
    if "GPU0" in matrix:  # it shows only the GPUs of the job, too; a driver that fails prints no matrix
        facts = merge(facts, parse_matrix(matrix))
    if visible and (reading := read_nvml()) is not None:
        facts = replace(facts, gpus=filled(facts.gpus, reading))
    allocated = environment.get("SLURM_CPUS_ON_NODE", "")
    return replace(
        facts,
        node=name,
        visible=visible,
        allocated_cpus=int(allocated) if allocated.isdigit() else None,
        route=None if rendezvous_host is None else interface_to(rendezvous_host),
        automatic=None if rendezvous_host is None else automatic_interface(),
        topology_file=topology_file(facts),
        net_plugin=find_plugin(environment),
        imex_channels=imex_channels(),
        nvlink_domain=parse_nvlink_domain(output_of(NVLINK_QUERY)) if several_node_nvlink(facts) else None,
        versions=read_versions(),
        settings=settings_of_communication(environment),
    )


def topology_file(facts: NodeFacts, root: Path = Path("/")) -> str | None:
    """Returns the topology file in Azure's image for this kind of machine; None on other machines or if it is
    missing."""
    models = {gpu.model or "" for gpu in facts.gpus} if facts.site == "azure" else set()
    for model, path in AZURE_TOPOLOGIES:
        if any(re.search(model, installed) for installed in models) and (root / path.lstrip("/")).is_file():
            return path
    return None


def imex_channels(root: Path = Path("/")) -> int | None:
    """Returns the number of device files with which this process may share GPU memory over NVLink with other nodes.

    Source: https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/imexchannels.html (July 2025).
    """
    devices = read_text(root / "proc/devices")
    if "nvidia-caps-imex-channels" not in devices:
        return None
    return sum(os.access(path, os.R_OK | os.W_OK) for path in (root / "dev/nvidia-caps-imex-channels").glob("channel*"))


def _of_job(facts: NodeFacts) -> NodeFacts:
    """Removes the GPUs of other jobs and renumbers the rest as CUDA does."""
    addresses = job_gpus()
    gpus = [gpu for gpu in facts.gpus if not addresses or gpu.pci is None or gpu.pci in addresses]
    if len(gpus) == len(facts.gpus):
        return facts
    names = {gpu.name: f"GPU{index}" for index, gpu in enumerate(gpus)}
    gone = {gpu.name for gpu in facts.gpus} - set(names)
    links = [
        replace(link, a=names.get(link.a, link.a), b=names.get(link.b, link.b))
        for link in facts.links
        if not {link.a, link.b} & gone
    ]
    numbered = tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))
    return replace(facts, gpus=numbered, links=tuple(links))


ANY_PORT = 9  # no data is sent; the kernel only looks up the route


def interface_to(host: str) -> str | None:
    """Returns the interface that routes to ``host``; None without a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, ANY_PORT))
        return interface_with(probe.getsockname()[0])
    return None


def automatic_interface() -> str | None:
    """Returns the interface with the address of this host name, to which gloo binds."""
    with suppress(OSError):
        return interface_with(socket.gethostbyname(socket.gethostname()))
    return None


def interface_with(address: str) -> str | None:
    """Returns the interface that has ``address``; all of 127.0.0.0/8 belongs to loopback."""
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.family is socket.AF_INET and candidate.address == address for candidate in addresses):
            return name
    return None


def filled(seen: Sequence[Gpu], reading: GpuReading) -> tuple[Gpu, ...]:
    """Completes the GPUs ``seen`` in ``/sys`` with NVML's facts about the GPUs at the same PCI addresses.

    If ``seen`` is empty, returns the GPUs that respond to NVML, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    facts = [
        Gpu(gpu.index, gpu.pci, gpu.model, gpu.uuid, slices=gpu.slices, problems=problems(gpu)) for gpu in reading.gpus
    ]
    by_address = {gpu.pci: gpu for gpu in facts}
    gpus = []
    for gpu in seen:
        known = by_address.get(gpu.pci, gpu)
        model = gpu.model or known.model
        uuid = gpu.uuid or known.uuid
        gpus.append(replace(gpu, model=model, uuid=uuid, slices=known.slices, problems=known.problems))
    return tuple(gpus or facts)


@dataclass(frozen=True)
class FabricReport:
    facts: NodeFacts
    ports: tuple[PortVerdict, ...]
    gpu_nics: tuple[Match, ...]
    masks: tuple[Mask, ...]
    decision: FabricDecision
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns an object with ``fabric gpus nics links limits gpu_direct versions gpu_nics masks environment not_set
        warnings unknown``.
        """
        verdicts = {(verdict.nic, verdict.port.number): verdict for verdict in self.ports}
        return {
            "fabric": self.decision.fabric,
            "gpus": [
                asdict(gpu) | {"name": gpu.name, "cpus": format_cpu_list(gpu.cpus) or None} for gpu in self.facts.gpus
            ],
            "nics": [
                asdict(nic)
                | {
                    "ports": [
                        asdict(port)
                        | {
                            "usable": verdicts[nic.name, port.number].usable,
                            "reason": verdicts[nic.name, port.number].reason,
                        }
                        for port in nic.ports
                    ]
                }
                for nic in self.facts.nics
            ],
            "links": [asdict(link) for link in self.facts.links],
            "limits": asdict(self.facts.limits),
            "gpu_direct": self.facts.gpu_direct,
            "versions": dict(self.facts.versions),
            "gpu_nics": [asdict(matched) for matched in self.gpu_nics],
            "masks": [
                asdict(mask) | {"cpus": None if mask.cpus is None else format_cpu_list(mask.cpus)}
                for mask in self.masks
            ],
            "environment": [asdict(variable) for variable in self.decision.variables],
            "not_set": [asdict(alone) for alone in self.decision.not_set],
            "warnings": list(self.warnings),
            "unknown": [*self.facts.unknown, *unknown_cores(self.facts), *self.decision.unknown],
        }


def report(facts: NodeFacts, job: FabricJob, settings: Mapping[str, Setting]) -> FabricReport:
    """Returns the report for a job whose nodes all have these ``facts``."""
    messages = (*port_warnings(facts), *warnings(settings))
    return FabricReport(
        facts, judge_ports(facts), match(facts), cpu_masks(facts), decide([facts], job, settings), messages
    )


def read_recording(sysfs: Path | None, matrix: Path | None, rdma: Path | None = None) -> NodeFacts:
    """Returns the facts of a recorded node; facts without a recording stay unknown. Raises UserError if a recording
    does not exist.

    Args:
        sysfs: a copy of ``/sys``, of a whole root directory, or of ``/sys/class/infiniband``.
        matrix: a file with the output of ``nvidia-smi topo -m`` or ``rocm-smi --showtopo``.
        rdma: a file with the output of ``ibstat`` or a similar tool, used if ``sysfs`` shows no NIC.
    """
    facts = NodeFacts()
    if sysfs is not None:
        if not sysfs.is_dir():
            raise UserError(f"{sysfs} is not a directory", where="--sysfs", fix="give the path of a copy of /sys")
        facts = replace(read_tree(*recorded_tree(sysfs)), versions=recorded_versions(sysfs))
    if rdma is not None and not facts.nics:
        facts = replace(facts, nics=parse_rdma_text(_read(rdma, "--ibstat", "give a file with the output of ibstat")))
    if matrix is not None:
        text = _read(matrix, "--topo", "give a file with the output of nvidia-smi topo -m or rocm-smi --showtopo")
        facts = merge(facts, parse_showtopo(text) if is_rocm_smi(text) else parse_matrix(text))
    return facts


def gpus_recorded(facts: NodeFacts, sysfs: Path | None) -> int:
    """Returns the number of GPUs of a recorded node; 1 if the recording shows no GPU and lacks the PCI bus."""
    has_bus = sysfs is not None and (recorded_tree(sysfs)[0] / "bus/pci/devices").is_dir()
    return len(facts.gpus) or (0 if has_bus else 1)


def _read(path: Path, where: str, fix: str) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", where=where, fix=fix) from None
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes it
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
