"""GPUs, their cards and the network between nodes."""

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
    """Those that are visible, and whether they are alike."""
    models = sorted({gpu.model or "an unknown model" for gpu in facts.gpus})
    if not facts.gpus:
        wanted = isinstance(asked, int) and asked > 0
        text = f"cluster.gpus_per_node={asked}, and no GPU is seen" if wanted else "none: training runs on the CPU"
        fix = "look from a compute node: doctor --submit, or ask for GPUs: salloc --gpus-per-node=1"
        yield Finding("GPUs", ERROR if wanted else OK, text, fix if wanted else "")
        return
    text = f"{len(facts.gpus)} x {', '.join(models)}, {len(facts.visible)} visible"
    if not facts.visible:
        yield Finding("GPUs", WARNING, text, "CUDA_VISIBLE_DEVICES hides them: unset it, or ask Slurm for GPUs")
    elif len(models) > 1:
        yield Finding("GPUs", WARNING, f"{text}: the slowest sets the pace", "cluster.constraint or cluster.gpu_type")
    else:
        yield Finding("GPUs", OK, text)
    for gpu in facts.gpus:
        for trouble in gpu.troubles:
            fix = f"cluster.exclude={facts.node}; for the staff: nvidia-smi -q -i {gpu.pci or gpu.index}"
            yield Finding("GPUs", WARNING, f"{gpu.name}: {trouble}", fix)


def check_ports(facts: NodeFacts) -> Iterator[Finding]:
    """Which ports carry the training, which are left out, and what is wrong with them."""
    for verdict in judge_ports(facts):
        rate = "" if verdict.port.rate_gbps is None else f" {verdict.port.rate_gbps:g} Gb/s"
        taken = {True: "used", False: "left out", None: "unknown"}[verdict.usable]
        name = f"{verdict.nic}:{verdict.port.number}{rate} {verdict.port.link_layer or ''}".rstrip()
        yield Finding("network", OK, f"{name}: {taken}, {verdict.reason}")
    for warning in port_warnings(facts):
        yield Finding("network", WARNING, warning, "ask the site; cluster.exclude avoids the node meanwhile")
    unmatched = [matched for matched in match(facts) if matched.nic is None]
    if facts.nics and unmatched:
        names = ", ".join(matched.gpu for matched in unmatched)
        fix = "nvidia-smi topo -m shows what the driver knows; NCCL_TOPO_FILE where the PCI tree is hidden"
        yield Finding("network", WARNING, f"no card is matched to {names}: {unmatched[0].reason}", fix)
    if (total := rate_gbps(facts)) is not None:
        yield Finding("network", OK, f"{total:g} Gb/s between nodes, each way")
    if facts.gpus and facts.nics and facts.gpu_direct is not None:
        yield _gpu_direct(facts.gpu_direct)


def _gpu_direct(by: str) -> Finding:
    if by != NONE:
        return Finding("network", OK, f"cards read GPU memory (GPUDirect RDMA) by {by}")
    text = "cards cannot read GPU memory: all traffic goes through the host's, up to 3 times slower (GPUDirect RDMA)"
    fix = "the site: modprobe nvidia_peermem, or NVIDIA's open kernel modules and Linux 5.12 for DMA-BUF"
    return Finding("network", WARNING, text, fix)


def check_environment(
    facts: NodeFacts, decision: FabricDecision, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """What workers would export with its reason, and what is wrong with what is set already."""
    for variable in decision.variables:
        yield Finding("environment", OK, f"would set {variable.name}={variable.value}: {variable.reason}")
    for wrong in warnings(merged({facts.node or "here": facts.settings})[0]):
        yield Finding("environment", WARNING, wrong, "unset it, or take the name that NCCL reads today")
    for note in decision.unknown:
        yield Finding("environment", WARNING, f"not known: {note}", "the site, or a profile: cluster/fabric=NAME")
    if decision.fabric == "efa" and not _has_plugin(environment):
        fix = "aws-ofi-nccl (the EFA installer has it), its lib directory on LD_LIBRARY_PATH"
        yield Finding("environment", ERROR, "EFA without its plugin for NCCL: everything would go over TCP", fix)


def _has_plugin(environment: Mapping[str, str]) -> bool:
    folders = [*environment.get("LD_LIBRARY_PATH", "").split(":"), *EFA_FOLDERS]
    return any(next(Path(folder).glob(EFA_PLUGIN), None) is not None for folder in folders if folder)
