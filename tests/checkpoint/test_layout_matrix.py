"""Layouts that save after two steps, and others that load what they have saved and take two steps more.

The end is that of one process that was never interrupted: parameters, the optimizer's state and the losses. All loads
of a layout happen in the same processes, each into a new engine. The long form loads every layout's checkpoint under
every layout, with tied and with untied weights, and has three dimensions on eight ranks. In the short form each of four
layouts loads that of another one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config, MoEConfig
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import LONG, Progress
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.test_verified import DAMAGES, flip, leave_a_foreign_file
from tests.checkpoint.tiny import LIMIT_S
from tests.checkpoint.training import Training, join_again
from tests.config.composing import compose
from tests.parallel.oracle import error, relative, shard_of, whole
from tests.ranks import run_on_world
from tests.train.runs import TINY

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

TOLERANCE = 1e-10
HALF, END = 2, 4
COMMON = (  # ten samples are no multiple of four ranks, and the third step ends an epoch with the four that are left
    "precision=fp64", "model.dropout=0", "batch.global_size=10", "data.samples=24", f"train.steps={END}",
)  # fmt: skip
KINDS = ("untied", "tied")
EXPERTS = MoEConfig(experts=4, top_k=2, capacity_factor=1.0, balance_loss=0.1, bias_rate=0.01)
REDUCE, TWO_STAGES = "strategy.data_parallel=allreduce", "strategy.stages_per_rank=2"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("+strategy=single",)),
    "dp4": (4, ("+strategy=dp",)),
    "zero3": (4 if LONG else 2, ("+strategy=zero3",)),
    "pp4": (4, ("+strategy=pp",)),
    "pp2-dp2": (4, ("+strategy=hybrid",)),
    "pp2-zero2": (4, ("+strategy=hybrid", "strategy.data_parallel=zero2")),
    "tp2-dp2": (4, ("+strategy=tp", "strategy.tp=2")),
    "interleaved": (2, ("+strategy=pp", "strategy.schedule=interleaved_1f1b", TWO_STAGES)),
    "zero-bubble": (2, ("+strategy=pp", "strategy.schedule=zbv", TWO_STAGES, REDUCE)),
}
LAYOUTS |= (
    {"3d": (8, ("+strategy=hybrid3d",))}
    if LONG
    else {"pp2-tp2": (4, ("+strategy=hybrid", "strategy.dp=1", "strategy.pp=2", "strategy.tp=2"))}
)
MORE = {
    "zero2-of-3": (3, ("+strategy=zero2",)),  # shards of unequal size
    "hsdp": (4, ("+strategy=hsdp", "strategy.shard=2")),
    "cp2": (2, ("+strategy=cp", "strategy.data_parallel=ddp")),
    "cp2-zero3": (4, ("+strategy=cp",)),
    "ring2": (2, ("+strategy=cp", "strategy.context=ring", "strategy.data_parallel=zero1")),
    "ring4": (4, ("+strategy=cp", "strategy.cp=4", "strategy.context=ring")),
    "both4": (4, ("+strategy=cp", "strategy.cp=4", "strategy.context=both", "strategy.data_parallel=ddp")),
    "cp2-pp2": (4, ("+strategy=cp", "strategy.pp=2", "strategy.data_parallel=zero1")),
    "tp2-zero3": (4, ("+strategy=tp", "strategy.data_parallel=zero3")),
}
DIVIDED = {  # whose ranks divide the experts or the sequences
    "ep4": (4, ("+strategy=dp", "strategy.ep=4")),
    "ep2-zero1": (4, ("+strategy=zero1", "strategy.ep=2")),
    "ep2-zero3": (4, ("+strategy=zero3", "strategy.ep=2")),
    "ep2-hsdp": (4, ("+strategy=hsdp", "strategy.shard=2", "strategy.ep=2")),
    "ep2-pp2": (4, ("+strategy=hybrid", REDUCE, "strategy.ep=2")),
    "ep2-pp2-zero2": (4, ("+strategy=hybrid", "strategy.data_parallel=zero2", "strategy.ep=2")),
    "tp2-ep4-zero3": (4, ("+strategy=tp", "strategy.tp=2", "strategy.data_parallel=zero3", "strategy.ep=4")),
    "tp2-pp2-ep2": (4, ("+strategy=hybrid", "strategy.dp=1", "strategy.pp=2", "strategy.tp=2", "strategy.ep=2")),
    "cp2-ep2-zero3": (4, ("+strategy=cp", "strategy.ep=2")),
}
ALL = LAYOUTS | MORE | DIVIDED
EXPERTS_SHORT = (("single", "zero3"), ("ep2-pp2", "tp2-ep4-zero3"))  # the layouts that save and load experts
TEN = [*LAYOUTS]
SHORT = ["single", "zero3", "interleaved", "cp2"]  # each loads what the one before has saved


def cases(target: str) -> list[tuple[str, str]]:
    """Whose checkpoints ``target`` loads, each tied, untied or both."""
    if not LONG:
        at = SHORT.index(target)
        return [(SHORT[at - 1], KINDS[at % 2])]
    if target in MORE:
        return [(TEN[-1], "tied")]
    return [(source, kind) for source in TEN for kind in KINDS] + [
        (name, "tied") for name in MORE if target == "single"
    ]


def config_of(layout: str, kind: str) -> Config:
    config = _composed(layout)
    moe = EXPERTS if kind == "experts" else MoEConfig()
    return replace(config, model=replace(config.model, tied_embeddings=kind == "tied", moe=moe))


@cache
def _composed(layout: str) -> Config:
    return typed(compose([*TINY, *COMMON, *ALL[layout][1]]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds LAYOUT/tied and LAYOUT/untied, as far as a test has loaded them, each with a checkpoint of step 2; and that
    of step 4 of a single process in ``whole``.
    """
    return tmp_path_factory.mktemp("layouts")


def save(folder: Path, name: str, kind: str) -> None:
    if not (folder / name / kind).exists():
        ranks = ALL[name][0]
        run_on_world(ranks, train_and_save, str(folder), name, {kind: config_of(name, kind)}, timeout=LIMIT_S)


def train_and_save(rank: int, world_size: int, folder: str, name: str, configs: dict[str, Config]) -> None:
    for kind, config in configs.items():
        mesh = join_again(config, rank, world_size)
        training = Training.of(RunDirectory(Path(folder, name, kind)), config, mesh)
        training.steps(0, HALF)
        training.manager.save(HALF, {})
        training.manager.close(lambda: False)
        if name == "single":
            training = Training.of(RunDirectory(Path(folder, "whole", kind)), config, mesh)
            losses = training.steps(0, END)
            training.manager.save(END, {"losses": losses[HALF:]})
            training.manager.close(lambda: False)


@pytest.mark.parametrize(
    "target",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long_form(30 if name in MORE else 250))
        for name in LAYOUTS | MORE
    ],
)
def test_every_layout_goes_on_with_what_other_layouts_have_saved(folder: Path, target: str) -> None:
    progress = Progress.of("layouts")
    if not progress.open([target]):
        pytest.skip("it has passed with this code")
    for source, kind in cases(target):
        save(folder, "single", kind)
        save(folder, source, kind)
        copy_checkpoint(folder, source, kind, target)
    configs = {kind: config_of(target, kind) for kind in KINDS}
    ranks = (LAYOUTS | MORE)[target][0]
    results = run_on_world(ranks, load_all, str(folder), target, cases(target), configs, timeout=LIMIT_S)
    for case in cases(target):
        found = [result[case] for result in results]
        assert max(max(errors.values()) for errors in found) < TOLERANCE, f"{target} from {case}: {found}"
    progress.passed(target)


def copy_checkpoint(folder: Path, source: str, kind: str, target: str) -> None:
    loads = folder / "loads" / target / source / kind
    shutil.copytree(folder / source / kind / "checkpoints", loads / "checkpoints")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *EXPERTS_SHORT,
        *(
            pytest.param(source, target, marks=pytest.mark.long_form(12))
            for source, target in product(("single", *DIVIDED), repeat=2)
            if (source, target) not in EXPERTS_SHORT
        ),
    ],
)
def test_experts_go_on_and_their_biases_have_the_same_bits(folder: Path, source: str, target: str) -> None:
    save(folder, "single", "experts")
    save(folder, source, "experts")
    copy_checkpoint(folder, source, "experts", target)
    configs = {"experts": config_of(target, "experts")}
    case = (source, "experts")
    for result in run_on_world(ALL[target][0], load_all, str(folder), target, [case], configs, timeout=LIMIT_S):
        errors = result[case]
        assert errors["expert_bias"] == 0.0
        assert max(errors.values()) < (1e-300 if source == target == "single" else TOLERANCE)


def load_damaged(rank: int, world_size: int, folder: str, saving: Config, loading: Config, seeds: range) -> list[str]:
    """Loads checkpoints of divided experts under another layout, after damage to the newest file by file, and describes
    each load that is neither refused nor falls back to the step before with one line."""
    template, run = (RunDirectory(Path(folder, name)) for name in ("template", "run"))
    training = Training.of(template, saving, join_again(saving, rank, world_size))
    for step in (1, 2):
        training.steps(step - 1, step)
        training.manager.save(step, {})
    training.manager.close(lambda: False)
    paths = {step: template.checkpoints / f"step-{step:08d}" for step in (1, 2)}
    places = dcp.FileSystemReader(paths[2]).read_metadata().storage_data
    of_biases = sorted({place.relative_path for index, place in places.items() if index.fqn.endswith("expert_bias")})
    training = Training.of(run, loading, join_again(loading, rank, world_size))
    shards: dict[int, dict[str, Tensor]] = {0: {}}  # of this rank, by step
    for step, path in paths.items():
        if rank == 0:
            shutil.copytree(path, run.checkpoints / path.name)
        dist.barrier()
        training.manager.restore()
        saved = read_tensors(path)
        assert all(torch.equal(whole(tensor), saved[name]) for name, tensor in training.state().items())
        shards[step] = {name: shard_of(tensor) for name, tensor in training.state().items()}
    wrong = []
    for seed in seeds:
        choose = random.Random(seed)
        damage = DAMAGES[seed % len(DAMAGES)]
        refuses = seed % 10 == 9  # since both checkpoints are damaged
        before = len(run.read_events())
        dist.barrier()
        if rank == 0:
            shutil.rmtree(run.checkpoints)
            shutil.copytree(template.checkpoints, run.checkpoints)
            older, newer = (run.checkpoints / path.name for path in paths.values())
            names = of_biases if seed % 3 == 0 else sorted(path.name for path in newer.iterdir())
            damage(newer / choose.choice(names), older, choose)
            if refuses:
                flip(older / choose.choice(of_biases), newer, choose)
        dist.barrier()
        for tensor in training.state().values():
            tensor.detach().fill_(torch.nan)
        message = ""
        step = 0
        try:
            restored = training.manager.restore()
            assert restored is not None
            step = restored.step
        except UserError as error:
            message = str(error)
        lines = len(run.read_events()) - before
        dist.barrier()
        harmless = damage is leave_a_foreign_file and (step, lines) == (2, 0)
        state = training.state()
        same = all(torch.equal(shard_of(state[name]), shard) for name, shard in shards[step].items())
        as_expected = harmless or (step, lines) == ((0, 2) if refuses else (1, 1))
        if not as_expected or not same or refuses != ("all checkpoints" in message):
            wrong.append(f"seed {seed}, {damage.__name__}: step {step}, {lines} lines, same numbers: {same}, {message}")
    return wrong


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 101), marks=pytest.mark.long_form(100))], ids=len)
def test_no_damaged_checkpoint_of_divided_experts_is_loaded(tmp_path: Path, seeds: range) -> None:
    configs = (config_of(name, "experts") for name in ("ep2-pp2", "ep2-zero3"))
    assert run_on_world(4, load_damaged, str(tmp_path), *configs, seeds, timeout=LIMIT_S) == [[]] * 4


Errors = dict[str, float]  # of each kind of tensor, and of the losses: the largest relative one


def load_all(
    rank: int, world_size: int, folder: str, target: str, cases: list[tuple[str, str]], configs: dict[str, Config]
) -> dict[tuple[str, str], Errors]:
    found = {}
    for kind in dict.fromkeys(kind for _, kind in cases):
        end = Checkpoint(END, Path(folder, "whole", kind, "checkpoints", f"step-{END:08d}"))
        expected, wanted = read_tensors(end.path), end.manifest().extra["losses"]
        mesh = join_again(configs[kind], rank, world_size)
        for source in (source for source, its in cases if its == kind):
            run = RunDirectory(Path(folder, "loads", target, source, kind))
            training = Training.resumed(run, configs[kind], mesh)
            training.manager.close(lambda: False)
            found[source, kind] = distance(training, training.steps(HALF, END), expected, wanted)
    return found


def distance(training: Training, losses: list[float], expected: Mapping[str, Tensor], wanted: list[float]) -> Errors:
    """Collective; ranks that hold other names measure others, and together they hold all."""
    state = {name: whole(tensor) for name, tensor in training.state().items()}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [*state])
    assert {name for held in names for name in held} == expected.keys()
    errors = {"loss": relative(tuple(losses), tuple(wanted))}
    for kind in {kind_of(name) for name in state}:
        errors[kind] = error(
            {name: value.double() for name, value in state.items() if kind_of(name) == kind},
            {name: value.double() for name, value in expected.items() if kind_of(name) == kind},
        )
    return errors


def kind_of(name: str) -> str:
    """``model``, ``expert_bias``, or the key of the optimizer's state."""
    return "model" if name.startswith("model.") and not name.endswith("expert_bias") else name.rpartition(".")[2]
