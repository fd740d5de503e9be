"""Builds the engine that trains the model of a config on a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from functools import partial

from torch import nn

from hpc_train.config.schema import Config, HFModelConfig
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import BALANCE, BALANCED_EXPERTS, COMPARED_SAMPLES, refusals
from hpc_train.layout.layout import Layout
from hpc_train.models import batch_norm
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.models.own_loss import Loss, place
from hpc_train.models.transformer import CrossEntropyHead
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.collectives import gather
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import sharder_of
from hpc_train.parallel.precision.float8 import check_use
from hpc_train.parallel.replica_engine import ReplicaEngine, ReproducibleEngine


def build_engine(
    config: Config, mesh: Mesh, layers: Sequence[range] | None = None, restored: Collection[str] = ()
) -> Engine:
    """Builds the model on ``meta`` and the engine for ``mesh.layout``, which sums gradients over a replica. Collective.

    Args:
        layers: the layers of each pipeline stage from ``balance.plan_split``; None follows ``strategy.pp_split``.
        restored: the parameters that a checkpoint will be loaded into, which are neither drawn nor read from files.

    Raises:
        UserError: the model cannot be distributed as the layout requires.
    """
    layout = mesh.layout
    mesh = mesh.replica
    needs_values = mesh.dp_cp_rank == 0 or sharder_of(mesh.layout) is None
    model = build_model(config.model, config.train.seed, needs_values)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "the model has no parameters that are trained: "
            + ("all have requires_grad=False" if any(True for _ in model.parameters()) else "it has no parameters"),
            where="model",
            fix="leave requires_grad=True in the parameters to train",
        )
    described = check_use(model, config.precision, mesh.device, config.train.compile)
    if described is not None and mesh.rank == 0:
        print(described)
    _check_micro_batches(config, layout, model)
    if model.mixes_samples:
        owner = model.head if isinstance(model, Model) else model
        assert owner is not None, "a whole model has a head"
        loss: Loss = owner.loss
        for refusal in refusals(COMPARED_SAMPLES, config, mesh.layout, place(loss)):
            raise refusal
        model.gather = partial(gather, group=mesh.group("dp"))
    if isinstance(model, WrappedModel) and model.balances_experts:
        accepted = isinstance(config.model, HFModelConfig) and config.model.split_dependent_loss
        parts = list(refusals(BALANCED_EXPERTS, config, mesh.layout))
        if parts and not accepted:
            raise parts[0]
        if parts and mesh.rank == 0:
            warnings.warn(
                "the load-balancing loss (output_router_logits) is computed for each rank and micro-batch separately, "
                "so the results depend on their number (model.split_dependent_loss=true)",
                stacklevel=2,
            )
    if config.train.z_loss:
        _check_z_loss(model)
    if mesh.layout.logical_micro_batches:
        return ReproducibleEngine(config, mesh, model, restored)
    if mesh.layout.pp == 1 and mesh.layout.tp == 1:
        return ReplicaEngine(config, mesh, model, restored)
    whole = _check_parts(model, mesh)
    if mesh.layout.pp == 1:
        return ReplicaEngine(config, mesh, whole, restored)
    from hpc_train.parallel.pipeline.engine import PipelineEngine  # torch's pipelining takes a second to import

    return PipelineEngine(config, mesh, whole, layers, restored)


def _check_micro_batches(config: Config, layout: Layout, model: Model | WrappedModel) -> None:
    """Raises UserError if the ranks exchange something in each micro-batch and these are padded or move."""
    if batch_norm.has_batch_statistics(model):
        batch_norm.check_batch(config.batch, config.data, layout)
    if not BALANCE.value(config, layout):
        return
    reason = ""
    if batch_norm.has_statistics(model):
        reason = "has batch or running statistics"
    if isinstance(model, WrappedModel) and layout.lockstep_ranks > 1:
        reason = f"has no stem, layers and head, so its ranks compare what {layout.data_parallel} gathers"
    if reason:
        raise UserError(
            f"the model {reason} in each micro-batch: all ranks compute equally many, but batch.balance is true",
            where="batch.balance, model",
            fix="batch.balance=false, or a model without batch statistics and strategy=dp",
        )


def _check_z_loss(model: Model | WrappedModel) -> None:
    """Raises UserError unless the trainer computes a cross-entropy of the logits that the model's head returns."""
    head = model.head if isinstance(model, Model) else None
    if isinstance(head, CrossEntropyHead) and not model.own_count:
        return
    behavior = "has no head that returns the logits of each token"
    if model.own_count:
        behavior = "computes its own loss"
    raise UserError(
        f"train.z_loss is set, but the model {behavior}",
        where="train.z_loss, model",
        fix="train.z_loss=0, or a head that derives from hpc_train.models.transformer.CrossEntropyHead and keeps its "
        "loss",
    )


def _check_parts(model: nn.Module, mesh: Mesh) -> Model:
    missing = [name for name in ("stem", "layers", "head") if getattr(model, name, None) is None]
    if isinstance(model, Model) and not missing:
        return model
    layout = mesh.layout
    raise UserError(
        "the model has no stem, layers and head, so it can neither be cut into pipeline stages nor split over "
        "tensor-parallel ranks",
        where=f"strategy.pp={layout.pp}, strategy.tp={layout.tp}, model",
        fix="use strategy=single, dp, zero1, zero2, zero3 or hsdp, or a model with the "
        "three parts of hpc_train.models.model.Model",
    )
