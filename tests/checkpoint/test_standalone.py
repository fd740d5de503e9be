"""``hpc_train.checkpoint.save`` and ``load`` in loops that know nothing else of hpc_train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc_train.checkpoint import Checkpoints, SaveFailed, disk, load, save
from hpc_train.commands.checkpoint import main as checkpoint_command
from hpc_train.errors import UserError
from tests.ranks import run_ranks

SAMPLES = 12  # of a global batch, for 1, 2, 3 and 4 ranks


@dataclass
class Loop:
    """A training loop of a user, with the usual objects."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    progress: dict[str, Any]

    @classmethod
    def of(cls, kind: str) -> Loop:
        """Returns a loop whose model is ``plain``, ``ddp``, ``fsdp2`` or ``hsdp`` (sharded and replicated)."""
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double()
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fsdp2":
            for layer in (model[0], model[2], model):  # type: ignore[index]
                fully_shard(layer)
        elif kind == "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return cls(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), {"samples": 0})

    @property
    def objects(self) -> dict[str, Any]:
        return vars(self)

    def step(self, number: int) -> None:
        batch = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.optimizer.zero_grad()
        self.model(batch.chunk(ranks)[rank]).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.progress["samples"] += SAMPLES

    def state(self) -> dict[str, Any]:
        """Returns all values as lists. Collective."""
        state: dict[str, Any] = {"lr": self.schedule.get_last_lr(), **self.progress}
        for path, parameter in self.model.named_parameters():
            name = path.removeprefix("module.")  # of DDP
            state[name] = whole(parameter)
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name}.{key}"] = whole(value)
        return state


def whole(tensor: Tensor) -> Any:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().tolist()


def go_on(rank: int, ranks: int, folder: str, kind: str, asynchronous: bool = False) -> tuple[int | None, Any, Any]:
    """Loads, trains two steps and saves; returns the step, the state that was loaded and the state that was saved."""
    loop = Loop.of(kind)
    with Checkpoints(folder, asynchronous=asynchronous, **loop.objects) as checkpoints:
        loaded = checkpoints.load()
        step = loaded or 0
        before = loop.state() if loaded else None
        for number in (step + 1, step + 2):
            loop.step(number)
        checkpoints.save(step + 2)
        after = loop.state()
        loop.step(step + 3)  # an asynchronous save has copied the state
    return loaded, before, after


def test_any_layout_loads_any_layout(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "checkpoints")
    oracle = Loop.of("plain")
    saved: Any = None
    layouts = [(2, "ddp"), (3, "fsdp2"), (1, "plain"), (4, "hsdp"), (2, "ddp")]
    for number, (ranks, kind) in enumerate(layouts):
        if kind == "plain":
            results = [go_on(0, 1, folder, kind)]
        else:
            results = run_ranks(ranks, go_on, folder, kind, number % 2 == 1)
        assert {loaded for loaded, _, _ in results} == {2 * number or None}
        assert all(before == saved for _, before, _ in results)
        saved = results[0][2]
        for step in (2 * number + 1, 2 * number + 2):
            oracle.step(step)
        expected = oracle.state()
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]))
    assert sorted(path.name for path in Path(folder).glob("step-*")) == ["step-00000008", "step-00000010"]


def saved_loop(folder: Path, steps: int = 2) -> Loop:
    """Returns a loop on one rank, after a save of each step."""
    loop = Loop.of("plain")
    for step in range(1, steps + 1):
        loop.step(step)
        save(folder, step, **loop.objects)
    return loop


def test_a_part_is_loaded_only_by_request_and_other_objects_are_refused(tmp_path: Path) -> None:
    loop = saved_loop(tmp_path)
    fresh = Loop.of("plain")
    assert load(tmp_path, strict=False, model=fresh.model) == 2
    assert whole(fresh.model[0].weight) == whole(loop.model[0].weight)  # type: ignore[index]
    with pytest.raises(UserError, match="it also has optimizer, progress, schedule, which is not passed"):
        load(tmp_path, model=fresh.model)
    with pytest.raises(UserError, match="it has no weights"):
        load(tmp_path, strict=False, weights=fresh.model)
    wider = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 3)).double()
    with pytest.raises(UserError, match=r"model.model.0.weight: \[10, 6\] float64 in the checkpoint, \[11, 6\]"):
        load(tmp_path, strict=False, model=wider)


def test_steps_only_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = saved_loop(tmp_path)
    save(tmp_path, 2, **loop.objects)  # the usual save after the last step
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="has a checkpoint of step 2, and this program saves step 1"):
        save(tmp_path, 1, **loop.objects)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"model": 3}, "model is a int, which has no state"),
        ({"model": nn.Linear(1, 1, device="meta")}, "model has parameters on the meta device"),
        ({"values": {"when": object()}}, "the state of values has a object at when"),
        ({"optimizer": torch.optim.SGD([torch.ones(1, requires_grad=True)])}, "in no registered module"),
    ],
)
def test_objects_that_cannot_be_saved_are_refused(tmp_path: Path, objects: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        save(tmp_path, 1, **objects)
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_cannot_be_made_is_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailed, match="rank 0: NotADirectoryError"):
        save(tmp_path / "file" / "checkpoints", 1, model=nn.Linear(1, 1))


def test_several_processes_need_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"is not initialized, but WORLD_SIZE is 2"):
        load(tmp_path, model=nn.Linear(1, 1))


def refused(action: Callable[[], object]) -> str:
    with pytest.raises((UserError, SaveFailed)) as caught:
        action()
    return str(caught.value)


def differ(rank: int, ranks: int, folder: str) -> list[str]:
    """Passes objects that are not the same on both ranks; returns the messages."""
    net = nn.Linear(2, 2)
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    return [
        refused(lambda: save(folder, 1, **{f"model{rank}": net})),
        refused(lambda: save(folder, 1, model=net, loader={"position": rank})),
        refused(lambda: save(folder, 1, model=net, generator=generator)),
        refused(lambda: save(folder, 1, model=wrapped)),
    ]


def test_state_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    for names, values, generator, fsdp1 in run_ranks(2, differ, str(tmp_path)):
        assert "the objects differ between ranks: model0" in names or "model.model0" in names
        assert "the values of loader differ between ranks" in values
        assert "the values of generator differ between ranks" in generator
        assert "fully_shard (FSDP2)" in fsdp1
    assert not [*tmp_path.iterdir()]


def test_a_random_generator_continues(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    save(tmp_path, 1, generator=generator)
    expected = torch.rand(5, generator=generator)
    other = torch.Generator()
    assert load(tmp_path, generator=other) == 1
    assert torch.equal(torch.rand(5, generator=other), expected)


def second_save_fails(rank: int, ranks: int, folder: str, asynchronous: bool) -> str:
    """Saves three times, the second time on a disk that is full for rank 1; returns the message of that save."""
    write = disk.write

    def full(file: Any, data: memoryview) -> None:
        if "step-00000002" in file.name and rank == 1:
            raise OSError(28, "No space left on device")
        write(file, data)

    disk.write = full
    loop = Loop.of("fsdp2")
    with Checkpoints(folder, asynchronous=asynchronous, **loop.objects) as checkpoints:
        loop.step(1)
        checkpoints.save(1)
        loop.step(2)
        if asynchronous:
            checkpoints.save(2)
            message = refused(checkpoints.wait)
        else:
            message = refused(lambda: checkpoints.save(2))
        loop.step(3)
        checkpoints.save(3)
    disk.write = write
    return message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_raises_on_all_ranks_and_the_next_one_succeeds(tmp_path: Path, asynchronous: bool) -> None:
    messages = run_ranks(2, second_save_fails, str(tmp_path), asynchronous)
    assert messages == ["rank 1: OSError: [Errno 28] No space left on device"] * 2
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000001", "step-00000003"]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    first = saved_loop(tmp_path, 1).state()
    saved_loop(tmp_path / "other", 2)
    intact = tmp_path / "other" / "step-00000002"
    newest = tmp_path / "step-00000002"
    for file in intact.iterdir():
        shutil.copytree(intact, newest)
        damage(newest / file.name)
        loop = Loop.of("plain")
        assert load(tmp_path, **loop.objects) == 1, file.name
        assert loop.state() == first, file.name
        assert "skipping the damaged checkpoint of step 2 in" in capsys.readouterr().out
        assert not newest.exists()
    damage(tmp_path / "step-00000001" / "manifest.json")
    with pytest.raises(UserError, match=r"all checkpoints of this run are damaged:\n  step 1: ") as caught:
        load(tmp_path, **Loop.of("plain").objects)
    assert caught.value.fix.endswith("or choose another directory to start at step 0")


def other_program(rank: int, ranks: int, folder: str) -> None:
    model = nn.Linear(2, 2)
    step = load(folder, model=model) or 0
    save(folder, step + 1, model=model)


def test_a_program_that_was_replaced_saves_nothing_more(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, 1, model=model)
    run_ranks(1, other_program, str(tmp_path))
    with pytest.raises(UserError, match=r"another program saves to .* now: process \d+ on ") as caught:
        save(tmp_path, 3, model=model)
    path = caught.value.fix.rpartition(" ")[2]
    Path(path).unlink()
    save(tmp_path, 3, model=model)
    assert [path.name for path in sorted(tmp_path.glob("*step*"))] == ["step-00000002", "step-00000003"]


def test_the_command_reads_such_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = saved_loop(tmp_path / "saved")
    assert checkpoint_command(["verify", str(tmp_path / "saved"), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [1, 2]
    assert checkpoint_command(["export", str(tmp_path / "saved"), "--to", str(tmp_path / "model.pt")]) == 0
    exported = torch.load(tmp_path / "model.pt")
    assert exported.keys() == {f"model.{name}" for name in loop.model.state_dict()}


def test_the_package_is_imported_without_torch() -> None:
    script = "import sys, hpc_train.checkpoint.listing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
