"""Builds the engine that trains a config on a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.models import batch_norm
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.bucket_search import Tell
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.replica_engine import ReplicaEngine
from hpc_train.parallel.reproducible_engine import ReproducibleEngine


def build_engine(
    config: Config, mesh: Mesh, layers: Sequence[range] | None = None, tell_buckets: Tell | None = None
) -> Engine:
    """Builds the model on ``meta`` and hands it to the engine of ``mesh.layout``. Collective.

    Args:
        layers: of each pipeline stage, as ``balance.plan_split`` finds them; None: as ``strategy.pp_split`` says.
        tell_buckets: called on every rank with what ``strategy.bucket_cap_mb=auto`` finds.

    Raises:
        UserError: the model cannot be laid out so.
    """
    model = build_model(config.model, config.train.seed)
    if batch_norm.has_batch_statistics(model):
        batch_norm.check_batch(config.batch, mesh.layout)
    if mesh.layout.logical_micro_batches:
        return ReproducibleEngine(config, mesh, model)
    if mesh.layout.pp == 1 and mesh.layout.tp == 1:
        return ReplicaEngine(config, mesh, model, tell_buckets)
    whole = _check_parts(model, mesh)
    if mesh.layout.pp == 1:
        return ReplicaEngine(config, mesh, whole, tell_buckets)
    from hpc_train.parallel.pipeline_engine import PipelineEngine  # torch's pipelining takes a second to import

    return PipelineEngine(config, mesh, whole, layers, tell_buckets)


def _check_parts(model: nn.Module, mesh: Mesh) -> Model:
    missing = [name for name in ("stem", "layers", "head") if getattr(model, name, None) is None]
    if isinstance(model, Model) and not missing:
        return model
    layout = mesh.layout
    raise UserError(
        "the model has no stem, layers and head: it can neither be cut into pipeline stages nor split over "
        "tensor-parallel ranks",
        where=f"strategy.pp={layout.pp}, strategy.tp={layout.tp}, model",
        fix="strategy=single, dp, zero1, zero2, zero3 or hsdp, or the three parts of hpc_train.models.model.Model",
    )
