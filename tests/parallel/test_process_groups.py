"""Which process groups a rank joins, and how many sockets they take."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import hpc_train
from hpc_train.layout.layout import Layout
from hpc_train.parallel.mesh import REPLICA_CONTROL, join_mesh
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.train import processes
from tests.ranks import run_ranks

ESTABLISHED, LISTENING = "01", "0A"  # states in /proc/net/tcp
CPU = torch.device("cpu")


def layout(dp: int = 1, pp: int = 1, tp: int = 1, shard: int = 1, kind: str = "ddp", **fields: int) -> Layout:
    return Layout(dp, pp, tp, shard, kind, "1f1b", 1, 1, 1, **fields)  # type: ignore[arg-type]


# by world size: a layout and the sizes of its groups besides those of all ranks
LAYOUTS: dict[int, list[tuple[Layout, list[int]]]] = {
    2: [(layout(dp=2), []), (layout(pp=2), []), (layout(dp=2, shard=2, kind="zero3"), [])],
    4: [
        (layout(dp=4), []),
        (layout(dp=2, pp=2), [2, 2]),
        (layout(dp=4, shard=2, kind="zero3"), [2, 2]),
        (layout(cp=4), [4]),
        (layout(pp=4), [2, 2]),  # one for each neighbor
        (layout(dp=2, cp=2), [2, 2]),
        (layout(cp=2, pp=2), [2, 2, 2]),  # gradients do not wait behind the exchanges of layers
    ],
    8: [
        (layout(dp=8), []),
        (layout(dp=4, pp=2), [4, 2]),
        (layout(dp=2, pp=2, tp=2), [2, 2, 2]),
        (layout(dp=4, pp=2, shard=2, kind="zero2"), [4, 2, 2, 2]),
    ],
}


def sockets() -> tuple[int, int]:
    """Returns how many connections and how many listening sockets this process has."""
    states: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            states[fields[9]] = fields[3]
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(states.get(str(descriptor.readlink())[len("socket:[") : -1], ""))
    return found.count(ESTABLISHED), found.count(LISTENING)


def sockets_of(rank: int, world_size: int, layouts: Sequence[Layout]) -> list[tuple[int, int]]:
    """Returns the sockets of the default group, and those that each mesh adds."""
    before = sockets()
    found = [before]
    for one in layouts:
        join_mesh(one, rank, CPU, timedelta(seconds=60))
        dist.barrier()
        now = sockets()
        found.append((now[0] - before[0], now[1] - before[1]))
        dist.barrier()
        before = now
    return found


@pytest.mark.long_form(10, cases=["8"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_sockets_of_a_rank(world_size: int) -> None:
    """Each gloo group takes one socket per peer and one to listen; docs/howto/network.md extrapolates this."""
    expected = [(world_size - 1, 1)]
    for _, sizes in LAYOUTS[world_size]:
        added = [world_size, *sizes]  # the first is the group control
        expected.append((sum(added) - len(added), len(added)))
    layouts = [one for one, _ in LAYOUTS[world_size]]
    assert run_ranks(world_size, sockets_of, layouts) == [expected] * world_size


def one_rank_per_shard(rank: int, world_size: int) -> tuple[Any, ...]:
    """The shards of ``strategy.shard=1``: fully_shard communicates along the axis of one rank."""
    mesh = join_mesh(layout(dp=world_size, shard=1, kind="zero3"), rank, CPU)
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, torch.ones(2), group=mesh.group("dp_shard"))
    return out.tolist(), dist.get_backend(mesh.group("dp_shard")), dist.get_backend(mesh.group("tp"))


def test_an_axis_of_one_rank_that_fsdp_uses_communicates() -> None:
    assert run_ranks(2, one_rank_per_shard) == [([1.0, 1.0], "gloo", "fake")] * 2


def on_demand(rank: int, world_size: int) -> tuple[int, int, list[Any]]:
    """Uses the control group, with connections on demand, as training, preflight and checkpoints do."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    before, _ = sockets()
    mesh = join_mesh(layout(dp=world_size), rank, CPU, timedelta(seconds=60))
    dist.barrier()
    idle, _ = sockets()
    dist.barrier()  # no other rank connects before this one has counted
    counted = torch.tensor([rank, 1])
    work = dist.all_reduce(counted, group=mesh.control, async_op=True)
    assert work is not None
    work.wait()
    gathered, sent = [None] * world_size, [f"of {rank}"]
    dist.all_gather_object(gathered, rank, group=mesh.control)
    dist.broadcast_object_list(sent, 0, group=mesh.control)
    all_of = [None] * world_size if rank == 0 else None
    dist.gather_object(rank, all_of, group=mesh.control)
    number = torch.tensor([rank])
    if rank == 0:
        dist.send(number, world_size - 1, group=mesh.control)
    if rank == world_size - 1:
        dist.recv(number, 0, group=mesh.control)
    dist.barrier(group=mesh.control)
    return idle - before, sockets()[0] - before, [counted.tolist(), gathered, sent, all_of, number.tolist()]


def test_gloo_connects_on_demand() -> None:
    everyone = list(range(4))
    for rank, (idle, used, values) in enumerate(run_ranks(4, on_demand)):
        assert idle == 0 and 0 < used <= 3
        assert values[:3] == [[6, 4], everyone, ["of 0"]]
        assert values[3] == (everyone if rank == 0 else None)
        assert values[4] == [0 if rank == 3 else rank]


MANY = {
    8: layout(dp=8),
    24: layout(dp=4, pp=3, tp=2),
    48: layout(dp=6, pp=2, tp=4, replicas=3),
    64: layout(dp=8, pp=2, tp=4),
    512: layout(dp=512, shard=8, kind="zero3"),
    8192: layout(dp=128, pp=8, tp=8, shard=16, kind="zero2"),
    1024: layout(dp=4, pp=2, cp=16, tp=8, shard=16, kind="zero3"),
    128: layout(dp=64, pp=2, shard=32, kind="zero3", ep=8),
}


def groups_of(_: int, __: int, world_size: int, rank: int) -> dict[str, Any]:
    """Joins a mesh on GPUs as ``rank`` of many, with a default group that stands for NCCL's; records its groups."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    made: list[tuple[str, Any]] = []
    splits: list[list[list[int]]] = []
    new_group = dist.new_group

    def recorded_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **given: Any) -> Any:
        made.append((backend, ranks))
        return new_group(ranks, backend="fake", **given)

    def recorded_split(split_ranks: list[list[int]], timeout: Any, group_desc: str) -> Any:
        splits.append(split_ranks)
        own = next((line for line in split_ranks if rank in line), None)
        if own is None:  # the rank takes part without a color
            return None
        return new_group(own, backend="fake", use_local_synchronization=True, group_desc=group_desc)

    dist.new_group, dist.split_group = cast(Any, recorded_group), cast(Any, recorded_split)
    mesh = join_mesh(MANY[world_size], rank, torch.device("cuda", 0), timedelta(seconds=60))
    return {
        "made": made,
        "splits": [(len(lines), len({rank for line in lines if len(line) > 1 for rank in line})) for lines in splits],
        "ranks": {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in mesh.groups},
        "links": [*mesh.links],
        "coordinate": list(mesh.device_mesh.get_coordinate() or ()),
    }


@pytest.mark.parametrize(
    ("world_size", "rank", "splits", "sizes"),
    [
        (8, 7, [], {"dp": 8, "pp": 1, "dp_replicate": 8, "dp_shard": 1, "tp": 1}),
        (24, 9, [6, 8, 12, 8, 8, 8], {"dp": 4, "pp": 3, "dp_replicate": 4, "dp_shard": 1, "tp": 2}),
        (
            48,
            29,
            [24, 24, 12, 3],
            {"dp": 2, "pp": 2, "dp_replicate": 2, "dp_shard": 1, "tp": 4, "replica": 16}
            | {"replicas": 3, REPLICA_CONTROL: 16},
        ),
        (64, 0, [8, 32, 16], {"dp": 8, "pp": 2, "dp_replicate": 8, "dp_shard": 1, "tp": 4}),
        (512, 511, [8, 64], {"dp": 512, "pp": 1, "dp_replicate": 64, "dp_shard": 8, "tp": 1}),
        (
            8192,
            4097,
            [64, 1024, 1024, 512, 1024, 4096, 4096],
            {"dp": 128, "pp": 8, "dp_replicate": 8, "dp_shard": 16, "tp": 8},
        ),
        (
            1024,
            777,
            [256, 16, 64, 512, 64, 128],
            {"dp": 4, "cp": 16, "dp_cp": 64, "pp": 2, "dp_replicate": 4, "dp_shard": 16, "tp": 8},
        ),
        (
            128,
            77,
            [2, 64, 64, 4, 32, 16],
            {"dp": 64, "pp": 2, "dp_replicate": 2, "dp_shard": 32, "tp": 1}
            | {"expert_replicate": 2, "expert_shard": 4, "ep": 8},
        ),
    ],
)
def test_the_groups_of_a_rank_on_gpus(world_size: int, rank: int, splits: list[int], sizes: dict[str, int]) -> None:
    """Only ``control`` and the groups of several replicas use gloo."""
    found = run_ranks(1, groups_of, world_size, rank)[0]
    on_hosts = [ranks for backend, ranks in found["made"] if backend == "gloo"]
    lines = [found["ranks"][name] for name in ("replicas", REPLICA_CONTROL) if name in sizes]
    assert on_hosts == [None, *lines]
    axes, links = (splits[:3], splits[3:]) if MANY[world_size].pp == 3 else (splits, [])
    # with three stages a link has two of them, and the ranks of the third make no communicator
    assert found["splits"] == [(groups, world_size) for groups in axes] + [(groups, 16) for groups in links]
    assert len(found["links"]) == (2 if MANY[world_size].pp > 2 else 0)
    others = {"cp": 1, "dp_cp": sizes["dp"], "replica": world_size}
    assert {axis: len(ranks) for axis, ranks in found["ranks"].items()} == others | sizes
    assert all(rank in ranks for ranks in found["ranks"].values())
    one = MANY[world_size]
    assert one.communicators == 1 + len(splits) - (one.pp > 2 and one.pp % 2), "an odd ring has a third round of links"
    one = one.replica
    rank %= one.world_size
    assert found["coordinate"] == [
        rank // one.stage_ranks, rank // (one.shard * one.tp) % (one.dp_cp // one.shard),
        rank // one.tp % one.shard, rank % one.tp,
    ]  # fmt: skip


GROUPS = re.compile("new_group|barrier|_object|_plain")  # words of the calls that are looked for


@cache
def calls() -> list[tuple[Path, ast.Call]]:
    """Returns the calls in the package's sources."""
    paths = [path for path in Path(hpc_train.__file__).parent.rglob("*.py") if GROUPS.search(path.read_text())]
    return [
        (path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]


def calls_of(*functions: str) -> Iterator[tuple[str, int, dict[str | None, str]]]:
    """Yields module, number of positional arguments and keyword arguments of the calls in the package's sources."""
    for path, node in calls():
        if getattr(node.func, "attr", None) in functions:
            yield path.name, len(node.args), {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_gloo_groups_are_of_all_ranks_or_created_by_their_ranks() -> None:
    """The ranks outside a gloo group that call ``new_group`` hang if a GPU is bound to the default group."""
    gloo = [
        (module, count, given) for module, count, given in calls_of("new_group") if given.get("backend") == "'gloo'"
    ]
    of_some = [(module, given) for module, count, given in gloo if count or "ranks" in given]
    assert 0 < len(of_some) < len(gloo)
    assert not [module for module, given in of_some if given.get("use_local_synchronization") != "True"]


CPU_COLLECTIVES = (
    "barrier", "monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list", "send_object_list", "recv_object_list",
)  # fmt: skip


def test_objects_and_barriers_use_a_gloo_group() -> None:
    """The default group of GPUs is NCCL's: it has no collectives for the CPU."""
    found = [(module, given.get("group", "none")) for module, _, given in calls_of(*CPU_COLLECTIVES)]
    checkpoints = {"group", "self.group", "self._group"}  # of checkpoint/, which has control or one like it
    assert len(found) > 10
    assert not [
        (module, group) for module, group in found if not group.endswith("control") and group not in checkpoints
    ]


def test_plain_values_use_a_gloo_group() -> None:
    groups = [
        ast.unparse(node.args[1])
        for _, node in calls()
        if getattr(node.func, "id", None) in ("gather_plain", "broadcast_plain")
    ]
    assert len(groups) > 5
    assert not [group for group in groups if not group.endswith("control")]


@pytest.mark.parametrize(
    ("gpus", "world_size", "given", "backend", "on_demand"),
    [(0, 2, None, "gloo", None), (8, 8, None, "nccl", None), (8, 512, None, "nccl", "1"), (8, 512, "0", "nccl", "0")],
)
def test_the_default_group(
    monkeypatch: pytest.MonkeyPatch, gpus: int, world_size: int, given: str | None, backend: str, on_demand: str | None
) -> None:
    """GPUs use NCCL alone, and gloo connects on demand in large worlds unless the user decides otherwise."""
    joined: dict[str, Any] = {}
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda name, **given: joined.update(given, name=name))
    spec = WorkerSpec("run", 0, 0, 0, gpus or 2, 0, 1, layout(dp=world_size), "n0", 1, gpus, 1)
    device = torch.device("cuda", 3) if gpus else CPU
    processes._join(spec, device, timedelta(seconds=60))
    assert (joined["name"], joined["device_id"]) == (backend, device if gpus else None)
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == on_demand
