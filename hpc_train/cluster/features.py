"""Features of nodes, as a site names them for ``--constraint``."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

PATIENCE_S = 5.0


def node_features(nodes: Iterable[str]) -> dict[str, frozenset[str]]:
    """By node; empty where Slurm does not answer."""
    command = ["scontrol", "show", "node", "--oneliner", ",".join(nodes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_features(done.stdout)


def parse_features(text: str) -> dict[str, frozenset[str]]:
    """From ``scontrol show node``, a node on one line or on many."""
    nodes = re.findall(r"\bNodeName=(\S+).*?\bActiveFeatures=(\S+)", text, flags=re.DOTALL)
    return {name: frozenset(features.split(",")) - {"(null)"} for name, features in nodes}
