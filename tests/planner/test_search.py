"""The search for the best layouts, which leaves out what no row shows, finds the rows of an exhaustive one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpc_train.config.compose import typed
from hpc_train.layout.memory import estimate, exceeds, needed_bytes
from hpc_train.planner.candidates import (
    SIMULATED,
    Candidate,
    candidates,
    close_and_others,
    distinct,
    fastest,
    with_values,
)
from hpc_train.planner.machine import read_machine
from hpc_train.planner.prediction import predict_step
from tests.config.composing import compose

LONG = ["data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.global_size=64"]
ASKED = [
    (["model=llama_7b", *LONG], "a100-40", 16, {"strategy.tp"}),
    pytest.param(
        ["model=llama_70b", *LONG, "strategy.tp=8"], "h100", 32, {"strategy.tp"}, marks=pytest.mark.long_form(10)
    ),
    pytest.param(
        ["model=qwen3_8b", *LONG, "strategy.cp=2"],
        "h100",
        8,
        {"strategy.cp", "strategy.schedule"},
        marks=pytest.mark.long_form(10),
    ),
    pytest.param(
        ["model=vit_large", "data=synthetic", "data.task=images", "batch.global_size=64"],
        "v100",
        8,
        set[str](),
        marks=pytest.mark.long_form(10),
    ),
    (["model=gpt_tiny", "data=synthetic", "batch.global_size=16"], "cpu", 4, set[str]()),
]


def exhaustive(found: Sequence[Candidate], tolerance: float) -> list[Candidate]:
    """The candidates that fit, in the order of the table, from the whole memory of each."""
    fitting = [each for each in found if each.prediction.needed_bytes <= each.prediction.device_bytes]
    fitting.sort(key=lambda each: -each.prediction.samples_per_s)
    least = max((each.prediction.samples_per_s for each in fitting), default=0.0) * (1 - tolerance)
    close = [each for each in fitting if each.prediction.samples_per_s >= least]
    return [*sorted(close, key=lambda each: each.complexity), *fitting[len(close) :]]


@pytest.mark.parametrize(("overrides", "name", "devices", "kept"), ASKED)
def test_the_rows_are_those_of_an_exhaustive_search(
    overrides: list[str], name: str, devices: int, kept: set[str]
) -> None:
    config, machine = typed(compose(["+strategy=single", *overrides])), read_machine(name)
    found = candidates(config, machine, devices, kept)
    nodes, workers = max(1, devices // machine.devices_per_node), min(devices, machine.devices_per_node)
    assert found and all(each.layout.world_size == nodes * workers for each in found)
    by_row = [predict_step(with_values(config, each.values), each.layout, machine, False) for each in found]
    for each, other in zip(found, by_row, strict=True):
        whole = estimate(with_values(config, each.values), each.layout)
        assert whole == each.prediction.memory and whole is not None
        assert each.prediction.needed_bytes == pytest.approx(
            needed_bytes(whole.total, machine.rates.allocator_share, machine.rates.reserved_bytes)
        )
        assert each.prediction.fits == (each.prediction.needed_bytes <= each.prediction.device_bytes)
        assert each.prediction.compute_s == other.compute_s
    first = exhaustive([Candidate(nodes, each.values, row) for each, row in zip(found, by_row, strict=True)], 0.0)
    simulated = {str(each.values) for each in first[:SIMULATED]}
    for each, row in zip(found, by_row, strict=True):
        chosen = str(each.values) in simulated
        expected = predict_step(with_values(config, each.values), each.layout, machine, True) if chosen else row
        assert each.prediction == expected
    for tolerance in (0.0, 0.05):
        assert [*fastest(found, tolerance)] == exhaustive(found, tolerance)
        assert [*distinct(fastest(found, tolerance))] == [*distinct(exhaustive(found, tolerance))]
    close, others = close_and_others(found, 0.05)
    assert [*close, *others] == exhaustive(found, 0.05)


def test_a_replay_that_ends_early_knows_what_fits() -> None:
    config = typed(compose(["+strategy=pp", "model=llama_7b", *LONG, "batch.micro_size=1"]))
    machine = read_machine("h100")
    for each in candidates(config, machine, 8, {"strategy.pp", "strategy.tp", "batch.micro_size"}):
        demand, held = each.prediction.demand, each.prediction.memory
        assert held is not None
        assert exceeds(demand.config, demand.layout, held.total * (1 - 1e-9))
        assert not exceeds(demand.config, demand.layout, held.total * (1 + 1e-9))


def test_the_memory_of_slow_layouts_is_not_replayed() -> None:
    config = typed(compose(["+strategy=single", "model=llama_7b", *LONG]))
    found = candidates(config, read_machine("h100"), 8, ())
    next(fastest(found))
    assert not any("memory" in vars(each.prediction.demand) for each in found)
