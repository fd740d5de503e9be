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
    """From ``scontrol show node --oneliner``."""
    found = {}
    for line in text.splitlines():
        name, features = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bActiveFeatures=(\S+)", line)
        if name and features:
            found[name[1]] = frozenset(set(features[1].split(",")) - {"(null)"})
    return found
