"""Decides whether a live run can continue on another number of nodes."""

from __future__ import annotations

from hpc_train.config.schema import Config
from hpc_train.elastic.rendezvous.addresses import AttemptSpec
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.requests import ResizeRequest
from hpc_train.schedulers.scheduler import CurrentJob


def refusal_of(request: ResizeRequest, config: Config, spec: AttemptSpec, job: CurrentJob) -> str | None:
    """Returns why the run cannot continue on the requested nodes; None if it can.

    Args:
        spec: the attempt that runs.
    """
    fewest = config.elastic.min_nodes or 1
    if request.nodes < fewest:
        return f"elastic.min_nodes={fewest} is the smallest number of nodes"
    try:
        resolve_layout(config, request.nodes, spec.workers_per_node)
    except UserError as error:
        return str(error)
    if request.nodes > spec.nodes:
        return "a running job cannot grow yet"
    return job.why_no_release()
