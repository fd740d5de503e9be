"""Compiled layers: one graph each under DDP, compiled by one rank per node, and kept in the run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor import codecache
from torch._inductor import config as inductor_config
from torch._library.fake_class_registry import FakeScriptObject
from torch.compiler._cache import CacheArtifactManager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hpc_train.config.schema import GPTConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.attention import rotary_tables, rotate
from hpc_train.models.build import build_model
from hpc_train.models.linear_head import LinearHead, _Logits, _loss_and_gradient, compilable_chunk_loss
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.compile import (
    CONCATENATION,
    KeptArtifacts,
    _turn,
    _written_apart,
    artifacts_name,
    compile_in_turns,
    compiled_graphs,
    kept_artifacts,
    stable_keys,
)
from tests.parallel.cells import VOCABULARY, Cell
from tests.parallel.graphs import run_graphs_as_cut
from tests.parallel.oracle import TOLERANCE, Outcome, check_cells, compare_cells, line, local_batch, merge, mesh_of
from tests.ranks import kept, run_on_world, run_ranks


def graphs(rank: int, world_size: int, cell: Cell) -> int:
    """The graphs that torch.compile passes to the compiler in two steps; they run as they are."""
    import torch._inductor.compile_fx as inductor

    found = 0

    def count(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        nonlocal found
        found += 1
        return graph.forward

    inductor.compile_fx = count  # type: ignore[assignment]
    mesh, config = mesh_of(cell, rank), cell.config()
    config.model = GPTConfig(vocab_size=VOCABULARY, n_layers=2, dim=256, n_heads=4, n_kv_heads=4, ffn_dim=512)
    engine = build_engine(config, mesh)
    for step in range(2):
        engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
    return found


@pytest.mark.long_form(10)
def test_a_layer_is_one_graph_under_ddp() -> None:
    """A layer has 2.5 MiB of parameters, which torch would cut at buckets of 1 MiB."""
    ddp = {"dp": 2, "data_parallel": "ddp", "bucket_cap_mb": 1.0}
    cell = Cell(2, precision="fp32", strategy=ddp, train={"compile": True})
    assert run_ranks(2, graphs, cell) == [2, 2]  # all layers are equal; the head is another graph


def without_inductor(rank: int, world_size: int, cells: list[Cell]) -> list[Outcome]:
    """Compares ``cells`` with one process, without generated code."""
    run_graphs_as_cut()
    found = []
    for cell in cells:
        found += compare_cells(rank, world_size, [cell])
        torch.compiler.reset()
    return found


def check_graphs(cells: list[Cell]) -> list[Outcome]:
    ranks = run_ranks(cells[0].world_size, without_inductor, cells, timeout=280)
    outcomes = [merge(list(of_ranks)) for of_ranks in zip(*ranks, strict=True)]
    assert all(outcome.worst <= TOLERANCE[outcome.cell.precision] for outcome in outcomes), [*map(line, outcomes)]
    return outcomes


def in_pairs(mode: str, split: dict[str, Any]) -> list[Cell]:
    """Returns a cell of tensor parallelism beside another axis."""
    train = {"compile": True, "activation_checkpointing": mode}
    return [Cell(4, "gpt-tied", strategy=split | {"tp": 2}, batch={"micro_batches": 4}, train=train)]


def alone(model: str, **train: Any) -> list[Cell]:
    return [Cell(2, model, strategy={"tp": 2}, batch={"micro_batches": 2}, train={"compile": True} | train)]


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(
            alone("gpt-tied", activation_checkpointing="ops", loss_chunks=4), id="ops", marks=pytest.mark.long_form(20)
        ),
        pytest.param(  # layers of two kinds, with and without a window
            alone("gpt-windows", activation_checkpointing="ops", loss_chunks=3),
            id="windows",
            marks=pytest.mark.long_form(20),
        ),
        pytest.param(
            alone("vit", activation_checkpointing="full", activation_offload="0.1KiB"),
            id="offload",
            marks=pytest.mark.long_form(20),
        ),
        pytest.param(  # layers of two kinds, with and without recomputation
            alone("gpt-tied", activation_checkpointing="selective:3"), id="selective", marks=pytest.mark.long_form(20)
        ),
        pytest.param(  # whose attention is not fused
            alone("gpt-options", loss_chunks=3), id="options", marks=pytest.mark.long_form(20)
        ),
    ],
)
def test_tensor_parallel_layers_are_compiled(cells: list[Cell], record: Callable[..., None]) -> None:
    record(check_graphs(cells), [])


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(in_pairs(mode, split), id=name, marks=pytest.mark.long_form(40))
        for name, mode, split in (
            ("zero3", "full", {"dp": 2, "data_parallel": "zero3"}),  # parameters of two meshes
            ("stages", "ops", {"pp": 2, "schedule": "1f1b"}),
            ("stages-full", "full", {"pp": 2, "schedule": "1f1b"}),
            ("allreduce", "ops", {"dp": 2, "data_parallel": "allreduce"}),
            ("zero1", "none", {"dp": 2, "data_parallel": "zero1"}),
            ("context", "none", {"cp": 2, "data_parallel": "allreduce"}),
        )
    ],
)
def test_tensor_parallel_layers_are_compiled_beside_another_axis(
    cells: list[Cell], record: Callable[..., None]
) -> None:
    record(check_graphs(cells), [])


FUSED = {"compile": True, "loss_chunks": 4, "z_loss": 0.01}


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(
            [Cell(1, "gpt-tied", train=FUSED)],
            marks=pytest.mark.long_form(25, every_share=True),  # the short form compiles without generating code
        ),
        pytest.param(
            [Cell(2, "gpt-tied", strategy={"dp": 2, "data_parallel": "zero3"}, train=FUSED)],
            marks=pytest.mark.long_form(25),
        ),
        pytest.param(
            [
                Cell(2, "gpt-tied", strategy={"pp": 2, "schedule": "gpipe"}, batch={"micro_batches": 4},
                     train={"compile": True, "loss_chunks": 2}),
                Cell(2, "gpt", strategy={"cp": 2}, batch={"micro_batches": 2}, train={"compile": True}),
            ],
            marks=pytest.mark.long_form(50),
        ),
        pytest.param(
            [
                Cell(2, "gpt-options", strategy={"dp": 2, "data_parallel": "zero3"}, train=FUSED | {"loss_chunks": 3}),
                Cell(2, "vit", strategy={"dp": 2, "data_parallel": "ddp"}, train={"compile": True}),
            ],
            marks=pytest.mark.long_form(30),
        ),
    ],
    ids=["short", "zero3", "other axes", "more"],
)  # fmt: skip
def test_stems_heads_and_losses_are_compiled_without_tensor_parallelism(
    cells: list[Cell], record: Callable[..., None]
) -> None:
    """The fused loss with sharded parameters, the loss that is computed again in a stage, a ViT, and split tokens."""
    record(check_graphs(cells), [])


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.long_form(70)  # measured on a busy machine
def test_generated_code_of_attention_in_fp64() -> None:
    """The fused kernel of CPUs fails in the code of torch before 2.13."""
    inputs = torch.randn(3, 2, 2, 8, 8, dtype=torch.float64).requires_grad_()
    results = causal(*inputs), torch.compile(causal, backend=compile_in_turns)(*inputs)
    (expected,), (found,) = (torch.autograd.grad(result.square().sum(), inputs) for result in results)
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(found, expected)


def settings_in_effect(rank: int, world_size: int) -> list[list[int]]:
    """The settings of concatenations while the forward, and then the backward, of a rotation are compiled."""
    import torch._inductor.compile_fx as inductor

    found: list[list[int]] = []

    def run_as_it_is(graph: fx.GraphModule, inputs: Sequence[Any], *_: Any, **__: Any) -> Callable[..., Any]:
        found.append([getattr(inductor_config, name, 0) for name in CONCATENATION])
        return make_boxed_func(graph.forward)

    inductor.compile_fx_inner = run_as_it_is
    joined = torch.ones(2, 4, 3, 8, requires_grad=True)
    tables = rotary_tables(torch.arange(4), 8, 1e4)

    def rotated(joined: Tensor) -> Tensor:
        query, value = joined.split((2, 1), dim=2)
        return rotate(query, *tables) * value

    torch.compile(rotated, backend=compile_in_turns)(joined).sum().backward()
    return found


DEFAULTS = [getattr(inductor_config, name, 0) for name in CONCATENATION]


@pytest.mark.long_form(8)
def test_kernels_of_a_backward_write_the_parts_of_a_concatenation_apart() -> None:
    """The gradient of the joined queries, keys and values is one, which a GPU would compute element by element."""
    (found,) = run_ranks(1, settings_in_effect)
    assert len(found) == 2
    assert found[0] == DEFAULTS
    assert found[1] == ([0, 0] if _written_apart() else DEFAULTS)


def test_a_loss_of_ones_own_is_not_compiled() -> None:
    model: Any = build_model(Cell(1, "gpt-weighted").config().model, 0)
    model.head.compile_with(lambda function: pytest.fail("compiled"))
    model = build_model(Cell(1).config().model, 0)
    assert isinstance(model, Model) and isinstance(model.head, LinearHead)
    names: list[str] = []
    model.head.compile_with(lambda function: names.append(function.__name__) or function)
    model.head.fused = True
    model.head.compile_with(lambda function: names.append(function.__name__) or function)
    assert names == ["_loss", "_normed", "compilable_chunk_loss"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (2.0, 0.0), (2.0, 0.3)])
def test_the_form_of_the_loss_for_compilers_computes_the_same(
    dtype: torch.dtype, cap: float | None, z_loss: float
) -> None:
    kind = _Logits(cap, None, z_loss)
    logits = 4 * torch.randn(12, 30, generator=torch.Generator().manual_seed(1), dtype=dtype)
    targets = torch.arange(12)
    targets[3] = IGNORED
    other = logits.clone()
    (loss, gradient), found = (
        _loss_and_gradient(logits, targets, kind),
        compilable_chunk_loss(other, targets, kind),
    )
    assert found[1].data_ptr() == other.data_ptr()  # in the memory of the logits
    torch.testing.assert_close(found, (loss, gradient))
    for wrong in (30, -5):
        targets[0] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            compilable_chunk_loss(other, targets, kind)


@pytest.mark.long_form(200)  # minutes of the C++ compiler
@pytest.mark.parametrize("model", ["gpt-options", "vit"])
def test_generated_code_of_tensor_parallel_layers(model: str, record: Callable[..., None]) -> None:
    record(check_cells([Cell(2, model, strategy={"tp": 2}, train={"compile": True})], timeout=600), [])


def attempt(cache: Path, kept: Path) -> tuple[bool, int, int, list[str]]:
    """A product of matrices, which needs no C++ compiler, with an empty cache on disk and the artifacts in ``kept``.

    Returns:
        Whether artifacts were loaded, the graphs that were compiled and reused, and the lines of the log.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch.compiler.reset()
    with redirect_stdout(StringIO()) as told:
        artifacts = KeptArtifacts(kept, writes=True)
        artifacts.load()
        one, other = torch.ones(4, 4), torch.full((4, 4), 2.0)
        assert torch.compile(torch.mm, backend=compile_in_turns)(one, other).sum() == 128
        artifacts.save()
    found = artifacts.loaded, *compiled_graphs(), told.getvalue().splitlines()
    torch._dynamo.utils.counters.clear()
    return found


def attempts(rank: int, world_size: int, folder: Path) -> None:
    kept = folder / "run" / "compiled" / "name.bin"
    assert attempt(folder / "first", kept) == (False, 1, 0, [])
    content = kept.read_bytes()
    assert attempt(folder / "second", kept) == (True, 0, 1, [])
    assert kept.read_bytes() == content and list(kept.parent.iterdir()) == [kept]
    other = folder / "run" / "other.bin"
    assert attempt(folder / "first", other) == (False, 0, 1, [])  # as on a rank whose neighbor has compiled the graph
    assert other.stat().st_size > 0
    kept.write_bytes(b"damaged")
    loaded, compiled, _, (line,) = attempt(folder / "third", kept)
    assert (loaded, compiled) == (False, 1) and f"cannot be loaded from {kept}" in line
    assert kept.read_bytes() != b"damaged"
    kept.unlink()
    kept.mkdir()
    loaded, compiled, _, lines = attempt(folder / "fourth", kept)
    assert (loaded, compiled) == (False, 1)
    assert ["loaded from" in lines[0], "saved to" in lines[1]] == [True, True] and len(lines) == 2
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.long_form(15)
def test_the_next_attempt_compiles_nothing_and_a_damaged_file_is_no_failure(tmp_path: Path) -> None:
    run_ranks(1, attempts, tmp_path)


def saves_as_graphs_come(rank: int, world_size: int, folder: Path) -> list[tuple[int, int]]:
    """Saves the artifacts after each of two graphs, in two attempts that start with an empty cache on disk.

    Returns:
        The graphs that were compiled and reused in each attempt.
    """
    found = []
    for name in ("first", "second"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / name)
        torch.compiler.reset()
        CacheArtifactManager.clear()  # a new process has used none
        torch._dynamo.utils.counters.clear()
        artifacts = KeptArtifacts(folder / "name.bin", writes=True)
        artifacts.load()
        for product in (torch.mm, torch.matmul):
            torch.compile(lambda one, product=product: product(one, one), backend=compile_in_turns)(
                torch.ones(4, 4) if product is torch.mm else torch.ones(5, 5)
            )
            artifacts.save()
        found.append(compiled_graphs())
    return found


@pytest.mark.long_form(10)
def test_the_next_attempt_finds_the_graphs_of_all_saves(tmp_path: Path) -> None:
    """Torch reads only the last of several lists that were saved."""
    assert run_ranks(1, saves_as_graphs_come, tmp_path) == [[(2, 0), (0, 2)]]


def with_other_hashes(rank: int, world_size: int, cache: Path) -> list[tuple[int, int]]:
    """Compiles the product of DTensors twice, the second time with a mesh as another process would have it.

    Returns:
        The graphs that were compiled and reused so far, after each time.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))["tp"]
    matrix = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False).requires_grad_()
    found = []
    for hashed in (1, 2):  # Python's hash of a string is another one in each process
        for each in (mesh, mesh._get_root_mesh()):
            each._hash = hashed
        torch.compiler.reset()
        # another rank's turn, for which a graph with a mesh does not wait; those of torch 2.11 have none
        with nullcontext() if torch.__version__.startswith("2.11.") else _turn(torch.device("cpu")):
            torch.compile(torch.mm, backend=compile_in_turns, dynamic=False)(matrix, matrix)
        found.append(compiled_graphs())
    return found


@pytest.mark.long_form(6)
def test_a_graph_with_a_mesh_is_found_by_another_process(tmp_path: Path) -> None:
    ((first, second),) = run_ranks(1, with_other_hashes, tmp_path)
    assert first[0] > 0 and first[1] == 0 and second == (first[0], first[0])


def graph_keys(rank: int, world_size: int) -> list[str]:
    """Returns the compiler's keys of a mesh between two strings: three times of one mesh, as processes may hold it, and
    once of another mesh."""
    whole = kept("graph_keys", lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    text = "".join(["equal ", "text"])
    copies = [(whole["tp"], text, text), (whole["tp"], text, "".join(["equal ", "text"]))]
    keys = []
    with stable_keys():
        for hashed, (mesh, *around) in enumerate([copies[0], *copies, (whole["dp"], text, text)]):
            mesh._hash = hashed + 1  # Python's hash of a string is another one in each process
            inputs = [around[0], FakeScriptObject(None, "mesh", mesh), around[1]]
            keys.append(codecache.FxGraphCachePickler(fx.GraphModule(nn.Module(), fx.Graph())).get_hash(inputs))
    return keys


def test_a_graph_with_a_mesh_has_the_same_key_in_every_process() -> None:
    first, second = run_on_world(2, graph_keys)
    for one, again, copied, other in (first, second):
        assert one == again == copied != other
    assert first[0] != second[0]  # a rank's graph has its place in the mesh


def test_artifacts_are_kept_for_each_device_model_strategy_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, config = torch.device("cpu"), Cell(2).config()
    names = {
        artifacts_name(config, cpu, "stage 0"),
        artifacts_name(config, cpu, "stage 1"),
        artifacts_name(config, cpu, "rank 1"),
        artifacts_name(Cell(2, "gpt-tied").config(), cpu, "stage 0"),
        artifacts_name(Cell(2, strategy={"dp": 2, "data_parallel": "zero3"}).config(), cpu, "stage 0"),
        artifacts_name(Cell(2, precision="fp32").config(), cpu, "stage 0"),
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    names |= {artifacts_name(config, torch.device("cuda", index), "stage 0") for index in (0, 1)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    names.add(artifacts_name(config, torch.device("cuda", 0), "stage 0"))
    monkeypatch.setattr(torch, "__version__", "2.99")
    names.add(artifacts_name(config, torch.device("cuda", 0), "stage 0"))
    assert len(names) == 10
    assert artifacts_name(Cell(2).config(), torch.device("cuda", 0), "stage 0") in names


def files(rank: int, world_size: int, cells: list[Cell], folder: Path) -> list[tuple[str, bool]]:
    kept = [kept_artifacts(cell.config(), mesh_of(cell, rank), folder) for cell in cells]
    return [(each._path.name, each._writes) for each in kept if each is not None]


def test_ranks_with_the_same_graphs_share_a_file(tmp_path: Path) -> None:
    """A graph with collectives contains the name of their group, and with DTensors the rank."""
    splits: list[dict[str, Any]] = [{"dp": 4}, {"dp": 2, "pp": 2, "schedule": "1f1b"}, {"dp": 2, "cp": 2}]
    splits.append({"dp": 2, "tp": 2, "data_parallel": "allreduce"})
    cells = [Cell(4, strategy=split, batch={"micro_batches": 4}, train={"compile": True}) for split in splits]
    by_cell = [*zip(*run_on_world(4, files, cells, tmp_path), strict=True)]
    shared = [[[name for name, _ in ranks].index(name) for name, _ in ranks] for ranks in by_cell]
    assert shared == [[0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]
    assert all(
        [rank for rank, (_, writes) in enumerate(ranks) if writes] == sorted({*first})
        for ranks, first in zip(by_cell, shared, strict=True)
    )


def turns(rank: int, world_size: int, cache: Path, devices: list[str], seen: Path) -> bool:
    """Whether another rank was inside its turn at the same time; each waits a while for the other."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    with _turn(torch.device(devices[rank])):
        (seen / str(rank)).touch()
        until = time.monotonic() + (20 if len(set(devices)) > 1 else 0.5)
        while time.monotonic() < until and len(list(seen.iterdir())) < world_size:
            time.sleep(0.01)
        together = len(list(seen.iterdir())) == world_size
        (seen / str(rank)).unlink() if len(set(devices)) == 1 else None
    return together


@pytest.mark.parametrize(("devices", "together"), [(["cuda:0", "cuda:0"], False), (["cuda:0", "cuda:1"], True)])
def test_only_ranks_with_the_same_device_index_take_turns(tmp_path: Path, devices: list[str], together: bool) -> None:
    """A graph for cuda:1 is another one than that for cuda:0, so it need not wait."""
    (tmp_path / "seen").mkdir()
    found = run_on_world(2, turns, tmp_path / "cache", devices, tmp_path / "seen")
    assert found == [together, together]
