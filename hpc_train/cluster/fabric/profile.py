"""The variables that the profile of a site asks for (``conf/cluster/fabric``), with where they come from."""

from __future__ import annotations

from hpc_train.cluster.environment import Variable
from hpc_train.config.schema import FabricConfig


def site_profile(fabric: FabricConfig) -> tuple[Variable, ...]:
    reason = f"the site profile {fabric.name}" + (f": {fabric.source}" if fabric.source else "")
    return tuple(Variable(name, value, reason) for name, value in fabric.variables.items())
