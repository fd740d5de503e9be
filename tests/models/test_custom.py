"""Custom models: any module under the contract, and what is said when one cannot be built."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.own_pipeline_model import ResidualNet
from hpc_train.config.schema import CustomModelConfig, GPTConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.models.batch_norm import SyncBatchNorm, convert, has_batch_statistics
from hpc_train.models.build import build_model
from hpc_train.models.gpt import GPT, GPTHead
from hpc_train.models.model import Head, Model, check_hidden_shape
from hpc_train.models.resnet import resnet18
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.engine import step_numbers
from hpc_train.parallel.parallelize import check_no_complex, materialize
from tests.models.models import TINY_GPT
from tests.ranks import run_on_world, run_ranks

HERE = "tests.models.test_custom"


def two_layers(width: int = 8, n_outputs: int = 3) -> nn.Module:
    return nn.Sequential(OrderedDict(inner=nn.Linear(4, width), act=nn.Tanh(), outer=nn.Linear(width, n_outputs)))


class Direct(nn.Module):
    """Parameters and buffers of its own, beside children; a loss of its own; keyword inputs from the context."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("offset", torch.zeros(3), persistent=False)
        self.body = two_layers()

    def forward(self, inputs: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.training:
            self.seen += 1
        outputs = self.body(inputs) * self.scale + self.offset
        return outputs if weight is None else outputs * weight

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.sum() - targets.sum(), targets.new_tensor(len(targets))


def a_gpt() -> GPT:
    return GPT(TINY_GPT)


class OwnModel(GPT):
    """A model with the three parts, made from plain arguments."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(GPTConfig(vocab_size=50, n_layers=n_layers, dim=32, n_heads=4, n_kv_heads=2, ffn_dim=64))


def wrap(target: str, **settings: object) -> WrappedModel:
    model = build_model(CustomModelConfig(_target_=target, **settings), seed=5)  # type: ignore[arg-type]
    assert isinstance(model, WrappedModel)
    return model


def test_names_are_the_modules_own_and_values_follow_the_seed() -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    model, again = wrap(f"{HERE}.two_layers", args={"width": 6}), wrap(f"{HERE}.two_layers", args={"width": 6})
    assert torch.equal(torch.random.get_rng_state(), before)
    assert list(model.state_dict()) == list(two_layers().state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in two_layers().named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_cross_entropy_and_accuracy() -> None:
    model = wrap(f"{HERE}.two_layers")
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 2, IGNORED, 1, 1])
    loss, number = model(inputs, {}, targets)
    outputs = model(inputs, {})
    torch.testing.assert_close(loss, nn.functional.cross_entropy(outputs, targets, reduction="sum"))
    assert number.item() == 4
    _, _, right = model.eval()(inputs, {}, targets)
    assert right.item() == (outputs.argmax(1) == targets).sum().item()


@pytest.mark.parametrize("shape", [(2, 7, 5), (2, 5, 7)])
def test_classes_may_stand_last_or_second(shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape)
    model = WrappedModel(nn.Identity(), "cross_entropy")
    targets = torch.randint(0, 5, (2, 7))
    last = scores if shape[-1] == 5 else scores.movedim(1, -1)
    loss, _ = model(scores, {}, targets)
    expected = nn.functional.cross_entropy(last.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(("class_dim", "shape"), [("last", (2, 5, 5)), ("second", (2, 5, 5)), ("second", (2, 5, 5, 5))])
def test_where_both_dims_fit_the_classes_are_not_guessed(class_dim: str, shape: tuple[int, ...]) -> None:
    scores, targets = torch.randn(shape), torch.randint(0, 5, shape[:-1])
    with pytest.raises(UserError, match="classes in the second or in the last dim") as raised:
        WrappedModel(nn.Identity(), "cross_entropy")(scores, {}, targets)
    assert f"model.class_dim={class_dim}" in str(raised.value)
    second = scores if class_dim == "second" else scores.movedim(-1, 1)
    loss, _ = WrappedModel(nn.Identity(), "cross_entropy", class_dim=class_dim)(scores, {}, targets)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(second, targets, reduction="sum"))


def test_a_class_dim_that_does_not_fit_is_refused() -> None:
    for class_dim, shape in (("last", (2, 5, 7)), ("second", (2, 7, 5))):
        with pytest.raises(UserError, match="do not match targets"):
            WrappedModel(nn.Identity(), "cross_entropy", class_dim=class_dim)(
                torch.randn(shape), {}, torch.zeros(2, 7, dtype=torch.int64)
            )


class FrozenBackbone(nn.Module):
    """Keeps its backbone in evaluation mode, as is usual where it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
        self.head = nn.Sequential(nn.Linear(4, 3), nn.Dropout())

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))


def test_a_module_decides_which_of_its_parts_train() -> None:
    model = WrappedModel(FrozenBackbone(), "cross_entropy")
    for mode in (True, False, True):
        model.train(mode)
        assert (model.training, model.bare.training) == (mode, mode)
        assert [part.training for part in model.head] == [mode, mode]  # type: ignore[union-attr]
        assert [part.training for part in model.backbone] == [False, False]  # type: ignore[union-attr]


def test_squared_error_leaves_out_ignored_targets() -> None:
    model = wrap(f"{HERE}.two_layers", loss="mse")
    inputs, targets = torch.randn(4, 4), torch.randn(4, 3, dtype=torch.float64)
    targets[3] = IGNORED
    loss, number = model(inputs, {}, targets)
    torch.testing.assert_close(loss, (model(inputs, {})[:3] - targets[:3].float()).square().sum())
    assert loss.dtype == torch.float32 and number.item() == 9
    assert model.eval()(inputs, {}, targets)[2] is None


def test_a_module_with_parameters_buffers_context_and_loss_of_its_own() -> None:
    model = wrap(f"{HERE}.Direct")
    weight = torch.full((2, 1), 3.0)
    loss, number = model(torch.randn(2, 4), {"weight": weight}, torch.zeros(2))
    assert number.item() == 2
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()(torch.randn(2, 4), {})
    assert set(model.state_dict()) == {"scale", "seen"} | {f"body.{n}" for n in two_layers().state_dict()}
    assert model.state_dict()["seen"].item() == 1
    moved = copy.deepcopy(model).double()
    assert moved(torch.randn(2, 4, dtype=torch.float64), {}).dtype == torch.float64
    assert model(torch.randn(2, 4), {}).dtype == torch.float32


class Counting(Direct):
    """A loss whose count is a number of Python's."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        return outputs.sum(), 0.5 * len(targets)


def test_the_count_of_an_own_loss_may_be_a_plain_number() -> None:
    model = wrap(f"{HERE}.Counting")
    _, number = model(torch.randn(3, 4), {}, torch.zeros(3))
    assert number.item() == 1.5 and model.own_count
    _, number, right = model.eval()(torch.randn(3, 4), {}, torch.zeros(3))
    assert number.item() == 1.5 and right is None
    assert not wrap(f"{HERE}.two_layers").own_count


class Results(Direct):
    """A loss that returns what it is told to."""

    def __init__(self, results: str) -> None:
        super().__init__()
        self.results = results

    def loss(self, outputs: Tensor, targets: Tensor) -> object:
        total = outputs.sum()  # noqa: F841  named in the results
        return eval(self.results)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ("total", "returned a Tensor of shape [] and dtype torch.float32, not a sum and a count"),
        ("outputs", "returned a Tensor of shape [2, 3] and dtype torch.float32, not a sum and a count"),
        ("(total, 2, 3)", "returned a tuple of 3 elements, not a sum and a count"),
        ("{'loss': total}", "returned a dict with the keys 'loss', not a sum and a count"),
        ("(outputs.sum(1), 2)", "returned a Tensor of shape [2] and dtype torch.float32 as the sum"),
        ("(total.item(), 2)", "as the sum, which must be a scalar tensor"),
        ("(total.detach(), 2)", "a sum that is detached from the outputs of the model"),
        ("(total, targets)", "returned a Tensor of shape [2] and dtype torch.float32 as the count"),
        ("(total, None)", "returned a NoneType, None as the count"),
        ("(total, -1)", "the count -1, which must be 0 or more"),
        ("(total, float('nan'))", "the count nan, which must be 0 or more"),
        ("(total, torch.ones((), device='meta'))", "a sum on cpu and a count on meta"),
    ],
)
def test_what_a_loss_may_not_return(results: str, said: str) -> None:
    """The message names the method of the user and its line."""
    model = wrap(f"{HERE}.Results", args={"results": results})
    with pytest.raises(UserError) as found:
        model(torch.randn(2, 4), {}, torch.zeros(2))
    assert said in found.value.what
    assert found.value.where.startswith("Results.loss (") and "test_custom.py:" in found.value.where


class MeanHead(GPTHead):
    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return hidden.mean()  # type: ignore[return-value]


def test_a_head_is_held_to_the_same_contract() -> None:
    model = a_gpt()
    model.head = MeanHead(TINY_GPT)
    materialize(model, torch.device("cpu"), 0, torch.float32)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    for part in (model, model.eval()):
        with pytest.raises(UserError, match="not a sum and a count"):
            part(tokens, {}, tokens)


def test_the_counts_of_all_ranks_must_divide_the_loss() -> None:
    assert step_numbers(0.0, 0.0, 0, 0).loss == 0.0
    assert math.isnan(step_numbers(math.nan, 0.0, 0, 0).loss)  # a divergence, which the training reports
    for total, count in ((2.0, -1.0), (2.0, 0.0)):
        with pytest.raises(UserError, match="the sum of their counts is"):
            step_numbers(total, count, 0, 0)


def criterion() -> nn.Module:
    """A criterion of torch as the attribute ``loss``."""
    module = nn.Bilinear(4, 4, 3)
    module.forward = lambda inputs: inputs[:, :3]  # type: ignore[method-assign, assignment]
    module.loss = nn.CrossEntropyLoss()
    return module


def test_a_criterion_of_torch_returns_a_mean() -> None:
    with pytest.raises(UserError, match="not a sum and a count") as found:
        wrap(f"{HERE}.criterion")(torch.randn(2, 4), {}, torch.tensor([0, 1]))
    assert found.value.where.startswith("CrossEntropyLoss.forward (")


def test_lazy_modules_are_refused_by_name() -> None:
    lazy = nn.Sequential(OrderedDict(inner=nn.LazyLinear(3)))
    with pytest.raises(UserError, match=r"inner.weight of LazyLinear has no shape before the first forward pass"):
        WrappedModel(lazy, "mse")
    lazy(torch.ones(2, 4))
    WrappedModel(lazy, "mse")


class OwnHead(GPTHead):
    """Half the loss of its class, per half a target."""

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(hidden, targets)
        return total / 2, count / 2


def test_a_head_with_another_loss_evaluates_by_it() -> None:
    hidden, targets = torch.randn(2, 5, TINY_GPT.dim), torch.randint(TINY_GPT.vocab_size, (2, 5))
    own, inherited = OwnHead(TINY_GPT), GPTHead(TINY_GPT)
    assert own.own_count and not inherited.own_count
    own.load_state_dict(inherited.state_dict())
    (half, fives, correct), (whole, tens, _) = own.evaluate(hidden, targets), inherited.evaluate(hidden, targets)
    assert (fives.item(), tens.item()) == (5.0, 10)
    assert correct is None, "right targets over half targets would be twice the accuracy"
    torch.testing.assert_close(2 * half, whole)


class SameCountHead(GPTHead):
    """Twice the loss of its class; it counts the targets and says so, as ``Head.own_count`` allows."""

    own_count = False  # type: ignore[assignment]

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(hidden, targets)
        return 2 * total, count


def test_a_head_that_counts_targets_evaluates_by_its_own_loss() -> None:
    hidden, targets = torch.randn(2, 5, TINY_GPT.dim), torch.randint(TINY_GPT.vocab_size, (2, 5))
    head = SameCountHead(TINY_GPT)
    torch.testing.assert_close(head.evaluate(hidden, targets)[0], head.loss(hidden, targets)[0])


def test_models_with_the_three_parts_come_on_meta() -> None:
    for target, args in ((f"{HERE}.OwnModel", {"n_layers": 2}), (f"{HERE}.a_gpt", {})):
        model = build_model(CustomModelConfig(_target_=target, args=args), seed=0)
        assert isinstance(model, GPT)
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("no_such_package.Thing", {}, "no module no_such_package"),
        ("torch.nn.NoSuchThing", {}, "has no NoSuchThing"),
        ("torch.nn.no_such.Thing", {}, "has no no_such.Thing"),
        ("justaword", {}, "cannot be imported"),
        ("torch.pi", {}, "cannot be called"),
        ("torch.nn.Linear", {"no_such": 3}, "no_such"),
        ("builtins.dict", {}, "returned dict"),
    ],
)
def test_what_cannot_be_built_is_said(target: str, args: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_model(CustomModelConfig(_target_=target, args=args), seed=0)


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.refuse(width)

    def refuse(self, width: int) -> None:
        raise ValueError(f"{width} is too wide")


def test_an_error_of_a_constructor_names_its_line() -> None:
    with pytest.raises(UserError, match="4 is too wide") as error:
        build_model(CustomModelConfig(_target_=f"{HERE}.Narrow", args={"width": 4}), seed=0)
    line = Narrow.refuse.__code__.co_firstlineno + 1
    assert error.value.where == f"model.args, test_custom.py:{line}"
    assert error.value.fix.startswith(f"correct test_custom.py:{line}, or change model.args")


class Unfinished(Model):
    def __init__(self, **parts: object) -> None:
        super().__init__()
        complete = ResidualNet()
        self.stem, self.layers, self.head = complete.stem, complete.layers, complete.head
        for name, part in parts.items():
            delattr(self, name)
            setattr(self, name, PARTS[str(part)])


PARTS = {"list": nn.ModuleList([nn.Linear(3, 3)]), "one": nn.ModuleDict({"1": nn.Linear(3, 3)}), "none": None}
PARTS |= {"linear": nn.Linear(3, 3), "no loss": Head()}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "hidden_shape is not implemented; init_parameter is not implemented; init_buffers is not implemented"),
        ({"layers": "list"}, 'layers is a ModuleList, but must be an nn.ModuleDict with the keys "0", "1"'),
        ({"layers": "one"}, "the keys of layers are 1, but"),
        ({"head": "linear"}, "head is a Linear, but must derive from"),
        ({"head": "no loss"}, "the head Head does not implement loss"),
        ({"stem": "none"}, "stem is not set"),
    ],
)
def test_a_model_that_is_not_complete_is_an_error_of_the_build(parts: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        build_model(CustomModelConfig(_target_=f"{HERE}.Unfinished", args=parts), seed=0)
    assert "examples/own_pipeline_model.py" in error.value.fix


class Unannounced(ResidualNet):
    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        return (len(inputs),)


class Shrinking(ResidualNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers["2"] = nn.Flatten(0)  # type: ignore[assignment]
        self.layers["2"].forward = lambda hidden, context: hidden[:, :3]  # type: ignore[method-assign]


def test_hidden_states_have_the_announced_shape() -> None:
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for target, words in (("Unannounced", r"returns \(2,\)"), ("Shrinking", r"layers.2 .* of shape \(2, 3\)")):
        model = build_model(CustomModelConfig(_target_=f"{HERE}.{target}"), seed=0)
        assert isinstance(model, Model)
        with pytest.raises(UserError, match=words):
            check_hidden_shape(model, images, {})
    for complete in (build_model(CustomModelConfig(_target_=f"{HERE}.a_gpt"), 0), build_model(TINY_GPT, 0)):
        assert isinstance(complete, Model)
        check_hidden_shape(complete, torch.zeros(2, 7, dtype=torch.int64), {})
        assert complete.training


def test_wrong_losses_and_shapes_are_said() -> None:
    with pytest.raises(UserError, match="do not match targets"):
        wrap(f"{HERE}.two_layers")(torch.randn(2, 4), {}, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(UserError, match="but the targets have shape"):
        wrap(f"{HERE}.two_layers", loss="mse")(torch.randn(2, 4), {}, torch.zeros(2))


@pytest.mark.parametrize(("outputs", "told"), [(None, "returned None"), ((torch.ones(2, 3),), "returned a tuple")])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_outputs_that_are_no_tensor_are_refused(outputs: object, told: str, loss: str) -> None:
    module = two_layers()
    module.forward = lambda inputs: outputs  # type: ignore[method-assign]
    with pytest.raises(UserError, match=f"Sequential.forward {told}, but the losses of model.loss need a tensor"):
        WrappedModel(module, loss)(torch.randn(2, 4), {}, torch.zeros(2, dtype=torch.int64))


def test_resnet18_has_the_usual_size() -> None:
    target = "hpc_train.models.resnet.resnet18"
    model = wrap(target)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_220_132
    assert has_batch_statistics(model) and not has_batch_statistics(wrap(f"{HERE}.two_layers"))
    assert model.eval()(torch.randn(2, 3, 32, 32), {}).shape == (2, 100)
    synchronized = wrap(target, sync_batch_norm=True, args={"width": 8})
    assert list(synchronized.state_dict()) == list(resnet18(width=8).state_dict())


def warnings_of_a_build(rank: int, world_size: int, synchronized: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap("hpc_train.models.resnet.resnet18", sync_batch_norm=synchronized, args={"width": 8})
    return [str(warning.message) for warning in caught]


def test_several_ranks_with_statistics_of_their_own_warn_once() -> None:
    first, second = run_on_world(2, warnings_of_a_build, False)
    assert len(first) == 1 and "batch statistics" in first[0] and not second
    assert run_on_world(2, warnings_of_a_build, True) == [[], []]
    assert run_on_world(1, warnings_of_a_build, False) == [[]]


def synchronized_norm(rank: int, world_size: int, values: list[list[list[float]]]) -> dict[str, list[float]]:
    """The output, gradients and running statistics of this rank's share of the batch."""
    norm = convert(nn.BatchNorm1d(3))
    assert isinstance(norm, SyncBatchNorm)
    norm.group = dist.group.WORLD
    inputs = torch.tensor(values).chunk(world_size)[rank].requires_grad_()
    outputs = norm(inputs)
    (outputs * torch.arange(outputs.numel()).view_as(outputs).add(100 * rank)).sum().backward()
    assert inputs.grad is not None
    found = {"outputs": outputs, "gradient": inputs.grad, "mean": norm.running_mean, "variance": norm.running_var}
    return {name: value.flatten().tolist() for name, value in found.items()}  # type: ignore[union-attr]


def test_synchronized_batch_norm_equals_one_process_with_the_whole_batch() -> None:
    values = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(4))
    ranks = run_ranks(2, synchronized_norm, values.tolist())
    norm = nn.BatchNorm1d(3)
    inputs = values.clone().requires_grad_()
    outputs = norm(inputs)
    weights = torch.arange(45.0).view(3, 3, 5)
    (outputs * torch.cat((weights, weights + 100))).sum().backward()
    assert inputs.grad is not None
    for name, whole in (("outputs", outputs), ("gradient", inputs.grad)):
        joined = torch.tensor(ranks[0][name] + ranks[1][name])
        torch.testing.assert_close(joined, whole.flatten(), rtol=1e-4, atol=1e-4)
    for name, running in (("mean", norm.running_mean), ("variance", norm.running_var)):
        torch.testing.assert_close(torch.tensor(ranks[0][name]), running)
        assert ranks[0][name] == ranks[1][name]


def test_complex_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_no_complex(model)
    model[1].register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UserError, match=r"1\.phases is complex"):
        check_no_complex(model)
