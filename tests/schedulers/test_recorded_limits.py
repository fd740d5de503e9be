"""Jobs against the limits of a site, in the form in which Slurm 22.05 prints them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors import cost
from hpc_train.launch.sbatch import options
from hpc_train.schedulers.slurm.limits import check_limits, check_queue
from hpc_train.schedulers.slurm.site import Site, read_site
from tests.launch.jobs import make_job

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
Cluster|Account|Partition|QOS|DefaultQOS|MaxSubmitJobs|MaxWall|MaxTRES
big|other|two_days|normal||||
big|lab|debug|normal||1|00:20:00|
big|lab||above,long,normal,plain,unbound||5|1-00:00:00|node=3
big|week||long,normal|long||1-00:00:00|
"""
QOS = """\
Name|Flags|MaxSubmitJobsPerUser|MaxWall|MaxTRESPerJob
normal||||
plain||||
long||8|7-00:00:00|
unbound|DenyOnLimit,PartitionMaxNodes,PartitionTimeLimit||7-00:00:00|
owners|||6-00:00:00|
above|OverPartQOS||7-00:00:00|
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
    tables = {"assoc": ASSOCIATIONS, "qos": QOS}
    return next((printed(table, command) for what, table in tables.items() if what in command), "lab\n")


@pytest.fixture(scope="module")
def site() -> Site:
    return read_site(answer)


def asked(**keys: Any) -> ClusterConfig:
    return ClusterConfig(kind="slurm", gpus_per_node=0, **keys)


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(asked(partition="cpu", time="10:00:00"), id="the association without a partition"),
        pytest.param(asked(partition="cpu", qos="plain"), id="a QOS of the association without a partition"),
        pytest.param(asked(partition="two_days", account="other"), id="the association with the partition"),
        pytest.param(asked(partition="two_days", time="2-00:00:00", qos="long"), id="a QOS above the association"),
        pytest.param(asked(partition="two_days", time="2-00:00:00", account="week"), id="the default QOS"),
        pytest.param(asked(partition="owned", time="5-00:00:00"), id="the QOS of the partition"),
        pytest.param(asked(partition="owned", time="6-12:00:00", qos="above"), id="a QOS above that of the partition"),
        pytest.param(asked(partition="two_days", time="3-00:00:00", qos="unbound"), id="PartitionTimeLimit"),
        pytest.param(asked(partition="two_days", nodes=3, qos="unbound"), id="PartitionMaxNodes"),
        pytest.param(asked(partition="secret"), id="a hidden partition"),
    ],
)
def test_what_slurm_starts_is_not_refused(cluster: ClusterConfig, site: Site, tmp_path: Path) -> None:
    check_limits(make_job(tmp_path / "sweep", cluster=cluster), site)


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        (asked(partition="debug", time="00:25:00"), "account lab allows 00:20:00"),
        (asked(partition="debug", qos="long"), "may not use QOS 'long'"),
        (asked(partition="two_days", time="2-00:00:00"), "account lab allows 1-00:00:00"),
        (asked(partition="two_days", time="2-00:00:00", qos="plain"), "account lab allows 1-00:00:00"),
        (asked(partition="two_days", time="3-00:00:00", qos="long"), "partition two_days allows 2-00:00:00"),
        (asked(partition="two_days", nodes=3, qos="long"), "partition two_days allows 2"),
        (asked(partition="owned", time="6-12:00:00", qos="long"), "QOS owners of partition owned allows 6-00:00:00"),
        (asked(partition="cpu", nodes=4, qos="long"), "account lab allows 3 per job"),
        (asked(partition="two_days", nodes=5, qos="unbound"), "partition two_days has 4"),
    ],
)
def test_what_slurm_never_starts_is_refused(cluster: ClusterConfig, named: str, site: Site, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        check_limits(make_job(tmp_path / "sweep", cluster=cluster), site)


def test_the_queue_has_the_first_limit_that_is_set(site: Site, tmp_path: Path) -> None:
    def jobs(count: int, **keys: Any) -> None:
        cluster = asked(**keys)
        check_queue([make_job(tmp_path / "sweep", number, cluster=cluster) for number in range(count)], site)

    jobs(8, qos="long")
    with pytest.raises(UserError, match="QOS long allows 8"):
        jobs(9, qos="long")
    with pytest.raises(UserError, match="account lab allows 5"):
        jobs(6, qos="plain")
    with pytest.raises(UserError, match="account lab allows 1 "):
        jobs(2, partition="debug")
    jobs(9, partition="debug", clusters="far")


def test_the_environment_chooses_what_the_config_does_not(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_node=4, time="2-00:00:00")
    job = make_job(tmp_path / "sweep", cluster=cluster, gpus=4)
    monkeypatch.setenv("SBATCH_PARTITION", "two_days")
    monkeypatch.setenv("SBATCH_QOS", "long")
    check_limits(job, site)
    assert options(job, site)["cpus-per-task"] == "16"
    assert cost.cost_lines([job], site)[0].startswith("account lab, partition two_days, ")
    monkeypatch.setenv("SBATCH_ACCOUNT", "other")
    with pytest.raises(UserError, match="may not use QOS 'long'"):
        check_limits(job, site)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # defaults of the user also reach sbatch from within a job
    with pytest.raises(UserError, match="may not use QOS 'long'"):
        check_limits(job, site)
