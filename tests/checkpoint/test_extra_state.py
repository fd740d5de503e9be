"""State of modules that is neither a parameter nor a buffer: saved, restored under any layout, exported, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.own_pipeline_model import Classifier, Layer, ResidualNet, Stem
from hpc_train.checkpoint.extra_state import digests
from hpc_train.checkpoint.listing import choose
from hpc_train.checkpoint.objects import ObjectState
from hpc_train.checkpoint.restoring import load_weights, open_weights
from hpc_train.checkpoint.transfer import export
from hpc_train.config.compose import typed
from hpc_train.data.build import build_dataset
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.parallel.build import build_engine
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from hpc_train.train.rehearsal import rehearse
from tests.checkpoint.made import quiet_bar
from tests.checkpoint.training import Training, join_again
from tests.config.composing import compose
from tests.ranks import run_on_world
from tests.train.runs import TINY


class CountingLayer(Layer):
    """Keeps a nested value with tensors by ``get_extra_state``."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen, self.largest = 0, torch.zeros(3, device="cpu")

    def get_extra_state(self) -> Any:
        return {
            "seen": self.seen,
            4: [("largest", self.largest), None, math.inf],
            "empty": torch.empty(0, device="cpu"),
        }

    def set_extra_state(self, state: Any) -> None:
        self.seen, ((_, self.largest), _, limit) = state["seen"], state[4]
        assert limit == math.inf and isinstance(state[4][0], tuple) and state["empty"].shape == (0,)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor] = {}) -> Tensor:
        if self.training:
            self.seen += len(hidden)
            self.largest = self.largest + 0.5
        return super().forward(hidden, context)


class HookedStem(Stem):
    """Keeps a number by hooks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0
        self.register_state_dict_post_hook(save_calls)
        self.register_load_state_dict_pre_hook(load_calls)

    def forward(self, inputs: Tensor, context: Mapping[str, Tensor] = {}) -> Tensor:
        self.calls += self.training
        return super().forward(inputs, context)


def save_calls(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}calls"] = module.calls


def load_calls(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    module.calls = state.pop(f"{prefix}calls", module.calls)


class AnnealedClassifier(Classifier):
    """Keeps a temperature, on which its loss depends, by an override."""

    temperature = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        self.temperature *= 1.25 if self.training else 1.0
        return super().forward(hidden) * self.temperature

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}temperature"] = torch.tensor(self.temperature)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        if f"{prefix}temperature" in state:
            self.temperature = float(state.pop(f"{prefix}temperature"))
        super()._load_from_state_dict(state, prefix, *others)


class Net(ResidualNet):
    """Has state in each part, and some of its own, which every pipeline stage has."""

    def __init__(self) -> None:
        super().__init__(4, 8, 4, 5)
        self.stem, self.head = HookedStem(48, 8), AnnealedClassifier(8, 5)
        self.layers = nn.ModuleDict({str(index): CountingLayer(8, 8) for index in range(4)})
        self.version = torch.tensor([3], device="cpu")

    def get_extra_state(self) -> Tensor:
        return self.version

    def set_extra_state(self, state: Tensor) -> None:
        self.version = state


class Plain(nn.Module):
    """The same kinds of state in a module without parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.age = HookedStem(48, 8), AnnealedClassifier(8, 5), 0
        self.layers = nn.ModuleList([CountingLayer(8, 8) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        self.age += self.training
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def get_extra_state(self) -> int:
        return self.age

    def set_extra_state(self, state: int) -> None:
        self.age = state


IMAGES = ["data=synthetic", "data.task=images", "data.image_size=4", "data.n_classes=5", "data.samples=64"]
KEPT = [each for each in TINY if not each.startswith(("model.", "data"))]


def frozen(path: Path, target: type[nn.Module], *overrides: str) -> RunDirectory:
    run = RunDirectory(path)
    model = ["model=custom", f"model._target_={__name__}.{target.__name__}"]
    freeze(typed(compose([*KEPT, *IMAGES, *model, "checkpoint.asynchronous=false", *overrides])), run)
    return run


def resumed(rank: int, world_size: int, first: Path, then: list[Path]) -> list[Any]:
    """Trains two steps in ``first``, and continues its checkpoint under the layout of each run of ``then``.

    Returns the digests before the save, and for each run those after the restore, and the loss of the next step.
    """
    run = RunDirectory(first)
    mesh = join_again(load(run), rank, world_size)
    training = Training.of(run, load(run), mesh)
    training.manager.restore()
    training.steps(0, 2)
    training.manager.save(2, {"tokens": 1}, final=True)
    found: list[Any] = [(digests(training.engine.parts), training.steps(2, 3))]
    for path in then:
        config = load(RunDirectory(path))
        again = Training.of(run, config, join_again(config, rank, world_size))
        assert again.manager.restore() is not None
        found.append((digests(again.engine.parts), again.steps(2, 3)))
        engine = build_engine(config, again.mesh)
        load_weights(open_weights(choose(run, None), again.mesh), engine, again.mesh)
        assert digests(engine.parts) == found[-1][0], "an evaluation has it too"
    return found


LAYOUTS = {
    "dp": ["+strategy=dp"],
    "zero3": ["+strategy=zero3", "train.activation_checkpointing=full"],
    "pp": ["+strategy=pp", "strategy.schedule=1f1b"],
    "stages": ["+strategy=pp", "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=2"],
}


@pytest.mark.parametrize(
    ("target", "first", "others"),
    [
        pytest.param(Net, "dp", ["zero3", "pp", "stages"], id="replicas", marks=pytest.mark.long_form(10)),
        pytest.param(Net, "stages", ["dp", "pp"], id="stages", marks=pytest.mark.long_form(10)),
        pytest.param(Plain, "zero3", ["dp"], id="plain"),
    ],
)
def test_it_is_restored_under_every_layout(
    target: type[nn.Module], first: str, others: list[str], tmp_path: Path
) -> None:
    run = frozen(tmp_path / "first", target, *LAYOUTS[first])
    then = [frozen(tmp_path / name, target, *LAYOUTS[name]).path for name in [first, *others]]
    ranks = run_on_world(2, resumed, run.path, then)
    before: dict[str, str] = {}
    for (mine, _), *_ in ranks:
        before |= mine
    assert {key.rpartition(".")[2] for key in before} == {"_extra_state", "calls", "temperature"}
    for name, *of_ranks in zip([first, *others], *(found[1:] for found in ranks), strict=True):
        after: dict[str, str] = {}
        for mine, _ in of_ranks:
            after |= mine
        assert after == before, name
    assert all(found[1][1] == found[0][1] for found in ranks), "the loss goes on, which depends on it"
    export(run, None, tmp_path / "model.pt", None, None, quiet_bar)
    module = target()
    module.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert digests([module]) == before
    assert run.read_events() == [] or all(event["event"] != "warning" for event in run.read_events())


def rehearsed(rank: int, world_size: int, path: Path) -> Any:
    """Rehearses a step after two steps; returns whether the state is the same, and the attributes that are named."""
    config = load(RunDirectory(path))
    training = Training.of(RunDirectory(path), config, join_again(config, rank, world_size))
    training.steps(0, 2)
    before = digests(training.engine.parts)
    data = build_dataset(config.data, "train", config.train.seed)
    batch = example_micro_batch(data, training.mesh.layout, training.mesh.device)
    found = rehearse(config, training.mesh, training.engine, batch)
    return digests(training.engine.parts) == before, found.attributes, found.not_compared


def test_the_check_before_the_first_step_leaves_it_and_knows_it(tmp_path: Path) -> None:
    """The plain copy has it too: the gradients depend on it."""
    run = frozen(tmp_path / "run", Plain, "+strategy=zero3")
    assert run_on_world(2, rehearsed, run.path) == [(True, [], None)] * 2


class ByRank(Plain):
    """Its state depends on the samples that a rank has seen."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.layers[0].largest = inputs.detach().flatten()[:3].clone()
        return outputs


class Refused(Plain):
    """A checkpoint cannot hold a set."""

    def get_extra_state(self) -> Any:
        return {"names": {"a"}}


class Renaming(Plain):
    """Saves a parameter under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(rename)


def rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}old.weight"] = state.pop(f"{prefix}stem.weight")


def refusal(rank: int, world_size: int, path: Path) -> str:
    config = load(RunDirectory(path))
    training = Training.of(RunDirectory(path), config, join_again(config, rank, world_size))
    with pytest.raises(UserError) as error:
        training.manager.restore()
    return str(error.value)


def test_what_cannot_be_restored_is_said_before_step_1(tmp_path: Path) -> None:
    run = frozen(tmp_path / "refused", Refused, "+strategy=dp")
    for message in run_on_world(2, refusal, run.path):
        assert "the state of the model, _extra_state, has a set at state.names" in message
    run = frozen(tmp_path / "renaming", Renaming, "+strategy=zero2")
    run_on_world(2, resumed, run.path, [run.path])
    said = [event["message"] for event in run.read_events() if event["event"] == "warning"]
    assert "Renaming renames tensors in its state dict (stem.weight as old.weight)" in said[0]
    run = frozen(tmp_path / "by_rank", ByRank, "+strategy=dp")
    (first, *_), (second, *_) = run_on_world(2, resumed, run.path, [run.path])
    assert first[0] != second[0]
    said = [event["message"] for event in run.read_events() if event["event"] == "warning"]
    assert len(said) == 1 and "layers.0._extra_state of the model differs between ranks" in said[0]


def test_a_loop_of_the_user_keeps_it_too() -> None:
    state = ObjectState("context.resume", "run.fork=NEW")
    state.register({"net": Plain(), "other": nn.Linear(2, 2)})
    assert {key.partition(".")[0] for key in digests(state.parts)} == {"net"} and len(digests(state.parts)) == 5
