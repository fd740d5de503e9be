"""Why a job waits: Slurm's reasons in words, and what would start it sooner."""

from __future__ import annotations

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.schedulers.slurm.reasons import REASONS, explain, sooner, with_gpus
from hpc_train.schedulers.slurm.records import Free

SINFO = """\
batch|up|2/1/1/4|1-00:00:00|gpu:2|batch*
batch|up|0/0/1/1|1-00:00:00|(null)|batch*
short|up|0/4/0/4|30:00|gpu:a100:4(S:0-1)|short
old|inact|0/8/0/8|infinite|gpu:8|old
"""


def test_reasons_as_squeue_prints_them() -> None:
    assert "maintenance" in explain("ReqNodeNotAvail, Reserved for maintenance").words
    assert explain("ReqNodeNotAvail, UnavailableNodes:n[1-2]") is REASONS["ReqNodeNotAvail"]
    assert (
        "are available"
        in explain("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions").words
    )
    assert "release {job}" in explain("launch_failed_requeued_held").fix
    assert explain("Priority").by_size
    assert "Slurm reports Sunspots" in explain("Sunspots").words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxCpuPerUserLimit", "your jobs have reached the limit of the QOS for cores"),
        ("QOSMaxJobsPerUserLimit", "your jobs have reached the limit of the QOS for running jobs"),
        ("QOSMaxSubmitJobPerUserLimit", "your jobs have reached the limit of the QOS for jobs in the queue"),
        ("QOSGrpGRES", "all of its jobs together have reached the limit of the QOS for GPUs"),
        ("QOSMaxNodePerJobLimit", "it requests more nodes than the QOS allows per job, so it may never start"),
        (
            "QOSMaxWallDurationPerJobLimit",
            "it requests more wall time than the QOS allows per job, so it may never start",
        ),
        ("QOSMinCpuNotSatisfied", "it requests fewer cores than the minimum of the QOS, so it never starts"),
        ("QOSMinGRES", "it requests fewer GPUs than the minimum of the QOS, so it never starts"),
        (
            "AssocGrpWallLimit",
            "all of its jobs together have reached the limit of the account (association) for wall time",
        ),
        ("AssocGrpCPURunMinutesLimit", "for run minutes"),
        ("AssocGrpNodeMinutes", "for minutes of use"),
        ("AssocMaxJobsLimit", "your jobs have reached the limit of the account (association) for running jobs"),
        ("AssocMaxMemPerNode", "it requests more memory than the account (association) allows per job"),
        ("QOSUsageThreshold", "for use"),
        ("QOSResourceLimit", "for resources"),
    ],
)
def test_limits_by_their_parts(reason: str, words: str) -> None:
    assert words in explain(reason).words


def test_what_is_idle_is_read_from_partitions_that_are_up() -> None:
    found = {one.partition: one for one in Free.read_all(SINFO)}
    assert found.keys() == {"batch", "short"}
    assert (found["batch"].idle, found["batch"].nodes, found["batch"].gpus, found["batch"].default) == (1, 5, 2, True)
    assert (found["short"].idle, found["short"].max_time_s, found["short"].gpus) == (4, 1800, 4)


def test_fewer_nodes_another_partition_and_a_shorter_time_start_sooner() -> None:
    found = sooner(ClusterConfig(nodes=2, time="02:00:00"), 2, Free.read_all(SINFO))
    assert [change.partition(":")[0] for change in found] == [
        "cluster.nodes=1-2", "cluster.partition=short cluster.time=00", "cluster.time=01",
    ]  # fmt: skip
    assert "cluster.partition=short cluster.time=00:30:00: 4 of its 4 nodes are idle" in found


def test_a_job_with_the_gpus_of_its_partition_is_not_sent_to_one_without() -> None:
    free = Free.read_all(f"{SINFO}cpu|up|0/9/0/9|infinite|(null)|cpu\n")
    assert [with_gpus(ClusterConfig(partition=name), free) for name in (None, "short", "cpu")] == [1, 1, 0]
    found = sooner(ClusterConfig(nodes=2), 1, free)
    assert any("cluster.partition=short" in change for change in found)
    assert not any("cluster.partition=cpu" in change for change in found)


def test_a_time_that_follows_from_the_pace() -> None:
    found = sooner(
        ClusterConfig(partition="batch", nodes=1, gpus_per_node=4, time="10:00:00"), 8, Free.read_all(SINFO), 1200
    )
    assert found == ["cluster.time=00:30:00: the rest of the run takes 00:20:00"]
