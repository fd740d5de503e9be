"""What an asynchronous save copies to host memory, where, and how training and the writing thread wait for it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hpc_train.checkpoint import host_copies as copying
from hpc_train.checkpoint import manager as managing
from hpc_train.checkpoint.host_copies import HostArena, HostCopies, SideStream
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.checkpoint.writer import write_tensors
from hpc_train.config.compose import typed
from hpc_train.config.schema import CheckpointConfig
from hpc_train.config.values import saves_asynchronously
from hpc_train.machine.kernel_counters import NODE, FreeMemory
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.test_tied import TIED_MODEL
from tests.checkpoint.training import Training, join_again, make_manager
from tests.config.composing import compose
from tests.ranks import run_on_world, run_ranks
from tests.train.runs import TINY, frozen

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def copied_bytes(manager: CheckpointManager) -> int:
    return manager._copies.bytes_of(managing.saved_state(manager.engine, manager.optimizer, manager.mesh))


def save_replicas(rank: int, world_size: int, path: str) -> list[int]:
    manager = make_manager(rank, world_size, path)
    copied = []
    for step in (1, 2, 3):
        for parameter in manager.engine.named_parameters().values():
            parameter.detach().fill_(step)
        manager.save(step, {})
        copied.append(copied_bytes(manager))
    manager.wait()
    manager._copies.forget_plan()
    manager.save(4, {})
    copied.append(copied_bytes(manager))
    assert manager._copies._arena.size >= copied[-1] > 0
    manager.save(5, {}, final=True)
    assert manager._copies._arena.size == 0
    return copied


def test_replicas_copy_together_one_state_from_the_first_save_on(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.asynchronous=true", "checkpoint.keep=9")
    first, second = run_on_world(2, save_replicas, str(run.path))
    assert len({*first}) == len({*second}) == 1
    for step in (1, 2, 3):
        found = read_tensors(run.checkpoints / f"step-{step:08d}")
        assert all(torch.equal(t, torch.full_like(t, step)) for name, t in found.items() if name.startswith("model."))
    assert min(first[0], second[0]) > 0
    assert first[0] + second[0] == sum(-(-tensor.nbytes // 64) * 64 for tensor in found.values())


def planned(copies: HostCopies, state: dict[str, Tensor]) -> HostCopies:
    copies.plan(state, state)
    return copies


def test_host_copies_are_reused() -> None:
    state = {"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64), "empty": torch.ones(0, 3)}
    copies = planned(HostCopies(CPU), state)
    first = copies.take(state).tensors
    state["a"].fill_(5)
    assert first["a"].tolist() == [1] * 4
    second = copies.take(state).tensors
    assert second["a"].tolist() == [5] * 4 and second["empty"].shape == (0, 3)
    assert [second[name].data_ptr() for name in "ab"] == [first[name].data_ptr() for name in "ab"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_has_a_storage_of_its_own(dtype: torch.dtype) -> None:
    state = {"x": torch.ones(3, 5, dtype=dtype).t(), "scalar": torch.tensor(1).to(dtype)}
    found = planned(HostCopies(CPU), state).take(state).tensors
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # DCP copies others before it writes


class FakeCuda:
    """Records the calls of the CUDA runtime and of streams and events."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = code

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device, threading.current_thread().name))

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def Stream(self, device: torch.device) -> str:
        return f"side of {device}"

    def current_stream(self, device: torch.device) -> str:
        return f"current of {device}"

    def Event(self, blocking: bool) -> FakeEvent:
        return FakeEvent(self.calls)

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.calls.append(("enter", stream))
        yield
        self.calls.append(("leave", stream))


class FakeEvent:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls
        self.stream = ""

    def record(self, stream: str) -> None:
        self.stream = stream
        self._calls.append(("record", stream))

    def wait(self, stream: str) -> None:
        self._calls.append((stream, "waits for", self.stream))

    def synchronize(self) -> None:
        self._calls.append(("host waits for", self.stream))


def test_the_arena_is_pinned_once_in_its_exact_size_and_given_back() -> None:
    cuda = FakeCuda()
    arena = HostArena(GPU, cuda)
    size = (5 << 20) + 1  # an allocator of powers of two takes 8 MiB
    for _ in range(2):
        arena.reserve(size)
        arena.pin()
    assert arena.size == (5 << 20) + 4096
    arena.release()
    assert [call[0] for call in cuda.calls] == ["register", "unregister"]
    assert cuda.calls[0][2] == (5 << 20) + 4096 and cuda.calls[0][1] == cuda.calls[1][1]
    assert arena.size == 0


def test_a_thread_pins_the_arena_before_the_first_save() -> None:
    cuda = FakeCuda()
    arena = HostArena(GPU, cuda)
    arena.begin_pin()
    assert not cuda.calls, "nothing is reserved"
    arena.reserve(5000)
    for _ in range(2):
        arena.begin_pin()
    arena.pin()
    assert [call[0] for call in cuda.calls] == ["set_device", "register"]
    assert cuda.calls[0][1:] == (GPU, "pin-checkpoint-memory")
    arena.begin_pin()
    arena.reserve(3 << 20)  # the memory is not given back while a thread pins it
    arena.begin_pin()
    arena.release()
    assert [call[0] for call in cuda.calls[2:]] == ["unregister", "set_device", "register", "unregister"]


def test_an_arena_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena(GPU, FakeCuda(code=801))
    cleared: list[HostArena] = []

    def clear(self: HostArena) -> None:
        cleared.append(self)

    monkeypatch.setattr(HostArena, "_clear_error", clear)
    arena.reserve(10)
    with pytest.warns(UserWarning, match="cannot pin 4096 bytes of host memory for checkpoints .CUDA error 801"):
        arena.pin()
    arena.pin()  # does not ask again
    assert cleared == [arena]
    assert arena.view(0, torch.ones(2)).fill_(7).tolist() == [7, 7]
    arena.release()


def test_copies_run_on_a_side_stream_and_only_changes_wait_for_them() -> None:
    cuda = FakeCuda()
    state = {"buffer": torch.ones(2), "weight": torch.ones(3)}
    copies = planned(HostCopies(GPU, SideStream(GPU, cuda), HostArena(GPU, cuda)), state)
    snapshot = copies.take(state, until_update={"weight"})
    side, current = "side of cuda:3", "current of cuda:3"
    copy = [("record", current), (side, "waits for", current), ("enter", side), ("leave", side), ("record", side)]
    assert cuda.calls[1:] == [*copy, (current, "waits for", side), *copy]
    assert snapshot.hold is not None and snapshot.complete is not None
    snapshot.hold()
    snapshot.complete()
    assert cuda.calls[12:] == [(current, "waits for", side), ("host waits for", side)]
    copies.release()


class SlowStream(SideStream):
    """Runs copies only when something waits for them on the device; a thread of the host waits until then."""

    def __init__(self) -> None:
        self.pending: list[Copy] = []

    def copy(self, copies: Iterable[Sequence[Tensor]]) -> Any:
        self.pending.append(Copy(copies))
        return self.pending[-1]

    def hold(self, copied: Any) -> None:
        copied.run()


class Copy:
    def __init__(self, copies: Iterable[Sequence[Tensor]]) -> None:
        self._copies = list(copies)
        self._done = threading.Event()

    @torch.no_grad()
    def run(self) -> None:
        for target, source in self._copies:
            target.copy_(source)
        self._copies.clear()
        self._done.set()

    @property
    def runs(self) -> bool:
        return not self._done.is_set()

    def synchronize(self) -> None:
        assert self._done.wait(60)


def test_tensors_that_a_forward_changes_are_copied_first() -> None:
    state = {"buffer": torch.ones(2), "weight": torch.ones(3)}
    snapshot = planned(HostCopies(CPU, SlowStream()), state).take(state, until_update={"weight"})
    state["buffer"].fill_(2)
    assert snapshot.hold is not None
    snapshot.hold()
    state["weight"].fill_(2)
    assert [tensor.tolist() for tensor in snapshot.tensors.values()] == [[1, 1], [1, 1, 1]]


def save_before_a_step(rank: int, world_size: int, path: str) -> None:
    run = RunDirectory(Path(path))
    config = load(run)
    training = Training.of(run, config, join_again(config, rank, world_size))
    slow = SlowStream()
    training.manager._copies = HostCopies(CPU, slow)
    training.steps(0, 1)
    assert training.engine.named_buffers()  # which a forward changes
    expected = {name: tensor.clone() for name, tensor in training.state().items()}
    training.manager.save(1, {})
    training.steps(1, 2)
    for copy in slow.pending:  # too late for those that nothing has waited for
        copy.run()
    training.manager.wait()
    found = read_tensors(run.checkpoints / "step-00000001")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    changed = training.state()
    assert not all(torch.equal(found[name], changed[name]) for name in found)


def test_the_optimizer_waits_for_the_copies(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    overrides = [override for override in TINY if not override.startswith("model.")]
    freeze(typed(compose([*overrides, *TIED_MODEL, "+strategy=single", "checkpoint.asynchronous=true"])), run)
    run_on_world(1, save_before_a_step, str(run.path))


def fail_a_save(rank: int, world_size: int, path: str) -> tuple[bool, bool]:
    """Returns whether copies run when an asynchronous save has begun, and when it has failed without a directory."""
    run = RunDirectory(Path(path))
    config = load(run)
    training = Training.of(run, config, join_again(config, rank, world_size))
    slow = SlowStream()
    manager = training.manager
    manager._copies = HostCopies(CPU, slow)
    training.steps(0, 1)

    def begin(self: CheckpointStore, step: int, attempt: int) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch.object(CheckpointStore, "begin", begin):
        manager.save(1, {})
        begun = any(copy.runs for copy in slow.pending)
        gpu = threading.Timer(0.5, lambda: [copy.run() for copy in slow.pending])
        gpu.start()
        manager.wait()
    ended = any(copy.runs for copy in slow.pending)
    gpu.join()
    return begun, ended


def test_no_copy_runs_when_a_save_has_failed(tmp_path: Path) -> None:
    """It would overwrite what the next save puts into the arena."""
    run = frozen(tmp_path / "run", "+strategy=single", "checkpoint.asynchronous=true")
    assert run_on_world(1, fail_a_save, str(run.path)) == [(True, False)]


def save_with_a_late_rank(rank: int, world_size: int, path: str) -> None:
    run = RunDirectory(Path(path))
    config = load(run)
    mesh = replace(join_again(config, rank, world_size), timeout=timedelta(seconds=1))
    manager = Training.of(run, config, mesh).manager
    write = manager._writer.write

    def late(*args: Any) -> Any:
        time.sleep(2 * rank)
        return write(*args)

    manager._writer.write = late  # type: ignore[method-assign]
    manager.save(1, {})
    manager.wait()


@pytest.mark.long_form(6)
def test_a_rank_that_writes_slowly_does_not_end_the_training(tmp_path: Path) -> None:
    """The others wait for it longer than for a collective of the training."""
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.asynchronous=true")
    run_ranks(2, save_with_a_late_rank, str(run.path))
    assert (run.checkpoints / "step-00000001").is_dir()


class ThreadRecord(list[tuple[Any, ...]]):
    """Keeps the calls of the threads of saves only."""

    def append(self, call: tuple[Any, ...]) -> None:
        if threading.current_thread().name.startswith("checkpoint"):
            super().append(call)


def save_on_a_gpu(rank: int, world_size: int, path: str) -> tuple[list[tuple[Any, ...]], str]:
    """Saves twice as on a GPU, from tensors on the host.

    Returns the CUDA calls of the first save's thread, and what was printed.
    """
    run = RunDirectory(Path(path))
    config = load(run)
    training = Training.of(run, config, join_again(config, rank, world_size))
    cuda = FakeCuda()
    cuda.calls = calls = ThreadRecord()
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: calls.append(("device", str(device)))  # type: ignore[assignment]
    for name in ("cudart", "Stream", "current_stream", "Event", "stream"):
        setattr(torch.cuda, name, getattr(cuda, name))
    mesh = replace(training.mesh, device=GPU)
    manager = CheckpointManager(training.manager.run_store, training.engine, training.optimizer, mesh, 1)
    with redirect_stdout(StringIO()) as printed:
        manager.save(1, {})
        manager.wait()
        found = list(calls)
        manager.save(2, {})
        manager.wait()
    assert manager._saved_step == 2 and 0 < manager.copied_s <= (manager.durable_s or 0)
    return found, printed.getvalue()


def test_the_thread_of_a_save_sets_its_device_and_uses_no_stream(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single")
    ((calls, printed),) = run_ranks(1, save_on_a_gpu, str(run.path))
    assert calls == [("device", str(GPU)), ("host waits for", f"side of {GPU}")]
    assert printed.startswith("checkpoint.asynchronous=auto: training continues during saves; rank 0 copies 136 KiB")
    assert printed.count("\n") == 1


def save_with_little_memory(rank: int, world_size: int, path: str) -> list[bool]:
    """Saves while the last rank's node is short of memory, twice, and then when it is not."""
    manager = make_manager(rank, world_size, path)
    short = rank == world_size - 1
    free = [2500 if short else 1 << 40] * 2 + [1 << 40, 0]  # at the end the arena is there
    background = []
    for step, size in enumerate(free, start=1):
        with mock.patch.object(copying, "free_memory", lambda size=size: FreeMemory(size, NODE)):
            manager.save(step, {})
        background.append(manager._thread is not None)
    manager.wait()
    return background


def test_a_save_is_synchronous_where_host_memory_is_short(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero2", "checkpoint.asynchronous=true", "checkpoint.keep=9")
    assert run_on_world(2, save_with_little_memory, str(run.path)) == [[False, False, True, True]] * 2
    (warning,) = [event for event in run.read_events() if event["event"] == "warning"]
    assert warning["step"] == 1
    assert "checkpoint.asynchronous=true: checkpoints are saved synchronously" in warning["message"]
    assert "on the node of rank 1, each of 2 ranks needs" in warning["message"]
    assert "2.44 KiB are free within the node's memory. Request more memory (cluster.mem)" in warning["message"]
    assert [event["step"] for event in run.read_events() if event["event"] == "checkpoint_saved"] == [1, 2, 3, 4]


def test_a_synchronous_save_from_a_device_needs_host_memory_for_one_tensor(tmp_path: Path) -> None:
    state = {f"model.{n}": torch.full((100 * n,), float(n)) for n in range(1, 30)}
    arena = HostArena(CPU)
    streamed = HostCopies(CPU, arena=arena).streamed(state)
    writing = tmp_path / "step"
    writing.mkdir()
    write_tensors(state, writing, None, lambda size, count: None, streamed)
    found = read_tensors(writing)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert arena.size == -(-4 * 2900 // 4096) * 4096
    assert streamed["model.1"].data_ptr() == streamed["model.2"].data_ptr()


@pytest.mark.parametrize(
    ("asked", "on_gpus", "expected"),
    [("auto", True, True), ("auto", False, False), (True, False, True), (False, True, False)],
)
def test_auto_saves_asynchronously_on_gpus(asked: bool | str, on_gpus: bool, expected: bool) -> None:
    assert saves_asynchronously(CheckpointConfig(asynchronous=asked), on_gpus) is expected
