"""Which linear layers a plan takes to compute in fp8, of models that are known after they are built: those that do."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.request import check_job
from hpc_train.layout.counted import counted, read_counts
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import sizes_of
from hpc_train.models import counting
from hpc_train.models.build import build_model
from hpc_train.parallel.precision.float8 import Float8Linear, use_float8
from hpc_train.planner import work as planner_work
from hpc_train.planner.machine import read_machine
from hpc_train.planner.passes import COMPILED, EAGER, Passes, float8_of, products_of, why_not_predicted
from hpc_train.planner.work import count_model, count_work
from hpc_train.run.directory import RunDirectory
from tests.config.composing import compose

OWN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, branch):
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(width, width) for _ in range(3))
        self.wide, self.odd = nn.Linear(width, branch), nn.Linear(branch, width + 1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, hidden):
        mixed = self.out(torch.sigmoid(self.query(hidden)) * self.key(hidden))
        return hidden + self.frozen(mixed) + self.odd(torch.relu(self.wide(mixed)))[..., :-1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(96, 64)
        self.blocks = nn.ModuleList([Block(64, 128), Block(64, 128), Block(64, 128)])
        self.head = nn.Linear(64, 10)

    def forward(self, pixels):
        hidden = self.stem(pixels.reshape(len(pixels), 32, 96))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


class Flat(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))
"""
CUSTOM = ["model=custom", "data=synthetic", "data.task=images"]
TEXT = ["data=synthetic", "data.sequence_length=32"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        planner_work, "_answer", lambda config, file: asdict(counting.count(config))
    )  # torch is here already
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "float8_net.py").write_text(OWN)
    read_counts.cache_clear()
    return tmp_path


def config_of(*overrides: str) -> Config:
    return typed(compose(["+strategy=single", "precision=fp8", *overrides]))


def job_of(*overrides: str) -> Config:
    return typed(compose(["+strategy=dp", "cluster=slurm", "cluster.gpus_per_node=4", *overrides]))


def hf_model(kind: str, folder: Path) -> list[str]:
    """Returns the overrides for a small model of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160}
    task, config = {
        "llama": ("causal_lm", transformers.LlamaConfig(**sizes, vocab_size=256, num_key_value_heads=1)),
        "classifier": ("sequence_classification", transformers.LlamaConfig(**sizes, vocab_size=256, pad_token_id=0)),
        "bert": ("masked_lm", transformers.BertConfig(**sizes, vocab_size=256)),
        "vit": ("image_classification", transformers.ViTConfig(**sizes, image_size=32, patch_size=8)),
        "phi": ("causal_lm", transformers.PhiConfig(**sizes, vocab_size=256)),
    }[kind]
    config.save_pretrained(folder / kind)
    data = ["data=synthetic", "data.task=images"] if kind == "vit" else TEXT
    return ["model=hf", f"model.name_or_path={folder / kind}", f"model.task={task}", "model.pretrained=false", *data]


def converted(config: Config) -> set[str]:
    """Returns the linear layers of the model that the worker makes compute in fp8."""
    model = build_model(config.model, 0)
    use_float8(model, config.precision, torch.device("cpu"))
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def predicted(config: Config) -> set[str]:
    """Returns those that the plan takes to do so."""
    known = products_of(counted(config).model, 1)
    assert known is not None
    chosen = [replace(each, names=((name,),), outputs=(outputs,)).chosen(config.precision) == [1] and name
              for each in known for names, outputs in zip(each.names, each.outputs, strict=True)
              for name in names]  # fmt: skip
    return {name for name in chosen if name}


@pytest.mark.long_form(5, cases=["classifier", "bert", "vit", "phi", "Flat"])
@pytest.mark.parametrize("model", ["llama", "Net", "classifier", "bert", "vit", "phi", "Flat"])
def test_the_layers_of_a_plan_are_those_that_are_converted(model: str, folder: Path) -> None:
    own = model[0].isupper()
    words = [*CUSTOM, f"model._target_=float8_net.{model}"] if own else hf_model(model, folder)
    for skip, recipe in ((r"precision.fp8_skip=[layers.0,query,q_proj]", "tensorwise"), ("", "mxfp8")):
        config = config_of(*words, *filter(None, [skip]), f"precision.fp8={recipe}")
        count_model(config)
        found = predicted(config)
        assert found == converted(config) and found, (skip, recipe)
    assert why_not_predicted(config, read_machine("b200")) is None


def test_counted_products_have_their_rates_and_casts(folder: Path) -> None:
    """Of a block of the width 64 with 32 rows per sample, query and key have one input, and two layers stay in bf16."""
    config = config_of(*CUSTOM, "model._target_=float8_net.Net", "batch.micro_size=4", "batch.global_size=4")
    assert "are unknown" in str(why_not_predicted(config, read_machine("h100"))), "it is not counted yet"
    count_model(config)
    assert why_not_predicted(config, read_machine("h100")) is None
    layout = resolve_layout(config, 1, 1)
    matrices, rows = 3 * 64 * 64 + 64 * 128, 4 * 32
    found = float8_of(config, layout, 1)
    assert found.share == pytest.approx(matrices / (matrices + 64 * 64 + 128 * 65))
    casts, results = EAGER["tensorwise"], rows * (3 * 64 + 128)
    assert found.forward == casts.forward * (rows * 4 * 64 + matrices)
    assert found.backward == casts.backward * (rows * 4 * 64 + matrices) + casts.gradient * results
    assert found.kernels == (4 * casts.kernels[0], 4 * casts.kernels[1])
    compiled = replace(config, train=replace(config.train, compile=True))
    assert float8_of(compiled, layout, 1).forward == COMPILED["tensorwise"].forward * (rows * 3 * 64 + matrices)
    passes = Passes(config, layout, read_machine("h100"), count_work(config))
    stem, layer, *_, head = passes.work.blocks
    assert [passes._float8(block).share > 0 for block in (stem, layer, head)] == [False, True, False]


def test_a_model_without_blocks_computes_in_fp8_as_a_whole(folder: Path) -> None:
    config = config_of(*CUSTOM, "model._target_=float8_net.Flat")
    count_model(config)
    layout = resolve_layout(config, 1, 1)
    assert float8_of(config, layout, 1).share == pytest.approx(3072 * 64 / (3072 * 64 + 64 * 10))
    passes = Passes(config, layout, read_machine("h100"), count_work(config))
    assert passes._float8(passes.work.blocks[0]).share > 0


def test_the_memory_of_the_casts_is_that_of_the_largest_counted_product(folder: Path) -> None:
    plain = config_of(*CUSTOM, "model._target_=float8_net.Net", "precision=bf16")
    scaled = config_of(*CUSTOM, "model._target_=float8_net.Net", "train.compile=true")
    count_model(plain)
    layout = resolve_layout(plain, 1, 1)
    (before, after), rows = [sizes_of(counted(each), layout).activations for each in (plain, scaled)], 32 * 128
    assert after.gradients - before.gradients == 2 * layout.micro_size * rows + 64 * 128
    none = replace(scaled, precision=replace(scaled.precision, fp8_skip=["blocks"]))
    assert sizes_of(counted(none), layout).activations.gradients == before.gradients


def make_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = folder / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["cluster.gpu_type=a100"], r"\(a100\) has compute capability 8\.0; tensorwise needs 8\.9 or later"),
        (["cluster.gres=gpu:l40s:4", "precision.fp8=rowwise"], r"\(l40s\) .* rowwise needs 9\.0 or later"),
        (["cluster.gres='gpu:a100:2,gpu:h100:2'"], r"cluster\.gpu_type=h100 or precision\.fp8=null"),
        (["cluster.machine=h100", "precision.fp8=mxfp8"], r"has compute capability 9\.0; mxfp8 needs 10\.0 or later"),
        (["cluster.gpu_type=mi250x"], r"has architecture gfx90a; fp8 needs an MI300 or later"),
        (["cluster.gpu_type=h100"], None),
        (["cluster.gpu_type=nvidia_b200", "cluster.machine=h100", "precision.fp8=mxfp8"], None),
        (["cluster.gpu_type=gpu"], None),  # an unknown type
        ([], None),
    ],
)
def test_gpus_that_cannot_compute_a_recipe_are_refused_before_the_submission(
    words: list[str], refusal: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sbatch(folder, monkeypatch)
    run, config = RunDirectory(folder / "run"), job_of("precision=fp8", *words)
    assert check_job(job_of("precision=bf16"), run).gpus == 4
    if refusal is None:
        assert check_job(config, run).gpus == 4
        return
    with pytest.raises(UserError, match=refusal):
        check_job(config, run)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["train.attention=fa3", "cluster.gpu_type=a100"], r"capability 9\.x, but the device is a100 \(8\.0\)"),
        (["train.attention=fa3", "cluster.gpu_type=b200"], r"capability 9\.x, but the device is b200 \(10\.0\)"),
        (["train.attention=cudnn", "cluster.gpu_type=mi300x"], r"but the device is mi300x \(gfx942\)"),
        (["train.attention=fa3", "cluster.gpus_per_node=0"], r"but the device is a CPU \(no GPU\)"),
        (["train.attention=fa4", "precision=fp32"], r"queries in bf16 or fp16, but precision\.name is fp32"),
        (["train.attention=fa4", "model.head_dim=192"], "multiples of 8 up to 128, not 192"),
        (["train.attention=fa3", "cluster.gpu_type=h200"], None),
        (["train.attention=fa4", "cluster.gpu_type=gb200"], None),
    ],
)
def test_a_kernel_of_attention_is_refused_before_the_submission(
    words: list[str], refusal: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sbatch(folder, monkeypatch)
    run, config = RunDirectory(folder / "run"), job_of("precision=bf16", *words)
    if refusal is None:
        assert check_job(config, run).gpus == 4
        return
    with pytest.raises(UserError, match=refusal):
        check_job(config, run)
