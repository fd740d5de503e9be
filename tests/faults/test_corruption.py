"""Injects wrong numbers into verified steps (``train.verify``): what is found, who is named, and what training uses."""

from __future__ import annotations

import pytest
import torch

from hpc_train.checkpoint.store import Kept, Retention, removable
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.checksums import position_checksum
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.verify import TIMED, Ballot, Value, Verification, count_votes
from tests.faults.corruption import (
    COMPILED,
    LAYOUTS,
    OF_USERS,
    Injection,
    Trial,
    cell_of,
    is_undisturbed,
    train_without_fault,
    trials,
)
from tests.parallel.oracle import mesh_of
from tests.ranks import run_on_world, run_ranks

GRADIENTS, REDUCTION, STATE = "gradients", "reduced gradients", "weights and optimizer state"
UPDATE = "update"


def suspicion_of(of_ranks: list[Trial]) -> tuple[str, tuple[int, ...], bool]:
    """Returns check, ranks and correction of the only suspicion, which is the same on all ranks."""
    first = of_ranks[0]
    assert all(trial.suspicions == first.suspicions for trial in of_ranks)
    assert sum(trial.injected for trial in of_ranks) > 0
    (suspicion,) = first.suspicions
    assert (first.ended is None) is suspicion.corrected
    return suspicion.check, suspicion.ranks, suspicion.corrected


def check_plain(of_ranks: list[Trial]) -> None:
    assert all(trial.suspicions == () and trial.warnings == () and trial.ended is None for trial in of_ranks)


def test_replicas() -> None:
    """Three replicas with all-reduce. Steps 2 and 4 are exchanged, and step 3 is repeated."""
    plain, product, summed, lasting, weight = trials(
        "dp3",
        None,
        Injection("product", rank=1, step=2, at_pass=1),
        Injection("sum", rank=1, step=3, at_pass=1),
        Injection("product", rank=1, step=3, at_pass=None),
        Injection("weight", rank=2, step=2),
    )
    check_plain(plain)
    assert suspicion_of(product) == (GRADIENTS, (1,), True)
    assert suspicion_of(summed) == (REDUCTION, (1,), True)
    assert all(is_undisturbed(trial, plain) for trial in (product, summed))
    assert suspicion_of(lasting) == (GRADIENTS, (1,), False)
    assert (lasting[0].ended, lasting[0].suspicions[0].findings, lasting[0].suspicions[0].since) == (4, 2, 2)
    assert (suspicion_of(weight), weight[0].ended) == ((STATE, (2,), False), 2)


@pytest.mark.long_form(20)  # test_replicas
def test_gradients_batches_and_moments_of_replicas() -> None:
    plain, gradient, batch, moment = trials(
        "dp3",
        None,
        Injection("gradient", rank=2, step=3, at_pass=0),
        Injection("batch", rank=1, step=3, at_pass=1),
        Injection("moment", rank=0, step=3),
    )
    check_plain(plain)
    assert suspicion_of(gradient) == (GRADIENTS, (2,), True)
    assert suspicion_of(batch) == (GRADIENTS, (1,), True)
    assert all(is_undisturbed(trial, plain) for trial in (gradient, batch))
    assert (suspicion_of(moment), moment[0].ended) == ((STATE, (0,), False), 3)


@pytest.mark.long_form(30)  # test_updates_of_other_optimizers
def test_shards() -> None:
    """Under zero3 a local gradient exists only until it is reduced."""
    plain, product, gradient, gathered, update, lasting = trials(
        "zero3",
        None,
        Injection("product", rank=0, step=2, at_pass=0),
        Injection("gradient", rank=1, step=3, at_pass=1),
        Injection("gathered parameter", rank=0, step=3, at_pass=0),
        Injection("update", rank=1, step=2, at_pass=0),
        Injection("product", rank=2, step=2, at_pass=None),
    )
    check_plain(plain)
    assert suspicion_of(product) == (GRADIENTS, (0,), True)
    assert suspicion_of(gradient) == (GRADIENTS, (1,), True)
    assert suspicion_of(gathered) == (GRADIENTS, (0,), True)
    assert suspicion_of(update) == (UPDATE, (1,), True)
    assert all(is_undisturbed(trial, plain) for trial in (product, gradient, gathered, update))
    assert (suspicion_of(lasting), lasting[0].ended) == ((GRADIENTS, (2,), False), 2)


def test_stages() -> None:
    """Of two pipelines with two stages each, the stage is named that has received right numbers and sent wrong ones.
    Between two replicas alone, a lasting error makes both suspects."""
    plain, first, last, batch, lasting = trials(
        "pp2dp2",
        None,
        Injection("product", rank=1, step=2, at_pass=0),
        Injection("product", rank=2, step=3, at_pass=1),
        Injection("batch", rank=1, step=2, at_pass=0),
        Injection("product", rank=1, step=3, at_pass=None),
    )
    check_plain(plain)
    assert suspicion_of(first) == (GRADIENTS, (1,), True)
    assert suspicion_of(last) == (GRADIENTS, (2,), True)
    assert suspicion_of(batch) == (GRADIENTS, (1,), True)
    assert all(is_undisturbed(trial, plain) for trial in (first, last, batch))
    assert suspicion_of(lasting) == (GRADIENTS, (0, 1), False)
    assert lasting[0].suspicions[0].findings == 1


@pytest.mark.parametrize("layout", ["zero2", "muon", "offload"])
def test_updates_of_other_optimizers(layout: str) -> None:
    """NAdam with foreach, Muon of whole matrices, and AdamW on the host, whose updates are repeated on one rank."""
    plain, first, second = trials(
        layout,
        None,
        Injection("update", rank=1, step=2, at_pass=0),
        Injection("update", rank=0, step=3, at_pass=1, place=7),
    )
    check_plain(plain)
    assert (suspicion_of(first), suspicion_of(second)) == ((UPDATE, (1,), True), (UPDATE, (0,), True))
    assert is_undisturbed(first, plain) and is_undisturbed(second, plain)


def test_updates_that_are_not_deterministic_are_left_out() -> None:
    """An optimizer may draw from torch's generator. If it draws from another one, its updates are not compared."""
    plain, noisy = trials("drawing", None, Injection("noisy update"))
    check_plain(plain)
    assert all(trial.suspicions == () and trial.ended is None for trial in noisy)
    assert [warning.partition(" differ ")[2] for warning in noisy[0].warnings] == [
        "when their update is repeated; updates are not compared"
    ]


def test_passes_that_depend_on_the_rank_are_not_exchanged() -> None:
    """The loss compares the samples of all ranks, in the order of the ranks."""
    cell = cell_of("custom-contrastive")
    trial, _ = run_on_world(cell.world_size, train_without_fault, cell, 8)
    assert (trial.suspicions, trial.ended) == ((), None)
    (warning,) = trial.warnings
    assert "repetitions alone prove checkpoints" in warning and warning.endswith("differ between ranks")


@pytest.mark.long_form(20)
def test_experts() -> None:
    """The ranks that divide the experts compute the passes of the other replica together, and are suspected
    together."""
    plain, product, batch, lasting = trials(
        "ep2dp4",
        None,
        Injection("product", rank=3, step=3, at_pass=0),
        Injection("batch", rank=3, step=3, at_pass=1),
        Injection("product", rank=1, step=2, at_pass=None),
    )
    check_plain(plain)
    assert suspicion_of(product) == (GRADIENTS, (2, 3), True)
    assert suspicion_of(batch) == (GRADIENTS, (2, 3), True)
    assert is_undisturbed(product, plain) and is_undisturbed(batch, plain)
    assert suspicion_of(lasting) == (GRADIENTS, (0, 1, 2, 3), False)


def test_one_rank() -> None:
    """A rank alone repeats its passes; what it always computes wrongly is out of reach."""
    plain, product, random_state, update, lasting = trials(
        "single",
        None,
        Injection("product", step=2, at_pass=1),
        Injection("random state", step=3, at_pass=0),
        Injection("update", step=3, at_pass=1),
        Injection("product", step=2, at_pass=None),
    )
    check_plain(plain)
    assert suspicion_of(product) == (GRADIENTS, (0,), True)
    assert suspicion_of(random_state) == (GRADIENTS, (0,), True)
    assert suspicion_of(update) == (UPDATE, (0,), True)
    assert all(is_undisturbed(trial, plain) for trial in (product, random_state, update))
    assert lasting[0].suspicions == () and lasting[0].injected > 0


def test_kernels_that_are_not_deterministic_are_left_out() -> None:
    for layout in ("single", "dp2"):
        (noisy,) = trials(layout, Injection("noise"))
        assert all(trial.suspicions == () and trial.ended is None for trial in noisy)
        assert noisy[0].warnings[0].endswith("differ from pass to pass and are not compared")
        assert "layers.0.attention.wq.weight" in noisy[0].warnings[0]


@pytest.mark.long_form(130)  # the tests above train most of these layouts, not compiled
def test_no_layout_raises_a_false_alarm() -> None:
    comparing = "custom-contrastive"  # test_passes_that_depend_on_the_rank_are_not_exchanged has its warning
    for layout in sorted({*LAYOUTS, *OF_USERS} - {comparing}):
        check_plain(trials(layout, None)[0])
    for layout in COMPILED:
        cell = cell_of(layout, compile=True)
        check_plain(run_ranks(cell.world_size, train_without_fault, cell, 5, timeout=600))


A, B, C = (1, 2), (1, 3), (4, 2)


@pytest.mark.parametrize(
    ("votes", "ballot"),
    [
        # all agree
        ([(0, A), (0, A)], Ballot(A, frozenset())),
        ([(0, A), (1, A), (2, A)], Ballot(A, frozenset())),
        # a rank contradicts itself: most of its values, or the other ranks, decide
        ([(0, A), (0, B), (0, A)], Ballot(A, frozenset({0}))),
        ([(0, A), (0, B)], Ballot(None, frozenset({0}))),
        ([(0, A), (0, B), (0, C)], Ballot(None, frozenset({0}))),
        ([(0, A), (0, B), (1, A)], Ballot(A, frozenset({0}))),
        ([(0, B), (0, B), (0, A), (1, A)], Ballot(A, frozenset({0}))),
        ([(0, A), (0, B), (1, A), (1, B)], Ballot(None, frozenset({0, 1}))),
        # ranks contradict each other: two that agree count twice, and repetitions do not count
        ([(0, A), (1, B), (2, A)], Ballot(A, frozenset({1}), findings=2)),
        ([(0, A), (0, A), (1, B)], Ballot(None, frozenset({0, 1}))),
        ([(0, A), (1, B), (2, C)], Ballot(None, frozenset({0, 1, 2}))),
        ([(0, A), (1, A), (2, B), (3, C)], Ballot(A, frozenset({2, 3}), findings=2)),
        ([(0, A), (1, A), (2, B), (3, B)], Ballot(None, frozenset({0, 1, 2, 3}))),
    ],
)
def test_votes(votes: list[tuple[int, Value]], ballot: Ballot) -> None:
    assert count_votes(votes) == ballot
    assert count_votes(votes[::-1]) == ballot


def due_steps(rank: int, world: int) -> tuple[list[int], list[str]]:
    """Returns the steps that ``auto`` verifies on a rank whose clock shows 1 s for other steps, and the warnings."""
    cell = cell_of("dp2", every="auto")
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    seconds = dict.fromkeys(TIMED, 2.0 + rank) | {1: 50.0, 2: 9.0, 5: 60.0}  # of each step; the last one saves
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        return sum(seconds.get(call, 1.0) for call in range(1, calls))

    warnings: list[str] = []
    optimizer = Optimizer(cell.config().optim, engine.named_parameters())
    verification = Verification(
        cell.config(),
        mesh,
        engine,
        optimizer,
        lambda suspicion: 0,
        lambda step, text: warnings.append(text),
        clock=clock,
    )
    return [step for step in range(620) if verification.is_due(step)], warnings


def test_auto_takes_one_percent_of_the_time() -> None:
    """The slower of two ranks takes two seconds more in a verified step, so every 200th step is verified."""
    for steps, warnings in run_on_world(2, due_steps):
        assert steps == [1, 5, 9, 13, 199, 399, 599]
        assert warnings == ["train.verify.every=auto: verifying every 200 steps"]


def test_each_bit_and_each_position_changes_the_checksum() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)):
        value = torch.randn(70, 3, generator=generator).to(dtype)
        sums = {int(position_checksum(value))}
        for bit in range(8 * dtype.itemsize):
            changed = value.clone()
            changed.view(bits)[bit, 1] ^= torch.iinfo(bits).min if bit == 8 * dtype.itemsize - 1 else 1 << bit
            sums.add(int(position_checksum(changed)))
        exchanged = value.clone()
        exchanged[0], exchanged[69] = value[69], value[0]
        sums.add(int(position_checksum(exchanged)))
        assert len(sums) == 8 * dtype.itemsize + 2
    assert position_checksum(torch.zeros(0)) == 0


def test_retention_keeps_the_newest_proved_checkpoint() -> None:
    kept = [Kept(step) for step in (10, 20, 30, 40, 50)]
    assert removable(kept, Retention(newest=2, proved=29)) == {10, 30}
    assert removable(kept, Retention(newest=2, proved=9)) == {10, 20, 30}
