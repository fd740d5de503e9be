"""Jobs against the limits of made-up sites, and the question about their cost."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_train.config.schema import ClusterConfig, PriceConfig
from hpc_train.config.values import fewest_nodes
from hpc_train.errors import UserError
from hpc_train.launch.executors import cost
from hpc_train.schedulers.slurm.limits import check_limits, check_queue
from hpc_train.schedulers.slurm.site import Association, NodeKind, Partition, PartitionLimits, Site
from tests.launch.jobs import make_job

EVERYTHING = frozenset({"associations", "limits", "qos"})
GPU = Partition("gpu", default=True, nodes=8, kinds=(NodeKind(8, 64, 512000, {"a100": 4}),))
LAB = Association("lab", frozenset({"normal", "long"}), True, PartitionLimits())


def site(partition: Partition = GPU, *associations: Association, **qos: PartitionLimits) -> Site:
    return Site(
        "big", enforced=EVERYTHING, partitions={partition.name: partition}, associations=associations or (LAB,), qos=qos
    )


def asked(**keys: Any) -> ClusterConfig:
    return ClusterConfig(kind="slurm", gpus_per_node=4, **keys)


@pytest.mark.parametrize(
    ("cluster", "found", "named"),
    [
        (asked(), site(Partition("gpu")), "no default partition"),
        (asked(), site(Partition("gpu", default=True, state="DOWN")), "the partition gpu is DOWN"),
        (asked(), site(Partition("gpu", default=True, accounts=frozenset({"ai"}))), "does not allow account lab"),
        (
            asked(qos="long"),
            site(Partition("gpu", default=True, qos=frozenset({"x"})), long=PartitionLimits()),
            "qos long",
        ),
        (asked(qos="gold"), site(gold=PartitionLimits()), "may not use QOS 'gold'"),
        (asked(account="other"), site(), "account 'other' is not one of yours"),
        (asked(nodes="9-12"), site(), "partition gpu has 8"),
        (
            asked(qos="long", time="10:00:00"),
            site(long=PartitionLimits(max_time_s=3600)),
            "QOS long allows 01:00:00",
        ),
        (asked(qos="long", nodes=2), site(long=PartitionLimits(max_gpus=4)), "8 GPUs are requested"),
        (asked(gpu_type="h100"), site(), "types here: a100"),
        (asked(cpus_per_gpu=32), site(), "128 cores per node"),
        (asked(mem="1T"), site(), "cluster.mem=512000M or less"),
        (asked(mem_per_gpu="200G"), site(), "cluster.mem_per_gpu=128000M or less"),
    ],
)
def test_a_refusal_names_the_limit(cluster: ClusterConfig, found: Site, named: str, tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=cluster, gpus=4)
    with pytest.raises(UserError) as refused:
        check_limits(job, found)
    assert named in refused.value.what + refused.value.fix
    assert refused.value.fix
    assert refused.value.where


def test_a_user_without_any_account(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=asked(), gpus=4)
    with pytest.raises(UserError, match="no account on this cluster"):
        check_limits(job, Site("big", enforced=EVERYTHING, associations=()))
    check_limits(job, Site("big", associations=()))  # where nobody needs one


@pytest.mark.parametrize(
    ("cluster", "found"),
    [
        (asked(), site()),
        (asked(mem="500G"), site()),
        (asked(mem="0"), site()),
        (asked(nodes="2-12"), site()),
        (asked(partition="gpu,other"), Site("big", partitions={"gpu": GPU, "other": Partition("other")})),
        (asked(time="2-00:00:00", time_min="01:00:00"), site(Partition("gpu", default=True, max_time_s=7200))),
        (asked(), Site("unknown")),
    ],
)
def test_what_may_start_is_let_through(cluster: ClusterConfig, found: Site, tmp_path: Path) -> None:
    check_limits(make_job(tmp_path / "sweep", cluster=cluster, gpus=4), found)


def test_the_queue_of_a_user_is_finite(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path / "sweep", number, cluster=asked(), gpus=4) for number in range(3)]
    small = Association("lab", frozenset({"normal"}), True, PartitionLimits(max_jobs=2))
    with pytest.raises(UserError, match="account lab allows 2"):
        check_queue(jobs, site(GPU, small))
    check_queue(jobs[:2], site(GPU, small))


def test_the_cost_is_said_and_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = asked(nodes="1-2", time="02:00:00")
    jobs = [make_job(tmp_path / "sweep", number, cluster=cluster, gpus=4) for number in range(2)]
    assert cost.gpu_hours(jobs) == 2 * 2 * 4 * 2 * 11  # jobs, nodes, GPUs, hours, the first start and ten requeues
    for job in jobs:
        job.config.run.max_gpu_hours = 20.0
    assert cost.gpu_hours(jobs) == 2 * 20
    for job in jobs:
        job.config.run.max_gpu_hours = None
    lines = cost.cost_lines(jobs, site())
    assert lines[0] == "2 x account lab, partition gpu, 1-2 nodes with 4 GPUs, 64 cores, 512000M memory, 02:00:00"
    assert "at most 352 GPU-hours" in lines[1]
    jobs[0].config.cluster.price = PriceConfig(per_gpu_hour=2.5, currency="EUR")
    assert cost.cost_lines(jobs, site())[1].endswith("GPU-hours (with up to 10 requeues), 880 EUR")
    with pytest.raises(UserError, match="352 GPU-hours"):
        cost.confirm_cost(jobs, site(), Console(force_terminal=False))
    monkeypatch.setattr("sys.stdin", Terminal("n\ny\n"))
    terminal = Console(force_terminal=True, file=io.StringIO())
    with pytest.raises(UserError, match="not submitted"):
        cost.confirm_cost(jobs, site(), terminal)
    cost.confirm_cost(jobs, site(), terminal)
    jobs[0].config.launch.yes = True
    cost.confirm_cost(jobs, site(), Console(force_terminal=False))


def test_spare_nodes_count(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=asked(nodes="2-4"), gpus=4)
    job.config.elastic.spares = 1
    assert cost.gpu_hours([job]) == 5 * 4 * 11
    assert "2-4 and 1 spare nodes" in cost.cost_lines([job], site())[0]
    with pytest.raises(UserError, match="3 nodes are requested"):
        check_limits(job, site(Partition("gpu", default=True, max_nodes=2)))
    job.config.elastic.spares, job.config.elastic.min_nodes = 0, 3
    with pytest.raises(UserError, match="allows the run to start with 2 nodes"):
        fewest_nodes(job.config)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
