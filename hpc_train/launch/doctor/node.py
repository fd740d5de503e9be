"""All that one node can tell of itself, as a value that goes to the node which compares them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.fabric.facts import NodeFacts
from hpc_train.config.compose import config_directory
from hpc_train.config.schema import Config
from hpc_train.launch.doctor.disk import check_root, probe
from hpc_train.launch.doctor.finding import Finding
from hpc_train.launch.doctor.limits import check_limits
from hpc_train.launch.doctor.network import check_gpus, check_ports
from hpc_train.launch.doctor.software import check_software


@dataclass(frozen=True)
class NodeReport:
    """``places``: what must be the same everywhere; ``skew``: the file server's clock minus the node's, in seconds."""

    facts: NodeFacts
    findings: tuple[Finding, ...]
    places: tuple[tuple[str, str], ...]
    skew: float | None

    @property
    def name(self) -> str:
        return self.facts.node or "?"

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
            "places": dict(self.places),
            "skew": self.skew,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeReport:
        return cls(
            NodeFacts.from_json(value["facts"]),
            tuple(Finding(**finding) for finding in value["findings"]),
            tuple(value["places"].items()),
            value["skew"],
        )


def examine(facts: NodeFacts, config: Config) -> NodeReport:
    """What this node says of itself."""
    root = Path(config.run.root)
    findings = (
        *check_gpus(facts, config.cluster.gpus_per_node),
        *check_ports(facts),
        *check_software(facts),
        *check_limits(facts, len(facts.visible) or config.cluster.cpu_workers),
        *check_root(root),
    )
    places = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "the config files": str(config_directory()),
        "run.root": str(root),
    }
    return NodeReport(facts, findings, tuple(places.items()), _skew(root))


def _skew(root: Path) -> float | None:
    try:
        return probe(root)[1]
    except OSError:
        return None
