"""The facts of this node, for the agent and for ``doctor``. Needs no privileges, and missing facts are not fatal.

Includes the network interface that leads to the rendezvous node and the one that gloo would select itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from hpc_train.cluster.gpus import own_gpus, visible_devices
from hpc_train.fabric.discovery import discover, merge, print_matrix
from hpc_train.fabric.facts import NodeFacts
from hpc_train.fabric.nccl_settings import settings_of_communication
from hpc_train.fabric.nvidia_smi import parse_matrix, print_listing, with_slices
from hpc_train.fabric.nvml import filled, gpus_of, nvml
from hpc_train.fabric.versions import read_versions

# for the ND series, whose GPUs have NVLink; the images contain these files on every machine
AZURE_TOPOLOGIES = (("A100-SXM", "/opt/microsoft/ndv4-topo.xml"), ("H100 80GB HBM3", "/opt/microsoft/ndv5-topo.xml"))


def this_node(name: str, rendezvous_host: str | None, environment: Mapping[str, str] = os.environ) -> NodeFacts:
    """Returns all facts that other nodes and the network decision need.

    Args:
        name: the node's name in Slurm.
        rendezvous_host: the rendezvous host; None if the job has one node.
    """
    visible = visible_devices(environment)
    facts = _own(discover())
    if visible and (matrix := print_matrix()) is not None:  # it also shows only the job's own GPUs
        facts = merge(facts, parse_matrix(matrix))
    if visible and (library := nvml()) is not None:
        facts = replace(facts, gpus=filled(facts.gpus, gpus_of(library)))
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
        versions=read_versions(),
        settings=settings_of_communication(environment),
    )


def topology_file(facts: NodeFacts, root: Path = Path("/")) -> str | None:
    """Returns the topology file of Azure's image for this kind of machine; None elsewhere or if it is missing."""
    models = {gpu.model or "" for gpu in facts.gpus} if facts.site == "azure" else set()
    for model, path in AZURE_TOPOLOGIES:
        if any(model in found for found in models) and (root / path.lstrip("/")).is_file():
            return path
    return None


def _own(facts: NodeFacts) -> NodeFacts:
    """Removes the GPUs of other jobs and renumbers the rest as CUDA does."""
    own = own_gpus()
    gpus = [gpu for gpu in facts.gpus if not own or gpu.pci is None or gpu.pci in own]
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
    return int(text) if text.isdigit() else None


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
        if any(found.family is socket.AF_INET and found.address == address for found in addresses):
            return name
    return None
