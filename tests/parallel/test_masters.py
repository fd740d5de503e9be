"""Weights in bf16 with fp32 masters: the same numbers under every strategy, checkpoints in fp32, and refusals.

Each layout adds two gradients, which round to the same sum in bf16 wherever they are added, so it can be compared with
one process more closely than bf16 rounds.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.compose import typed
from hpc_train.config.schema import Config, CustomModelConfig, OptimConfig, PrecisionConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelize import apply_loss_form, is_meta, materialize
from hpc_train.parallel.precision.dtypes import autocast, set_hidden_dtype
from hpc_train.parallel.precision.masters import local_part, master_of, narrow_weights, saved_value
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from hpc_train.train.optimizers import held
from hpc_train.train.optimizers.optimizer import Optimizer
from tests.checkpoint.training import Training, join_again
from tests.config.composing import compose
from tests.parallel.cells import CLASSES, DATA_PARALLEL, IMAGE, Cell
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world
from tests.train.runs import frozen

CPU = torch.device("cpu")
STEPS, RATE, MAX_NORM = 2, 1e-2, 0.05
SPLITS: dict[str, dict[str, Any]] = DATA_PARALLEL | {
    "offload": {"dp": 2, "offload": "optimizer"},
    "offload-zero2": {"dp": 2, "data_parallel": "zero2", "offload": "optimizer"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
}
BY_ROW = ("embedding", "class_token")  # whose gradients ZeRO sums over tokens or samples in another order
Values = dict[str, Tensor]


def config_of(cell: Cell) -> Config:
    config = cell.config()
    return replace(
        config,
        precision=PrecisionConfig(name=cell.precision, weights="bf16"),
        optim=OptimConfig(lr=RATE, eps=1e-3),  # a larger epsilon, or noise in tiny gradients would become full steps
        model=replace(config.model, n_layers=4),
    )


def cell_of(model: str, split: dict[str, Any]) -> Cell:
    return Cell(2, model, "bf16", split, {"global_size": 4, "micro_size": 2})


def alone(cell: Cell) -> tuple[Values, Values]:
    """Returns the first gradients and the last masters of a plain loop with torch's clipping and AdamW."""
    config = config_of(cell)
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, CPU, config.train.seed, torch.float32)
    set_hidden_dtype(model, config.precision)
    apply_loss_form(model, loss_form(config, cell.layout()))
    masters = {name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()}
    decays = {decays: [each for each in masters.values() if (each.ndim >= 2) is decays] for decays in (True, False)}
    groups = [{"params": some, "weight_decay": 0.1 if key else 0.0} for key, some in decays.items()]
    adamw, first = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-3), dict[str, Tensor]()
    model.to(torch.bfloat16)
    for step in range(STEPS):
        model.zero_grad()
        inputs, targets = global_batch(cell, step)
        count = int((targets != IGNORED).sum())
        for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
            with autocast("bf16", CPU):
                loss, _ = model(part, {}, wanted)
            (loss / count).backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm()
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1).bfloat16()
        for name, gradient in gradients.items():
            masters[name].grad = (gradient * factor).float()
        adamw.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])
    return first, {name: value.detach() for name, value in masters.items()}


def trained(rank: int, cell: Cell) -> tuple[Values, Values]:
    config, mesh = config_of(cell), mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    offload = config.strategy.offload == "optimizer"
    optimizer, first = Optimizer(config.optim, engine.named_parameters(), offload), dict[str, Tensor]()
    for step in range(STEPS):
        engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        grads = {name: value.grad for name, value in engine.named_parameters().items()}
        assert {gradient.dtype for gradient in grads.values() if gradient is not None} == {torch.bfloat16}
        first = first or {name: whole(gradient).clone() for name, gradient in grads.items()}
        optimizer.step(RATE, engine.clip_grad_norm_(MAX_NORM).isfinite())
    for value in engine.named_parameters().values():
        master = master_of(value)
        assert master is not None and master.dtype == torch.float32
        assert torch.equal(local_part(value), local_part(master).bfloat16())
    saved = {name: saved_value(value) for name, value in engine.named_parameters().items()}
    return first, {name: whole(value) for name, value in saved.items()}


def differences(rank: int, _: int, chosen: list[Cell]) -> list[tuple[float, float, float]]:
    """Returns the relative differences of the first gradients, of the last masters, and of the gradients ``BY_ROW``."""
    found = []
    for cell in chosen:
        wanted, last = alone(cell)
        gradients, masters = trained(rank, cell)
        rows = {name for name in gradients if any(part in name for part in BY_ROW)}
        others = {name: value for name, value in gradients.items() if name not in rows}
        by_row = error({name: gradients[name] for name in rows}, wanted) if rows else 0.0
        found.append((error(others, wanted), error(masters, last), by_row))
    return found


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt-tied", ("zero3", "offload", "1f1b")),
        *(pytest.param(model, (*SPLITS,), marks=pytest.mark.long_form(10)) for model in ("gpt-tied", "gpt", "vit")),
    ],
)
def test_bf16_weights_are_the_same_under_every_strategy(model: str, names: tuple[str, ...]) -> None:
    chosen = [cell_of(model, SPLITS[name]) for name in names]
    for ranks in run_on_world(2, differences, chosen):
        for name, (of_gradients, of_masters, by_row) in zip(names, ranks, strict=True):
            assert of_gradients < 1e-6, name
            assert by_row < 0.01, name
            assert of_masters < (1e-6 if by_row < 1e-6 else 0.005), name


@pytest.mark.parametrize("chunk", [1, 700, 2**26])
def test_updates_in_parts_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Also with compact moments, and a step that is not finite changes nothing."""
    monkeypatch.setattr(held, "MOST_ELEMENTS", chunk)
    for moments in ("fp32", "bf16"):
        model, narrow = (nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)) for _ in range(2))
        narrow.load_state_dict(model.state_dict())
        narrow_weights(narrow)
        config = OptimConfig(lr=1e-2, moments=moments)
        wide, own = (Optimizer(config, dict(each.named_parameters())) for each in (model, narrow))
        for step in range(3):
            for one, other in zip(model.parameters(), narrow.parameters(), strict=True):
                other.grad = torch.randn(other.shape).bfloat16()
                one.grad = other.grad.float()
            for optimizer in (wide, own):
                optimizer.step(1e-2, torch.tensor(step != 1))
        for one, other in zip(model.parameters(), narrow.parameters(), strict=True):
            assert torch.equal(one, saved_value(other)) and torch.equal(one.bfloat16(), other)
            assert other.dtype == torch.bfloat16


LARGE = ("model.dim=32", "model.ffn_dim=64", "model.n_layers=2", "train.steps=6", "data.samples=48", "precision=bf16")


def save(rank: int, world_size: int, run: RunDirectory) -> list[str]:
    """Trains three steps and saves; returns the digests of the whole masters or weights."""
    training = Training.of(run, load(run), join_again(load(run), rank, world_size))
    training.steps(0, 3)
    training.manager.save(3, {})
    training.manager.close(lambda: False)
    return _digests(training)


def resume(rank: int, world_size: int, run: RunDirectory) -> list[str]:
    """Loads the checkpoint, and returns the digests of it after a check of what it computes with."""
    training = Training.of(run, load(run), join_again(load(run), rank, world_size))
    restored = training.manager.restore()
    assert restored is not None and restored.step == 3 and restored.with_optimizer
    narrow = load(run).precision.weights == "bf16"
    for value in training.engine.named_parameters().values():
        assert value.dtype == (torch.bfloat16 if narrow else torch.float32)
        assert torch.equal(local_part(value), local_part(saved_value(value)).to(value.dtype))
    found = _digests(training)
    training.steps(3, 5)
    return found


def _digests(training: Training) -> list[str]:
    values = {name: whole(saved_value(value)) for name, value in training.engine.named_parameters().items()}
    return [f"{name} {hashlib.sha256(values[name].numpy().tobytes()).hexdigest()}" for name in sorted(values)]


@pytest.mark.parametrize(
    ("before", "after", "strategies"),
    [
        ("bf16", "fp32", ("zero3",)),
        *(
            pytest.param(*precisions, ("single", "zero3", "dp"), marks=pytest.mark.long_form(15))
            for precisions in (("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"))
        ),
    ],
)
def test_checkpoints_have_the_bits_of_the_masters(
    tmp_path: Path, before: str, after: str, strategies: tuple[str, ...]
) -> None:
    saved = frozen(tmp_path / "saved", "+strategy=zero2", *LARGE, f"precision.weights={before}")
    expected = run_on_world(2, save, saved)[0]
    for strategy in strategies:
        ranks = 1 if strategy == "single" else 2
        run = frozen(tmp_path / strategy, f"+strategy={strategy}", *LARGE, f"precision.weights={after}")
        shutil.copytree(saved.path / "checkpoints", run.path / "checkpoints", dirs_exist_ok=True)
        for found in run_on_world(ranks, resume, run):
            assert found == expected, strategy


def test_only_weights_that_train_have_masters() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    bias = model.bias.detach().clone()
    narrow_weights(model)
    assert master_of(model.weight) is not None and master_of(model.bias) is None
    assert torch.equal(saved_value(model.bias), bias.bfloat16())
    optimizer, before = Optimizer(OptimConfig(lr=1e-2), dict(model.named_parameters())), model.weight.detach().clone()
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step(1e-2, torch.tensor(True))
    assert torch.equal(model.bias, bias.bfloat16()) and not torch.equal(model.weight, before)


FROZEN: dict[str, dict[str, Any]] = {
    "RoundedTiny": {"classes": CLASSES},
    "RoundedNet": {"width": 16, "image_size": IMAGE, "n_classes": CLASSES},
}
FROZEN_SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "RoundedTiny": {
        **DATA_PARALLEL,
        "offload": {"dp": 2, "data_parallel": "zero3", "offload": "all"},
        "reproducible": {"dp": 2, "reproducible": True},
    },
    "RoundedNet": {
        name: SPLITS[name] for name in ("1f1b", "gpipe", *(name for name in DATA_PARALLEL if "zero" in name))
    },
}


def gradients_with_frozen(
    rank: int, model: str, split: dict[str, Any], wide: bool
) -> tuple[Values, dict[str, torch.dtype]]:
    """Returns the gradients of a step, and the dtype of each frozen weight. With ``wide`` the model is all in fp32."""
    reproducible = "reproducible" in split
    train = {"reproducible": "any_world_size"} if reproducible else {}
    batch: dict[str, Any] = {"global_size": 4, "logical_micro_batches" if reproducible else "micro_size": 2}
    strategy = {key: value for key, value in split.items() if key != "reproducible"}
    cell = Cell(2, "own", "bf16", strategy, batch, train)
    target = CustomModelConfig(_target_=f"tests.parallel.module.{model}", args={**FROZEN[model], "wide": wide})
    config, mesh = replace(cell.config(), model=target), mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    parameters = engine.named_parameters()
    gradients = {name: whole(value.grad) for name, value in parameters.items() if value.requires_grad}
    assert all(value.dtype == torch.float32 for value in parameters.values() if value.requires_grad)
    return gradients, {name: value.dtype for name, value in parameters.items() if not value.requires_grad}


def alone_in_fp32(model: str) -> Values:
    """Returns the gradients of one process that holds all weights in fp32."""
    cell = Cell(1, "own", "bf16", {}, {"global_size": 4})
    target = CustomModelConfig(_target_=f"tests.parallel.module.{model}", args={**FROZEN[model], "wide": True})
    config = replace(cell.config(), model=target)
    module: Any = build_model(config.model, config.train.seed)
    if is_meta(module):
        materialize(module, CPU, config.train.seed, torch.float32)
    set_hidden_dtype(module, config.precision)
    inputs, targets = global_batch(cell, 0)
    count = int((targets != IGNORED).sum())
    for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
        with autocast("bf16", CPU):
            loss, *_ = module(part, {}, wanted)
        (loss / count).backward()
    return {name: value.grad for name, value in module.named_parameters() if value.requires_grad}


def with_frozen(rank: int, _: int, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, float, Any]]:
    """Returns the relative differences of the gradients from those with all weights in fp32, under the same layout and
    in one process, and the dtypes of the frozen weights of this rank."""
    found = []
    for model, split in cases:
        gradients, held = gradients_with_frozen(rank, model, split, wide=False)
        in_fp32, _ = gradients_with_frozen(rank, model, split, wide=True)
        expected = alone_in_fp32(model)
        differences = [error(gradients, others) for others in (in_fp32, expected) if gradients]  # a stage has none
        found.append((*(differences or (0.0, 0.0)), held))
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([("RoundedTiny", "allreduce"), ("RoundedTiny", "zero3"), ("RoundedNet", "1f1b")], id="short"),
        pytest.param(
            [(model, name) for model, splits in FROZEN_SPLITS.items() for name in splits],
            id="every",
            marks=pytest.mark.long_form(10),
        ),
    ],
)
def test_frozen_weights_in_bf16_give_the_gradients_of_fp32(chosen: list[tuple[str, str]]) -> None:
    """Weights that only products use stay in bf16; others do so under ZeRO, which casts them in any case."""
    cases: list[Any] = [(model, FROZEN_SPLITS[model][name]) for model, name in chosen]
    for ranks in run_on_world(2, with_frozen, cases):
        for (model, split), (difference, from_one, dtypes) in zip(cases, ranks, strict=True):
            sharded = "zero" in split.get("data_parallel", "")
            assert difference == 0, (model, split)
            assert from_one < (0.01 if sharded else 1e-6), (model, split)  # ZeRO sums other gradients in bf16
            for name, dtype in dtypes.items():
                narrow = sharded or name.startswith("middle")
                assert dtype == (torch.bfloat16 if narrow else torch.float32), (split, name)


def frozen_run(path: Path, strategy: str, *words: str) -> RunDirectory:
    """Freezes a run in bf16 of a model whose first half does not train."""
    sizes = [f"+model.args.{key}={value}" for key, value in FROZEN["RoundedNet"].items()]
    data = ("data=synthetic", "data.task=images", f"data.image_size={IMAGE}", f"data.n_classes={CLASSES}")
    target = ("model=custom", "model._target_=tests.parallel.module.RoundedNet", *sizes)
    run = RunDirectory(path)
    free = ("batch.global_size=8", "train.steps=6", "precision=bf16", "telemetry.wandb.mode=disabled")
    freeze(typed(compose([f"+strategy={strategy}", *target, *data, *free, *words])), run)
    return run


def frozen_values(
    rank: int, world_size: int, run: RunDirectory, saves: bool, warns: bool
) -> tuple[dict[str, list[float]], Any]:
    """Trains and saves, or loads and trains; returns all weights at the checkpoint, and the dtypes of frozen ones.

    Args:
        warns: whether the load reports that it rounds values.
    """
    training = Training.of(run, load(run), join_again(load(run), rank, world_size))
    if saves:
        training.steps(0, 3)
        training.manager.save(3, {})
        training.manager.close(lambda: False)
    else:
        restored = training.manager.restore()
        assert restored is not None and restored.step == 3 and restored.with_optimizer
        assert bool(restored.rounded) is warns
    parameters = training.engine.named_parameters()
    values = {name: whole(value.detach()).float().flatten().tolist() for name, value in parameters.items()}
    if not saves:
        training.steps(3, 5)
    return values, {value.dtype for value in parameters.values() if not value.requires_grad}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero3 +model.args.wide=true", "zero3"),
        *(
            pytest.param("zero2", each, marks=pytest.mark.long_form(8))
            for each in ("dp", "pp", "zero3 precision=fp32", "zero1")
        ),
    ],
)
def test_frozen_weights_load_in_either_dtype(tmp_path: Path, before: str, after: str) -> None:
    """As in a checkpoint of a version that held them in fp32, or under a layout that holds others in bf16."""
    saved = frozen_run(tmp_path / "saved", *before.split())
    expected, _ = run_on_world(2, frozen_values, saved, True, False)[0]
    run = frozen_run(tmp_path / "loaded", *after.split())
    shutil.copytree(saved.path / "checkpoints", run.path / "checkpoints", dirs_exist_ok=True)
    narrow = after in ("zero3", "zero1")
    for values, dtypes in run_on_world(2, frozen_values, run, False, "wide" in before):
        assert all(values[name] == expected[name] for name in values)
        assert not dtypes or dtypes == {torch.bfloat16 if narrow else torch.float32}
