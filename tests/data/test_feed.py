from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from hpc_train.config.schema import BatchConfig, SyntheticDataConfig, TextDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import IGNORED, Dataset, Sample, SampleError
from hpc_train.data.feed import EvalFeed, LocalBatch, TrainFeed, loader_workers
from hpc_train.errors import UserError
from tests.data.layouts import replicas
from tests.data.stand_ins import Numbers, Where

CPU = torch.device("cpu")


def feed(
    dataset: Dataset,
    global_size: int = 8,
    dp: int = 1,
    rank: int = 0,
    micro_batches: int = 2,
    start_step: int = 0,
    **batch: object,
) -> TrainFeed:
    config = BatchConfig(**{"global_size": global_size, "loader_workers": 0} | batch)  # type: ignore[arg-type]
    return TrainFeed(dataset, config, replicas(dp, global_size, micro_batches), rank, 5, CPU, start_step)


def real(batch: LocalBatch) -> list[int]:
    """The samples in a batch of ``Numbers``, without padding."""
    targets = torch.cat([micro.targets[:, 0] for micro in batch.micro_batches])
    return targets[targets != IGNORED].tolist()


class Prefetched(Numbers):
    """Records which samples are announced and which are read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls: list[tuple[str, int]] = []

    def prefetch(self, index: int) -> None:
        self.calls.append(("prefetch", index))

    def sample(self, index: int, epoch: int) -> Sample:
        self.calls.append(("read", index))
        return super().sample(index, epoch)


def test_samples_are_prefetched_two_steps_before_they_are_read() -> None:
    dataset = Prefetched(100)
    steps = feed(dataset, drop_last=False)
    for _ in range(3):
        next(steps)
    reads = [index for call, index in dataset.calls if call == "read"]
    prefetched = [index for call, index in dataset.calls if call == "prefetch"]
    assert prefetched[: len(reads)] == reads
    for number, index in enumerate(reads[: 3 * 8]):  # two steps of two micro-batches
        ahead = dataset.calls[: dataset.calls.index(("read", index))]
        assert sum(call == "prefetch" for call, _ in ahead) >= number // 4 * 4 + 20


@pytest.mark.long_form(8, cases=["2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_4_2_1_3_4_ranks_mid_epoch_go_on_in_the_same_order(workers: int) -> None:
    dataset = Numbers(100)
    one_rank = feed(dataset, loader_workers=0)
    expected = [real(next(one_rank)) for _ in range(14)]
    found: list[list[int]] = []
    for dp, steps in ((4, 3), (2, 4), (1, 1), (3, 4), (4, 2)):
        ranks = [feed(dataset, dp=dp, rank=rank, start_step=len(found), loader_workers=workers) for rank in range(dp)]
        found += [[index for rank in ranks for index in real(next(rank))] for _ in range(steps)]
        for rank in ranks:
            rank.close()
    assert found == expected
    epoch = Counter(index for batch in expected[:12] for index in batch)
    assert len(epoch) == 96 and set(epoch.values()) == {1}


@pytest.mark.parametrize("workers", [0, 2])
def test_other_counts_only_change_the_owner_of_a_micro_batch(workers: int) -> None:
    config = BatchConfig(global_size=8, loader_workers=workers)

    def by_number(*counts: int) -> list[dict[int, list[int]]]:
        ranks = [TrainFeed(Numbers(50), config, replicas(2, 8, 4), rank, 5, CPU, 0, counts=counts) for rank in (0, 1)]
        steps = []
        for _ in range(8):  # into the second epoch
            batches = [next(rank) for rank in ranks]
            assert [len(batch.micro_batches) for batch in batches] == [*counts]
            numbers = [number for batch in batches for number in batch.numbers]
            micro_batches = [micro.targets[:, 0].tolist() for batch in batches for micro in batch.micro_batches]
            steps.append(dict(zip(numbers, micro_batches, strict=True)))
        for rank in ranks:
            rank.close()
        return steps

    even = by_number(4, 4)
    assert [sorted(step) for step in even] == [[*range(8)]] * 8
    assert by_number(7, 1) == even and by_number(3, 5) == even


def test_micro_batches_are_equally_many_and_equally_shaped_with_padding() -> None:
    ranks = [feed(Numbers(10), global_size=7, dp=3, rank=rank, drop_last=False) for rank in range(3)]
    for _ in range(4):  # two epochs of a whole and a short batch
        batches = [next(rank) for rank in ranks]
        shapes = {tuple(micro.inputs.shape) for batch in batches for micro in batch.micro_batches}
        assert shapes == {(2, 2)} and {len(batch.micro_batches) for batch in batches} == {2}
        for batch in batches:
            targets = torch.stack([micro.targets for micro in batch.micro_batches])
            assert batch.local_count == int((targets != IGNORED).sum()) == 2 * len(real(batch))
            assert all((micro.inputs >= 0).all() for micro in batch.micro_batches)
    assert ranks[0].steps_per_epoch == 2 and ranks[0].epoch_of(3) == 1


def test_the_epoch_and_the_context_arrive() -> None:
    steps = feed(Numbers(8), start_step=6)
    assert [next(steps).micro_batches[0].context["epoch"].tolist() for _ in range(2)] == [[6] * 4, [7] * 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_feed_is_a_function_of_seed_and_step(workers: int) -> None:
    dataset = build_dataset(TextDataConfig(path=str(Path(__file__).parent), sequence_length=8), "train", 0)
    long = feed(dataset, loader_workers=workers)
    batches = [next(long) for _ in range(5)]
    resumed = feed(dataset, start_step=3)
    for before, after in zip(batches[3:], resumed, strict=False):
        for one, other in zip(before.micro_batches, after.micro_batches, strict=True):
            assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
    long.close()


def test_a_feed_leaves_the_random_state_of_the_process_alone() -> None:
    before = torch.random.get_rng_state()
    steps = feed(Numbers(20), loader_workers=1)
    next(steps)
    steps.close()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("dp", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_validation_sees_each_sample_once(dp: int, workers: int) -> None:
    config = BatchConfig(global_size=8, loader_workers=workers)
    ranks = [EvalFeed(Numbers(29), config, replicas(dp, 8, 2), rank, CPU) for rank in range(dp)]
    for _ in range(2):
        batches = [list(rank) for rank in ranks]
        assert {len(batch) for batch in batches} == {len(ranks[0])} == {4}
        seen = Counter(index for rank in batches for batch in rank for index in real(batch))
        assert len(seen) == 29 and set(seen.values()) == {1}
        assert {tuple(m.inputs.shape) for rank in batches for batch in rank for m in batch.micro_batches} == {
            tuple(batches[0][0].micro_batches[0].inputs.shape)
        }


@pytest.mark.parametrize("dp", [1, 3])
def test_a_limited_validation_sees_the_same_samples_under_any_layout(dp: int) -> None:
    config = BatchConfig(global_size=8, loader_workers=0)
    ranks = [EvalFeed(Numbers(29), config, replicas(dp, 8, 2), rank, CPU) for rank in range(dp)]
    assert all(rank.limited(29) is rank and rank.limited(30) is rank for rank in ranks)
    seen = sorted(index for rank in ranks for batch in rank.limited(10) for index in real(batch))
    assert seen == [index * 29 // 10 for index in range(10)]  # evenly spaced
    assert [(len(rank.limited(10)), rank.limited(10).samples, rank.samples) for rank in ranks] == [(2, 10, 29)] * dp


def test_validation_that_is_left_early_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    batches = iter(EvalFeed(Numbers(29), BatchConfig(global_size=8, loader_workers=2), replicas(1, 8), 0, CPU))
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()  # type: ignore[attr-defined]
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_names_the_sample_and_its_file_at_its_step(workers: int) -> None:
    reference = feed(Numbers(40))
    bad = [real(next(reference)) for _ in range(3)][2][1]
    steps = feed(Numbers(40, raises_at=bad), loader_workers=workers)
    next(steps), next(steps)  # the step before is whole, although it reads ahead
    with pytest.raises(SampleError, match=rf"sample {bad} \(/numbers/{bad}.txt\): ZeroDivisionError") as error:
        next(steps)
    assert "no such number" in str(error.value) and "Traceback" in str(error.value)
    steps.close()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_sample_of_another_shape_is_refused(micro_batches: int) -> None:
    with pytest.raises(UserError, match=r"need equal shapes|but sample"):
        for _ in zip(range(6), feed(Numbers(40, odd_at=3), micro_batches=micro_batches), strict=False):
            pass


def test_a_dead_loader_process_is_an_error_that_names_the_samples() -> None:
    reference = feed(Numbers(400))
    batches = [real(next(reference)) for _ in range(12)]
    steps = feed(Numbers(400, dies_at=batches[10][0]), loader_workers=1)
    with pytest.raises(SampleError, match=r"loader process died .* from /numbers/.*batch.loader_workers=0"):
        for _ in range(12):
            next(steps)
    steps.close()


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
def test_the_death_of_a_loader_process_interrupts_only_the_wait_for_data(wait_s: float) -> None:
    steps = feed(Where(), loader_workers=1)
    first = next(steps).micro_batches[0].inputs[0].tolist()
    os.kill(first[0], signal.SIGKILL)
    until = time.monotonic() + wait_s
    while Path(f"/proc/{first[0]}/stat").read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)  # a save could be here
    with pytest.raises(SampleError, match=r"loader process died .*batch.loader_workers=0"):
        for _ in range(12):
            next(steps)
    steps.close()


def test_loader_processes_compute_on_one_thread_and_ignore_stop_requests() -> None:
    steps = feed(Where(), loader_workers=2)
    first = next(steps).micro_batches[0].inputs[0].tolist()
    assert first[0] != os.getpid() and first[1] == 1
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(first[0], name)
    for _ in range(12):
        next(steps)
    steps.close()
    steps.close()
    assert not Path(f"/proc/{first[0]}").exists()


@pytest.mark.long_form(8)
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_loader_processes_never_outlive_their_reader(end: str) -> None:
    code = (
        "import time, torch\n"
        "from tests.data.test_feed import Where, feed\n"
        "steps = feed(Where(), loader_workers=2)\n"
        "print(*{int(micro.inputs[0, 0]) for _ in range(6) for micro in next(steps).micro_batches}, flush=True)\n"
        + ("time.sleep(60)\n" if end == "kill" else "")
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        loaders = process.stdout.readline().split()
        if end == "kill":
            process.kill()
        assert process.wait(60) == (-signal.SIGKILL if end == "kill" else 0)
    assert loaders
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in loaders):
        assert time.monotonic() < deadline, "loader processes live on"
        time.sleep(0.05)


def test_how_many_loader_processes() -> None:
    cheap = build_dataset(SyntheticDataConfig(), "train", 0)
    cores = len(os.sched_getaffinity(0))
    assert loader_workers(BatchConfig(), cheap, 1) == 0
    assert loader_workers(BatchConfig(), Numbers(1), 1) == min(4, cores)
    assert loader_workers(BatchConfig(), Numbers(1), cores + 1) == 0
    assert loader_workers(BatchConfig(loader_workers=3), cheap, 8) == 3


def test_too_small_a_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="7 samples do not fill one global batch of 8"):
        feed(Numbers(7))


def test_many_steps_flow() -> None:
    dataset = build_dataset(SyntheticDataConfig(sequence_length=16), "train", 0)
    steps = feed(dataset, global_size=64, micro_batches=4)
    assert sum(next(steps).local_count for _ in range(30)) == 30 * 64 * 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_the_gpu(workers: int) -> None:
    device = torch.device("cuda", 0)
    config, layout = BatchConfig(global_size=8, loader_workers=workers), replicas(1, 8, 2)
    on_gpu = TrainFeed(Numbers(100), config, layout, 0, 5, device, 0)
    on_cpu = feed(Numbers(100))
    for _ in range(20):
        one, other = next(on_gpu), next(on_cpu)
        assert all(micro.inputs.is_cuda and micro.context["epoch"].is_cuda for micro in one.micro_batches)
        assert real(one) == real(other) and one.local_count == other.local_count
    on_gpu.close()
