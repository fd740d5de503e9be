"""Jobs against the limits of made-up sites and of one that Slurm 22.05 prints, and the question about their cost."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_train.config.schema import ClusterConfig, PriceConfig
from hpc_train.config.values import fewest_nodes
from hpc_train.errors import UserError
from hpc_train.launch.executors import cost
from hpc_train.launch.sbatch import options
from hpc_train.schedulers.slurm.limits import check_limits, check_queue
from hpc_train.schedulers.slurm.site import Association, NodeKind, Partition, PartitionLimits, Site, read_site
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
        (asked(gpu_type="h100", nodes=9), site(replace(GPU, nodes=8 + 4))),  # Slurm does not show 4 of the nodes
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


def test_the_limits_of_accounts_above_hold_unless_a_qos_precedes_them(tmp_path: Path) -> None:
    groups = (("lab", PartitionLimits(group_nodes=7)), ("dept", PartitionLimits(group_nodes=3, max_jobs=1)))
    small = replace(LAB, groups=groups)
    jobs = [make_job(tmp_path / "sweep", number, cluster=asked(nodes=4), gpus=4) for number in range(2)]
    with pytest.raises(
        UserError, match="4 nodes are requested, but account dept allows 3 for all of its jobs together"
    ):
        check_limits(jobs[0], site(GPU, small))
    with pytest.raises(UserError, match="2 jobs are submitted, but account dept allows 1 in the queue"):
        check_queue(jobs, site(GPU, small))
    check_limits(jobs[0], site(GPU, small, normal=PartitionLimits(group_nodes=4)))


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
        cost.confirm_cost(jobs, Console(force_terminal=False))
    monkeypatch.setattr("sys.stdin", Terminal("n\ny\n"))
    terminal = Console(force_terminal=True, file=io.StringIO())
    with pytest.raises(UserError, match="not submitted"):
        cost.confirm_cost(jobs, terminal)
    cost.confirm_cost(jobs, terminal)
    jobs[0].config.launch.yes = True
    cost.confirm_cost(jobs, Console(force_terminal=False))


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


CONFIG = "AccountingStorageEnforce = associations,limits,qos\nClusterName = big\n"
PARTITIONS = (
    "PartitionName=cpu Default=YES QoS=N/A Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=4\n"
    "PartitionName=debug Default=NO QoS=N/A Hidden=NO MaxNodes=2 MaxTime=00:30:00 State=UP TotalNodes=4\n"
    "PartitionName=two_days Default=NO QoS=N/A Hidden=NO MaxNodes=2 MaxTime=2-00:00:00 State=UP TotalNodes=4\n"
    "PartitionName=owned Default=NO QoS=owners Hidden=NO MaxNodes=UNLIMITED MaxTime=7-00:00:00 State=UP TotalNodes=4\n"
)
HIDDEN = "PartitionName=secret Default=NO QoS=N/A Hidden=YES MaxTime=2-00:00:00 State=UP TotalNodes=2\n"
NODES = "cpu|4|16|64000|(null)|(null)\ntwo_days|4|16|64000|gpu:4|(null)\n"
HIDDEN_NODES = "secret|2|16|64000|gpu:2|(null)\n"
ASSOCIATIONS = """\
Cluster|Account|Partition|QOS|DefaultQOS|MaxSubmitJobs|MaxWall|MaxTRES|GrpTRES
big|other|two_days|normal|||||
big|lab|debug|normal||1|00:20:00||
big|lab||above,long,many,normal,plain,unbound||5|1-00:00:00|node=3|
big|shared||above,normal|||||node=2
big|week||long,normal|long||1-00:00:00||
"""
ACCOUNTS = "Cluster|Account|ParentName|GrpSubmitJobs|GrpTRES\nbig|week|||node=4\n"
QOS = """\
Name|Flags|MaxSubmitJobsPerUser|MaxWall|MaxTRESPerJob|MaxTRESPerUser|GrpTRES|MinTRES
normal|||||||
plain|||||||
many|||||node=1||
long||8|7-00:00:00||||
unbound|DenyOnLimit,PartitionMaxNodes,PartitionTimeLimit||7-00:00:00||||
owners|||6-00:00:00||||
above|OverPartQOS||7-00:00:00||||node=2
"""


def printed(table: str, command: Sequence[str]) -> str:
    """Returns the columns of a table that ``sacctmgr`` is asked for."""
    head, *rows = (line.split("|") for line in table.splitlines())
    names = command[-1].removeprefix("format=").split(",")
    return "".join("|".join(row[head.index(name)] for name in names) + "\n" for row in rows)


def answer(command: Sequence[str]) -> str | None:
    hidden = "--all" in command
    if command[0] == "sinfo":
        return NODES + (HIDDEN_NODES if hidden else "")
    if command[0] == "scontrol":
        shown = {"config": CONFIG, "partition": PARTITIONS + (HIDDEN if hidden else "")}
        return next((text for what, text in shown.items() if what in command), None)
    tables = {"user=": ACCOUNTS, "assoc": ASSOCIATIONS, "qos": QOS}
    return next((printed(table, command) for what, table in tables.items() if what in command), "lab\n")


@pytest.fixture(scope="module")
def recorded() -> Site:
    return read_site(answer)


def on_cpus(**keys: Any) -> ClusterConfig:
    return ClusterConfig(kind="slurm", gpus_per_node=0, **keys)


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(on_cpus(partition="cpu", time="10:00:00"), id="the association without a partition"),
        pytest.param(on_cpus(partition="cpu", qos="plain"), id="a QOS of the association without a partition"),
        pytest.param(on_cpus(partition="two_days", account="other"), id="the association with the partition"),
        pytest.param(on_cpus(partition="two_days", time="2-00:00:00", qos="long"), id="a QOS above the association"),
        pytest.param(on_cpus(partition="two_days", time="2-00:00:00", account="week"), id="the default QOS"),
        pytest.param(on_cpus(partition="owned", time="5-00:00:00"), id="the QOS of the partition"),
        pytest.param(
            on_cpus(partition="owned", nodes="1-2", time="6-12:00:00", qos="above"),
            id="a QOS above that of the partition",
        ),
        pytest.param(on_cpus(partition="two_days", time="3-00:00:00", qos="unbound"), id="PartitionTimeLimit"),
        pytest.param(on_cpus(partition="two_days", nodes=3, qos="unbound"), id="PartitionMaxNodes"),
        pytest.param(on_cpus(partition="secret"), id="a hidden partition"),
    ],
)
def test_what_slurm_starts_is_not_refused(cluster: ClusterConfig, recorded: Site, tmp_path: Path) -> None:
    check_limits(make_job(tmp_path / "sweep", cluster=cluster), recorded)


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        (on_cpus(partition="debug", time="00:25:00"), "account lab allows 00:20:00"),
        (on_cpus(partition="debug", qos="long"), "may not use QOS 'long'"),
        (on_cpus(partition="two_days", time="2-00:00:00"), "account lab allows 1-00:00:00"),
        (on_cpus(partition="two_days", time="2-00:00:00", qos="plain"), "account lab allows 1-00:00:00"),
        (on_cpus(partition="two_days", time="3-00:00:00", qos="long"), "partition two_days allows 2-00:00:00"),
        (on_cpus(partition="two_days", nodes=3, qos="long"), "partition two_days allows 2"),
        (on_cpus(partition="owned", time="6-12:00:00", qos="long"), "QOS owners of partition owned allows 6-00:00:00"),
        (on_cpus(partition="cpu", nodes=4, qos="long"), "account lab allows 3 per job"),
        (on_cpus(partition="two_days", nodes=5, qos="unbound"), "partition two_days has 4"),
        (on_cpus(partition="cpu", nodes=2, qos="many"), "QOS many allows 1 for all jobs of a user"),
        (on_cpus(partition="cpu", nodes=3, account="shared"), "account shared allows 2 for all of its jobs together"),
        (on_cpus(partition="cpu", nodes=1, qos="above"), "the job requests 1 node, but QOS above requires 2 per job"),
    ],
)
def test_what_slurm_never_starts_is_refused(cluster: ClusterConfig, named: str, recorded: Site, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        check_limits(make_job(tmp_path / "sweep", cluster=cluster), recorded)


def test_the_queue_has_the_first_limit_that_is_set(recorded: Site, tmp_path: Path) -> None:
    def jobs(count: int, **keys: Any) -> None:
        cluster = on_cpus(**keys)
        check_queue([make_job(tmp_path / "sweep", number, cluster=cluster) for number in range(count)], recorded)

    jobs(8, qos="long")
    with pytest.raises(UserError, match="QOS long allows 8"):
        jobs(9, qos="long")
    with pytest.raises(UserError, match="account lab allows 5"):
        jobs(6, qos="plain")
    with pytest.raises(UserError, match="account lab allows 1 "):
        jobs(2, partition="debug")
    jobs(9, partition="debug", clusters="far")


def test_the_environment_chooses_what_the_config_does_not(
    recorded: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_node=4, time="2-00:00:00")
    job = make_job(tmp_path / "sweep", cluster=cluster, gpus=4)
    monkeypatch.setenv("SBATCH_PARTITION", "two_days")
    monkeypatch.setenv("SBATCH_QOS", "long")
    check_limits(job, recorded)
    assert options(job, recorded)["cpus-per-task"] == "16"
    assert cost.cost_lines([job], recorded)[0].startswith("account lab, partition two_days, ")
    monkeypatch.setenv("SBATCH_ACCOUNT", "other")
    with pytest.raises(UserError, match="may not use QOS 'long'"):
        check_limits(job, recorded)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # defaults of the user also reach sbatch from within a job
    with pytest.raises(UserError, match="may not use QOS 'long'"):
        check_limits(job, recorded)
