"""How many nodes a job asks for: a number, or a range of which Slurm gives what is free."""

from __future__ import annotations

import re

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig

NODES = re.compile(r"(\d+)(?:-(\d+))?")


def node_range(cluster: ClusterConfig) -> tuple[int, int]:
    """The fewest and the most nodes of ``cluster.nodes``: ``4`` or ``2-4``.

    Raises:
        ConfigError: neither, or an empty range.
    """
    found = NODES.fullmatch(str(cluster.nodes))
    if found is not None:
        fewest, most = int(found[1]), int(found[2] or found[1])
        if 1 <= fewest <= most:
            return fewest, most
    raise ConfigError(
        f"nodes is {cluster.nodes}", where="cluster.nodes", mend="1 or more, or a range for Slurm: cluster.nodes=2-4"
    )
