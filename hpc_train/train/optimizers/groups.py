"""Checks the optimizers and parameter groups of a config against a model that is split over ranks."""

from __future__ import annotations

from hpc_train.checkpoint.agreement import from_rank
from hpc_train.config.schema import OptimConfig
from hpc_train.layout.optimizers import check_matches, own_targets, parameter_groups
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.optimizers.own import check_elementwise


def check_groups(optim: OptimConfig, engine: Engine, mesh: Mesh) -> None:
    """Collective over all ranks.

    Raises:
        UserError: a group of ``optim.groups`` matches no trained parameter of any stage, or an optimizer is not
            elementwise as the config states; raised on every rank.
    """
    for target in own_targets(optim):
        check_elementwise(target)
    groups = parameter_groups(optim)
    if not groups:
        return
    own = [name for name, parameter in engine.named_parameters().items() if parameter.requires_grad]
    first_ranks = range(0, mesh.layout.world_size, mesh.layout.stage_ranks)
    names = [name for rank in first_ranks for name in from_rank(rank, own, mesh.control)]
    check_matches(groups, list(dict.fromkeys(names)))
