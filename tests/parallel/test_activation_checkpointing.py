"""Options that save memory: what is kept, what the estimate says, and what a recomputation repeats and leaves alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.config.schema import BatchConfig, Config, StrategyConfig, SyntheticDataConfig, TargetConfig, ViTConfig
from hpc_train.config.values import parse_recomputation
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import sizes_of
from hpc_train.parallel.activation_checkpointing import apply_activation_checkpointing
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import local_part
from hpc_train.run.directory import RunDirectory
from hpc_train.train.hooks import HookContext
from hpc_train.train.hooks.ema import EMA
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.watch.memory import MemoryReport, report_memory
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.memory import Allocations, gpt_config, norms_of_gpus
from tests.parallel.oracle import kept_mesh, local_batch, mesh_of
from tests.ranks import run_on_world, run_ranks

LAYERS, SEQUENCE, VOCABULARY, DIM = 6, 32, 512, 16


def config_of(layers: int = LAYERS, model: dict[str, Any] | None = None, **train: Any) -> Config:
    """A small model with a large vocabulary, in fp32."""
    sizes = {"n_layers": layers, "dim": DIM, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": VOCABULARY}
    return gpt_config(sizes | (model or {}), SEQUENCE, {"global_size": 2}, **train)


def engine_of(config: Config) -> Engine:
    return build_engine(config, kept_mesh(resolve_layout(config, 1, 1), 0))


def kept_by(rank: int, world_size: int, cases: list[tuple[int, str, dict[str, Any]]]) -> list[int]:
    """Bytes that wait for the backward after so many layers of a model with these options."""
    found = []
    for layers, mode, options in cases:
        model: Any = engine_of(config_of(layers, options, activation_checkpointing=mode)).parts[0]
        hidden = torch.randn(2, SEQUENCE, DIM, requires_grad=True)
        with norms_of_gpus(), Allocations() as allocations:
            context = model.prepare(hidden, {})
            for layer in model.layers.values():
                hidden = layer(hidden, context)
            found.append(allocations.alive)
    return found


def test_activation_checkpointing_keeps_less() -> None:
    ((none, selective, third, ops, full),) = run_on_world(
        1, kept_by, [(LAYERS, mode, {}) for mode in ("none", "selective", "selective:3", "ops", "full")]
    )
    hidden = 2 * SEQUENCE * DIM * 4
    assert full < 2 * LAYERS * hidden  # inputs of layers, and the rotary tables
    assert none > 10 * full
    for share, found in ((1 / 2, selective), (1 / 3, third)):
        assert found == pytest.approx(none - share * (none - full), rel=0.02)
    # queries, keys, values, attention and its projection, a feed-forward of four widths; and attention's normalizer
    products = LAYERS * hidden * (3 + 2 + 2 * 4 + 1)
    assert products + full <= ops < products + full + hidden
    assert ops < 0.63 * none


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"n_kv_heads": 1, "head_dim": 16},
    {"qk_norm": True, "post_norms": True, "norm_offset": True, "qkv_bias": True, "activation": "gelu_tanh"},
    {"attention_softcap": 2.0, "sliding_window": 8, "n_kv_heads": 1},
)


@pytest.mark.long_form(5, cases=["none", "ops"])
@pytest.mark.parametrize("mode", ["none", "ops", "selective:3"])
def test_the_estimate_is_what_the_layers_keep(mode: str) -> None:
    def estimated(layers: int, options: dict[str, Any]) -> float:
        config = config_of(layers, options, activation_checkpointing=mode)
        found = estimate(config, resolve_layout(config, 1, 1))
        assert found is not None
        return found.activations

    cases = [(layers, mode, options) for options in OPTIONS for layers in (LAYERS, 2 * LAYERS)]
    (found,) = run_on_world(1, kept_by, cases)
    for options, few, many in zip(OPTIONS, found[::2], found[1::2], strict=True):
        stated = estimated(2 * LAYERS, options) - estimated(LAYERS, options)
        assert stated == pytest.approx(many - few, rel=0.03), options


def split_config(family: str, layers: int, mode: str) -> Config:
    config = replace(config_of(layers, activation_checkpointing=mode), strategy=StrategyConfig(tp=2))
    if family == "gpt":
        return config
    model = ViTConfig(image_size=16, patch_size=4, n_classes=4, n_layers=layers, dim=DIM, n_heads=2, mlp_dim=64)
    return replace(config, model=model, data=SyntheticDataConfig(task="images", image_size=16, n_classes=4))


def kept_by_split(rank: int, world_size: int, cases: list[tuple[str, int, str]]) -> list[int]:
    """Bytes that one of the tensor-parallel ranks keeps for the backward of so many layers."""
    found = []
    for case in cases:
        config = split_config(*case)
        mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
        model: Any = build_engine(config, mesh).parts[0]
        hidden = torch.randn(2, SEQUENCE if case[0] == "gpt" else 17, DIM)
        own = hidden[:, : len(hidden[0]) // model.sequence_shards].clone().requires_grad_()
        with norms_of_gpus(), Allocations() as allocations:
            context = model.prepare(hidden, {})
            for layer in model.layers.values():
                own = layer(own, context)
            found.append(allocations.alive)
    return found


@pytest.mark.long_form(15)  # the peak of tensor-parallel ranks is in test_peak_memory
@pytest.mark.parametrize("family", ["gpt", "vit"])
def test_the_estimate_counts_what_tensor_parallel_ranks_gather(family: str) -> None:
    """A collective may hold a tensor of hidden states a little longer than the layer that made it."""
    modes, few, many = ("none", "full", "ops"), LAYERS, 4 * LAYERS
    cases = [(family, layers, mode) for mode in modes for layers in (few, many)]
    found, _ = run_on_world(2, kept_by_split, cases)
    hidden = 2 * SEQUENCE * DIM * 4
    for place, mode in enumerate(modes):
        kept = found[2 * place + 1] - found[2 * place]  # with the statistics of norms, which are not in the estimate
        config = split_config(family, many, mode)
        stated = sizes_of(config, resolve_layout(config, 1, 2)).activations
        growth = (many - few) * stated.kept[mode]
        assert growth == pytest.approx(kept, rel=0.04, abs=1.1 * hidden), (mode, growth, kept)


def averaged_bytes(config: Config, mesh: Mesh, engine: Engine, optimizer: Optimizer) -> int:
    """Bytes that the average of the weights takes on this rank."""
    run, ignore = RunDirectory(Path()), lambda *_: None
    average = EMA()
    average.start(HookContext(1, 1, {}, engine, optimizer, mesh, config, run, request_end=ignore, show_text=ignore))
    local = (value.to_local() if isinstance(value, DTensor) else value for value in average.state_dict().values())
    return sum(value.nbytes for value in local)


def held_by(rank: int, world_size: int, configs: list[Config]) -> list[tuple[MemoryReport, int]]:
    """After a step of each: the report, and the bytes of the average of the weights on this rank."""
    tokens = torch.arange(SEQUENCE).view(1, SEQUENCE) % VOCABULARY
    found = []
    for config in configs:
        mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
        engine = build_engine(config, mesh)
        optimizer = Optimizer(config.optim, engine.named_parameters())
        batch = Batch(tokens.repeat(mesh.layout.micro_size, 1), tokens.repeat(mesh.layout.micro_size, 1))
        engine.train_step(0, StepBatch((batch,) * mesh.layout.micro_batches, config.batch.global_size * SEQUENCE))
        optimizer.step(1e-3, engine.clip_grad_norm_(1.0).isfinite())
        report = report_memory(config, mesh, engine, optimizer)
        found.append((report, averaged_bytes(config, mesh, engine, optimizer)))
    return found


SPLITS: list[dict[str, Any]] = [
    {"dp": 2},
    *({"dp": 2, "data_parallel": kind} for kind in ("allreduce", "zero2", "zero3")),
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "pp_split": [2, 6]},
    {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"pp": 2, "schedule": "zbv", "stages_per_rank": 2},
]


@in_two_forms(25)
def test_the_estimate_is_what_the_rank_with_most_holds(form: Form) -> None:
    """Whole copies that ZeRO gathers come on top of what is held from step to step. Gradients are not whole at the peak
    (``test_peak_memory``). Every second layout has tied embeddings.
    """
    configs = [
        replace(
            config_of(8, {"tied_embeddings": index % 2 == 1}),
            strategy=StrategyConfig(**split),
            batch=BatchConfig(global_size=8),
            hooks={"ema": TargetConfig("hpc_train.train.hooks.ema.EMA")},
        )
        for index, split in enumerate(form(SPLITS, "dp", "tp", "pp_split", "stages_per_rank"))
    ]
    for config, *held_of_ranks in zip(configs, *run_on_world(2, held_by, configs), strict=True):
        wanted = estimate(config, resolve_layout(config, 1, 2))
        assert wanted is not None
        assert wanted.hooks == pytest.approx(max(held for _, held in held_of_ranks), rel=0.02), config.strategy
        report = held_of_ranks[0][0]
        for part in ("parameters", "optimizer"):
            held = max(getattr(rank, part) for rank in report.ranks)
            if part == "parameters" and config.strategy.data_parallel.startswith("zero"):
                assert held < wanted.parameters
            else:
                assert getattr(wanted, part) == pytest.approx(held, rel=0.02), (config.strategy, part)


def largest_tensor(rank: int, world_size: int, chunks: list[int]) -> list[tuple[int, float, int]]:
    """In a training step and in an evaluation, and the loss."""
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % VOCABULARY
    batch = StepBatch((Batch(tokens, tokens.flip(1)),), tokens.numel())
    found = []
    for number in chunks:
        engine = engine_of(config_of(loss_chunks=number))
        with Allocations() as training:
            result = engine.train_step(0, batch)
        with Allocations() as evaluation:
            engine.eval_step(batch)
        found.append((training.largest, engine.reduce(result).loss, evaluation.largest))
    return found


def test_the_logits_of_a_loss_in_chunks_never_exist_whole() -> None:
    (((whole, loss, evaluated), *chunked),) = run_on_world(1, largest_tensor, [1, 3, 8])
    logits, matrix = 2 * SEQUENCE * VOCABULARY, VOCABULARY * DIM
    assert whole == evaluated == logits
    for chunks, (trained, its_loss, its_evaluated) in zip((3, 8), chunked, strict=True):
        positions = -(-SEQUENCE // chunks)
        assert trained == max(2 * positions * VOCABULARY, matrix)  # the gradient of the output matrix is whole
        assert its_evaluated == 2 * positions * VOCABULARY
        assert its_loss == pytest.approx(loss, rel=1e-6)


def test_a_loss_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.loss_chunks is 9, but a rank has only 8 tokens of a sequence"):
        Cell(2, strategy={"pp": 2, "schedule": "gpipe"}, train={"loss_chunks": 9}).layout()
    with pytest.raises(UserError, match=r"train\.loss_chunks is 999, but a rank has only \d+ tokens of a micro-batch"):
        Cell(2, strategy={"tp": 2}, train={"loss_chunks": 999}).layout()
    with pytest.raises(UserError, match=r"selective:N \(every N-th\)"):
        Cell(1, train={"activation_checkpointing": "selective:0"}).layout()


class Mean(nn.Module):
    """Subtracts a running mean, which the forward pass changes first."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.constant = nn.Module()
        self.constant.register_buffer("table", torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + hidden.detach().mean(0) * 0.1
        return hidden + torch.sin(self.linear(hidden) * (1 + self.mean) * self.constant.table)


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(self.norm(self.linear(hidden)))


class Spectral(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(kind(8) for _ in range(3)))
        self.block_names = [f"blocks.{number}" for number in range(3)]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


def trained(kind: type[nn.Module], mode: str, in_flight: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the gradients and the buffers after evaluations and steps of ``in_flight`` forward passes each."""
    torch.manual_seed(0)
    net = Net(kind).double()
    apply_activation_checkpointing(net, parse_recomputation(mode))
    samples = torch.randn(4, in_flight, 16, 8, dtype=torch.float64)
    for step in samples:
        net.eval()(step[0])
        net.train()
        losses = [net(each).square().mean() for each in step]
        for loss in losses:
            loss.backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    buffers = {name.replace("_checkpoint_wrapped_module.", ""): buffer for name, buffer in net.named_buffers()}
    return gradients, buffers


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("mode", ["full", "ops", "selective:2"])
@pytest.mark.parametrize("kind", [Mean, Normed, Spectral])
def test_gradients_and_buffers_are_those_without_recomputation(
    kind: type[nn.Module], mode: str, in_flight: int
) -> None:
    if kind is Spectral and in_flight > 1:
        pytest.skip("torch refuses a backward pass after the vectors have changed")
    plain, recomputed = trained(kind, "none", in_flight), trained(kind, mode, in_flight)
    assert all(torch.equal(one, other) for one, other in zip(plain[0], recomputed[0], strict=True))
    assert plain[1].keys() == recomputed[1].keys()
    assert [name for name, value in plain[1].items() if not torch.equal(value, recomputed[1][name])] == []


def test_constant_buffers_are_copied_once() -> None:
    net = Net(Mean)
    apply_activation_checkpointing(net, parse_recomputation("full"))
    copied: list[str] = []
    for name, buffer in net.named_buffers():
        buffer.clone = lambda name=name: copied.append(name) or torch.zeros(8)  # type: ignore[method-assign, assignment]
    for _ in range(3):
        net(torch.randn(4, 8))
    assert [name for name in copied if name.endswith("table")] == [
        f"blocks.{n}._checkpoint_wrapped_module.constant.table" for n in range(3)
    ]


COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.namespace == "_c10d_functional" and function._opname in COLLECTIVES:
            self.calls[function._opname] += 1
        return function(*args, **(kwargs or {}))


def collectives(rank: int, _: int, cells: list[Cell]) -> list[tuple[dict[str, int], list[Tensor]]]:
    """Returns the collectives of hidden states in a step of each cell, and its gradients."""
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        with _Counted() as counted:
            engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        parameters = engine.named_parameters().values()
        gradients = [local_part(value.grad) for value in parameters if value.grad is not None]
        found.append((dict(counted.calls), gradients))
    return found


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("gpt", {"tp": 2, "data_parallel": "allreduce"}),
        ("gpt", {"cp": 2}),
        pytest.param("vit", {"tp": 2}, marks=pytest.mark.long_form(5)),
        pytest.param("gpt-options", {"tp": 2}, marks=pytest.mark.long_form(5)),
    ],
)
def test_cheap_operations_repeat_no_collective(model: str, strategy: dict[str, Any]) -> None:
    """The gradients have the same bits; a layer that is recomputed as a whole repeats collectives."""
    cells = [
        Cell(2, model, strategy=strategy, train={"activation_checkpointing": mode}) for mode in ("none", "ops", "full")
    ]
    for none, ops, full in run_on_world(2, collectives, cells):
        assert ops[0] == none[0]
        assert sum(full[0].values()) > sum(none[0].values()) > 0
        assert ops[1]
        assert all(torch.equal(*pair) for pair in zip(ops[1], none[1], strict=True))


def compiled_calls(rank: int, _: int, cells: list[Cell]) -> list[list[Counter[str]]]:
    """Returns the collectives and products in the graphs of the forward and of the backward pass of each cell."""
    import torch._inductor.compile_fx as inductor
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[Counter[str]] = []

    def count(graph: Any, _: Any) -> Any:
        names = (getattr(node.target, "_opname", "") for node in graph.graph.nodes)
        graphs.append(Counter(name for name in names if name in (*COLLECTIVES, "mm")))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    inductor.compile_fx = lambda graph, inputs, **_: backend(graph, inputs)  # type: ignore[assignment]
    found = []
    for cell in cells:
        graphs.clear()
        torch._dynamo.reset()
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        found.append([*graphs])
    return found


@pytest.mark.long_form(40)  # test_cheap_operations_repeat_no_collective has the decision
@pytest.mark.parametrize("strategy", [{"tp": 2, "data_parallel": "allreduce"}, {"cp": 2}], ids=["tp", "cp"])
def test_compiled_layers_repeat_neither_collectives_nor_products(strategy: dict[str, Any]) -> None:
    cells = [
        Cell(2, "gpt", strategy=strategy, train={"activation_checkpointing": mode, "compile": True})
        for mode in ("none", "ops")
    ]
    for none, ops in run_ranks(2, compiled_calls, cells, timeout=280):
        assert ops == none
        assert any(calls.keys() - {"mm"} for calls in none)
