"""A chain of jobs as the executor sees it: how it is submitted, what it costs, how it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors import cost
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.runs.job_status import JobStatus, folded
from hpc_train.schedulers.slurm.site import Site
from tests.launch.jobs import make_job
from tests.launch.test_slurm import command, slurm  # noqa: F401

NUMBERED = 'n=$(($(cat {0}/n 2>/dev/null) + 1)); echo $n > {0}/n; echo "$@" >> {0}/calls; '


def executor(folder: Path, tmp_path: Path, then: str) -> SlurmJobExecutor:
    command(folder, "sbatch", NUMBERED.format(tmp_path) + then)
    command(folder, "scancel", f'echo "scancel $@" >> {tmp_path}/calls')
    return SlurmJobExecutor()


def test_each_job_waits_for_the_one_before(slurm: Path, tmp_path: Path) -> None:  # noqa: F811
    place = executor(slurm, tmp_path, "echo Submitted batch job $((40 + n))")
    jobs = [make_job(tmp_path / "sweep", number, cluster=ClusterConfig(kind="slurm")) for number in range(2)]
    for job in jobs:
        job.config.launch.chain = 3
    assert place.submit(jobs, tmp_path / "sweep", 2) == ["41", "44"], "no array: its tasks could not wait one by one"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all("--no-requeue " in call and "--requeue" not in call for call in calls)
    assert [call.partition("--dependency=")[2].split(" ")[0] for call in calls] == [
        "", "afterany:41", "afterany:42", "", "afterany:44", "afterany:45",
    ]  # fmt: skip
    assert (jobs[1].run.attempts / "chain-000").read_text().split() == ["44", "45", "46"]
    assert place.identity("44")["chain"] == ["44", "45", "46"]
    command(slurm, "scancel", f'echo "$@" >> {tmp_path}/scancel')
    place.stop(["44"])
    assert (tmp_path / "scancel").read_text() == "--signal=USR1 44 45 46\n"


def test_a_chain_that_is_refused_in_the_middle_leaves_nothing(slurm: Path, tmp_path: Path) -> None:  # noqa: F811
    place = executor(slurm, tmp_path, "[ $n -lt 3 ] || exit 1; echo Submitted batch job $((40 + n))")
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm"))
    job.config.launch.chain = 3
    with pytest.raises(UserError):
        place.submit([job], tmp_path / "sweep", 1)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel 41 42"


def test_the_cost_is_that_of_the_chain(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm", gpus_per_node=4, time="02:00:00"), gpus=4)
    job.config.launch.chain = 3
    assert cost.gpu_hours([job]) == 4 * 2 * 3
    assert "at most 24 GPU-hours (a chain of 3 jobs)" in cost.cost_lines([job], Site(""))[0]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ("PENDING PENDING PENDING", "job 1, 1 of 3, pending"),
        ("FAILED RUNNING PENDING", "job 2, 2 of 3, running"),
        ("FAILED PENDING PENDING", "job 2, 2 of 3, pending"),
        ("FAILED COMPLETED CANCELLED", "job 2, 2 of 3, completed"),
        ("CANCELLED CANCELLED CANCELLED", "job 1, 1 of 3, cancelled"),
        ("? RUNNING PENDING", "job 2, 2 of 3, running"),
    ],
)
def test_a_chain_stands_as_the_job_that_counts(states: str, words: str) -> None:
    ids = ["1", "2", "3"]
    known = {job_id: JobStatus(state) for job_id, state in zip(ids, states.split(), strict=True) if state != "?"}
    assert folded({"1": ids}, known)["1"].words == words
    assert folded({"1": ids}, {}) == {}
