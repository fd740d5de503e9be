"""Reads the facts of this node for the agent and for ``doctor``, without privileges. Missing facts are not fatal.

The facts include the network interface that leads to the rendezvous node and the one that gloo would select itself.
NVIDIA's management library (NVML), a part of the driver, fills gaps where ``/sys`` is hidden. It respects the control
group of the job and knows MIG slices.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from hpc_train.machine.gpus import job_gpus, print_listing, visible_devices
from hpc_train.machine.health.gpu_health import GpuReading, problems
from hpc_train.machine.health.nvml import read_nvml
from hpc_train.machine.network.discovery import discover, merge, print_matrix
from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.machine.network.libfabric import find_plugin
from hpc_train.machine.network.nccl_settings import settings_of_communication
from hpc_train.machine.network.nvidia_smi import parse_matrix, parse_nvlink_domain, print_nvlink_domain, with_slices
from hpc_train.machine.network.rails import several_node_nvlink
from hpc_train.machine.network.rdma import read_text
from hpc_train.machine.network.versions import read_versions

# for the ND series, whose GPUs have NVLink; the images contain these files on every machine. Azure's health checks use
# the file of the H100 for the H200 as well (azurehpc-health-checks, nd96isr_h200_v5). The H200 NVL is a PCIe card.
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
    if visible and (matrix := print_matrix()) is not None:  # it also shows only the job's own GPUs
        facts = merge(facts, parse_matrix(matrix))
    if visible and (reading := read_nvml()) is not None:
        facts = replace(facts, gpus=filled(facts.gpus, gpus_of(reading)))
    if any(name.startswith("MIG-") for name in visible) and not any(gpu.slices for gpu in facts.gpus):
        facts = replace(facts, gpus=with_slices(facts.gpus, print_listing()))
    return replace(
        facts,
        node=name,
        visible=visible,
        allocated_cpus=_allocated_cpus(environment),
        route=None if rendezvous_host is None else interface_to(rendezvous_host),
        automatic=None if rendezvous_host is None else automatic_interface(),
        topology_file=topology_file(facts),
        net_plugin=find_plugin(environment),
        imex_channels=imex_channels(),
        nvlink_domain=parse_nvlink_domain(print_nvlink_domain()) if several_node_nvlink(facts) else None,
        versions=read_versions(),
        settings=settings_of_communication(environment),
    )


def topology_file(facts: NodeFacts, root: Path = Path("/")) -> str | None:
    """Returns the topology file of Azure's image for this kind of machine; None elsewhere or if it is missing."""
    models = {gpu.model or "" for gpu in facts.gpus} if facts.site == "azure" else set()
    for model, path in AZURE_TOPOLOGIES:
        if any(re.search(model, installed) for installed in models) and (root / path.lstrip("/")).is_file():
            return path
    return None


def imex_channels(root: Path = Path("/")) -> int | None:
    """Returns the device files with which this process may share GPU memory over NVLink with other nodes.

    Source: https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/imexchannels.html (July 2025).
    """
    devices = read_text(root / "proc/devices") or ""
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


def _allocated_cpus(environment: Mapping[str, str]) -> int | None:
    text = environment.get("SLURM_CPUS_ON_NODE", "")
    if text.isdigit():
        return int(text)
    return None


ANY_PORT = 9  # nothing is sent; the kernel only looks up the route


def interface_to(host: str) -> str | None:
    """Returns the interface that routes to ``host``; None without a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, ANY_PORT))
        return interface_with(probe.getsockname()[0])
    return None


def automatic_interface() -> str | None:
    """Returns the interface with the address of this host's name, to which gloo binds."""
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


def gpus_of(reading: GpuReading) -> tuple[Gpu, ...]:
    """Returns the GPUs that respond, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    return tuple(
        Gpu(gpu.index, gpu.pci, gpu.model, gpu.uuid, slices=gpu.slices, problems=problems(gpu)) for gpu in reading.gpus
    )


def filled(seen: Sequence[Gpu], nvml_facts: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Completes the GPUs ``seen`` in ``/sys`` with NVML's facts on the same PCI addresses; returns NVML's if none was
    seen.
    """
    if not seen:
        return tuple(nvml_facts)
    by_address = {gpu.pci: gpu for gpu in nvml_facts}
    return tuple(_filled(gpu, by_address.get(gpu.pci)) for gpu in seen)


def _filled(seen: Gpu, nvml_facts: Gpu | None) -> Gpu:
    if nvml_facts is None:
        return seen
    model, uuid = seen.model or nvml_facts.model, seen.uuid or nvml_facts.uuid
    return replace(seen, model=model, uuid=uuid, slices=nvml_facts.slices, problems=nvml_facts.problems)
