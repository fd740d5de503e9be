"""The clock that stands in every training step: what it sees, and what it leaves alone."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hpc_train.parallel.activation_offload import _Copy, _SavedLayer, _Transfers
from hpc_train.train.watch import step_clock
from hpc_train.train.watch.step_clock import HostStopwatch, StepClock
from tests.ranks import run_ranks

LATE_S = 1.0
CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def replicas_with_a_late_rank(rank: int, world_size: int) -> tuple[float, int]:
    model = layers()
    replica, clock = DistributedDataParallel(model), StepClock(CPU)
    backward(replica)
    with clock.watching([model]):
        backward(replica)  # outside of a step
        with clock.step():
            with replica.no_sync():
                backward(replica)
            dist.barrier()
            if rank == 1:
                time.sleep(LATE_S)
            backward(replica)
    return clock.read().communication_s, clock.stretches


def test_the_end_of_a_backward_under_ddp() -> None:
    (early, stretches), (late, _) = run_ranks(2, replicas_with_a_late_rank)
    assert stretches == 3  # two backwards, and the barrier
    assert early > LATE_S / 4 and early > late


def shards_and_tensor_parallel(rank: int, world_size: int) -> tuple[int, int, bool]:
    sharded, split, clock = layers(), layers(), StepClock(CPU)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(split, init_device_mesh("cpu", (world_size,)), plan)
    wait = dist.Work.wait
    with clock.watching(), clock.step():
        backward(sharded)
        by_fsdp = clock.stretches
        backward(split)
    return by_fsdp, clock.stretches - by_fsdp, dist.Work.wait is wait


def test_collectives_of_fsdp_and_of_tensor_parallelism() -> None:
    for by_fsdp, by_tensor_parallel, restored in run_ranks(2, shards_and_tensor_parallel):
        assert by_fsdp >= 3 + 3  # gathers and reductions
        assert by_tensor_parallel >= 1
        assert restored


def another_thread(rank: int, world_size: int) -> int:
    clock = StepClock(CPU)

    def reduce() -> None:
        dist.all_reduce(torch.ones(1))

    with clock.watching(), clock.step():
        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
    return clock.stretches


def test_a_save_in_the_background_is_not_the_steps_communication() -> None:
    assert run_ranks(2, another_thread) == [0, 0]


class Stream:
    """Stands for the stream of a GPU."""

    cuda_stream = 1

    def wait_event(self, event: Event) -> None:
        event.wait(self)


class Event:
    """Stands for the end of copies to a GPU.

    Attributes:
        waits: how often a stream was made to wait.
    """

    waits = 0

    def wait(self, stream: Stream) -> None:
        self.waits += 1


def activations_that_come_back(rank: int, world_size: int) -> tuple[int, int]:
    gpu, main = torch.device("cuda", 0), Stream()
    torch.cuda.Stream, torch.cuda.current_stream = Stream, lambda device: main  # type: ignore
    step_clock.make_stopwatch = lambda device: HostStopwatch()  # type: ignore[assignment, attr-defined]
    clock, layer, arrival = StepClock(gpu), _SavedLayer(_Transfers(gpu), None), Event()
    copies = [_Copy(None, torch.zeros(1), arrival) for _ in range(6)]  # type: ignore[arg-type]
    for copy in copies:
        layer.add(copy)
    with clock.watching(), clock.step():
        layer.reach()
    return clock.stretches, arrival.waits


def test_copies_of_activations_are_no_communication() -> None:
    """The copies of a layer have one event, for which the computation waits once."""
    assert run_ranks(1, activations_that_come_back) == [(0, 1)]
