"""The collectives of one training step of each strategy, in order, as files in ``traces``.

They show which bytes a strategy sends through which group, and what a change of the code does to them. Without stages,
one process of the backend ``fake`` stands for rank 0 of eight on two nodes. DDP and pipelines need what other ranks
send, so rank 0 of four on two nodes is recorded, and of a pipeline also the last. ``HPC_TRAIN_WRITE_TRACES=1`` writes
the files anew.
"""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.fsdp import choose_communication
from hpc_train.parallel.mesh import Mesh, join_mesh
from tests.config.composing import config_of
from tests.parallel.oracle import SEPARATES, kept_mesh
from tests.ranks import run_on_world, run_ranks

FOLDER = Path(__file__).parent / "traces"
NODES = 2
SEQUENCE = 16
FAKE = {  # the arguments of each strategy
    "allreduce": ["strategy=dp", "strategy.data_parallel=allreduce"],
    "zero1": ["strategy=zero1"],
    "zero2": ["strategy=zero2"],
    "zero3": ["strategy=zero3"],
    "zero3_tied": ["strategy=zero3", "model.tied_embeddings=true"],
    "zero3_bf16": ["strategy=zero3", "strategy.compression=bf16"],
    "hsdp": ["strategy=hsdp"],
    "tp": ["strategy=tp"],
    "cp": ["strategy=cp"],
}
if SEPARATES:
    FAKE["zero3_separate"] = ["strategy=zero3", "strategy.comm=separate"]
COMMUNICATING = {
    "dp": ["strategy=dp"],
    "pp": ["strategy=pp"],
    "model_parallel": ["strategy=model_parallel"],
    "hybrid": ["strategy=hybrid"],
    "hybrid_zero2": ["strategy=hybrid", "strategy.data_parallel=zero2"],
    "hybrid3d": ["strategy=hybrid3d"],
}
REDUCTIONS = {0: "sum", 1: "avg", 3: "min", 4: "max", 8: "premul_sum"}  # torch's enumeration


def config_for(arguments: list[str], micro: int | str) -> Config:
    sizes = ["n_layers=4", "dim=32", "n_heads=8", "n_kv_heads=8", "ffn_dim=64", "vocab_size=256"]
    data = ["data.vocab_size=256", f"data.sequence_length={SEQUENCE}", "batch.global_size=16"]
    model = ["model=gpt_tiny", *(f"model.{size}" for size in sizes), "precision=bf16"]
    return config_of(*model, *data, f"batch.micro_size={micro}", *arguments)


class Recorder(TorchDispatchMode):
    """Records the collectives of a block: name, group, operation, dtype, and bytes of the larger of input and
    output."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        names = {group.group_name: axis for axis, group in mesh.groups.items()}
        names |= {group.group_name: f"link to stage {place}" for place, group in mesh.links.items()}
        world = dist.group.WORLD
        assert world is not None
        self._names = names | {world.group_name: "world", mesh.control.group_name: "control"}
        self.lines: list[str] = []
        self._phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional") and not re.match("_?wait|_?wrap", func._opname):
            phase = "backward:" if torch._C._current_graph_task_id() >= 0 else "forward:"
            if phase != self._phase:
                self.lines.append(phase)
                self._phase = phase
            self.lines.append(self._line(func._opname, tree_leaves((*args, *kwargs.values()))))
        return func(*args, **kwargs)

    def _line(self, name: str, values: list[Any]) -> str:
        words = [re.sub("_base|_into_tensor|_tensor", "", name.strip("_")).replace("allgather", "all_gather")]
        for value in values:
            if isinstance(value, str):
                words.append(self._names.get(value, value))
            elif isinstance(value, torch.ScriptObject) and value._has_method("op"):
                words.append(REDUCTIONS.get(value.op(), "other"))
            elif isinstance(value, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(value)
                words.append(self._names.get(group.group_name, group.group_desc))
        tensors = [value for value in values if isinstance(value, Tensor)]
        largest = max(tensor.nbytes for tensor in tensors)
        return " ".join([*words, str(tensors[0].dtype).removeprefix("torch."), f"{largest:,} B"])


def trace(config: Config, mesh: Mesh) -> list[str]:
    """Returns the collectives of the second step of this rank. Equal ones that follow each other are one line."""
    layout = mesh.layout
    engine = build_engine(config, mesh)
    tokens = torch.zeros(layout.micro_size, SEQUENCE, dtype=torch.int64)
    batch = StepBatch((Batch(tokens, tokens),) * layout.micro_batches, 1000)
    engine.train_step(0, batch)
    with Recorder(mesh) as recorder:
        engine.train_step(1, batch)
        engine.clip_grad_norm_(1.0)
    counted = [(line, len([*same])) for line, same in groupby(recorder.lines)]
    return [f"{count} x {line}" if count > 1 else line for line, count in counted]


def fake_traces(_: int, __: int, configs: dict[str, Config]) -> dict[str, list[str]]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    new_group = dist.new_group
    dist.new_group = cast(Any, lambda *args, **given: new_group(*args, **(given | {"backend": "fake"})))
    layouts = {name: validate(config, NODES, 4) for name, config in configs.items()}
    return {name: trace(configs[name], join_mesh(layouts[name], 0, torch.device("cpu"))) for name in configs}


def traces(rank: int, world_size: int, configs: dict[str, Config]) -> dict[str, list[str]]:
    layouts = {name: validate(config, NODES, world_size // NODES) for name, config in configs.items()}
    return {name: trace(config, kept_mesh(layouts[name], rank)) for name, config in configs.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    sizes = {name: "auto" if name == "model_parallel" else 4 for name in COMMUNICATING}
    of_ranks = run_on_world(4, traces, {name: config_for(words, sizes[name]) for name, words in COMMUNICATING.items()})
    both = {name: lines if name == "dp" else [*lines, "the last rank:", *of_ranks[-1][name]]
            for name, lines in of_ranks[0].items()}  # fmt: skip
    return both | run_ranks(1, fake_traces, {name: config_for(words, 1) for name, words in FAKE.items()})[0]


@pytest.mark.parametrize("name", [*FAKE, *COMMUNICATING])
def test_the_collectives_of_a_step(found: dict[str, list[str]], name: str) -> None:
    path = FOLDER / f"{name}.txt"
    text = "".join(f"{line}\n" for line in found[name])
    if os.environ.get("HPC_TRAIN_WRITE_TRACES"):
        path.write_text(text)
    assert path.read_text() == text


def test_an_older_torch_has_no_separate_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_separate_reduce_scatter_group", raising=False)
    with pytest.raises(UserError, match="gathers and scatters on one communicator only"):
        choose_communication(nn.Linear(1, 1), "separate")
