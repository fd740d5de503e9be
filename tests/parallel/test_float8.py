"""Products in fp8: their rounding, the same numbers under every strategy, which matrices take part, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.layout import user_code
from hpc_train.layout.float8 import check_float8, check_skip
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import sizes_of
from hpc_train.layout.user_code import check_packages
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelize import apply_loss_form, materialize
from hpc_train.parallel.precision import float8
from hpc_train.parallel.precision.dtypes import KeptCasts, autocast, set_hidden_dtype
from hpc_train.parallel.precision.float8 import Float8Linear, check_device, check_use, matrices, use_float8
from tests.parallel.cells import DATA_PARALLEL, Cell
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world, run_ranks

RECIPES = ("tensorwise", "rowwise", "mxfp8")
CPU = torch.device("cpu")
E4M3, E5M2, BF16 = 2.0**-4, 2.0**-3, 2.0**-9  # the largest relative error of rounding
SPLITS: dict[str, dict[str, Any]] = DATA_PARALLEL | {
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "zbv": {"pp": 2, "schedule": "zbv", "stages_per_rank": 2},
    "dualpipev": {"pp": 2, "schedule": "dualpipev", "stages_per_rank": 2},
}
Gradients = dict[str, Tensor]


def config_of(cell: Cell, recipe: str | None, dim: int = 32, **precision: Any) -> Config:
    """Returns the config of ``cell`` for a model whose matrices can be computed in fp8."""
    config = cell.config()
    model: Any = config.model
    sizes = {"dim": dim, "n_heads": 4, "n_layers": 4}
    sizes |= {"mlp_dim": 64} if cell.model == "vit" else {"ffn_dim": 64, "n_kv_heads": 4}
    return replace(
        config,
        model=replace(model, **sizes),
        precision=PrecisionConfig(name=cell.precision, fp8=recipe, **precision),
    )


def cell_of(model: str, split: dict[str, Any], **train: Any) -> Cell:
    """Returns a cell whose micro-batches have two samples, so that the scales cover the same values."""
    return Cell(2, model, "bf16", split, {"global_size": 8, "micro_size": 2}, train)


def alone(cell: Cell, recipe: str | None) -> tuple[float, Gradients]:
    """Returns the loss and gradients of one process, in micro-batches of two samples."""
    config = config_of(cell, recipe)
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, CPU, config.train.seed, torch.float32)
    set_hidden_dtype(model, config.precision)
    use_float8(model, config.precision, CPU)
    apply_loss_form(model, loss_form(config, resolve_layout(config, 1, 2)))
    inputs, targets = global_batch(cell, 0)
    count, total = int((targets != IGNORED).sum()), 0.0
    with KeptCasts([model], torch.bfloat16).step():
        for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
            with autocast("bf16", CPU):
                loss, _ = model(part, {}, wanted)
            (loss / count).backward()
            total += loss.item()
    return total / count, {name: value.grad for name, value in model.named_parameters()}


def first_step(rank: int, cell: Cell, recipe: str | None) -> tuple[float, Gradients]:
    config = config_of(cell, recipe)
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    result = engine.reduce(engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0)))
    return result.loss, {name: whole(value.grad) for name, value in engine.named_parameters().items()}


def differences(rank: int, world_size: int, chosen: list[Cell], recipe: str) -> list[tuple[float, float]]:
    """Returns the relative differences of loss and gradients from one process."""
    wanted, expected = alone(chosen[0], recipe)
    found = []
    for cell in chosen:
        loss, gradients = first_step(rank, cell, recipe)
        rows = ("embedding", "class_token")  # which ZeRO sums over tokens or samples in bf16
        exact = {name: value for name, value in gradients.items() if not any(part in name for part in rows)}
        found.append((abs(loss - wanted) / wanted, error(exact, expected)))
    return found


@pytest.mark.parametrize(
    ("model", "recipe", "names"),
    [
        ("gpt", "tensorwise", ("zero3", "zbv")),
        *(
            pytest.param(model, recipe, tuple(SPLITS), marks=pytest.mark.long_form(15))
            for model in ("gpt", "vit")
            for recipe in RECIPES
        ),
    ],
)
def test_fp8_is_the_same_under_every_strategy(model: str, recipe: str, names: tuple[str, ...]) -> None:
    chosen = [cell_of(model, SPLITS[name]) for name in names]
    for ranks in run_on_world(2, differences, chosen, recipe):
        for name, found in zip(names, ranks, strict=True):
            assert max(found) < 1e-6, (name, found)


def recomputed(rank: int, world_size: int) -> list[bool]:
    """Returns for each option that saves memory whether the gradients have the same bits."""
    recomputing: list[dict[str, Any]] = [{"activation_checkpointing": mode} for mode in ("full", "ops")]
    _, expected = first_step(rank, replace(cell_of("gpt", {}), world_size=1), "rowwise")
    found = []
    for train in [*recomputing, {"activation_offload": "1KiB"}]:
        _, gradients = first_step(rank, replace(cell_of("gpt", {}, **train), world_size=1), "rowwise")
        found.append(all(torch.equal(gradients[name], expected[name]) for name in expected))
    return found


@pytest.mark.long_form(10)
def test_options_that_save_memory_keep_the_bits() -> None:
    assert run_on_world(1, recomputed) == [[True, True, True]]


def distances(
    rank: int, world_size: int, split: dict[str, Any], recipe: str, train: dict[str, Any]
) -> tuple[float, float]:
    """Returns how far a split, which changes the rounding, and bf16 are from one process."""
    cell = cell_of("gpt", split, **train)
    _, expected = alone(cell, recipe)
    _, narrow = alone(cell, None)
    _, gradients = first_step(rank, cell, recipe)
    return error(gradients, expected), error(narrow, expected)


@pytest.mark.parametrize(
    ("split", "recipe", "train"),
    [
        pytest.param({"cp": 2}, "tensorwise", {}, marks=pytest.mark.long_form(5)),
        pytest.param({"cp": 2}, "rowwise", {}, marks=pytest.mark.long_form(10)),
        pytest.param({"tp": 2}, "tensorwise", {"activation_checkpointing": "ops"}, marks=pytest.mark.long_form(10)),
    ],
)
def test_another_rounding_is_as_far_from_one_process_as_two(
    split: dict[str, Any], recipe: str, train: dict[str, Any]
) -> None:
    """Context-parallel ranks scale their tokens alone, and tensor-parallel ones round the sums over their shards.

    Both and one process differ from bf16 by their rounding, so their distance is at most twice that, and on average 1.4
    times. In fp64 tensor parallelism gives the same numbers (``test_float8_shards.py``).
    """
    for own, of_bf16 in run_on_world(2, distances, split, recipe, train):
        assert 0 < own < 2 * of_bf16


def in_one_binade(*shape: int) -> Tensor:
    """Returns values whose magnitudes are between 1/2 and 1, so that none of them underflows in any format."""
    return (torch.rand(shape) / 2 + 0.5) * torch.randint(0, 2, shape).mul(2).sub(1)


@pytest.mark.parametrize("tokens", [32, 7])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_and_its_gradients_differ_by_the_rounding_of_their_operands(recipe: str, tokens: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    layer.weight.data = in_one_binade(32, 64)
    exact = nn.Linear(64, 32).double()
    exact.load_state_dict(layer.state_dict())
    inputs, gradient = in_one_binade(2, tokens, 64), in_one_binade(2, tokens, 32)
    _as_float8(layer, recipe)
    found, expected = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(found)
    output.backward(gradient.bfloat16())
    wanted = exact(expected)
    wanted.backward(gradient.double())
    rounded, of_gradient = E4M3 + BF16, (E5M2 if recipe == "tensorwise" else E4M3) + BF16
    rows, passed = inputs.reshape(-1, 64).abs(), gradient.reshape(-1, 32).abs()
    weight = exact.weight.detach().abs().float()
    _close(output, wanted, rows @ weight.t() + exact.bias.detach().abs().float(), rounded, rounded)
    _close(found.grad, expected.grad, passed @ weight, of_gradient, rounded)
    _close(layer.weight.grad, exact.weight.grad, passed.t() @ rows, of_gradient, rounded)
    _close(layer.bias.grad, exact.bias.grad, passed.sum(0), BF16, BF16 * passed.shape[0])


def _as_float8(layer: nn.Linear, recipe: str) -> None:
    changed: Any = layer
    changed.__class__ = Float8Linear
    changed.multiply = float8._multiply(recipe, emulate=True)


def _close(found: Tensor | None, wanted: Tensor | None, magnitudes: Tensor, first: float, second: float) -> None:
    """Compares each element with the sum of the magnitudes of its terms times the errors of both factors."""
    assert found is not None and wanted is not None
    bound = (first + second + first * second + 2 * BF16) * magnitudes.view_as(wanted)
    assert (found.double() - wanted).abs().le(bound).all()
    assert not torch.equal(found.double(), wanted)


def test_a_layer_that_leaves_autocast_is_a_plain_one() -> None:
    layer, inputs = nn.Linear(32, 32), torch.randn(3, 32)
    expected = layer(inputs)
    _as_float8(layer, "rowwise")
    assert torch.equal(layer(inputs), expected)


def whole_model(model: str = "gpt", **precision: Any) -> tuple[Model, PrecisionConfig]:
    config = config_of(cell_of(model, {}), "rowwise", **precision)
    built: Any = build_model(config.model, 0)
    return built, config.precision


def test_layers_compute_in_fp8_and_keep_names_and_values() -> None:
    model, precision = whole_model()
    names = {name: value.shape for name, value in model.named_parameters()}
    line = check_use(model, precision, CPU, compiled=False)
    assert line is not None and line.startswith("fp8 (rowwise): 28 of 29 matrices, layers.*.attention.wq, ")
    assert "bf16: head.output (not in a layer); emulated" in line
    use_float8(model, precision, CPU)
    assert sum(isinstance(module, Float8Linear) for module in model.modules()) == 28
    assert {name: value.shape for name, value in model.named_parameters()} == names
    assert len(matrices(model, precision).chosen) == 28, "it says the same of a model that it has changed"


def test_patterns_sizes_and_frozen_weights_are_left_out() -> None:
    model, precision = whole_model(fp8_skip=["attention", r"layers\.0\."])
    layer: Any = model.layers["1"]
    layer.ffn.w1 = nn.Linear(24, 64, device="meta")
    layer.ffn.w2.weight.requires_grad_(False)
    found = matrices(model, precision)
    assert found.chosen == ("layers.1.ffn.w3", *(f"layers.{n}.ffn.w{k}" for n in (2, 3) for k in (1, 2, 3)))
    assert found.skipped["layers.1.attention.wq"] == found.skipped["layers.0.ffn.w1"] == "precision.fp8_skip"
    assert found.skipped["layers.1.ffn.w1"] == "sizes that are not multiples of 16"
    assert found.skipped["layers.1.ffn.w2"] == "frozen"


def test_a_module_without_layers_takes_part_as_a_whole() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    found = matrices(module, PrecisionConfig(name="bf16", fp8="rowwise"))
    assert found.chosen == ("0",) and [*found.skipped] == ["2"]


def test_a_model_without_such_matrices_is_refused() -> None:
    model, precision = whole_model(fp8_skip=["attention", "atention"])
    with pytest.raises(UserError, match=r"precision\.fp8_skip has 'atention', which matches no matrix of the model"):
        check_use(model, precision, CPU, compiled=False)
    model, precision = whole_model(fp8_skip=["layers"])
    with pytest.raises(UserError, match=r"no matrix of the model can be computed in fp8: .*precision\.fp8_skip"):
        check_use(model, precision, CPU, compiled=False)


def graphs_of(rank: int, world_size: int) -> list[int]:
    """Returns the number of operations of each graph that two steps of two micro-batches compile."""
    graphs: list[int] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    config = config_of(cell_of("gpt", {}), "rowwise")
    model: Any = build_model(config.model, 0)
    materialize(model, CPU, 0, torch.float32)
    set_hidden_dtype(model, config.precision)
    use_float8(model, config.precision, CPU)
    for layer in model.layers.values():
        layer.compile(backend=backend)
    inputs = torch.arange(16).view(2, 8) % config.model.vocab_size
    casts = KeptCasts([model], torch.bfloat16)
    for _step in range(2):
        with casts.step():
            for _micro in range(2):
                with autocast("bf16", CPU):
                    loss, _count = model(inputs, {}, inputs)
                loss.backward()
    return graphs


@pytest.mark.long_form(10)
def test_all_layers_share_one_compiled_graph() -> None:
    [graphs] = run_ranks(1, graphs_of)
    assert len(graphs) == 1


def test_shards_of_other_sizes_are_refused() -> None:
    cell = Cell(4, precision="bf16", strategy={"tp": 4})
    config = config_of(cell, "tensorwise")
    what = r"shards of a multiple of 16, but a matrix of model\.n_heads has a width of 32, which 4 ranks share"
    with pytest.raises(UserError, match=what):
        check_float8(config, resolve_layout(config, 1, 4))


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="not a regular expression"):
        check_skip(PrecisionConfig(fp8_skip=["("]))


@pytest.mark.parametrize(
    ("recipe", "capability", "refused"),
    [
        ("tensorwise", (8, 0), True), ("tensorwise", (8, 9), False), ("rowwise", (8, 9), True),
        ("rowwise", (9, 0), False), ("mxfp8", (9, 0), True), ("mxfp8", (10, 0), False),
    ],
)  # fmt: skip
def test_a_gpu_without_the_units_is_refused(recipe: str, capability: tuple[int, int], refused: bool) -> None:
    known: dict[str, Any] = {"get_device_name": lambda _: "NVIDIA X", "get_device_capability": lambda _: capability}
    with mock.patch.multiple(torch.cuda, **known), mock.patch.object(torch.version, "hip", None):
        if not refused:
            check_device(recipe, torch.device("cuda", 0))
            return
        with pytest.raises(UserError, match=rf"\(NVIDIA X\) has compute capability {capability[0]}\.{capability[1]}"):
            check_device(recipe, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("recipe", "kind", "refused"),
    [("rowwise", "gfx942:sramecc+", False), ("rowwise", "gfx90a", True), ("mxfp8", "gfx950", True)],
)
def test_amd_gpus_need_to_be_an_mi300_or_later(recipe: str, kind: str, refused: bool) -> None:
    properties = SimpleNamespace(gcnArchName=kind)
    known: dict[str, Any] = {"get_device_name": lambda _: "AMD X", "get_device_properties": lambda _: properties}
    with mock.patch.multiple(torch.cuda, **known), mock.patch.object(torch.version, "hip", "7.0"):
        if not refused:
            check_device(recipe, torch.device("cuda", 0))
            return
        with pytest.raises(UserError, match=r"\(AMD X\) has architecture gfx"):
            check_device(recipe, torch.device("cuda", 0))


def without_torchao(rank: int, world_size: int) -> str:
    sys.modules["torchao"] = None  # type: ignore[assignment]  # importing it fails
    model, precision = whole_model()
    try:
        check_use(model, precision, CPU, compiled=False)
    except UserError as error:
        return str(error)
    return "nothing was refused"


def test_a_missing_library_is_told() -> None:
    assert all("[fp8]" in answer for answer in run_ranks(1, without_torchao))


def test_a_product_that_fails_is_told_before_the_training() -> None:
    def broken(rows: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")

    model, precision = whole_model()
    with (
        mock.patch.object(float8, "_multiply", lambda recipe, emulate: broken),
        pytest.raises(UserError, match=r"a product in fp8 \(rowwise\) fails on cpu .*no kernel image"),
    ):
        check_use(model, precision, CPU, compiled=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_estimate_of_memory_has_the_casts_of_one_product(compiled: bool) -> None:
    """A GPT of width 32 with 64 units has 7 matrices per layer, of which the estimate takes the largest to be 1/4."""
    cell = cell_of("gpt", {}, compile=compiled)
    layout = resolve_layout(config_of(cell, None), 1, 1)
    plain, scaled = (estimate(config_of(cell, recipe), layout) for recipe in (None, "rowwise"))
    assert plain is not None and scaled is not None
    matrix = (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) / 4
    rows = 2 * 8 * matrix / 32
    casts = 2 * rows + matrix + (0 if compiled else 8 * max(rows, matrix))
    assert plain.total <= scaled.total <= plain.total + casts
    assert per_micro_batch_difference(cell, layout) == casts


def per_micro_batch_difference(cell: Cell, layout: Any) -> float:
    plain, scaled = (sizes_of(config_of(cell, recipe), layout) for recipe in (None, "rowwise"))
    return scaled.activations.gradients - plain.activations.gradients


def test_a_missing_package_is_refused_before_a_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    real = user_code.module_spec
    monkeypatch.setattr(user_code, "module_spec", lambda name: None if name == "torchao" else real(name))
    with pytest.raises(UserError, match=r"precision\.fp8=rowwise needs torchao") as refused:
        check_packages(config_of(cell_of("gpt", {}), "rowwise"))
    assert "[fp8]" in refused.value.fix
