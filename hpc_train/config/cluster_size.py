"""How many nodes a run works on and its job asks for: a number, or a range of which Slurm gives what is free."""

from __future__ import annotations

import re

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig, Config

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


def asked_nodes(config: Config) -> tuple[int, int]:
    """The fewest and the most nodes that a job asks for: those that work, and the spares."""
    fewest, most = node_range(config.cluster)
    return fewest + config.elastic.spares, most + config.elastic.spares


def fewest_nodes(config: Config) -> int:
    """The fewest that the run must be able to work on: what it may start with, or is left with.

    Raises:
        ConfigError: more are to be left than it starts with.
    """
    fewest, least = node_range(config.cluster)[0], config.elastic.min_nodes
    if least is not None and least > fewest:
        raise ConfigError(
            f"min_nodes is {least}, and the run starts with {fewest}",
            where="elastic.min_nodes",
            mend=f"elastic.min_nodes={fewest} or fewer, or more cluster.nodes",
        )
    return fewest if least is None else least
