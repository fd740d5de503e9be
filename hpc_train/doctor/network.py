"""Checks the GPUs, their NICs and the network between nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_train.doctor.finding import ERROR, OK, WARNING, Finding
from hpc_train.fabric.decision import FabricDecision
from hpc_train.fabric.discovery import NONE
from hpc_train.fabric.facts import NodeFacts
from hpc_train.fabric.nccl_settings import merged, warnings
from hpc_train.fabric.rails import judge_ports, match, port_warnings, rate_gbps

EFA_PLUGIN = "libnccl-net*.so*"
EFA_FOLDERS = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib", "/usr/lib")


def check_gpus(facts: NodeFacts, asked: int | str) -> Iterator[Finding]:
    """Checks whether GPUs are visible, healthy and of one model."""
    models = sorted({gpu.model or "an unknown model" for gpu in facts.gpus})
    if not facts.gpus:
        wanted = isinstance(asked, int) and asked > 0
        text = f"cluster.gpus_per_node={asked}, but no GPU is found" if wanted else "no GPU; training runs on the CPU"
        fix = "check from a compute node with `doctor --submit`, or request GPUs with salloc --gpus-per-node=1"
        yield Finding("GPUs", ERROR if wanted else OK, text, fix if wanted else "")
        return
    text = f"{len(facts.gpus)} x {', '.join(models)}, {len(facts.visible)} visible"
    if not facts.visible:
        yield Finding(
            "GPUs", WARNING, text, "CUDA_VISIBLE_DEVICES hides the GPUs: unset it, or request GPUs from Slurm"
        )
    elif len(models) > 1:
        yield Finding(
            "GPUs",
            WARNING,
            f"{text}: the slowest sets the pace",
            "select one model with cluster.constraint or cluster.gpu_type",
        )
    else:
        yield Finding("GPUs", OK, text)
    for gpu in facts.gpus:
        for problem in gpu.problems:
            fix = f"cluster.exclude={facts.node}; for the staff: nvidia-smi -q -i {gpu.pci or gpu.index}"
            yield Finding("GPUs", WARNING, f"{gpu.name}: {problem}", fix)


def check_ports(facts: NodeFacts) -> Iterator[Finding]:
    """Reports which ports carry training traffic, which are excluded, and what is wrong with them."""
    for verdict in judge_ports(facts):
        rate = "" if verdict.port.rate_gbps is None else f" {verdict.port.rate_gbps:g} Gb/s"
        use = {True: "used", False: "excluded", None: "unknown"}[verdict.usable]
        name = f"{verdict.nic}:{verdict.port.number}{rate} {verdict.port.link_layer or ''}".rstrip()
        yield Finding("network", OK, f"{name}: {use}, {verdict.reason}")
    for warning in port_warnings(facts):
        yield Finding("network", WARNING, warning, "ask the site; until then set cluster.exclude to avoid the node")
    unmatched = [matched for matched in match(facts) if matched.nic is None]
    if facts.nics and unmatched:
        names = ", ".join(matched.gpu for matched in unmatched)
        fix = "see `nvidia-smi topo -m`; set NCCL_TOPO_FILE if the PCI tree is hidden"
        yield Finding("network", WARNING, f"no NIC is matched to {names}: {unmatched[0].reason}", fix)
    if (total := rate_gbps(facts)) is not None:
        yield Finding("network", OK, f"{total:g} Gb/s between nodes in each direction")
    if facts.gpus and facts.nics and facts.gpu_direct is not None:
        yield _gpu_direct(facts.gpu_direct)


def _gpu_direct(by: str) -> Finding:
    if by != NONE:
        return Finding("network", OK, f"NICs read GPU memory (GPUDirect RDMA) with {by}")
    text = "NICs cannot read GPU memory (no GPUDirect RDMA): traffic is staged in host memory, up to 3 times slower"
    fix = "ask the site to load nvidia_peermem, or NVIDIA's open kernel modules on Linux 5.12 or newer (DMA-BUF)"
    return Finding("network", WARNING, text, fix)


def check_environment(
    facts: NodeFacts, decision: FabricDecision, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Reports the variables that workers would export, with reasons, and problems with variables that are already
    set.
    """
    for variable in decision.variables:
        yield Finding("environment", OK, f"would set {variable.name}={variable.value}: {variable.reason}")
    for wrong in warnings(merged({facts.node or "here": facts.settings})[0]):
        yield Finding("environment", WARNING, wrong, "unset it, or use the name that NCCL reads today")
    for note in decision.unknown:
        yield Finding(
            "environment", WARNING, f"unknown: {note}", "ask the site, or select a profile with cluster/fabric=NAME"
        )
    if decision.fabric == "efa" and not _has_plugin(environment):
        fix = "install aws-ofi-nccl (part of the EFA installer) and put its lib directory on LD_LIBRARY_PATH"
        yield Finding("environment", ERROR, "the NCCL plugin for EFA is missing; all traffic would go over TCP", fix)


def _has_plugin(environment: Mapping[str, str]) -> bool:
    folders = [*environment.get("LD_LIBRARY_PATH", "").split(":"), *EFA_FOLDERS]
    return any(next(Path(folder).glob(EFA_PLUGIN), None) is not None for folder in folders if folder)
