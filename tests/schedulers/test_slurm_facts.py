"""What Slurm's commands print about a job, as recorded from 22.05, read."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence

from hpc_train.schedulers.slurm.reasons import JobFacts, read_facts
from hpc_train.schedulers.slurm.records import NodeState

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
