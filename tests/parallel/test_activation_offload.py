"""What layers save waits in host memory for the backward pass, each storage once, and changes no gradient."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate
from hpc_train.layout.recomputation import kept_by_layers, node_bytes, offloaded_bytes
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.parallel import activation_offload as offload_module
from hpc_train.parallel.build import build_engine
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.memory import Allocations, PeakMemory, batch_of_eight, gpt_config, norms_of_gpus
from tests.parallel.oracle import check_cells, kept_mesh, mesh_of
from tests.ranks import run_on_world, run_ranks

LAYERS, SEQUENCE, VOCABULARY = 8, 64, 64
TINY = "0.1KiB"  # smaller than the hidden states of the cells


def offloading(world_size: int, model: str = "gpt", checkpointing: str = "none", **strategy: Any) -> Cell:
    train = {"activation_offload": TINY, "activation_checkpointing": checkpointing}
    return Cell(world_size, model, strategy=strategy, batch={"micro_batches": 4}, train=train)


def pipeline(schedule: str, **fields: Any) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "stages_per_rank": SCHEDULES[schedule].stages_per_rank[0]} | fields


@in_two_forms(40)
def test_offload_changes_no_gradient(form: Form, record: Callable[..., None]) -> None:
    models = ("gpt", "vit", "gpt-tied", "gpt-options")
    cells = [offloading(2, models[place % len(models)], dp=2, data_parallel=kind) for place, kind in enumerate(KINDS)]
    cells += [offloading(2, "vit", tp=2)]
    cells += [offloading(2, models[place % 3], **pipeline(name)) for place, name in enumerate(SCHEDULES)]
    cells = [cell for cell in cells if cell.strategy.get("schedule") != "sequential"]
    cells += [offloading(2, checkpointing=mode, dp=2, data_parallel="zero3") for mode in ("full", "ops", "selective")]
    cells += [offloading(2, checkpointing=mode, tp=2) for mode in ("full", "ops")]
    cells += [offloading(2, "gpt-tied", "full", **pipeline(name)) for name in ("1f1b", "zbv")]
    all_of_it = offloading(2, "gpt", "full", dp=2, data_parallel="zero3", offload="all")
    cells += [replace(all_of_it, train=all_of_it.train | {"loss_chunks": 2})]
    record(check_cells(form(cells, "activation_checkpointing")), [])


@pytest.mark.long_form(200)  # minutes of the C++ compiler
def test_offload_goes_with_compiled_layers(record: Callable[..., None]) -> None:
    cells = [offloading(2, checkpointing=mode, dp=2, data_parallel="zero3") for mode in ("none", "full")]
    cells += [offloading(2, "gpt-tied", dp=2), offloading(2, **pipeline("1f1b"))]
    record(check_cells([replace(cell, train=cell.train | {"compile": True}) for cell in cells], timeout=600), [])


def moved_by_compiled_layers(rank: int, world_size: int, config: Config) -> tuple[list[int], int]:
    """The bytes in host memory when the forward passes of a step end, without ``Allocations``, under which torch does
    not compile; and those left after the step.
    """
    host = HostMemory()
    offload_module.host_buffer = host  # type: ignore[assignment]
    mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
    engine: Any = build_engine(config, mesh)
    waiting = list[int]()
    engine.parts[0].head.register_forward_pre_hook(lambda *_: waiting.append(host.alive))
    engine.train_step(0, batch_of_eight(SEQUENCE, VOCABULARY, mesh.layout.micro_batches))
    return waiting, host.alive


@pytest.mark.long_form(60)
def test_compiled_layers_move_what_the_formula_says() -> None:
    config = config_of("none", "fp32")
    config = replace(config, train=replace(config.train, compile=True))
    ((waiting, left),) = run_ranks(1, moved_by_compiled_layers, config, timeout=300)
    stated = offloaded_bytes(config, layout_of(config), 0)
    assert len(set(waiting)) == 1 and abs(waiting[0] / stated - 1) < 0.05 and left == 0


def config_of(mode: str, precision: str, offload: str = "4KiB", **strategy: Any) -> Config:
    sizes = {"n_layers": LAYERS, "dim": 64, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": VOCABULARY}
    train = {"activation_checkpointing": mode, "activation_offload": offload}
    config = gpt_config(sizes, SEQUENCE, {"global_size": 8, "micro_size": 2}, strategy, **train)
    return replace(config, precision=PrecisionConfig(name=precision))


class HostMemory:
    """Makes the buffers in host memory, which ``Allocations`` then takes for memory of the device no longer.

    Attributes:
        made: how many there were.
    """

    def __init__(self) -> None:
        self.made = 0
        self._buffers: list[tuple[StorageWeakRef, int]] = []

    def __call__(self, size: int, pinned: bool) -> Tensor:
        with _disable_current_modes():
            buffer = torch.empty(size, dtype=torch.uint8)
        self.made += 1
        self._buffers.append((StorageWeakRef(buffer.untyped_storage()), size))
        return buffer

    @property
    def alive(self) -> int:
        return sum(size for reference, size in self._buffers if not reference.expired())


def kept_in_step(rank: int, world_size: int, configs: list[Config]) -> list[tuple[int, int, int, int]]:
    """The bytes that wait for the first backward of a step, on the device and in host memory, and those left after it;
    and how many storages each layer has moved.
    """
    found = []
    for config in configs:
        host = HostMemory()
        mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
        engine: Any = build_engine(config, mesh)
        layers = [*engine.parts[0].layers.values()]
        before, after = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        buffers = mock.patch.object(offload_module, "host_buffer", host)
        with buffers, norms_of_gpus(), Allocations() as allocations:
            layers[0].register_forward_pre_hook(partial(_look, allocations, host, before))
            layers[-1].register_forward_hook(partial(_look, allocations, host, after))
            engine.train_step(0, batch_of_eight(SEQUENCE, VOCABULARY, mesh.layout.micro_batches))
        in_flight = mesh.layout.in_flight(mesh.pp_rank)
        device, waiting, made = after[in_flight - 1]
        moving = in_flight * (len(layers) - (mesh.pp_rank == mesh.layout.placement[-1]))
        found.append((device - before[0][0], waiting, host.alive, made // moving))
    return found


def _look(allocations: Allocations, host: HostMemory, seen: list[tuple[int, int, int]], *_: Any) -> None:
    seen.append((allocations.alive, host.alive, host.made))


def layout_of(config: Config) -> Layout:
    ranks = config.strategy.pp
    assert isinstance(ranks, int)
    return resolve_layout(config, 1, ranks)


@pytest.mark.long_form(10)
@pytest.mark.parametrize("strategy", [{}, {"pp": 2}], ids=["single", "1f1b"])
def test_a_real_step_keeps_on_the_device_and_in_host_memory_what_the_formula_says(strategy: dict[str, Any]) -> None:
    configs = [config_of(mode, "fp32", **strategy) for mode in ("none", "full", "ops")]
    layout = layout_of(configs[0])
    found = run_on_world(layout.world_size, kept_in_step, configs)[0]
    hidden = 2 * SEQUENCE * 64 * 4
    for config, (device, waiting, left, _) in zip(configs, found, strict=True):
        mode = config.train.activation_checkpointing
        away = offloaded_bytes(config, layout, 0)
        tables = 2 * SEQUENCE * 32 * 4 if mode == "none" else 0  # of the rotation, which all layers save
        assert waiting == pytest.approx(away, rel=0.05, abs=2 * tables), mode
        outputs = 3 * hidden if layout.pp > 1 else 0  # of the stage, which wait for their gradients
        stays = kept_by_layers(config, layout, 0) - away
        assert device == pytest.approx(stays, rel=0.05, abs=outputs), mode
        assert left == 0, "the memory is freed without a garbage collection"


@pytest.mark.long_form(8)
def test_weights_stay_and_what_layers_share_is_moved_once() -> None:
    """Two norms with their inputs and results, queries, keys, values, attention, and of the feed-forward branch the
    gate before and after its activation, its factor and the product: 12 per layer.
    """
    (found,) = run_on_world(1, kept_in_step, [config_of("none", name) for name in ("fp32", "bf16")])
    assert [moved for *_, moved in found] == [12, 12], "besides the tables of the rotation, two for all layers"


def peaks(rank: int, world_size: int, configs: list[Config]) -> list[int]:
    """The most bytes on the device in a step, besides weights."""
    found = []
    for config in configs:
        mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
        engine = build_engine(config, mesh)
        batch = batch_of_eight(SEQUENCE, VOCABULARY, mesh.layout.micro_batches)
        with mock.patch.object(offload_module, "host_buffer", HostMemory()):
            engine.train_step(0, batch)  # which creates the gradients
            with norms_of_gpus(), PeakMemory() as memory:
                engine.train_step(0, batch)
        found.append(memory.peak)
    return found


@pytest.mark.long_form(8)
def test_the_peak_of_a_step_falls_to_that_of_two_layers() -> None:
    configs = [config_of("none", "fp32", offload) for offload in ("none", "4KiB")]
    ((plain, moved),) = run_on_world(1, peaks, configs)
    before, after = (estimate(config, layout_of(config)) for config in configs)
    assert before is not None and after is not None
    assert plain - moved == pytest.approx(before.total - after.total, rel=0.05)


def test_the_estimate_has_two_layers_on_the_device_and_the_others_in_host_memory() -> None:
    plain, moved = (config_of("none", "fp32", offload) for offload in ("none", "4KiB"))
    layout = layout_of(plain)
    of_layer = kept_by_layers(plain, layout, 0) / LAYERS
    assert offloaded_bytes(moved, layout, 0) == (LAYERS - 1) * of_layer == node_bytes(moved, layout, 1)
    before, after = (estimate(config, layout) for config in (plain, moved))
    assert before is not None and after is not None
    assert before.activations - after.activations == pytest.approx((LAYERS - 2) * of_layer)
    assert offloaded_bytes(config_of("none", "fp32", "1MiB"), layout, 0) == 0, "no tensor is that large"
    assert node_bytes(plain, layout, 1) is None


class LateTransfers(offload_module._Transfers):
    """Copies at the latest moment that a GPU may choose, and notes the memory that is no longer there by then."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gone: list[str] = []
        self.done = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def to_host(self, flat: Tensor) -> Tensor:
        host = torch.full((len(flat),), 255, dtype=torch.uint8)
        self._waiting.append(partial(self._copy, host, weakref.ref(flat), "source"))
        return host

    def to_device(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        flats = [torch.full((len(host),), 255, dtype=torch.uint8) for host in hosts]
        self._waiting += [
            partial(self._copy, host, weakref.ref(flat), "target") for host, flat in zip(hosts, flats, strict=True)
        ]
        return flats

    def mark(self) -> Any:
        return self.done + len(self._waiting)

    def wait_for(self, event: Any) -> None:
        while self.done < event:
            self._waiting.popleft()()
            self.done += 1

    def _copy(self, host: Tensor, on_device: weakref.ref[Tensor], role: str) -> None:
        flat = on_device()
        if flat is None:
            self.gone.append(f"{role} of {len(host)} bytes")
        elif role == "source":
            host.copy_(flat)
        else:
            flat.copy_(host)


def with_late_transfers(rank: int, world_size: int, config: Config) -> tuple[list[str], int, float]:
    """What was gone, the number of copies, and the largest difference of a gradient to those without offload."""
    made = list[LateTransfers]()
    late = mock.patch.object(
        offload_module, "_Transfers", lambda device: made.append(LateTransfers(device)) or made[-1]
    )
    mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
    found = []
    for offload in (config.train.activation_offload, "none"):
        with late:
            engine = build_engine(replace(config, train=replace(config.train, activation_offload=offload)), mesh)
        engine.train_step(0, batch_of_eight(SEQUENCE, VOCABULARY, mesh.layout.micro_batches))
        found.append([parameter.grad for parameter in engine.named_parameters().values()])
    (transfers,) = made
    return (
        transfers.gone,
        transfers.done,
        max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)),
    )


def test_memory_lives_until_a_late_copy_has_used_it() -> None:
    """Several tensors of a layer are views of one storage, which is copied once."""
    ((gone, copies, difference),) = run_on_world(1, with_late_transfers, config_of("none", "fp32"))
    assert gone == [] and difference == 0
    assert copies > 8 * LAYERS


def test_what_offload_does_not_go_with_is_refused() -> None:
    for train, reason in (
        ({"activation_offload": "1MiB", "activation_checkpointing": "1GiB"}, "is a budget for what stays on a device"),
        ({"activation_offload": "all"}, "'all', which is not a size"),
    ):
        with pytest.raises(UserError, match=reason):
            Cell(1, train=train).layout()
    run_on_world(1, without_blocks)


def without_blocks(rank: int, world_size: int) -> None:
    cell = Cell(1, "custom", train={"activation_offload": TINY})
    with pytest.raises(UserError, match="no repeated blocks were found"):
        build_engine(cell.config(), mesh_of(cell, rank))
