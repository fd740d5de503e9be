"""The contenders of ``bench-peers`` do the same work, one that is not installed says so, and the table has them all."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest

from benchmarks.peers.__main__ import rows
from benchmarks.peers.processes import BUILDERS, FIRST, OURS, Found, Results, Work, run_case

SMALL = ("model.dim=32", "model.ffn_dim=64", "model.n_layers=2", "data.sequence_length=16", "batch.global_size=4")
NEEDS = {
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "Trainer, its Llama": "transformers",
    "torchtitan": "torchtitan",
}


@pytest.mark.long_form(25)  # a benchmark
@pytest.mark.parametrize("case", ["single", "dp2"])
def test_all_contenders_train_the_same_model_on_the_same_data(case: str) -> None:
    found = run_case(Work(case, "fp32", tuple(BUILDERS), 1, 2, SMALL))
    ours = found[OURS]
    assert isinstance(ours, Found)
    assert ours.losses[0] == pytest.approx(math.log(256), rel=0.01)  # of a vocabulary of 256
    for name, one in found.items():
        if name in NEEDS and find_spec(NEEDS[name]) is None:
            assert one == f"not installed: No module named '{NEEDS[name]}'"
            continue
        assert isinstance(one, Found), one
        assert one.parameters == ours.parameters
        assert one.losses == pytest.approx(ours.losses, abs=3e-5)
        assert len(one.losses) == FIRST and len(one.seconds) == len(one.cpu_seconds) == 2
    _calls_no_more_than_the_bare_loop(found)


def _calls_no_more_than_the_bare_loop(found: Results) -> None:
    """Without the calls of engines, control messages and telemetry the bare loop still has those of ``DataLoader``."""
    ours, bare = found[OURS], found["bare loop"]
    assert isinstance(ours, Found) and isinstance(bare, Found) and ours.calls and bare.calls
    assert ours.calls < 1.1 * bare.calls


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param("zero3", "Accelerate has FSDP for GPUs only", marks=pytest.mark.long_form(10)),
        pytest.param("interleaved2", "no pipelines", marks=pytest.mark.long_form(20)),
    ],
)
def test_a_split_or_sharded_model_trains_as_the_bare_loop_does(case: str, reason: str) -> None:
    found = run_case(Work(case, "fp32", (OURS, "bare loop", "Accelerate"), 1, 1, (*SMALL, "model.n_layers=4")))
    ours, bare = found[OURS], found["bare loop"]
    assert isinstance(ours, Found) and isinstance(bare, Found)
    assert ours.losses[0] == pytest.approx(math.log(256), rel=0.01)
    assert bare.losses == pytest.approx(ours.losses, abs=3e-5)
    if find_spec("accelerate") is not None:
        assert found["Accelerate"] == reason
    _calls_no_more_than_the_bare_loop(found)


@pytest.mark.long_form(35)
def test_memory_grows_with_the_model() -> None:
    def peak(dim: int) -> int:
        wide = (*SMALL, f"model.dim={dim}", f"model.ffn_dim={4 * dim}")
        found = run_case(Work("single", "fp32", (OURS,), 2, None, wide))[OURS]
        assert isinstance(found, Found) and found.peak is not None
        assert found.parameters > 0 and not found.seconds
        return found.peak

    small, large = peak(32), peak(512)
    parameters = 2 * (3 * 512 * 512 + 3 * 512 * 2048) + 2 * 256 * 512
    state = 16 * parameters  # weights, gradients and two moments
    assert small < 0.5 * state
    assert large - small == pytest.approx(state, rel=0.25)


def test_the_table() -> None:
    work = Work("single", "fp32", (OURS, "Trainer", "torchtitan"), 2, 3, SMALL)
    found: Results = {
        OURS: Found(300, (5.5, 5.25), (0.125, 0.25, 0.5), (0.25, 0.25, 0.5), calls=1234),
        "Trainer": Found(300, (5.5, 5.125), (0.25, 0.5, 1.0), (0.125, 0.125, 0.25)),
        "torchtitan": "not installed: No module named 'torchtitan'",
    }
    peaks: Results = {OURS: Found(1, (), peak=3 * 2**20), "Trainer": Found(1, (), peak=5 * 2**20)}
    assert rows(work, found, peaks) == [
        "| single fp32 | hpc_train | 256 | 1 | 250 | 1 | 1,234 | 3 | 300 | 5.5000 |  |",
        "| single fp32 | Trainer | 128 | 2.000 (2.000 to 2.000) | 125 | 0.500 (0.500 to 0.500) |  | 5 | 300 | 5.5000 "
        "| 1e-01 |",
        "| single fp32 | torchtitan | not installed: No module named 'torchtitan' |  |  |  |  |  |  |  |  |",
    ]
