"""The time of a block's passes: what each part of it contributes, from the numbers of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import nn

from hpc_train.config.compose import typed
from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.recomputation import IMBALANCE, layer_bytes
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import parameters_of
from hpc_train.models.build import build_model
from hpc_train.models.wrapped import layers_of
from hpc_train.planner.machine import Figure, Machine, read_machine
from hpc_train.planner.passes import (
    FSDP_GATHER,
    FSDP_HOOKS,
    FSDP_SCATTER,
    Passes,
    float8_of,
    gather,
    group_of,
    why_not_predicted,
)
from hpc_train.planner.prediction import predict_step
from hpc_train.planner.work import Block, count_work
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


def test_the_passes_of_a_block_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    block = count_work(config).blocks[1]
    found = passes(config, changed(**ONLY_PRODUCTS))
    seconds = (found.forward(block), found.backward(block, "none"))
    monkeypatch.delattr(Passes, "_products")
    assert (found.forward(block), found.backward(block, "none")) == seconds


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
    for again, times in (("full", 7), ("ops", 4)):  # as a whole, 3 of them once more
        assert found.backward(block, again) - free.backward(block, again) == pytest.approx(times * one)


def test_the_host_starts_layers_of_dtensors_slowly_unless_they_are_compiled() -> None:
    split = ("strategy.tp=4", "strategy.dp=2", "strategy.data_parallel=allreduce")
    machine = changed(bf16_flops=1e30, memory_bytes_per_s=1e30, node_bytes_per_s=1e30, node_latency_s=0.0)
    seconds = {}
    for words in ((), split, (*split, "train.compile=true")):
        config = config_of(*words)
        found = passes(config, machine)
        layer = found.work.blocks[1]
        seconds[words] = found.forward(layer) / layer.kernels / machine.rates.launch_s
    assert [*seconds.values()] == pytest.approx([1, machine.rates.tp_launches, 1])


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("allreduce", 0, 0),
        ("zero1", FSDP_HOOKS + FSDP_GATHER / 4, FSDP_HOOKS + FSDP_SCATTER / 4),
        ("zero2", FSDP_HOOKS + FSDP_GATHER / 4, FSDP_HOOKS + FSDP_SCATTER),
        ("zero3", FSDP_HOOKS + FSDP_GATHER, FSDP_HOOKS + FSDP_GATHER + FSDP_SCATTER),
    ],
)
def test_fsdp_keeps_the_host_busy_also_with_compiled_layers(kind: str, forward: float, backward: float) -> None:
    machine = changed(bf16_flops=1e30, memory_bytes_per_s=1e30)
    split = (f"strategy.data_parallel={kind}", "train.compile=true")
    found = passes(config_of(*split, "strategy.dp=8", "batch.global_size=32", "batch.micro_size=1"), machine)
    layer = found.work.blocks[1]
    assert found.layout.micro_batches == 4
    times = found.forward(layer), found.backward(layer, "none")
    kernels = [seconds / machine.rates.launch_s for seconds in times]
    assert kernels == pytest.approx([layer.kernels + forward, 2 * layer.kernels + backward])


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


@pytest.mark.parametrize("context", ["ring", "both"])
def test_attention_covers_the_messages_of_a_ring(context: str) -> None:
    split = "strategy.dp=1", "strategy.data_parallel=zero1", f"strategy.context={context}"
    config = config_of("strategy.cp=16", *split)
    layout = resolve_layout(config, 2, 8)
    assert layout.ring == {"ring": 16, "both": 2}[context]
    work = count_work(config)
    block = work.blocks[1]
    free = {**ONLY_PRODUCTS, "fabric_latency_s": 0.0, "node_bytes_per_s": 1e30}
    quick, slow = (Passes(config, layout, changed(**free, fabric_bytes_per_s=speed), work) for speed in (1e30, 1e6))
    keys_and_values = 2 * 2 * 4096 * 4096 * 2 / 16 / 1e6  # of two samples, in bf16
    covered = 2 * block.attention / 16 / layout.ring / quick.attention_per_s
    rounds = layout.ring - 1
    assert slow.forward(block) - quick.forward(block) == pytest.approx(rounds * (keys_and_values - covered))
    both = 3 * keys_and_values  # and their gradients in fp32
    left = rounds * (both - 2.5 * covered) + 2 * keys_and_values
    assert slow.backward(block, "none") - quick.backward(block, "none") == pytest.approx(left)


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


ROWS = 2 * 4096  # of a micro-batch
QKV, WO, FFN = 4096 * 3 * 4096, 4096 * 4096, 4096 * 11008


@pytest.mark.parametrize("overrides", [["model=qwen3_8b"], ["model=vit_large", "data.task=images"]], ids=["gpt", "vit"])
def test_the_linear_layers_of_a_family_are_those_of_its_model(overrides: list[str]) -> None:
    config = typed(compose([*overrides, "data=synthetic", "model.n_layers=1"])).model
    layer = next(iter(layers_of(build_model(config, 0, values=False))))
    found = {
        name: (module.in_features, module.out_features)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    linear_layers = family_of(config).linear_layers
    groups = linear_layers(config) if linear_layers else None
    assert groups is not None
    stated = {
        name: (group.inputs, outputs)
        for group in groups
        for name, outputs in zip(group.names, group.outputs, strict=True)
    }
    assert stated == found


def test_products_in_fp8_run_at_its_rate_and_casts_move_bytes() -> None:
    plain, config = config_of(), config_of("precision=fp8", "train.compile=true")
    machine = changed(**ONLY_PRODUCTS)
    before, found = passes(plain, machine), passes(config, machine)
    _, layer, *_, head = found.work.blocks
    saved = 2 * layer.products * (1 - 989 / (1979 * 0.882)) / found.flops_per_s
    assert before.forward(layer) - found.forward(layer) == pytest.approx(saved)
    assert before.backward(layer, "none") - found.backward(layer, "none") == pytest.approx(2 * saved)
    assert found.forward(head) == pytest.approx(before.forward(head)), "the head stays in bf16"
    # three inputs of the width (that of queries, keys and values is cast once) and one of the branch, and the weights
    values = ROWS * (3 * 4096 + 11008) + QKV + WO + 3 * FFN
    results = ROWS * (5 * 4096 + 2 * 11008)
    casts = float8_of(config, found.layout, 4096)
    assert (casts.forward, casts.backward) == (5 * values, 3 * values + 8 * results)
    slow = changed(**ONLY_PRODUCTS | {"memory_bytes_per_s": 1e12})
    moving, alone = passes(config, slow), passes(config_of("train.compile=true"), slow)
    longer = moving.forward(moving.work.blocks[1]) - alone.forward(alone.work.blocks[1])
    assert longer == pytest.approx(5 * values / 1e12 - saved)


def test_only_matrices_in_fp8_are_credited() -> None:
    whole = QKV + WO + 3 * FFN
    attention = (QKV + WO) / (QKV + WO + 3 * 4096 * 11000)
    for skip, ffn, share in (
        (["attention"], 11008, 3 * FFN / whole),
        ([r"layers\.[0-7]\."], 11008, 24 / 32),
        ([], 11000, attention),  # no multiple of 16
    ):
        config = config_of("precision=fp8", f"model.ffn_dim={ffn}")
        config = replace(config, precision=replace(config.precision, fp8_skip=skip))
        assert float8_of(config, resolve_layout(config, 1, 8), 4096).share == pytest.approx(share), (skip, ffn)


def test_fp8_is_refused_on_gpus_without_it_and_not_credited_where_it_is_unknown() -> None:
    config = config_of("precision=fp8")
    layout = resolve_layout(config, 1, 8)
    with pytest.raises(UserError, match=r"compute capability 8\.0; tensorwise needs 8\.9"):
        predict_step(config, layout, read_machine("a100-80"))
    with pytest.raises(UserError, match="no rate of fp8"):
        predict_step(config, layout, replace(read_machine("a100-80"), device="another"))
    blocks_of_32 = config_of("precision=fp8", "precision.fp8=mxfp8")
    with pytest.raises(UserError, match=r"compute capability 9\.0; mxfp8 needs 10\.0"):
        predict_step(blocks_of_32, layout, read_machine("h100"))
    assert predict_step(blocks_of_32, layout, read_machine("b200")).step_s > 0
    assert why_not_predicted(config, read_machine("h100")) is None
    cpu = read_machine("cpu")
    assert "CPUs emulate fp8" in str(why_not_predicted(config, cpu))
    assert predict_step(config, layout, cpu).step_s == predict_step(config_of(), layout, cpu).step_s


def test_products_cover_the_traffic_of_asynchronous_tensor_parallelism_but_two_scatters() -> None:
    size, layout = ROWS * 4096 * 2, ("strategy.tp=4", "strategy.dp=2", "strategy.data_parallel=zero1")
    plain = config_of(*layout, "train.compile=true")
    overlapped = replace(plain, strategy=replace(plain.strategy, async_tp=True))

    def saved(**figures: float) -> tuple[float, float]:
        """Returns by how much the passes of a layer are shorter."""
        found = [passes(each, changed(**ONLY_PRODUCTS | figures)) for each in (plain, overlapped)]
        forward, backward = ((each.forward(block), each.backward(block, "full")) for each, block in blocks(found))
        return forward[0] - backward[0], forward[1] - backward[1]

    fast = {"node_bytes_per_s": 1e13}  # even the shortest product covers its collective
    one = gather(size, group_of(4, 1, 8), changed(**ONLY_PRODUCTS | fast).rates)
    assert saved(**fast) == pytest.approx((4 * one, (2 + 3) * one)), "what is recomputed has three"
    found = passes(plain, changed(**ONLY_PRODUCTS))
    products = 2 * found.work.blocks[1].products / 4 / found.flops_per_s
    assert saved(node_bytes_per_s=1e9)[0] == pytest.approx(3 / 4 * products), "those of all pieces but one"
    copies = saved(**fast)[0] - saved(**fast, memory_bytes_per_s=1e12)[0]
    assert copies == pytest.approx(2 * (1 + 3 / 4) * size / 1e12), "of two gathers and two scatters"


def test_a_cuda_graph_starts_like_one_kernel() -> None:
    of = ("strategy.data_parallel=ddp", "train.compile=true")
    slow_host = changed(**ONLY_PRODUCTS | {"launch_s": 1.0})
    found = [passes(config_of(*of, *more), slow_host) for more in ((), ("train.cuda_graphs=true",))]
    plain, graph = ((each.forward(block), each.backward(block, "none")) for each, block in blocks(found))
    assert (plain, graph) == ((14, 28), (1, 1))
    assert found[1].forward(found[1].work.blocks[-1]) == found[1].work.blocks[-1].kernels


def blocks(found: list[Passes]) -> Iterator[tuple[Passes, Block]]:
    """Yields each with its first layer."""
    return ((each, each.work.blocks[1]) for each in found)


def test_rows_travel_to_their_experts_and_back_inside_nodes_and_across() -> None:
    words = ["model=qwen3_30b_a3b", "strategy.dp=fill", "strategy.data_parallel=zero1"]
    machine = changed(**ONLY_PRODUCTS, fabric_latency_s=0.0, grouped_share=0.5)
    config = config_of(*words)
    work = count_work(config)
    block = work.blocks[1]
    assert block.rows == 4096 * 8 * 2048 and block.experts == 128 * 3 * 2048 * 768
    assert block.grouped == 2 * 4096 * 8 * 3 * 2048 * 768, "two operations for each token and weight of 8 experts"
    alone = passes(config, machine)
    products = 2 * (block.products + block.grouped) / alone.flops_per_s
    assert alone.forward(block) == pytest.approx(products + 2 * block.attention / alone.attention_per_s)
    size = 2 * block.rows * 2
    for ep, nodes, seconds in (
        (8, 1, size * 7 / 8 / machine.rates.node_bytes_per_s),
        (16, 2, size / 2 / machine.rates.fabric_bytes_per_s),  # 7 of 16 stay in the node, over faster links
    ):
        apart = config_of(*words, f"strategy.ep={ep}")
        found = Passes(apart, resolve_layout(apart, nodes, 8), machine, work)
        assert found.forward(block) - alone.forward(block) == pytest.approx(2 * seconds), ep
        assert found.backward(block, "none") - alone.backward(block, "none") == pytest.approx(2 * seconds, rel=1e-3), ep


def test_expert_parallel_ranks_hold_a_part_of_the_experts_and_a_margin_for_their_rows() -> None:
    words = ["model=qwen3_30b_a3b", "strategy.dp=fill", "strategy.data_parallel=zero1", "batch.micro_size=1"]
    config = config_of(*words)
    apart = config_of(*words, "strategy.ep=8")
    routed = 128 * 3 * 2048 * 768
    layouts = [resolve_layout(each, 1, 8) for each in (config, apart)]
    whole, part = (parameters_of(each, layout) for each, layout in zip((config, apart), layouts, strict=True))
    assert whole.layer - part.layer == routed * 7 / 8
    assert whole.state == part.state == whole.layer, "the optimizer's state is shared by as many ranks"
    kept, with_margin = (layer_bytes(each, layout) for each, layout in zip((config, apart), layouts, strict=True))
    rows = 4096 * 8 * 2
    assert with_margin["none"] - kept["none"] == pytest.approx((IMBALANCE - 1) * rows * (2048 + 4 * 768))
    # eight ranks share the gradients of other parameters, and each sums those of its own experts
    again = ["strategy.data_parallel=zero2", "batch.global_size=64", "strategy.ep=8"]
    found = passes(config_of(*words, *again), changed(**ONLY_PRODUCTS))
    block = found.work.blocks[1]
    moved = 4 * 3 * (block.parameters / 8) * (1 - 1 / found.layout.micro_batches)
    assert found.accumulated(block) * found.rates.memory_bytes_per_s == pytest.approx(moved)
    bounded = config_of(*words, "strategy.ep=8", "model.moe.capacity_factor=1.1")
    bound = layer_bytes(bounded, layouts[1])["none"]
    assert bound - kept["none"] == pytest.approx(0.1 * rows * (2048 + 4 * 768))
