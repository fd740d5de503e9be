"""The replay's peak is what the engine holds at once when it runs a step, counted tensor by tensor on CPUs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from hpc_train.config.schema import (
    BatchConfig,
    Config,
    GPTConfig,
    MoEConfig,
    OptimConfig,
    PrecisionConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.layout import recomputation
from hpc_train.layout.memory import estimate, peak_of, rank_of, stages_of
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import sizes_of
from hpc_train.layout.techniques import SCHEDULES
from hpc_train.models.moe import Experts
from hpc_train.parallel.build import build_engine
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from tests.parallel.memory import PeakMemory, norms_of_gpus
from tests.parallel.oracle import kept_mesh
from tests.ranks import run_on_world

LENGTH = 64
Case = dict[str, Any]  # keys of the strategy, and those of ``config_of``


def config_of(
    layers: int = 6,
    dim: int = 64,
    vocabulary: int = 512,
    micro: int = 4,
    batches: int = 1,
    precision: str = "fp32",
    recompute: str = "none",
    chunks: int = 1,
    tied: bool = False,
    in_backward: bool = False,
    z_loss: float = 0.0,
    weights: str = "fp32",
    moe: dict[str, Any] | None = None,
    **strategy: Any,
) -> Config:
    """Returns a small Llama, or a mixture of experts, with ``batches`` micro-batches of ``micro`` samples on each
    rank."""
    return Config(
        model=GPTConfig(
            vocab_size=vocabulary,
            n_layers=layers,
            dim=dim,
            n_heads=4,
            n_kv_heads=4,
            ffn_dim=11 * dim // 4,
            tied_embeddings=tied,
            moe=MoEConfig(**moe or {}),
        ),
        data=SyntheticDataConfig(sequence_length=LENGTH, vocab_size=vocabulary),
        batch=BatchConfig(global_size=micro * batches * strategy.get("dp", 1), micro_size=micro),
        precision=PrecisionConfig(name=precision, weights=weights),
        strategy=StrategyConfig(**strategy),
        optim=OptimConfig(in_backward=in_backward, clip_norm=0.0 if in_backward else 1.0),
        train=TrainConfig(steps=1, activation_checkpointing=recompute, loss_chunks=chunks, z_loss=z_loss),
    )


def peaks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, float]]:
    """Returns the most bytes that this rank holds in the second step of each case, and the rows of its experts in a
    step, relative to an even load."""
    return [_peak(rank, world_size, config_of(**case)) for case in cases]


def _peak(rank: int, world_size: int, config: Config) -> tuple[int, float]:
    layout = resolve_layout(config, 1, world_size)
    mesh = kept_mesh(layout, rank)
    tokens = torch.arange(LENGTH).expand(layout.micro_size, -1).contiguous()
    targets = config.batch.global_size * LENGTH
    batch = StepBatch((Batch(tokens, tokens.clone()),) * layout.micro_batches, targets)
    with norms_of_gpus(), PeakMemory() as memory:
        engine = build_engine(config, mesh)
        optimizer = Optimizer(config.optim, engine.named_parameters())
        take_step = TrainStep(config, mesh, engine, optimizer, 2)
        rows: list[int] = []
        for experts in (module for part in engine.parts for module in part.modules() if isinstance(module, Experts)):
            experts.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        for step in range(2):
            memory.peak = 0
            rows.clear()
            take_step(step, batch)
    model = config.model
    assert isinstance(model, GPTConfig)
    even = len(rows) * layout.micro_size * LENGTH * model.moe.top_k
    return memory.peak, sum(rows) / even if rows else 1.0


INSIDE: Case = {"in_backward": True}
WAITING: Case = INSIDE | {"dim": 128, "micro": 1, "recompute": "full"}  # gradients decide the peak
ALONE: list[Case] = [
    {},
    {"batches": 3},
    {"precision": "bf16", "micro": 16},
    {"precision": "bf16", "vocabulary": 4096, "batches": 2},
    {"precision": "bf16", "weights": "bf16", "micro": 16, "batches": 2},
    {"precision": "bf16", "weights": "bf16", "dim": 256, "micro": 1},  # whose peak is the update
    {"recompute": "full", "micro": 16},
    {"recompute": "full", "precision": "bf16"},
    {"recompute": "selective"},
    {"recompute": "ops"},
    {"chunks": 4, "micro": 16},
    {"chunks": 4, "micro": 16, "vocabulary": 4096, "precision": "bf16", "batches": 2},
    {"tied": True, "vocabulary": 2048, "recompute": "full", "chunks": 4, "precision": "bf16", "batches": 2},
    {"z_loss": 1e-4, "vocabulary": 2048, "micro": 8},
    {"z_loss": 1e-4, "vocabulary": 4096, "micro": 16, "chunks": 4, "precision": "bf16"},
    INSIDE,
    INSIDE | {"precision": "bf16", "dim": 128, "micro": 1, "recompute": "full"},
    INSIDE | {"chunks": 4, "micro": 16, "vocabulary": 4096, "precision": "bf16"},
    INSIDE | {"tied": True, "vocabulary": 4096, "recompute": "full", "chunks": 4},
    *({"recompute": "ops", "dim": 128, "layers": layers, "micro": 16} for layers in (2, 4)),  # few parameters
]
MIXTURES: dict[str, dict[str, Any]] = {
    "few": {"experts": 8, "top_k": 2, "expert_dim": 448},
    "many": {"experts": 32, "top_k": 8, "expert_dim": 48, "balance_loss": 0.01},
    "shared": {
        "experts": 16, "top_k": 4, "expert_dim": 40, "shared_experts": 1, "router": "sigmoid", "bias_rate": 0.01,
    },
    "capacity": {"experts": 8, "top_k": 1, "normalize": False, "capacity_factor": 1.25, "balance_loss": 0.01},
}  # fmt: skip
OF_EXPERTS: list[Case] = [
    {"moe": moe, "precision": precision, "recompute": recompute, "micro": 16, "dim": 128, "layers": 2}
    for moe in MIXTURES.values()
    for precision in ("fp32", "bf16")
    for recompute in ("none", "full", "ops")
]
# gradients decide the peak, with copies of them on the way
COPIES: Case = {"dp": 2, "data_parallel": "allreduce", "dim": 128, "micro": 1, "recompute": "full"}
PIPELINE: Case = {"pp": 2, "layers": 8, "batches": 8}
TWO: list[list[Case]] = [
    [
        {"dp": 2, "data_parallel": "ddp"},
        {"dp": 2, "batches": 2, "precision": "bf16"},
        {"dp": 2, "data_parallel": "zero1", "batches": 3, "precision": "bf16"},
        {"dp": 2, "data_parallel": "zero2", "batches": 3},
        {"dp": 2, "batches": 2, "precision": "bf16", "weights": "bf16"},
        {"dp": 2, "data_parallel": "zero1", "batches": 3, "precision": "bf16", "weights": "bf16"},
        {"dp": 2, "data_parallel": "zero3", "batches": 2, "precision": "bf16", "weights": "bf16"},
        {"dp": 2, "data_parallel": "zero3", "batches": 2, "precision": "bf16"},
        {"dp": 2, "data_parallel": "zero3", "recompute": "full", "micro": 16},
    ],
    [
        PIPELINE | {"schedule": "1f1b", "precision": "bf16"},
        PIPELINE | {"schedule": "1f1b", "recompute": "full"},
        PIPELINE | {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "batches": 4},
        PIPELINE | {"schedule": "zbv", "stages_per_rank": 2},
    ],
    [
        {"tp": 2},
        {"tp": 2, "precision": "bf16", "micro": 16},
        {"tp": 2, "recompute": "full", "micro": 16},
        {"tp": 2, "moe": MIXTURES["few"], "dim": 128, "layers": 3, "micro": 8},
        {"tp": 2, "moe": MIXTURES["shared"], "dim": 128, "layers": 3, "micro": 8, "recompute": "ops"},
        {"tp": 2, "ep": 2, "moe": MIXTURES["many"], "dim": 128, "layers": 3, "micro": 8, "precision": "bf16"},
    ],
    [
        *(WAITING | {"dp": 2, "bucket_cap_mb": cap} for cap in (0.001, 0.2, 25.0)),
        INSIDE | {"dp": 2, "bucket_cap_mb": 0.1, "tied": True, "vocabulary": 2048, "recompute": "full", "micro": 1},
        INSIDE | {"cp": 2, "bucket_cap_mb": 0.1, "recompute": "full"},
    ],
    [
        COPIES,
        COPIES | {"bucket_cap_mb": 0.5, "batches": 2},
        COPIES | {"bucket_cap_mb": 0.05},  # smaller than a matrix, which is sent without a copy
        COPIES | {"bucket_cap_mb": 0.5, "precision": "bf16", "compression": "bf16"},
        COPIES | {"dp": 1, "pp": 2, "batches": 2},  # nothing is sent
    ],
    [
        {"cp": 2, "micro": 16} | numbers | {"context": context}
        for context in ("ulysses", "ring")
        for numbers in ({}, {"precision": "bf16", "batches": 2})
    ],
    [
        {"dp": 2, "data_parallel": kind, "moe": moe, "dim": 128, "layers": 3, "micro": 8} | numbers
        for kind in ("ddp", "allreduce", "zero1", "zero2", "zero3")
        for moe, numbers in ((MIXTURES["few"], {}), (MIXTURES["many"], {"batches": 3, "precision": "bf16"}))
    ],
    [
        PIPELINE | {"moe": MIXTURES["many"], "dim": 128, "schedule": "1f1b"},
        PIPELINE | {"moe": MIXTURES["few"], "dim": 128, "schedule": "1f1b", "precision": "bf16"},
        PIPELINE | {"moe": MIXTURES["many"], "dim": 128, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
        PIPELINE | {"moe": MIXTURES["many"], "dim": 128, "schedule": "zbv", "stages_per_rank": 2},
    ],
    [
        {"dp": 2, "ep": 2, "data_parallel": kind, "moe": moe, "dim": 128, "layers": 3, "micro": 8} | numbers
        for kind in ("allreduce", "zero1", "zero2", "zero3")
        for moe in (MIXTURES["few"], MIXTURES["many"])
        for numbers in ({}, {"batches": 3, "precision": "bf16"})
    ],
]
FOUR: list[Case] = [
    *(
        PIPELINE | {"dp": 2, "ep": 2, "data_parallel": kind, "moe": moe, "dim": 128, "schedule": "1f1b"}
        for kind in ("allreduce", "zero1")
        for moe in (MIXTURES["few"], MIXTURES["many"])
    ),
    *(
        {"dp": 4, "ep": ep, "data_parallel": kind, "moe": MIXTURES["few"], "dim": 128, "layers": 3, "micro": 8}
        for kind in ("allreduce", "zero1", "zero2", "zero3")
        for ep in (2, 4)
    ),
]


def check(cases: list[Case], found: list[list[tuple[int, float]]]) -> None:
    for case, *of_ranks in zip(cases, *found, strict=True):
        config = config_of(**case)
        peak, load = max(of_ranks)
        with patch.object(recomputation, "IMBALANCE", max(1.0, load)):  # the load that has occurred, not a margin
            wanted = estimate(config, resolve_layout(config, 1, len(found)))
        assert wanted is not None
        # few large experts that ZeRO-3 gathers are predicted 6 to 7 % too high
        limit = 0.08 if "moe" in case and case.get("data_parallel") == "zero3" else 0.05
        assert wanted.total == pytest.approx(peak, rel=limit), case


SHORT: list[Case] = [
    {"recompute": "full", "precision": "bf16"},
    {"chunks": 4, "z_loss": 1e-4},
    INSIDE,
    {"moe": MIXTURES["many"], "dim": 128, "layers": 2},
]


@pytest.mark.parametrize(
    "cases",
    [
        SHORT,
        pytest.param(ALONE, marks=pytest.mark.long_form(60)),
        pytest.param(OF_EXPERTS, marks=pytest.mark.long_form(60)),
    ],
    ids=["short", "every", "experts"],
)
def test_the_peak_of_one_rank(cases: list[Case]) -> None:
    check(cases, run_on_world(1, peaks, cases, timeout=300))


SHORT_OF_TWO = [  # smaller than those of the long form
    {"dp": 2, "data_parallel": "zero2", "batches": 2},
    {"pp": 2, "layers": 4, "batches": 3, "schedule": "1f1b", "precision": "bf16"},
]
KINDS = ["data", "pipeline", "tensor", "inside", "copies", "context", "experts", "pipeline of experts"]
KINDS += ["divided experts"]


@pytest.mark.parametrize(
    "cases",
    [
        # test_the_peak_of_one_rank in the short form
        pytest.param(SHORT_OF_TWO, id="short", marks=pytest.mark.long_form(10)),
        *(
            pytest.param(cases, id=kind, marks=pytest.mark.long_form(25))
            for kind, cases in zip(KINDS, TWO, strict=True)
        ),
    ],
)
def test_the_peak_of_the_fullest_of_two_ranks(cases: list[Case]) -> None:
    check(cases, run_on_world(2, peaks, cases, timeout=300))


@pytest.mark.long_form(60)  # test_the_peak_of_one_rank in the short form
def test_the_peak_of_the_fullest_of_four_ranks_with_divided_experts() -> None:
    check(FOUR, run_on_world(4, peaks, FOUR, timeout=900))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_rank_of_a_pipeline_needs_more_than_the_estimate(schedule: str, recompute: str) -> None:
    row = SCHEDULES[schedule]
    stages = min(2, row.stages_per_rank[1])
    for pp in (2, 4, 8):
        batches = 1 if row.micro_batches == "one" else 3 * stages * pp
        case: Case = {"pp": pp, "layers": 4 * stages * pp, "batches": batches, "recompute": recompute}
        config = config_of(**case, schedule=schedule, stages_per_rank=stages)
        layout = resolve_layout(config, 1, pp)
        sizes, parts = sizes_of(config, layout), stages_of(config, layout)
        totals = [peak_of(sizes, rank_of(layout, rank, parts)).total for rank in range(pp)]
        wanted = estimate(config, layout)
        assert wanted is not None and max(totals) == pytest.approx(wanted.total), (pp, totals)
