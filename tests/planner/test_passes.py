"""The time of a block's passes: what each part of it contributes, from the numbers of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.layout.resolve import resolve_layout
from hpc_train.planner.collectives import gather, group_of
from hpc_train.planner.machine import Figure, Machine, read_machine
from hpc_train.planner.passes import Passes
from hpc_train.planner.prediction import predict_step
from hpc_train.planner.work import count_work
from tests.config.composing import compose

SEVEN = ["model=llama_7b", "data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.micro_size=2"]


def config_of(*overrides: str) -> Config:
    return typed(compose([*SEVEN, "batch.global_size=512", *overrides]))


def passes(config: Config, machine: Machine) -> Passes:
    return Passes(config, resolve_layout(config, 1, 8), machine, count_work(config))


def changed(**figures: float) -> Machine:
    machine = read_machine("h100")
    new = {name: Figure(value, "assumed", "x") for name, value in figures.items()}
    return replace(machine, figures={**machine.figures, **new})


ONLY_PRODUCTS = {"half_rate_flops": 0.0, "memory_bytes_per_s": 1e30, "launch_s": 0.0, "node_latency_s": 0.0}


def test_the_backward_takes_twice_the_products_and_two_and_a_half_times_the_attention() -> None:
    config = config_of()
    block = count_work(config).blocks[1]
    found = passes(config, changed(**ONLY_PRODUCTS))
    products, attention = 2 * block.products / found.flops_per_s, 2 * block.attention / found.attention_per_s
    assert found.forward(block) == pytest.approx(products + attention)
    assert found.backward(block, "none") == pytest.approx(2 * products + 2.5 * attention)


def test_recomputing_ends_before_the_last_product_of_a_layer() -> None:
    config = config_of("train.activation_checkpointing=full")
    block = count_work(config).blocks[1]
    found = passes(config, changed(**ONLY_PRODUCTS))
    assert block.last == 2 * 4096 * 4096 * 11008, "two operations for each token and weight of the second matrix"
    again = found.backward(block, "full") - found.backward(block, "none")
    assert again == pytest.approx(found.forward(block) - 2 * block.last / found.flops_per_s)
    kept = passes(config_of("train.activation_checkpointing=ops"), changed(**ONLY_PRODUCTS))
    assert kept.backward(block, "ops") == pytest.approx(kept.backward(block, "none"))


def test_tensor_parallel_ranks_gather_and_scatter_twice_in_each_pass() -> None:
    config = config_of("strategy.tp=4", "strategy.dp=2", "strategy.data_parallel=zero1")
    machine = changed(**ONLY_PRODUCTS)
    free, found = passes(config, changed(**ONLY_PRODUCTS, node_bytes_per_s=1e30)), passes(config, machine)
    block = count_work(config).blocks[1]
    one = gather(2 * 4096 * 4096 * 2, group_of(4, 1, 8), machine.rates)
    assert found.forward(block) - free.forward(block) == pytest.approx(4 * one)
    for again in ("full", "ops"):
        assert found.backward(block, again) - free.backward(block, again) == pytest.approx(7 * one), (
            "3 of them once more"
        )


def test_context_parallel_ranks_exchange_queries_keys_values_and_the_result_in_each_pass() -> None:
    config = config_of("strategy.cp=4", "strategy.dp=2", "strategy.data_parallel=zero1")
    machine = changed(**ONLY_PRODUCTS)
    free, found = passes(config, changed(**ONLY_PRODUCTS, node_bytes_per_s=1e30)), passes(config, machine)
    alone = passes(config_of("strategy.dp=8", "strategy.data_parallel=zero1"), machine)
    block = count_work(config).blocks[1]
    both = sum(gather(each * 2 * 4096 * 4096 * 2 / 4, group_of(4, 1, 8), machine.rates) for each in (3, 1))
    assert found.forward(block) - free.forward(block) == pytest.approx(both)
    assert found.backward(block, "full") - free.backward(block, "full") == pytest.approx(2 * both), "once more"
    assert free.forward(block) == pytest.approx(alone.forward(block) / 4)


def test_a_collective_slows_the_computation_that_covers_it_by_the_bytes_it_moves() -> None:
    config = config_of("+strategy=zero3")

    def communication(nodes: int, machine: Machine) -> float:
        return predict_step(config, resolve_layout(config, nodes, 8), machine).communication_s

    base = {**ONLY_PRODUCTS, "overlap_share": 0.0, "fabric_latency_s": 0.0}
    slower = {**base, "overlap_share": 0.5}
    within = communication(1, changed(**slower)) - communication(1, changed(**base))
    slow = {"fabric_bytes_per_s": read_machine("h100").rates.node_bytes_per_s / 16}
    across = communication(2, changed(**slower, **slow)) - communication(2, changed(**base, **slow))
    batches = 512 / 2 / 8
    size = 2 + 2 + 4  # bytes of two gathers in bf16 and a reduce-scatter in fp32
    moved = batches * count_work(config).parameters * size * 7 / 8 / read_machine("h100").rates.node_bytes_per_s
    assert within == pytest.approx(0.5 * moved, rel=0.05), "all but the first and the last block"
    assert across == pytest.approx(within / 2 * (15 / 16) / (7 / 8), rel=0.05), "half the micro-batches, as many bytes"


def test_gradients_in_bf16_halve_the_reduce_scatter() -> None:
    machine = changed(**ONLY_PRODUCTS, node_bytes_per_s=1e8)  # so slow that hardly anything is covered

    def communication(*overrides: str) -> float:
        config = config_of("+strategy=zero1", *overrides)
        return predict_step(config, resolve_layout(config, 1, 8), machine).communication_s

    found = communication("strategy.compression=bf16") / communication()
    assert found == pytest.approx((2 + 2) / (2 + 4), rel=0.02), "a gather in bf16, and a reduce-scatter in bf16 or fp32"
