"""Why a job waits, what would start it sooner, and what Slurm 22.05 says of a job."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.schedulers.slurm.reasons import REASONS, JobFacts, explain, read_facts, sooner, with_gpus
from hpc_train.schedulers.slurm.records import Free, NodeState

PARTITIONS = """\
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
    found = {one.partition: one for one in Free.read_all(PARTITIONS)}
    assert found.keys() == {"batch", "short"}
    assert (found["batch"].idle, found["batch"].nodes, found["batch"].gpus, found["batch"].default) == (1, 5, 2, True)
    assert (found["short"].idle, found["short"].max_time_s, found["short"].gpus) == (4, 1800, 4)


def test_fewer_nodes_another_partition_and_a_shorter_time_start_sooner() -> None:
    found = sooner(ClusterConfig(nodes=2, time="02:00:00"), 2, Free.read_all(PARTITIONS))
    assert [change.partition(":")[0] for change in found] == [
        "cluster.nodes=1-2", "cluster.partition=short cluster.time=00", "cluster.time=01",
    ]  # fmt: skip
    assert "cluster.partition=short cluster.time=00:30:00: 4 of its 4 nodes are idle" in found


def test_a_job_with_the_gpus_of_its_partition_is_not_sent_to_one_without() -> None:
    free = Free.read_all(f"{PARTITIONS}cpu|up|0/9/0/9|infinite|(null)|cpu\n")
    assert [with_gpus(ClusterConfig(partition=name), free) for name in (None, "short", "cpu")] == [1, 1, 0]
    found = sooner(ClusterConfig(nodes=2), 1, free)
    assert any("cluster.partition=short" in change for change in found)
    assert not any("cluster.partition=cpu" in change for change in found)


def test_a_time_that_follows_from_the_pace() -> None:
    found = sooner(
        ClusterConfig(partition="batch", nodes=1, gpus_per_node=4, time="10:00:00"), 8, Free.read_all(PARTITIONS), 1200
    )
    assert found == ["cluster.time=00:30:00: the rest of the run takes 00:20:00"]


SCONTROL = (
    "JobId=12 JobName=hpc_train-far UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901746 Nice=0 "
    "Account=(null) QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=2 "
    "BatchFlag=1 Reboot=0 ExitCode=1:0 DerivedExitCode=0:9 RunTime=00:00:04 TimeLimit=00:10:00 NodeList=n[1-2] "
    "BatchHost=n1 "
    "Comment=hpc_train:/home/me/outputs/far with JobState=words\n"
)
SACCT = "12|FAILED|1:0|0:9||n[1-2]\n12.batch|FAILED|1:0||4M|n1\n12.0|FAILED|0:9||123456K|n[1-2]\n"
SINFO = "n1|idle|none\nn2|down*|Not responding\nn2|down*|Not responding\n"


def asked(**answers: str | None) -> JobFacts | None:
    def ask(command: Sequence[str]) -> str | None:
        return answers.get(command[0])

    return read_facts("12", ask)


def test_all_that_is_known_of_a_failed_job() -> None:
    found = asked(scontrol=SCONTROL, sacct=SACCT, sinfo=SINFO)
    assert found == JobFacts(
        "12", "FAILED", "NonZeroExitCode", "1:0", "0:9", "n[1-2]",
        (NodeState("n1", "idle"), NodeState("n2", "down*", "Not responding")), 123456 * 1024, 2,
    )  # fmt: skip


GIB = 1024**3
MEASURED = {
    "total_time": 100,
    "nodes": {
        "n1": {
            "total_time": 150, "cpus": 2, "used_memory": 8 * GIB, "total_memory": 16 * GIB,
            "gpu_utilization": {"0": 90, "1": 48}, "gpu_used_memory": {"0": 48 * GIB, "1": 32 * GIB},
            "gpu_total_memory": {"0": 80 * GIB, "1": 80 * GIB},
        },
        "n2": {
            "total_time": 50, "cpus": 2, "used_memory": 12 * GIB, "total_memory": 16 * GIB,
            "gpu_utilization": {"0": 96}, "gpu_used_memory": {"0": 60 * GIB}, "gpu_total_memory": {"0": 80 * GIB},
        },
    },
}  # fmt: skip


def commented(text: str) -> tuple[str, ...]:
    found = asked(sacct=f"12|COMPLETED|0:0|0:0||n[1-2]|{text}\n12.0|COMPLETED|0:0||4M|n[1-2]|\n")
    assert found is not None
    return found.use


def test_the_summary_of_jobstats() -> None:
    packed = base64.b64encode(gzip.compress(json.dumps(MEASURED).encode())).decode()
    assert commented(f"JS1:{packed}") == (
        "Jobstats: GPU utilization 78 % (lowest 48 %, GPU 1 of n1)",
        "Jobstats: GPU memory 60 GiB of 80 GiB on the fullest",
        "Jobstats: CPU utilization 50 %, host memory of the fullest node 12 GiB of 16 GiB",
    )
    others = ["JS1:Short", "JS1:None", "moved by the staff", "", packed, "JS1:" + base64.b64encode(b"{}").decode()]
    assert {commented(text) for text in others} == {()}


def test_a_site_without_accounting() -> None:
    found = asked(scontrol=SCONTROL)
    assert found is not None
    assert (found.state, found.max_rss_bytes) == ("FAILED", None)


def test_an_old_job_that_only_accounting_knows() -> None:
    found = asked(sacct="12|CANCELLED by 1000|0:15|0:0||None assigned\n")
    assert found == JobFacts("12", "CANCELLED", "", "0:15", "0:0")


def test_no_slurm_or_an_unknown_job() -> None:
    assert asked() is None
    assert asked(sacct="", scontrol="") is None
