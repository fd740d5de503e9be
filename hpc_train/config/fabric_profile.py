"""What a site profile may hold: variables of communication libraries, and nothing else."""

from __future__ import annotations

import re

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import FabricConfig

VARIABLE = re.compile(r"(NCCL|TORCH_NCCL|GLOO|TP|FI|OFI|UCX|SHARP|MLX5|RDMAV)_[A-Z0-9_]+")


def check_profile(fabric: FabricConfig) -> None:
    """Raises ConfigError for a name that no communication library reads, or a value that cannot be exported."""
    for name, value in fabric.variables.items():
        where = f"cluster.fabric.variables.{name}"
        if not VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{name} is no variable of NCCL, libfabric, UCX or gloo",
                where=where,
                mend=f"its right name; variables of other kinds go to cluster.env: +cluster.env.{name}={value}",
            )
        if not value or not value.isprintable():
            raise ConfigError(f"{name} is {value!r}", where=where, mend="a value, or leave it out")
