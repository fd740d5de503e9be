"""The share of a pipeline's step in which a rank computes nothing, in theory."""

from __future__ import annotations

from hpc_train.config.layout import SPLIT_BACKWARD, Layout


def ideal_bubble(layout: Layout) -> float:
    """With equal stages, messages that take no time, and all ranks waiting for each other after every step.

    For p ranks with v stages each and m micro-batches the pipeline fills and drains in p - 1 forwards and backwards:
    (p - 1) / (m + p - 1) with one stage per rank (GPipe, arXiv:1811.06965, section 2.3; 1F1B is the same),
    (p - 1) / (v m + p - 1) with v (arXiv:2104.04473, section 2.2). Zero-bubble schedules compute the gradients of
    weights meanwhile, and where these take as long as a forward and as the gradients of inputs, a third of it is left:
    (p - 1) / (3 v m + p - 1), from (p - 1) (TF + TB - TW) in arXiv:2401.10241, table 2.
    """
    waiting = layout.pp - 1
    parts = 3 if layout.schedule in SPLIT_BACKWARD else 1
    return waiting / (parts * layout.stages_per_rank * layout.micro_batches + waiting)
