"""The preflight's verdicts from numbers, and its measuring on real ranks that stand for nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.values import preflight_actions
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.machine.allocation import Allocation
from hpc_train.machine.network.nccl_settings import recorded_versions
from hpc_train.parallel.mesh import join_mesh
from hpc_train.preflight import run as preflight_run
from hpc_train.preflight.bandwidth import Expected, ExpectedBandwidths, PairRate, best_of, rounds, slow_nodes
from hpc_train.preflight.checks import (
    Bandwidths,
    BurnIn,
    ClockOffset,
    PreflightFinding,
    RankFacts,
    check_bandwidths,
    check_burn_in,
    check_clocks,
    check_config,
    check_copies,
    check_gemm,
    check_inside,
    check_models,
    check_shared_gpu,
    check_slow_nodes,
    check_transport,
    check_versions,
    slow_devices,
)
from hpc_train.preflight.measure import Crew, Effort, burn_in, measure_all, paired_test
from hpc_train.preflight.nccl_log import Transport, parse_transport
from hpc_train.preflight.run import actions_of, nccl_log, preflight, stop_for
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import RESPONSES, Action, UnfitNode, classify
from hpc_train.schedulers.slurm.records import NodeRecord
from tests.ranks import run_ranks

LITTLE = Effort(gemm_s=0.01, gemm_size=64, burn_in_s=0.0, stage_s=0.05, bytes=1 << 20, limit_s=60)


def gpus(nodes: int = 3, each: int = 2) -> list[RankFacts]:
    """Ranks as they should be."""
    return [
        RankFacts(rank, f"n{rank // each}", "abc", {"torch": "2.9.0", "driver": "570"}, "H100", f"GPU-{rank}", 7e14)
        for rank in range(nodes * each)
    ]


def only(findings: Iterable[PreflightFinding]) -> PreflightFinding:
    (found,) = findings
    return found


def test_ranks_as_they_should_be_give_no_finding() -> None:
    ranks = gpus()
    for check in (check_config, check_versions, check_shared_gpu, slow_devices):
        assert not list(check(ranks))
    assert not list(check_models(ranks, {}))
    assert not list(check_transport(ranks, {"n0": True}))


def test_what_differs_is_named_with_its_node_and_the_fix() -> None:
    ranks = gpus()
    ranks[4:] = [replace(rank, config_hash="def", versions={"torch": "2.8.0", "driver": "580"}) for rank in ranks[4:]]
    found = only(check_config(ranks))
    assert found.level == "error" and "n2" in found.message and "run.root" in found.fix
    torch_found, driver = check_versions(ranks)
    assert torch_found.level == "error" and "2.8.0 on n2" in torch_found.message and "exclude=n2" in torch_found.fix
    assert driver.level == "warning"
    ranks[1] = replace(ranks[1], gpu="GPU-0")
    assert "ranks 0, 1 share the GPU GPU-0 on n0" in only(check_shared_gpu(ranks)).message
    ranks[3] = replace(ranks[3], gpu="GPU-0")  # of another node
    assert len(list(check_shared_gpu(ranks))) == 1


def test_a_slow_gpu_is_told_against_its_own_model_and_its_node_is_unfit() -> None:
    def found(ranks: list[RankFacts]) -> PreflightFinding:
        return only(check_gemm(slow_devices(ranks)))

    ranks = gpus()
    ranks[3] = replace(ranks[3], gemm=6.5e14)
    assert (found(ranks).level, found(ranks).unfit) == ("warning", None)
    assert "rank 3 on n1 (GPU GPU-3)" in found(ranks).message
    ranks[3] = replace(ranks[3], gemm=5.9e14)
    assert (found(ranks).level, found(ranks).unfit) == ("error", "n1")
    assert "scontrol update nodename=n1 state=drain reason='slow GPU GPU-3'" in found(ranks).fix
    others = [replace(rank, device="A100", gemm=2.5e14) for rank in ranks[4:]]
    assert found([*ranks[:4], *others]).level == "error", "the A100 are as fast as each other"
    cpus = [replace(rank, gpu=None, device="a CPU") for rank in ranks]
    assert not slow_devices(cpus)
    cpus[0] = replace(cpus[0], gemm=0.45 * 7e14)
    assert (found(cpus).level, found(cpus).unfit) == ("error", "n0")
    assert not slow_devices([replace(cpus[0], gemm=0.55 * 7e14), *cpus[1:3], *cpus[4:]])


@pytest.mark.parametrize(
    ("results", "known", "wrong", "warns"),
    [
        ("aaa", None, [], False),
        ("aab", None, [2], False),
        ("aaab", "b", [], True),  # most devices are wrong in the same way: their kernel rounds
        ("ab", None, [], True),
        ("ab", "b", [0], False),
        ("a", "b", [0], False),
        (["a", "ab"], None, [1], False),
        (["a", "ab", "ab"], None, [], True),
        (["ab"], "a", [0], False),
        (["ab"], None, [], True),
        ("aabb", None, [], True),
    ],
)
def test_the_device_with_other_bits_is_wrong(results: list[str], known: str, wrong: list[int], warns: bool) -> None:
    """A letter is the hash of a result, and a text of two letters a device whose repetitions differ."""
    exact = {} if known is None else {"a sum": known}
    ranks = [
        replace(rank, burn_in=BurnIn("H100", {"a sum": tuple(result)}, exact))
        for rank, result in zip(gpus(4, 1), results, strict=False)
    ]
    others = [replace(rank, rank=9 + rank.rank, burn_in=BurnIn("A100", {"a sum": ("c",)}, {})) for rank in gpus(2)]
    found = list(check_burn_in([*ranks, *others]))
    assert [one.unfit for one in found if one.level == "error"] == [f"n{rank}" for rank in wrong]
    assert [one.unfit for one in found if one.level == "warning"] == [None] * warns
    assert all("computes wrong numbers: a sum" in one.message for one in found if one.level == "error")


def test_products_that_err_once_are_found_on_a_single_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = gpus(1, 1)
    threads, cores, right, calls = torch.get_num_threads(), os.sched_getaffinity(0), torch.mm, list[torch.dtype]()

    def err(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(left, other)
        calls.append(product.dtype)
        if calls.count(torch.bfloat16) == 4:
            product[3, 5] += 1
        return product

    burnt = burn_in("a CPU", torch.device("cpu"), 0.0)
    assert list(check_burn_in([replace(ranks[0], burn_in=burnt)])) == []
    monkeypatch.setattr(torch, "mm", err)
    wrong = burn_in("a CPU", torch.device("cpu"), 0.0)
    found = only(check_burn_in([replace(ranks[0], burn_in=wrong)]))
    assert (found.level, found.unfit) == ("error", "n0")
    assert "rank 0 on n0 (GPU GPU-0) computes wrong numbers: a product of integers in bfloat16" in found.message
    assert {name for name in burnt.hashes if burnt.hashes[name] != wrong.hashes[name]} == {
        "a product of integers in bfloat16"
    }
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, cores)


def test_mixed_models_come_with_the_constraint() -> None:
    ranks = gpus()
    ranks[4:] = [replace(rank, device="A100") for rank in ranks[4:]]
    shown = (
        "NodeName=n0 Arch=x86_64 AvailableFeatures=ib,h100 ActiveFeatures=ib,h100 Gres=gpu:8\n"
        "NodeName=n1 Arch=x86_64 AvailableFeatures=h100,ib ActiveFeatures=h100,ib Gres=gpu:8\n"
        "NodeName=n2 Arch=x86_64 AvailableFeatures=ib,a100 ActiveFeatures=ib,a100 Gres=gpu:8\n"
    )
    features = {node.name: node.active_features for node in NodeRecord.read_all(shown)}
    found = only(check_models(ranks, features))
    assert "A100 on n2" in found.message and found.fix == "cluster.constraint=h100"
    assert "sinfo" in only(check_models(ranks, {"n0": frozenset()})).fix


def test_tcp_beside_an_active_rdma_port_is_an_error_and_a_copy_through_the_host_a_warning() -> None:
    tcp, staged = Transport(networks=("Socket",)), Transport(networks=("IB",), gpu_direct=False)
    ranks = [replace(rank, transport=tcp if rank.node == "n1" else Transport(networks=("IB",))) for rank in gpus()]
    found = only(check_transport(ranks, {"n0": True, "n1": True}))
    assert (found.kind, found.level, found.unfit) == ("tcp", "error", "n1") and "on n1," in found.message
    everywhere = [replace(rank, transport=tcp) for rank in ranks]
    assert only(check_transport(everywhere, {"n0": True, "n1": True, "n2": True})).unfit is None
    assert not list(check_transport(ranks, {"n0": True, "n1": False})), "no RDMA there"
    assert not list(check_transport(ranks, {})), "nothing is known"
    copied = only(check_transport([replace(rank, transport=staged) for rank in ranks], {}))
    assert copied.level == "warning" and "nvidia_peermem" in copied.fix
    amd = [replace(rank, transport=staged, versions={"rccl": "2.26.6"}) for rank in ranks]
    assert "NCCL_DMABUF_ENABLE=1" in only(check_transport(amd, {})).fix


THROUGH_HOST = """\
n1:1186:1372 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct
n1:1186:1372 [1] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct/direct
"""
OVER_NVLINK = "n0:1186:1372 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM/read\n"


def test_a_node_that_does_not_use_its_nvlink_ends_the_job() -> None:
    copied, linked = parse_transport(THROUGH_HOST), parse_transport(OVER_NVLINK)
    ranks = [replace(rank, transport=copied if rank.rank == 2 else linked) for rank in gpus()]
    found = only(check_inside(ranks, {"n0", "n1", "n2"}))
    assert (found.level, found.unfit) == ("error", "n1") and "host memory (SHM) in n1" in found.message
    with pytest.raises(UserError, match=r"cluster\.visible_gpus=all") as refused:
        stop_for([found], DEFAULT, "n1")
    assert "cluster.preflight_action.nvlink=warn" in refused.value.fix
    everywhere = [replace(rank, transport=copied) for rank in ranks]
    assert only(check_inside(everywhere, {"n0", "n1", "n2"})).unfit is None
    assert not list(check_inside(ranks, {"n0"})), "it has none"
    assert not list(check_inside(gpus(), {"n0", "n1"})), "nothing is known"


def test_a_gpu_with_a_slow_pcie_link_is_named() -> None:
    ranks = [replace(rank, copy=50e9) for rank in gpus()]
    assert not list(check_copies(ranks)) and not list(check_copies(gpus()))
    ranks[4] = replace(ranks[4], copy=25e9)
    found = only(check_copies(ranks))
    assert found.level == "warning" and "rank 4 on n2 (GPU GPU-4) receives 25 GB/s" in found.message


def test_bandwidths_are_judged_where_it_is_known_what_to_expect() -> None:
    expected = ExpectedBandwidths(node=Expected(460e9, "8 H100 with NVLink"), world=Expected(368e9, "8 cards"))
    found = Bandwidths({"n0": 455e9, "n1": 300e9}, (10e9, 11e9), 320e9)
    node, world = check_bandwidths(found, expected)
    assert (node.level, "in n1 " in node.message, "65%" in node.message) == ("error", True, True)
    assert (world.level, "over all ranks" in world.message) == ("warning", True)
    assert not list(check_bandwidths(found, ExpectedBandwidths()))
    crawling = only(check_bandwidths(replace(found, world=0.02e9), ExpectedBandwidths()))
    assert crawling.level == "warning" and "less than gigabit Ethernet" in crawling.message


@pytest.mark.parametrize(("offset", "level"), [(0.05, None), (-0.5, "warning"), (3.0, "error")])
def test_clocks(offset: float, level: str | None) -> None:
    found = list(check_clocks([ClockOffset("n1", offset, 0.01)]))
    assert [one.level for one in found] == ([] if level is None else [level])
    assert not list(check_clocks([ClockOffset("n1", offset, 2 * abs(offset))])), "the round trip may explain it"


@pytest.mark.parametrize("count", range(2, 12))
def test_each_node_meets_two_others_in_three_rounds(count: int) -> None:
    found = rounds(count)
    pairs = [frozenset(pair) for one in found for pair in one]
    assert len(found) <= 3 and len(set(pairs)) == len(pairs)
    for one in found:
        assert len({node for pair in one for node in pair}) == 2 * len(one)
    for node in range(count):
        assert sum(node in pair for pair in pairs) >= min(2, count - 1)


@pytest.mark.parametrize("count", range(3, 12))
def test_the_slow_node_is_named_and_no_other(count: int) -> None:
    for slow in range(count):
        pairs = [
            PairRate((f"n{a}", f"n{b}"), (2.0 if slow in (a, b) else 10.0) + 0.1 * ((a + b) % 3))
            for one in rounds(count)
            for a, b in one
        ]
        (found,) = slow_nodes(pairs)
        assert found.node == f"n{slow}" and len(set(found.partners)) >= 2
        finding = only(check_slow_nodes([found]))
        assert finding.unfit == f"n{slow}" and f"nodename=n{slow} state=drain" in finding.fix


def test_one_slow_pair_names_nobody_and_the_better_pass_counts() -> None:
    fast = [PairRate((a, b), 10.0) for a, b in combinations("abcd", 2)]
    assert slow_nodes([*fast[1:], PairRate(("a", "b"), 1.0)]) == ()
    assert slow_nodes([PairRate(("a", "b"), 1.0)]) == ()
    slow = [replace(pair, rate=1.0) if "a" in pair.nodes else pair for pair in fast]
    assert [one.node for one in slow_nodes(slow)] == ["a"]
    assert slow_nodes(slow, 0.1) == ()
    assert slow_nodes(best_of(slow, fast)) == ()


def of_four_nodes(rank: int, world_size: int, each: int) -> tuple[object, object]:
    """The node n2 is slow to exchange, the clock of n1 is five seconds ahead, and a product of rank 1 is wrong."""
    layout = Layout(world_size, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)
    mesh = join_mesh(layout, rank, torch.device("cpu"))
    names = tuple(f"n{number}" for number in range(world_size // each))
    crew, node = Crew(mesh, names if rank == 0 else (), each), names[rank // each]
    plain = dist.batch_isend_irecv
    multiply = torch.mm

    def slow(operations: list[dist.P2POp]) -> list[dist.Work]:
        time.sleep(0.3)
        return plain(operations)

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        product[0, 0] += 1
        return product

    if node == "n2":
        dist.batch_isend_irecv = slow
    if rank == 1:
        torch.mm = wrong
    own = RankFacts(rank, node, "abc", {}, "cpu", None, 0.0)
    ahead = 5.0 if node == "n1" else 0.0
    found = measure_all(crew, own, LITTLE, lambda: Transport(networks=(str(rank),)), lambda: time.time() + ahead)
    return found, paired_test(crew, 1e8, LITTLE)


def on_one_node_and_on_two(rank: int, world_size: int) -> tuple[object, object]:
    """Measures on a node of all ranks and, with no time at all, on a node of each rank."""
    mesh = join_mesh(Layout(world_size, 1, 1, 1, "ddp", "1f1b", 1, 1, 1), rank, torch.device("cpu"))
    own = RankFacts(rank, "n0", "abc", {}, "cpu", None, 0.0)
    one = measure_all(Crew(mesh, ("n0",), world_size), own, LITTLE, lambda: None, time.time)
    own = replace(own, node=f"n{rank}")
    nodes = Crew(mesh, tuple(f"n{number}" for number in range(world_size)), 1)
    return one, measure_all(nodes, own, replace(LITTLE, limit_s=0.0), lambda: None, time.time)


@pytest.mark.parametrize("world_size", [1, 2])
def test_measuring_on_one_node_and_without_the_time_for_two(world_size: int) -> None:
    found, hurried = run_ranks(world_size, on_one_node_and_on_two)[0]
    if world_size == 2:
        assert hurried.left_out == ("in the node", "over each rail", "over all ranks")
    assert found.bandwidths.nodes == {} and found.bandwidths.rails == () and found.clocks == ()
    assert (found.bandwidths.world is None) == (world_size == 1)
    assert all(rank.gemm > 0 and rank.copy is None for rank in found.ranks)


def test_a_job_on_the_cpus_of_one_node_has_no_preflight(tmp_path: Path) -> None:
    """It returns before the first collective, for which there is no group here."""
    layout = Layout(4, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)
    spec = WorkerSpec(str(tmp_path), 0, 0, 0, 4, 0, 1, layout, "n0", 1, gpus_per_node=0, threads=1)
    run = RunDirectory(tmp_path)
    preflight(spec, Config(), run, None, EventLog.open(run, "rank-0000", 0, 0), None)


def test_its_time_begins_when_all_ranks_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def gather(*_: object) -> list[str]:
        calls.append("gather")
        return ["n0"]

    def clock() -> float:
        calls.append("clock")
        raise InterruptedError

    monkeypatch.setattr("hpc_train.preflight.run.to_first", gather)
    monkeypatch.setattr("hpc_train.preflight.run.time", SimpleNamespace(monotonic=clock))
    layout = Layout(1, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)
    spec = WorkerSpec(str(tmp_path), 0, 0, 0, 1, 0, 2, layout, "n0", 1, gpus_per_node=0, threads=1)
    run = RunDirectory(tmp_path)
    with pytest.raises(InterruptedError):
        preflight(spec, Config(), run, None, EventLog.open(run, "rank-0000", 0, 0), None)
    assert calls == ["gather", "clock"]


@pytest.mark.long_form(6, cases=["1"])
@pytest.mark.parametrize("each", [1, 2])
def test_measuring_on_ranks_that_stand_for_nodes(each: int) -> None:
    nodes = 4 if each == 1 else 3
    results = run_ranks(nodes * each, of_four_nodes, each)
    found, pairs = results[0]
    assert [rank.rank for rank in found.ranks] == list(range(nodes * each))
    assert all(rank.gemm > 0 and rank.transport == Transport(networks=(str(rank.rank),)) for rank in found.ranks)
    assert found.bandwidths.world > 0 and found.left_out == ()
    assert list(found.bandwidths.nodes) == ([] if each == 1 else ["n0", "n1", "n2"])
    assert len(found.bandwidths.rails) == (0 if each == 1 else 2)
    offsets = {one.node: one for one in found.clocks}
    for node, ahead in (("n1", 5.0), ("n2", 0.0)):
        assert abs(offsets[node].offset_s - ahead) <= offsets[node].round_trip_s / 2 + 1e-3
    assert [one.node for one in slow_nodes(pairs)] == ["n2"]
    wrong = only(check_burn_in(found.ranks))
    assert wrong.unfit == found.ranks[1].node and "a product in float32, a product of integers in" in wrong.message
    for others, their_pairs in results[1:]:
        assert (others.ranks, others.clocks, their_pairs) == ((), (), ()), "nothing of N ranks on each of N ranks"
        assert (others.bandwidths.nodes, others.bandwidths.rails) == ({}, ())


def test_nccl_logs_where_a_preflight_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    run, config = RunDirectory(tmp_path), Config()
    run.create()
    layout = Layout(2, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)
    spec = WorkerSpec(str(tmp_path), 4, 1, 0, 1, 1, 2, layout, "n0", 1, gpus_per_node=1, threads=1)

    def logs(spec: WorkerSpec) -> bool:
        with monkeypatch.context() as context:
            context.setattr(os, "environ", dict(os.environ))
            with nccl_log(spec, config, run) as path:
                return path is not None

    older, others = (run.logs / "nccl" / name for name in ("003-rank-0001.log", "003-rank-0000.log"))
    older.parent.mkdir()
    for path in (older, others):
        path.touch()
    run.fabric.write_text("not JSON: only rank 0 reads it, after all have joined")
    assert logs(spec)
    assert not older.exists() and others.exists()
    assert not logs(replace(spec, gpus_per_node=0))
    assert not logs(replace(spec, checked=True)), "the nodes have been checked"


def problem(kind: str, level: str = "error", unfit: str | None = None) -> PreflightFinding:
    return PreflightFinding(kind, level, f"a problem of {kind}", "fix it", unfit)


DEFAULT = preflight_actions(ClusterConfig())


def test_what_stops_a_job_by_default() -> None:
    warned = [problem("tcp", "warning"), problem("network", unfit="n1"), problem("clock"), problem("versions")]
    stop_for(warned, DEFAULT, "n1")
    for kind in ("tcp", "nvlink", "shared_gpu", "config"):
        with pytest.raises(UserError, match=f"a problem of {kind}: fix it") as refused:
            stop_for([problem("clock"), problem(kind)], DEFAULT, "n1")
        assert f"cluster.preflight_action.{kind}=warn" in refused.value.fix and "clock" not in str(refused.value)
    for node in ("n1", "n2"):
        with pytest.raises(UnfitNode, match="a problem of slow_device") as unfit:
            stop_for([problem("slow_device", unfit="n1")], DEFAULT, node)
        assert unfit.value.secondary is (node == "n2"), "a rank of the node is the first to fail"
    with pytest.raises(UserError):
        stop_for([problem("slow_device", unfit="n1"), problem("tcp", unfit="n2")], DEFAULT, "n1")
    assert RESPONSES[classify(UnfitNode("n2"))].action is Action.REPLACE


def test_the_action_of_each_class_can_be_set() -> None:
    def actions(value: object) -> dict[str, str]:
        return preflight_actions(ClusterConfig(preflight_action=value))

    everything = [problem(kind, unfit="n1") for kind in DEFAULT]
    stop_for(everything, actions("warn"), "n1")
    with pytest.raises(UnfitNode):
        stop_for(everything, actions("exclude"), "n1")
    with pytest.raises(UserError):
        stop_for(everything, actions("stop"), "n1")
    with pytest.raises(UserError):
        stop_for([problem("clock")], actions("exclude"), "n1")  # of no node
    stop_for([problem("tcp")], actions({"tcp": "warn"}), "n1")
    with pytest.raises(UserError):
        stop_for([problem("shared_gpu")], actions({"tcp": "warn"}), "n1")
    for wrong, fix in (({"tpc": "warn"}, "tcp"), ({"tcp": "wran"}, "warn")):
        with pytest.raises(UserError) as refused:
            actions(wrong)
        assert fix in refused.value.fix


def test_a_machine_outside_of_slurm_is_not_excluded() -> None:
    layout = Layout(4, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)
    spec = WorkerSpec("run", 0, 0, 0, 4, 0, 1, layout, "n0", 1, gpus_per_node=4, threads=1)
    here = Allocation(1, 0, "n0", None, "n0.1", "127.0.0.1", ("n0",))
    actions = actions_of(Config(), spec, here)
    assert (actions["slow_device"], actions["tcp"]) == ("warn", "stop")
    for other_nodes in (actions_of(Config(), spec, replace(here, job_id="7")),
                        actions_of(Config(), replace(spec, nodes=2), here)):  # fmt: skip
        assert other_nodes == DEFAULT


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that claims to be built with ROCm."""
    driver = tmp_path / "sys/module/amdgpu/version"
    driver.parent.mkdir(parents=True)
    driver.write_text("6.12.12\n")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    monkeypatch.setattr(preflight_run, "recorded_versions", lambda _: recorded_versions(tmp_path))


@pytest.mark.usefixtures("rocm")
def test_versions_of_rocm() -> None:
    found = preflight_run.versions(cuda=True)
    assert (found["rccl"], found["driver"]) == ("2.22.3", "6.12.12")
    assert "nccl" not in found


@pytest.mark.usefixtures("rocm")
def test_gpus_without_a_serial_number_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(*buses: int) -> list[RankFacts]:
        found = []
        for rank, bus in enumerate(buses):
            gpu = SimpleNamespace(
                uuid="0", name="AMD Instinct MI250X", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0
            )
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
            found.append(preflight_run.rank_facts(rank, "n1", "hash", torch.device("cuda", 0)))
        return found

    assert not list(check_shared_gpu(ranks(0xC1, 0xC6)))
    (finding,) = check_shared_gpu(ranks(0xC1, 0xC1))
    assert "ranks 0, 1 share the GPU 0 at 00:c1:00" in finding.message
