"""Optimizers of a user under every strategy, compared with one process, and their state in checkpoints."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from examples.own_optimizer import Lion
from hpc_train.checkpoint.state import TensorShape, shapes
from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import OF_RUN, check_compatibility
from hpc_train.layout.optimizers import check_optimizers, describe_values, own_targets, values_per_parameter
from hpc_train.layout.user_code import check_tried_optimizer
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelize import materialize
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.train.optimizers import held, probe
from hpc_train.train.optimizers.learning_rate import learning_rates
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.optimizers.own import check_elementwise
from tests.checkpoint.training import Training, join_again
from tests.parallel.cells import Cell
from tests.parallel.oracle import MAX_NORM, error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world
from tests.train.own_optimizers import Preconditioned
from tests.train.runs import frozen

OWN, LION = "tests.train.own_optimizers", "examples.own_optimizer.Lion"
STEPS, LR = 3, 1e-2
MIXED = OptimConfig(  # an optimizer for each kind of matrix, so that one training shows them all
    _target_="torch.optim.RMSprop",
    args={"alpha": 0.9},
    lr=LR,
    groups={
        "muon": {"match": r"wq|wk|ffn\.w1", "_target_": "torch.optim.Muon", "args": {"ns_steps": 3}},
        "lion": {"match": r"wv|ffn_norm", "_target_": LION, "elementwise": True, "lr_factor": 0.5},
        "adafactor": {"match": r"wo|attention_norm|head\.norm", "_target_": "torch.optim.Adafactor"},
        "sides": {"match": r"ffn\.w2", "_target_": f"{OWN}.Preconditioned", "weight_decay": 0.2},
        "factor": {"match": "stem", "lr_factor": 2.0, "args": {"alpha": 0.5}},
    },
)


LARGE_BATCH = "hpc_train.train.optimizers.large_batch"
LARS = r"wq|ffn\.w2|attention_norm"
LARGE = OptimConfig(  # of large batches: the norms of the step are those of whole parameters
    _target_=f"{LARGE_BATCH}.Lamb", lr=LR, groups={"lars": {"match": LARS, "_target_": f"{LARGE_BATCH}.Lars"}}
)


class ByFormula(torch.optim.Optimizer):
    """LARS and LAMB of one parameter as in the articles, in fp64."""

    def __init__(self, parameter: nn.Parameter, decay: float, is_lars: bool) -> None:
        super().__init__([parameter], {})
        self.parameter = parameter
        self.decay = decay
        self.is_lars = is_lars
        self.first = torch.zeros(parameter.shape, dtype=torch.float64)
        self.second = self.first
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weight = self.parameter
        gradient = weight.grad
        assert gradient is not None
        self.updates += 1
        if self.is_lars:
            update = gradient + self.decay * weight
            size = gradient.norm() + self.decay * weight.norm()
        else:
            self.first = 0.9 * self.first + 0.1 * gradient
            self.second = 0.999 * self.second + 0.001 * gradient**2
            root = (self.second / (1 - 0.999**self.updates)).sqrt() + 1e-6
            update = self.first / (1 - 0.9**self.updates) / root + self.decay * weight
            size = update.norm()
        if weight.ndim >= 2:
            update = update * (1e-3 if self.is_lars else 1) * weight.norm() / size
        if self.is_lars:
            self.first = update = 0.9 * self.first + update
        weight -= LR * update


def expected(name: str, parameter: nn.Parameter, config: OptimConfig = MIXED) -> torch.optim.Optimizer:
    """The optimizer of one parameter, by hand."""
    decay = 0.1 if parameter.ndim >= 2 else 0.0
    one = [parameter]
    if config is LARGE:
        return ByFormula(parameter, decay, re.search(LARS, name) is not None)
    if any(part in name for part in ("wq", "wk", "ffn.w1")):
        return torch.optim.Muon(one, lr=LR, weight_decay=decay, ns_steps=3)
    if "wv" in name or "ffn_norm" in name:
        return Lion(one, lr=LR / 2, weight_decay=decay)
    if "wo" in name or "attention_norm" in name or "head.norm" in name:
        return torch.optim.Adafactor(one, lr=LR, weight_decay=decay)
    if "ffn.w2" in name:
        return Preconditioned(one, lr=LR, weight_decay=0.2)
    in_stem = "stem" in name
    return torch.optim.RMSprop(one, 2 * LR if in_stem else LR, 0.5 if in_stem else 0.9, weight_decay=decay)


def train_plainly(cell: Cell, of: OptimConfig) -> Mapping[str, Tensor]:
    config = cell.config()
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, torch.device("cpu"), config.train.seed, torch.float64)
    optimizers = [expected(name, parameter, of) for name, parameter in model.named_parameters()]
    for step in range(STEPS):
        model.zero_grad()
        inputs, targets = global_batch(cell, step)
        total, count = model(inputs, {}, targets)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(rank: int, world_size: int, cells: list[Cell], large: bool = False) -> list[float]:
    """Every second cell updates groups of a few parameters."""
    errors = []
    for number, cell in enumerate(cells):
        with mock.patch.object(held, "MOST_ELEMENTS", (2**26, 300)[number % 2]):
            errors.append(compare_one(rank, cell, LARGE if large else MIXED))
    return errors


def compare_one(rank: int, cell: Cell, of: OptimConfig) -> float:
    """Before each step, it takes one that is not finite."""
    mesh, config = mesh_of(cell, rank), cell.config()
    engine = build_engine(config, mesh)
    parameters = engine.named_parameters()
    optimizer = Optimizer(of, parameters, config.strategy.offload == "optimizer")
    for step in range(STEPS):
        engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        finite = engine.clip_grad_norm_(MAX_NORM).isfinite()
        gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
        for name, gradient in gradients.items():
            parameters[name].grad = torch.full_like(gradient, torch.nan)
        optimizer.step(LR, torch.tensor(False))
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        optimizer.step(LR, finite)
    return error({name: whole(value.detach()) for name, value in parameters.items()}, train_plainly(cell, of))


SPLITS: list[dict[str, Any]] = [
    {"dp": 4, "data_parallel": "ddp"},
    {"dp": 4, "data_parallel": "zero3", "shard": 2},
    {"dp": 2, "pp": 2, "data_parallel": "zero1"},
    {"dp": 2, "tp": 2, "data_parallel": "zero3"},
    {"pp": 2, "tp": 2, "offload": "optimizer"},
    {"dp": 4, "data_parallel": "zero2", "offload": "optimizer"},
    *({"dp": 4, "data_parallel": kind} for kind in ("allreduce", "zero1", "zero3")),
    *({"dp": 2, "tp": 2, "data_parallel": kind} for kind in ("allreduce", "zero1", "zero2")),
    *({"dp": 2, "pp": 2, "data_parallel": kind} for kind in ("ddp", "zero2", "zero3")),
]


@pytest.mark.long_form(25, every_share=True)
def test_every_optimizer_trains_as_in_one_process_under_every_strategy() -> None:
    batch = {"micro_batches": 2}
    cells = [Cell(4, "gpt-tied" if "pp" in split else "gpt", strategy=split, batch=batch) for split in SPLITS]
    ranks = run_on_world(4, compare, cells, timeout=300)
    worst = {str(cell): max(errors) for cell, errors in zip(cells, zip(*ranks, strict=True), strict=True)}
    assert not {cell: error for cell, error in worst.items() if not error < 1e-10}
    single = [Cell(1, strategy={}), Cell(1, strategy={"offload": "optimizer"})]
    assert max(run_on_world(1, compare, single)[0]) < 1e-10


@pytest.mark.parametrize("form", [{"dp": 2, "tp": 2, "data_parallel": "zero3"}, "every"], ids=["short", "every"])
@pytest.mark.long_form(25, cases=["every"])
def test_lars_and_lamb_train_by_their_formulas_under_every_strategy(form: Any) -> None:
    """The counts of steps are in fp32, so the bias corrections of LAMB have its precision."""
    splits = SPLITS if form == "every" else [form]
    cells = [Cell(4, "gpt-tied" if "pp" in split else "gpt", strategy=split) for split in splits]
    ranks = run_on_world(4, compare, cells, True, timeout=300)
    assert max(map(max, ranks)) < 1e-6


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives from others in collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._opname == "alltoall_base_":
            output, _, group, received, _ = args[:5]
            row = output.nbytes // max(1, sum(received))
            self.bytes += output.nbytes - row * received[dist.ProcessGroup.unbox(group).rank()]
        elif function.namespace in ("c10d", "_c10d_functional") and "wait" not in function._opname:
            raise AssertionError(f"{function} is not counted")
        return function(*args, **(kwargs or {}))


def receive(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[int, int]]:
    """Returns the bytes that each optimizer step receives, and those of the parameters that are updated whole."""
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        parameters = engine.named_parameters()
        optimizer = Optimizer(MIXED, parameters)
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        with Received() as received:
            optimizer.step(LR, torch.tensor(True))
        names = [name for name in parameters if re.search(r"wq|wk|ffn\.w1|wo|attention_norm|head\.norm|ffn\.w2", name)]
        size = sum(parameters[name].nbytes for name in names if isinstance(parameters[name], DTensor))
        found.append((received.bytes, size))
    return found


def test_a_parameter_travels_to_its_owner_and_back_only() -> None:
    """Over n ranks, (n - 1) / n of the gradients and of the values. Replicas of shards repeat this."""
    cells = [
        Cell(4, strategy={"dp": 4, "data_parallel": kind, **shard})
        for kind, shard in (("zero3", {}), ("zero1", {"shard": 2}))
    ]
    for ranks, shards in zip(zip(*run_on_world(4, receive, cells), strict=True), (4, 2), strict=True):
        size = ranks[0][1]
        assert sum(received for received, _ in ranks) == (4 // shards) * 2 * size * (shards - 1) / shards
        assert max(received for received, _ in ranks) < 2.5 * size / shards


def test_the_host_updates_a_group_while_the_next_one_arrives() -> None:
    """With offload, it waits for the gradients of one group only."""
    log: list[str] = []

    class Copy(held.HostCopy):
        def __init__(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
            super().__init__(hosts, tensors)
            self.name = "x".join(map(str, tensors[0].shape))
            log.append(f"copy {self.name}")

        def wait(self) -> None:
            super().wait()
            log.append(f"wait {self.name}")

    with mock.patch.multiple(held, HostCopy=Copy, MOST_ELEMENTS=8):
        parameters = {str(size): nn.Parameter(torch.ones(size)) for size in (5, 6, 7)}
        optimizer = Optimizer(OptimConfig(), parameters, offload=True)
        optimizer._parts[0].inner.register_step_post_hook(lambda *_: log.append("update"))  # type: ignore[union-attr]
        for value in parameters.values():
            value.grad = torch.ones_like(value)
        optimizer.step(0.1, torch.tensor(True))
    steps = [entry for entry in log if entry not in ("copy ", "wait ")]  # of the flag
    assert steps == [
        "copy 5", "copy 6", "wait 5", "update", "copy 7", "wait 6", "update", "wait 7", "update",
    ]  # fmt: skip


SAVED = [
    "+strategy=zero3 strategy.shard=2",
    "+strategy=hybrid strategy.dp=1 strategy.pp=2 strategy.tp=2",
    "+strategy=dp",
]


def configured(path: Path, *overrides: str) -> RunDirectory:
    return frozen(path, *overrides, "precision=fp64", "train.steps=8", "optim.clip_norm=0.05", "model.dropout=0")


def go_on(rank: int, world_size: int, paths: list[str]) -> list[float]:
    """Takes a step under each layout in turn, from the checkpoint of the one before; the last one never stops."""
    found: list[Mapping[str, Tensor]] = []
    for number, path in enumerate(paths):
        training = opened(path, rank, world_size)
        if number and path != paths[-1]:
            training.manager.run_store.run = RunDirectory(Path(paths[0]))
            assert training.manager.restore() is not None
        training.steps(*((0, len(paths) - 1) if path == paths[-1] else (number, number + 1)))
        training.manager.run_store.run = RunDirectory(Path(paths[0]))
        if path != paths[-1]:
            training.manager.save(number + 1, {"tokens": 0, "loss_scale": None}, final=True)
        found = [
            *found[-1:],
            {name: whole(value.detach()) for name, value in training.engine.named_parameters().items()},
        ]
    return [float((found[0][name] - value).abs().max()) for name, value in found[1].items() if name in found[0]]


def opened(path: str, rank: int, world_size: int) -> Training:
    run = RunDirectory(Path(path))
    config = replace(load(run), optim=replace(MIXED, schedule="constant", warmup_steps=0))
    return Training.of(run, config, join_again(config, rank, world_size))


@pytest.mark.long_form(9)
def test_a_run_goes_on_under_other_layouts(tmp_path: Path) -> None:
    paths = [str(configured(tmp_path / str(n), *over.split()).path) for n, over in enumerate([*SAVED, SAVED[2]])]
    differences = [each for rank in run_on_world(4, go_on, paths) for each in rank]
    assert differences
    assert max(differences) < 1e-10


MATRICES = {"layers.0.weight": (4, 3), "layers.0.bias": (4,), "norm.weight": (4,)}


def small(**settings: Any) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    parameters = {name: nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in MATRICES.items()}
    return Optimizer(OptimConfig(lr=0.1, **settings), parameters), parameters


def update(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], finite: bool = True, lr: float = 0.1) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel(), dtype=torch.float64).view_as(parameter)
    optimizer.step(lr, torch.tensor(finite))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    optimizer, parameters = small(_target_=LION)
    update(optimizer, parameters, finite=False)
    assert all((parameter == 1).all() for parameter in parameters.values())
    assert not any(optimizer.named_state().values())


def test_weight_decay_is_that_of_matrices_or_of_the_group() -> None:
    groups = {"norms": {"match": "norm", "weight_decay": 0.5, "lr_factor": 2.0}}
    optimizer, parameters = small(_target_=LION, weight_decay=0.2, groups=groups)
    update(optimizer, parameters)
    centers = {name: float((value.detach().min() + value.detach().max()) / 2) for name, value in parameters.items()}
    assert centers == pytest.approx({"layers.0.weight": 0.98, "layers.0.bias": 1.0, "norm.weight": 0.9})


def test_groups_of_a_built_in_optimizer() -> None:
    groups = {"slow": {"match": "bias", "lr_factor": 0.0}, "own": {"match": "norm", "args": {"eps": 1.0}}}
    optimizer, parameters = small(weight_decay=0.0, groups=groups)
    plain, others = small(weight_decay=0.0)
    for _ in range(3):
        update(optimizer, parameters)
        update(plain, others)
    assert (parameters["layers.0.bias"] == 1).all()
    assert torch.equal(parameters["layers.0.weight"], others["layers.0.weight"])
    assert not torch.equal(parameters["norm.weight"], others["norm.weight"])


def test_a_factory_gets_lr_and_its_own_arguments() -> None:
    optimizer, parameters = small(_target_=f"{OWN}.lion", args={"beta": 0.5})
    update(optimizer, parameters, lr=0.25)
    assert float(parameters["norm.weight"].detach().max()) == 1.25


def test_state_keeps_its_names_in_a_checkpoint_and_its_python_values() -> None:
    optimizer, parameters = small(_target_=f"{OWN}.Preconditioned")
    update(optimizer, parameters)
    state = optimizer.named_state()
    assert [*state["layers.0.weight"]] == [
        f"Preconditioned.{key}" for key in ("count:int", "unused:none", "sides[0]", "sides[1]")
    ]
    assert [*state["norm.weight"]] == [f"Preconditioned.{key}" for key in ("count:int", "unused:none", "sides:list")]
    stored = shapes(training_names(state)) | {"optim.norm.weight.exp_avg": TensorShape((4,), torch.float64)}
    other, copies = small(_target_=f"{OWN}.Preconditioned")
    assert set(other.expect(stored)) == set(training_names(state)), "not the state of AdamW"
    for name, tensors in other.named_state().items():
        for key, tensor in tensors.items():
            tensor.copy_(state[name][key])
        copies[name].data.copy_(parameters[name])
    other.loaded()
    for one, values in ((optimizer, parameters), (other, copies)):
        update(one, values)
    assert all(torch.equal(copies[name], parameters[name]) for name in MATRICES)


def test_the_state_of_torchao_in_8_bits_is_that_of_a_checkpoint() -> None:
    sizes = {"layers.0.weight": (64, 64), "norm.weight": (4,)}
    config = OptimConfig(name="custom", _target_="torchao.optim.AdamW8bit", lr=0.1)

    def build() -> tuple[Optimizer, dict[str, nn.Parameter]]:
        torch.manual_seed(0)
        parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in sizes.items()}
        return Optimizer(config, parameters), parameters

    def take_step(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        for parameter in parameters.values():
            parameter.grad = torch.sin(parameter.detach())
        optimizer.step(0.1, torch.tensor(True))

    with mock.patch("torch.compile", lambda function, **_: function):  # the compiler takes a minute
        optimizer, parameters = build()
        for _ in range(2):
            take_step(optimizer, parameters)
        state = optimizer.named_state()
        assert "AdamW8bit.exp_avg@codes" in state["layers.0.weight"]
        assert "AdamW8bit.exp_avg" in state["norm.weight"], "torchao keeps small tensors in fp32"
        other, copies = build()
        other.expect(shapes(training_names(state)))
        for name, tensors in other.named_state().items():
            for key, tensor in tensors.items():
                tensor.copy_(state[name][key])
            copies[name].data.copy_(parameters[name])
        other.loaded()
        for one, values in ((optimizer, parameters), (other, copies)):
            take_step(one, values)
    assert all(torch.equal(copies[name], parameters[name]) for name in sizes)


def training_names(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"optim.{name}.{key}": tensor for name, tensors in state.items() for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_target_": f"{OWN}.CountsInGroup"}, "stores count of group 0, count of group 1"),
        ({"_target_": f"{OWN}.WarmsUpByItself"}, "stores _warm in its"),
        ({"_target_": f"{OWN}.CountsInTensor"}, "stores t of group 0, t of group 1"),
        ({"_target_": f"{OWN}.RemembersNorms"}, "stores norms in its"),
        ({"_target_": f"{OWN}.KeepsText"}, "stores 'note' for a parameter, which is a str"),
        ({"_target_": f"{OWN}.NeedsClosure"}, "calls a closure"),
        ({"_target_": f"{OWN}.not_an_optimizer"}, "returned list, not a torch.optim.Optimizer"),
        ({"_target_": f"{OWN}.Missing"}, "has no Missing"),
        ({"_target_": LION, "args": {"beta": 1}}, "Lion has no parameter beta"),
        ({"_target_": "torch.optim.Muon"}, "Muon only supports 2D parameters"),
        ({"groups": {"a": {"match": "norm", "args": {"beta": 1}}}}, "adamw has no parameter beta"),
        ({"_target_": f"{OWN}.Preconditioned", "elementwise": True}, "updates a matrix differently from its halves"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value.values())),
)
def test_what_cannot_be_used_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        for target in own_targets(OptimConfig(**settings)):
            check_elementwise(target)
        optimizer = small(**settings)
        for _ in range(2):
            update(*optimizer)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"_target_": "nope.Lion"}, "optim._target_"),
        ({"_target_": f"{OWN}.Lino"}, "optim._target_"),
        ({"_target_": LION, "args": {"beta": 1}}, "optim.args.beta"),
        ({"_target_": LION, "args": {"lr": 1}}, "optim.args.lr"),
        ({"name": "custom"}, "optim._target_"),
        ({"_target_": "torch.optim.SparseAdam"}, "optim._target_"),
        ({"args": {"beta": 1}}, "optim.args"),
        ({"groups": {"a": {"lr_factor": 1.0}}}, "optim.groups.a.match"),
        ({"groups": {"a": {"match": "["}}}, "optim.groups.a.match"),
        ({"groups": {"a": {"match": "b", "lr_factr": 1}}}, "optim.groups.a.lr_factr"),
        ({"groups": {"a": {"match": "b", "lr_factor": -1}}}, "optim.groups.a"),
        ({"groups": {"a": {"match": "b", "elementwise": True}}}, "optim.groups.a.elementwise"),
        ({"schedule": "cosin"}, "optim.schedule"),
        ({"schedule": f"{OWN}.missing"}, "optim.schedule"),
        ({"schedule": {"_target_": f"{OWN}.to_zero", "args": {"power": 2}}}, "optim.schedule.args.power"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_found_without_torch(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        check_optimizers(OptimConfig(**settings))
    assert caught.value.where == where


def test_the_trial_before_a_submission_names_the_parameters() -> None:
    model = Cell(1).config().model
    mistaken = {"a": {"match": "norm"}, "b": {"match": r"ffn_norm|\.bias$"}}
    with pytest.raises(UserError, match=r"which matches no parameter that no earlier group has") as caught:
        probe.check(model, OptimConfig(groups=mistaken), 10)
    assert "layers.*.attention.wq.weight" in caught.value.fix
    with pytest.raises(UserError, match="which is a str"):
        probe.check(model, OptimConfig(_target_=f"{OWN}.KeepsText"), 10)
    probe.check(model, MIXED, 10)


def test_a_mistake_is_printed_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for module, name in ((OWN, "KeepsText"), ("torch.optim", "RMSprop")):
        given = {"model": asdict(Cell(1).config().model), "optim": {"_target_": f"{module}.{name}"}, "steps": 3}
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(given)))
        probe.main()
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["where"] == "optim._target_"
    assert found[1] == {}


@pytest.mark.long_form(8)  # it imports torch in another process
def test_a_login_node_hears_of_a_mistake_from_another_process() -> None:
    config = replace(Cell(1).config(), optim=OptimConfig(_target_=f"{OWN}.KeepsText"))
    with pytest.raises(UserError, match="which is a str"):
        check_tried_optimizer(config)


def test_whole_updates_need_parameters_on_the_device() -> None:
    zero = {"dp": 2, "data_parallel": "zero3", "offload": "all"}
    cell = Cell(2, strategy=zero)
    config, layout = cell.config(), cell.layout()
    for settings in ({"_target_": LION, "elementwise": True}, {"_target_": "torch.optim.RMSprop"}):
        check_compatibility(OF_RUN, replace(config, optim=OptimConfig(**settings)), layout)
    with pytest.raises(UserError, match="offload=all cannot gather"):
        check_compatibility(OF_RUN, replace(config, optim=OptimConfig(_target_=LION)), layout)


def rates(total: int, **settings: Any) -> list[float]:
    rate = learning_rates(OptimConfig(lr=2.0, **settings), 8, total)
    return [rate(step) for step in range(total)]


def test_schedules_of_a_user() -> None:
    assert rates(4, schedule=f"{OWN}.to_zero") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    own = {"_target_": "examples.own_optimizer.inverse_square_root", "args": {"warmup": 1}}
    assert rates(4, schedule=own) == pytest.approx([2.0, 2**0.5, 2 / 3**0.5, 1.0])
    with pytest.raises(UserError, match=r"returned -1\.0"):
        rates(1, schedule=f"{OWN}.negative")


@pytest.mark.filterwarnings("error")
def test_a_scheduler_of_torch_goes_on_where_it_was() -> None:
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 2, "gamma": 0.5}}
    assert rates(5, schedule=schedule) == [2.0, 2.0, 1.0, 1.0, 0.5]
    resumed = learning_rates(OptimConfig(lr=2.0, schedule=schedule), 8, 5)
    assert [resumed(4), resumed(2), resumed(3)] == [0.5, 1.0, 1.0], "after a resume, and after a rollback"
    with pytest.raises(UserError, match="not a scheduler that depends on the step alone"):
        rates(1, schedule="torch.optim.lr_scheduler.ReduceLROnPlateau")


def test_a_scheduler_that_changes_the_momentum_is_refused() -> None:
    schedule: dict[str, Any] = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "args": {"max_lr": 2.0}}
    with pytest.raises(UserError, match="OneCycleLR changes the momentum") as raised:
        rates(5, schedule=schedule)
    assert "cycle_momentum: false" in str(raised.value)
    schedule["args"]["cycle_momentum"] = False
    assert max(rates(5, schedule=schedule)) <= 2.0


def test_the_estimate_says_what_it_assumes() -> None:
    def described(**settings: Any) -> tuple[float, str | None]:
        optim = OptimConfig(**settings)
        return values_per_parameter(optim), describe_values(optim)

    assert described() == (2.0, None)
    assert described(_target_="torch.optim.RMSprop")[0] == 1.0
    assert described(_target_=LION, state_per_parameter=1.0)[0] == 1.0
    assert described(_target_=LION) == (
        2.0,
        f"2 values of optimizer state per parameter, since {LION} is unknown "
        "(optim.state_per_parameter=N states the number)",
    )
