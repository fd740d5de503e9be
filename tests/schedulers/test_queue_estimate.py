"""When Slurm says that jobs would start, and how far off it was, against commands that answer as Slurm does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.commands import plan
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.sbatch import earlier_starts
from hpc_train.schedulers.slurm import queue_estimate
from hpc_train.schedulers.slurm.client import SlurmError
from hpc_train.schedulers.slurm.queue_estimate import (
    ESTIMATES,
    Estimate,
    Start,
    describe_accuracy,
    read_estimates,
    starts_of,
)
from hpc_train.schedulers.slurm.site import Site
from tests.launch.jobs import make_job
from tests.launch.test_slurm import SITE
from tests.schedulers.test_variables import command

PARTITION = "PartitionName=gpu Default=YES State=UP TotalNodes=8 MaxNodes=8 MaxTime=UNLIMITED"
PLAN = [
    "model=gpt_tiny", "data=synthetic", "batch.global_size=64", "train.steps=100000", "cluster=slurm", "strategy.tp=1",
    "--machine", "a100-40", "--rows", "4",
]  # fmt: skip


def slurm_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of a cluster that would start any job in an hour, but refuses 64 GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "sinfo", "sacctmgr", "sacct"):
        command(folder, name, "true")
    command(folder, "scontrol", f'case "$2" in config) echo ClusterName = devel;; *) echo "{PARTITION}";; esac')
    late = f"sbatch: Job 7 to start at {slurm_time(time.time() + 3600)} using 8 processors on nodes n1 in partition gpu"
    taken = f'case "$*" in *--test-only*) echo "{late}" >&2;; *) echo Submitted batch job 41;; esac'
    refused = '*nodes=8*) echo "allocation failure: Node count specification invalid" >&2; exit 1'
    command(folder, "sbatch", f'echo "$@" >> {tmp_path}/calls; case "$*" in {refused};; *) {taken};; esac')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path / "runs"))
    return folder


def test_a_plan_asks_once_for_each_shape_and_is_sorted_by_the_end(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*PLAN, "--gpus", "8,64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert plan.main([*PLAN, "--gpus", "8,64"]) == 0
    shown = capsys.readouterr().out
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and all("--test-only" in call for call in calls), "rows of a shape share the answer"
    assert [row["gpus"] for row in rows] == [8, 8, 64, 64], "though 64 GPUs have the shorter steps"
    assert [row["starts"] is None for row in rows] == [False, False, True, True]
    assert rows[0]["done"] == pytest.approx(rows[0]["starts"] + rows[0]["seconds"])
    assert rows[0]["starts"] == pytest.approx(time.time() + 3600, abs=600)
    assert any("Slurm refuses 64 GPUs: allocation failure: Node count" in line for line in rows[0]["queue"])
    assert "starts" in shown and "done" in shown and "after three jobs here have started" in shown


@pytest.mark.parametrize("silent", ["scontrol", "sbatch"])
def test_a_queue_that_does_not_answer_is_one_message_beside_the_table(
    silent: str, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(slurm, silent, "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    assert plan.main([*PLAN, "--gpus", "2,4"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the start in the queue is unknown: ") == 1
    assert "Unable to contact" in shown if silent == "sbatch" else "Slurm does not respond" in shown
    assert "starts  " not in shown and "2 GPUs instead of 4" in shown


def test_an_answer_is_kept_for_minutes_and_a_silence_is_not(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ["--nodes=1"], ["--nodes=2"]
    found = starts_of([first, second, first])
    assert {*found} == {tuple(first), tuple(second)} and all(start.at for start in found.values())
    command(slurm, "sbatch", "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")
    assert starts_of([first]) == {tuple(first): found[tuple(first)]}
    with pytest.raises(SlurmError, match="configuration source"):
        starts_of([["--nodes=3"]])
    monkeypatch.setattr(queue_estimate, "FRESH_S", 0.0)
    with pytest.raises(SlurmError):
        starts_of([first])
    (tmp_path / "cache/hpc_train/queue-starts.json").write_text("[damaged")
    command(slurm, "sbatch", "echo 'allocation failure: too many' >&2; exit 1")
    assert starts_of([first]) == {tuple(first): Start(None, "allocation failure: too many")}


def test_a_submission_records_the_expected_start(slurm: Path, tmp_path: Path) -> None:
    jobs = [make_job(tmp_path / "sweep", number, cluster=SITE, gpus=4) for number in range(2)]
    executor = SlurmJobExecutor()
    executor.check(jobs)
    executor.submit(jobs, tmp_path / "sweep", 2)
    with (tmp_path / ESTIMATES).open("a") as file:
        file.write('{"cluster": "devel"}\n{"clus')
    (found,) = read_estimates(tmp_path, "devel", "gpu")
    assert (found.job_id, found.cluster, found.partition) == ("41_0", "devel", "gpu")
    assert found.expected - found.submitted == pytest.approx(3600, abs=120)
    assert read_estimates(tmp_path, "devel", "other") == read_estimates(tmp_path, "another", "gpu") == []


def test_how_far_off_slurm_was(slurm: Path) -> None:
    now = float(int(time.time()) - 100_000)
    waits = {"1": 600.0, "2": 1200.0, "3_0": 1800.0, "4": 10.0, "5": None, "6": 0.0}
    said = [Estimate("devel", "gpu", job, now, now + (600 if job != "4" else 0)) for job in waits]
    submitted = {job: now + (9999 if job == "6" else 1) for job in waits}  # job 6 was requeued
    started = {job: "Unknown" if wait is None else slurm_time(submitted[job] + wait) for job, wait in waits.items()}
    (slurm / "rows").write_text("".join(f"{job}|{slurm_time(submitted[job])}|{started[job]}\n" for job in waits))
    command(slurm, "sacct", f'echo "$@" > {slurm}/asked; cat {slurm}/rows')
    words = "your last 4 jobs here waited 1.5 times as long as Slurm had said (half of them 1 to 2.2 times)"
    assert describe_accuracy(said) == words
    assert "--jobs=1,2,3_0,4,5,6" in (slurm / "asked").read_text()
    assert describe_accuracy(said[:2]) is None and describe_accuracy(said[3:]) is None, "fewer than three have started"
    command(slurm, "sacct", "exit 1")
    assert describe_accuracy(said) is None


def test_smaller_and_shorter_jobs_that_start_earlier_are_proposed(slurm: Path, tmp_path: Path) -> None:
    """A job of one node would start in ten minutes, and one of at most half an hour at once."""

    def starts_in(seconds: float) -> str:
        return f'echo "sbatch: Job 7 to start at {slurm_time(time.time() + seconds)} using 8 processors on n1" >&2'

    cases = f"*--time=00:30:00*) {starts_in(0)};; *--nodes=1*) {starts_in(600)};; *) {starts_in(7200)};;"
    command(slurm, "sbatch", f'echo "$@" >> {tmp_path}/calls; case "$*" in {cases} esac')
    job = make_job(tmp_path / "sweep", cluster=SITE, gpus=4)

    def shapes() -> list[str]:
        return [line.partition(": Slurm expects")[0] for line in earlier_starts(job, Site("devel"))]

    assert shapes() == ["cluster.nodes=1", "cluster.time=00:30:00"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 5, "the job, and four shapes"
    assert shapes() == ["cluster.nodes=1", "cluster.time=00:30:00"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 5, "the answers are kept for minutes"
    short = replace(job, config=replace(job.config, cluster=replace(SITE, time="00:30:00")))
    assert earlier_starts(short, Site("devel")) == [], "it starts at once"
    assert len((tmp_path / "calls").read_text().splitlines()) == 5
    command(slurm, "sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    other = replace(job, config=replace(job.config, cluster=replace(SITE, account="other")))
    assert earlier_starts(other, Site("devel")) == []
