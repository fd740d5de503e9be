"""Models what differs on CPUs, whose cores run the kernels themselves, start them, and move the bytes of collectives.

Nothing of it overlaps: the times of a rank add up. Imports no torch.
"""

from __future__ import annotations

from hpc_train.planner.machine import Rates


def pass_seconds(computed: float, started: float, rates: Rates) -> float:
    """Returns the time of a pass whose kernels take ``computed`` seconds to run and ``started`` seconds to start."""
    return computed + started if rates.cores else max(computed, started)


def uncovered(traffic: float, window: float, blocks: int, rates: Rates, load: float = 1.0) -> float:
    """Returns the part of ``traffic`` that ``window`` seconds of computation do not cover: at least that of a block.

    On GPUs the part that they cover slows them (``overlap_share``), the less the longer it waits for the network.

    Args:
        traffic: the seconds of the collectives of ``blocks`` blocks; on CPUs as one collective.
        load: how busy the collectives keep a device, as a share of collectives within a node.
    """
    if rates.cores:
        return traffic + (blocks - 1) * rates.node_latency_s if traffic else 0.0
    alone = traffic / blocks
    covered = min(traffic - alone, window)
    return traffic - covered + rates.overlap_share * load * covered


def pipeline_seconds(simulated: float, busy: float, ranks: int, rates: Rates) -> float:
    """Returns the time of a pipeline's passes when its ``ranks`` ranks on a node share the cores.

    With more ranks than cores, the ranks that compute take the cores of those that wait: a step takes as long as with
    a core per rank, but no less than all cores need for the work of all ranks.

    Args:
        simulated: the seconds if each rank always has only its share of a core.
        busy: the seconds in which the busiest rank then computes.
    """
    slices = ranks / rates.cores if rates.cores else 1.0
    return simulated if slices <= 1 else max(busy, simulated / slices)
