"""Derives a report from the facts of one node, live or recorded: the output of ``python -m hpc_train doctor
--json``.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.machine.network.decision import FabricDecision, FabricJob, decide
from hpc_train.machine.network.discovery import merge, read_tree, recorded_tree
from hpc_train.machine.network.facts import NodeFacts, format_cpu_list
from hpc_train.machine.network.nccl_settings import Setting, warnings
from hpc_train.machine.network.nvidia_smi import parse_matrix
from hpc_train.machine.network.rails import Match, PortVerdict, judge_ports, match, port_warnings
from hpc_train.machine.network.rank_binding import Mask, cpu_masks, unknown_cores
from hpc_train.machine.network.rdma import parse_rdma_text
from hpc_train.machine.network.rocm_smi import is_rocm_smi, parse_showtopo
from hpc_train.machine.network.versions import recorded_versions


@dataclass(frozen=True)
class FabricReport:
    """A node's facts and the resulting decisions for a job of several such nodes."""

    facts: NodeFacts
    ports: tuple[PortVerdict, ...]
    gpu_nics: tuple[Match, ...]
    masks: tuple[Mask, ...]
    decision: FabricDecision
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns ``gpus nics links limits gpu_direct versions gpu_nics masks environment not_set warnings
        unknown``.
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
    """Returns the facts of a recorded node; facts without a recording stay unknown.

    Args:
        sysfs: a copy of ``/sys``, of a whole root directory, or of ``/sys/class/infiniband``.
        matrix: a file with the output of ``nvidia-smi topo -m`` or ``rocm-smi --showtopo``.
        rdma: a file with the output of ``ibstat`` or a similar tool, used if ``sysfs`` shows no NIC.

    Raises:
        UserError: one of them does not exist.
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
    """Returns the number of GPUs of a recorded node; 1 if the recording lacks the PCI bus and shows none."""
    has_bus = sysfs is not None and (recorded_tree(sysfs)[0] / "bus/pci/devices").is_dir()
    return len(facts.gpus) or (0 if has_bus else 1)


def _read(path: Path, where: str, fix: str) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", where=where, fix=fix) from None
    return data.decode(_encoding(data), errors="replace")


def _encoding(data: bytes) -> str:
    """Returns UTF-16, which PowerShell writes, if the mark at the beginning or the zero bytes of ASCII text show it."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if data[1:16:2] and not any(data[1:16:2]):
        return "utf-16-le"
    if data[:16:2] and not any(data[:16:2]):
        return "utf-16-be"
    return "utf-8-sig"
