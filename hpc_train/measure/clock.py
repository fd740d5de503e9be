"""How far the clocks of the nodes are apart, by messages to and fro between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hpc_train.measure.preflight_checks import ClockOffset

MESSAGES = 8  # the one with the shortest round trip counts


def clock_offsets(
    names: Sequence[str], first_ranks: Sequence[int], group: dist.ProcessGroup, now: Callable[[], float]
) -> tuple[ClockOffset, ...]:
    """The clocks of all nodes against that of rank 0, one node after the other. Collective over ``group``, on the CPU.

    With t0 and t3 rank 0's times of sending and receiving, and t1 and t2 the other's of receiving and sending, the
    other clock is ((t1 - t0) + (t2 - t3)) / 2 ahead, off by half the round trip at most (NTP, RFC 5905, section 8).

    Args:
        first_ranks: one rank of each node, in the order of ``names``; that of the first node is 0.
        now: seconds since the epoch.

    Returns:
        Of all nodes but the first, on rank 0; nothing on the other ranks.
    """
    rank, found = dist.get_rank(group), []
    for name, peer in zip(names[1:], first_ranks[1:], strict=True):
        if rank == 0:
            found.append(_ask(name, peer, group, now))
        elif rank == peer:
            _answer(group, now)
    return tuple(found)


def _ask(name: str, peer: int, group: dist.ProcessGroup, now: Callable[[], float]) -> ClockOffset:
    answers = []
    for _ in range(MESSAGES):
        times = torch.zeros(2, dtype=torch.float64)
        t0 = now()
        dist.send(times, peer, group=group)
        dist.recv(times, peer, group=group)
        t3 = now()
        t1, t2 = times.tolist()
        answers.append(ClockOffset(name, ((t1 - t0) + (t2 - t3)) / 2, (t3 - t0) - (t2 - t1)))
    return min(answers, key=lambda answer: answer.round_trip_s)


def _answer(group: dist.ProcessGroup, now: Callable[[], float]) -> None:
    for _ in range(MESSAGES):
        times = torch.zeros(2, dtype=torch.float64)
        dist.recv(times, 0, group=group)
        received = now()
        dist.send(torch.tensor([received, now()], dtype=torch.float64), 0, group=group)
