"""Each row of the table of exclusions refuses the smallest config that combines both, and the docs list the rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import (
    CIFAR100DataConfig,
    Config,
    HFModelConfig,
    ImagesDataConfig,
    StreamDataConfig,
    TargetConfig,
    VerifyConfig,
)
from hpc_train.errors import UserError, UserErrors
from hpc_train.layout.compatibility import OF_LAYOUT, OF_RUN, Exclusion
from hpc_train.layout.reference import compatibility
from hpc_train.layout.techniques import KINDS
from hpc_train.layout.validate import checked_layout
from tests.parallel.cells import Cell

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ROWS = (*OF_LAYOUT, *OF_RUN)
HOOKS = "hpc_train.train.hooks"
OWN_KIND = {"strategy.data_parallel": "tests.extensions.package.kinds:KIND"}
ZBV = {"strategy.pp": 2, "strategy.schedule": "zbv", "strategy.stages_per_rank": 2, "strategy.data_parallel": "zero2"}
MIXTURE = {"model": replace(Cell(1, "gpt-moe").config().model, n_layers=4)}
OWN_OPTIMIZER = {"optim.name": "custom", "optim._target_": "examples.own_optimizer.Lion", "optim.elementwise": False}
VIT = {"model": replace(Cell(1, "vit").config().model, n_layers=4), "data": Cell(1, "vit").config().data}
CUSTOM = {"model": Cell(1, "custom").config().model, "data": VIT["data"]}
EXPERTS = HFModelConfig(
    name_or_path="small", task="causal_lm", config={"output_router_logits": True, "router_aux_loss_coef": 0.1}
)
ON_DEVICE = replace(KINDS["allreduce"], name="on_device", offloads=())
# the keys that make each condition hold, by its name on the page
EXAMPLES: dict[str, dict[str, Any]] = {
    "a pipeline": {"strategy.pp": 2},
    "tensor parallelism": {"strategy.tp": 2, "strategy.data_parallel": "allreduce"},
    "tensor parallelism or a pipeline": {"strategy.tp": 2, "strategy.data_parallel": "zero3"},
    "context parallelism": {"strategy.cp": 2},
    "`strategy.context=ring` or `both`": {"strategy.cp": 2, "strategy.context": "ring"},
    "tensor parallelism or context parallelism": {"strategy.cp": 2},
    "a pipeline or tensor parallelism or context parallelism": {"strategy.pp": 2},
    "expert parallelism": {"strategy.ep": 2, **MIXTURE},
    "no tensor parallelism": {"strategy.tp": 1},
    "several ranks with the same parameters": {"strategy.dp": "fill"},
    "several micro-batches in a step": {"batch.micro_batches": 4},
    "`batch.micro_size` or `batch.micro_batches`": {"batch.micro_batches": 4},
    "stages that are divided when the workers start": {"strategy.pp": 2, "strategy.pp_split": "measured"},
    "a pipeline schedule": ZBV,
    "a schedule that is not compiled": ZBV,
    "a schedule that recomputes in two parts": ZBV,
    "`train.reproducible`": {"train.reproducible": "any_world_size"},
    "`batch.balance`": {"batch.balance": True, "batch.micro_batches": 4},
    "too few micro-batches": {"batch.micro_batches": "auto"},
    "a schedule that keeps all micro-batches": {
        "strategy.pp": 2,
        "strategy.schedule": "gpipe",
        "strategy.stages_per_rank": 1,
    },
    "`zero2` or `zero3` over all data-parallel ranks": {"strategy.data_parallel": "zero3"},
    "ZeRO with several stages of a pipeline on a rank": ZBV,
    "`train.compile` with tensor or context parallelism": {"strategy.cp": 2, "train.compile": True},
    "`train.buffers=rank0` or `mean`": {"train.buffers": "mean"},
    "a kind that the schedule does not support": {"strategy.data_parallel": "zero3"},
    "ZeRO": {"strategy.data_parallel": "zero3"},
    "`ddp`": {"strategy.data_parallel": "ddp"},
    "a kind that cannot compress": OWN_KIND,
    "a custom kind": OWN_KIND,
    "`strategy.local_steps`": {"strategy.local_steps": 2, "strategy.shard": 2},
    "a kind that cannot update in the backward": OWN_KIND,
    "a kind that cannot offload": {"strategy.data_parallel": "tests.layout.test_compatibility:ON_DEVICE"},
    "any other layout than `zero2` or `zero3` on several ranks": {"strategy.data_parallel": "zero1"},
    "`strategy.comm=user_buffers`": {"strategy.data_parallel": "zero3", "strategy.comm": "user_buffers"},
    "`strategy.compression`": {"strategy.compression": "bf16"},
    "compression other than `bf16`": {"strategy.compression": "fp16"},
    "compression that carries errors": {"strategy.compression": "powersgd"},
    "compression between replicas": {"strategy.compression": "bf16"},
    "`optim.in_backward`": {"optim.in_backward": True, "optim.clip_norm": 0.0},
    "`optim.clip_norm`": {"optim.clip_norm": 1.0},
    "`optim.moments`": {"optim.moments": "bf16"},
    "any optimizer but `adamw`": {"optim.name": "sgd"},
    "an optimizer that updates whole parameters": OWN_OPTIMIZER,
    "a custom optimizer that updates whole parameters": OWN_OPTIMIZER,
    "`strategy.offload`": {"strategy.offload": "optimizer"},
    "`strategy.offload=optimizer`": {"strategy.offload": "optimizer"},
    "`strategy.offload=all`": {"strategy.offload": "all", "strategy.data_parallel": "zero3"},
    "`train.activation_offload`": {"train.activation_offload": "1MiB"},
    "`train.activation_checkpointing=ops`": {"train.activation_checkpointing": "ops"},
    "a budget of `train.activation_checkpointing`": {"train.activation_checkpointing": "8GiB"},
    "`train.loss_chunks`": {"train.loss_chunks": 2},
    "`precision.fp8`": {"precision.name": "bf16", "precision.fp8": "tensorwise"},
    "`precision.name=fp16`": {"precision.name": "fp16"},
    "any other precision than `bf16`": {"precision.name": "fp32"},
    "`precision.weights=bf16`": {"precision.name": "bf16", "precision.weights": "bf16"},
    "`fp32` or `fp64`": {"precision.name": "fp32"},
    "`train.attention`": {"train.attention": "fa4", "precision.name": "bf16"},
    "`train.compile`": {"train.compile": True},
    "no `train.compile`": {"train.compile": False},
    "`train.cuda_graphs`": {"train.compile": True, "train.cuda_graphs": True},
    "`strategy.async_tp`": {
        "strategy.async_tp": True,
        "strategy.tp": 2,
        "strategy.data_parallel": "allreduce",
        "train.compile": True,
        "cluster.visible_gpus": "all",
    },
    "CPUs": {"cluster.gpus_per_node": 0},
    "`cluster.visible_gpus=own`": {"cluster.visible_gpus": "own"},
    "a model that cannot be cut": {"model": HFModelConfig(name_or_path="x", task="masked_lm")},
    "a model without a tensor-parallel plan": CUSTOM,
    "a model that does not shard the sequence": VIT,
    "any model but a `gpt`": VIT,
    "a model that computes its loss in one piece": VIT,
    "`model.attention_softcap`": {"model": replace(Cell(1).config().model, n_layers=4, attention_softcap=30.0)},
    "heads that the kernel does not support": {"model": replace(Cell(1).config().model, n_layers=4, head_dim=136)},
    "a model whose activations are unknown": CUSTOM,
    "a model that predicts no next token": VIT,
    "a loss that compares samples": {**CUSTOM, "model": Cell(1, "custom-contrastive").config().model},
    "`model.moe`": MIXTURE,
    "`model.moe.capacity_factor`": {"model": replace(Cell(1, "gpt-moe-capacity").config().model, n_layers=4)},
    "a model without `model.moe`": {"model": replace(Cell(1).config().model, n_layers=4)},
    "`output_router_logits` of `model=hf`": {"model": EXPERTS},
    "`train.z_loss`": {"train.z_loss": 1e-4},
    "`train.epochs`": {"train.epochs": 1.0, "train.steps": None},
    "`train.verify.every`": {"train.verify": VerifyConfig(every=10)},
    "a stream": {"data": StreamDataConfig(_target_="tests.data.test_stream.Counting")},
    "data without sequences": {"data": CIFAR100DataConfig()},
    "`data.decoder=dali`": {"data": ImagesDataConfig(path="images", n_classes=2, decoder="dali")},
    "`data.collate`": {"data.collate": "tests.data.collating.padded"},
    "`train.debug`": {"train.debug": True},
    "the hook `ema`": {"hooks": {"ema": TargetConfig(_target_=f"{HOOKS}.ema.EMA")}},
    "the hook `early_stopping`": {"hooks": {"stop": TargetConfig(_target_=f"{HOOKS}.early_stopping.EarlyStopping")}},
    "the hook `samples`": {
        "hooks": {"texts": TargetConfig(_target_=f"{HOOKS}.samples.Samples", args={"prompts": ["a"]})}
    },
    "`train.eval_every=0`": {"train.eval_every": 0},
}


def config_of(*names: str) -> Config:
    """Returns a config of four data-parallel ranks with the examples of these conditions, of which the last win."""
    config = Cell(4, strategy={"dp": "fill"}, batch={"global_size": 8}).config()
    config = replace(config, model=replace(config.model, n_layers=4, dim=64))  # type: ignore[call-arg]
    for key, value in [item for name in names for item in EXAMPLES[name].items()]:
        group, _, name = key.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value}) if name else value})
    return config


def mistakes(config: Config) -> Iterator[UserError]:
    try:
        checked_layout(config, 1, 4)
    except UserErrors as error:
        yield from error.found
    except UserError as error:
        yield error


def is_of(row: Exclusion, mistake: UserError) -> bool:
    """Returns whether a mistake has the message and the fix of a row, whose values depend on the config."""
    texts = ((row.message, mistake.what), (row.fix, mistake.fix))
    return all(re.fullmatch(re.sub(r"\\\{(this|it).*?\\\}", ".*", re.escape(text)), shown) for text, shown in texts)


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the config.json of a small model of Hugging Face."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
    (tmp_path / "small").mkdir()
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64} | sizes
    (tmp_path / "small" / "config.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.technique.name} with {row.excluded.name}")
def test_each_row_refuses_what_it_excludes(row: Exclusion) -> None:
    shown = [mistake for mistake in mistakes(config_of(row.technique.name, row.excluded.name)) if is_of(row, mistake)]
    (refusal,) = shown
    assert refusal.where and refusal.fix


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.long_form(15))])
def test_every_other_pair_of_techniques_is_accepted(step: int) -> None:
    """So the page has all pairs of its techniques that are refused."""
    unlisted = {}
    different = {repr(keys): name for name, keys in EXAMPLES.items()}
    for pair in [*combinations(different.values(), 2)][::step]:
        others = [mistake for mistake in mistakes(config_of(*pair)) if not any(is_of(row, mistake) for row in ROWS)]
        if others:
            unlisted[pair] = [mistake.what for mistake in others]
    assert unlisted == {}


def test_the_page_is_up_to_date() -> None:
    if not PAGE.exists():
        pytest.skip("there is no docs/compatibility.md")
    command = "python -m hpc_train.layout.reference compatibility > docs/compatibility.md"
    assert PAGE.read_text() == compatibility(), command
