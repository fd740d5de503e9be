"""Which runs give nodes back to more urgent jobs: the decision on made-up queues, and the agents that share a queue."""

from __future__ import annotations

import random
import runpy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.config.settings import SITE
from hpc_train.elastic import priority
from hpc_train.elastic.priority import LiveRun, PriorityWatch, Queue, Shrink, WaitingJob, decide
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from hpc_train.run.requests import resize_requested
from tests.doors.command import REPOSITORY
from tests.launch.jobs import make_job
from tests.schedulers.test_variables import command

NOW = 1e6
KINDS: list[tuple[str, ...]] = [(), ("a100",), ("a100", "fast")]


def live(job_id: str, nodes: int = 4, least: int = 1, urgency: int = 0, **fields: object) -> LiveRun:
    run = LiveRun(job_id, urgency, nodes, nodes, least, interval_s=3600.0, partition="gpu")
    return replace(run, **fields)  # type: ignore[arg-type]


def waiting(job_id: str, nodes: int, urgency: int = 5, partitions: str = "gpu") -> WaitingJob:
    return WaitingJob(job_id, f"/runs/{job_id}", urgency, nodes, frozenset(partitions.split(",")))


@pytest.mark.parametrize("seed", range(200))
def test_no_run_gives_back_what_it_must_keep(seed: int) -> None:
    draw = random.Random(seed)
    runs = []
    for number in range(draw.randint(0, 6)):
        nodes = draw.randint(1, 8)
        run = live(
            str(number), nodes, draw.randint(1, nodes), draw.randint(-2, 2), partition=draw.choice("ab"),
            needs=draw.choice(KINDS), shrunk_at=draw.choice([0.0, NOW - 7200, NOW - 60]),
        )  # fmt: skip
        if draw.random() < 0.2 and nodes > run.min_nodes:
            run = replace(run, target=run.min_nodes, urgent="70", shrunk_at=NOW - 10)
        runs.append(run)
    jobs = []
    for number in range(draw.randint(0, 5)):
        places = draw.choice(["a", "b", "a,b"])
        job = waiting(f"7{number}", draw.randint(1, 9), draw.randint(-2, 3), places)
        jobs.append(replace(job, needs=draw.choice(KINDS), run=f"/runs/{draw.randint(0, 4)}"))
    idle = {name: draw.randint(0, 3) for name in "ab"}
    shrinks = decide(jobs, runs, idle, NOW)
    by_id = {run.job_id: run for run in runs}
    assert len({shrink.job_id for shrink in shrinks}) == len(shrinks)
    for shrink in shrinks:
        run = by_id[shrink.job_id]
        assert 0 < shrink.nodes <= run.nodes - run.min_nodes
        assert run.priority < shrink.urgent.priority and {*shrink.urgent.needs} <= {*run.needs}
        assert run.partition in shrink.urgent.partitions
        assert NOW - run.shrunk_at >= run.interval_s and run.target == run.nodes
    served = {shrink.urgent.job_id: shrink.urgent for shrink in shrinks}
    assert len({job.run for job in served.values()}) == len(served), "one job of each run"
    for job in served.values():
        given = [shrink for shrink in shrinks if shrink.urgent == job]
        promised = sum(run.nodes - run.target for run in runs if run.urgent == job.job_id)
        (partition,) = {by_id[shrink.job_id].partition for shrink in given}
        total = sum(shrink.nodes for shrink in given) + promised
        assert job.nodes - idle[partition] <= total <= job.nodes, "what the job lacks, and no more"
        kept = {shrink.job_id for shrink in shrinks}
        lower = [run for run in runs if run.may_shrink_for(job, partition, NOW) and run.job_id not in kept]
        assert all(run.priority >= max(by_id[shrink.job_id].priority for shrink in given) for run in lower)
    for _ in range(3):
        draw.shuffle(jobs)
        draw.shuffle(runs)
        assert {*decide(jobs, runs, idle, NOW)} == {*shrinks}, "the same for each agent"


def test_the_runs_of_the_lowest_priority_give_back_what_is_missing() -> None:
    job = waiting("9", 5)
    runs = [live("1", 4, 2), live("2", 6, 1, urgency=-1), live("3", 8, 1, urgency=5)]
    assert decide([job], runs, {"gpu": 1}, NOW) == [Shrink("2", 4, job)]
    assert decide([job], runs, {}, NOW) == [Shrink("2", 5, job)]
    assert decide([replace(job, nodes=7)], runs, {}, NOW)[-1].job_id == "1"
    assert decide([replace(job, nodes=8)], runs, {}, NOW) == [], "the runs together cannot"
    promised = [replace(runs[1], target=1, urgent="9", shrunk_at=NOW - 5), runs[0]]
    assert decide([job], promised, {}, NOW) == [], "a run is giving back nodes for it"
    assert decide([replace(job, priority=0)], runs[:1], {}, NOW) == [], "it is not more urgent"


def test_an_urgent_third_run_need_not_wait_for_two_others() -> None:
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "pictures.py"))
    expected = ([10.0, 12.0, 12.0], [11.6, 12.6, 3.1], [10.0, 14.0, 3.0])
    for policy, ends in zip(drawn["POLICIES"], expected, strict=True):
        runs = drawn["queue"](policy)
        assert [run.hours()[1] for run in runs] == ends
        used = [0.1 * sum(run.history) for run in runs]
        assert used == pytest.approx([40, 48, 8], abs=0.4), "the same node-hours"


SQUEUE = "9|PENDING|Resources|gpu,cpu|3|(null)|gres/gpu:a100:4|hpc_train:{urgent} mine"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv(SITE, "")

    def answers(lines: list[str]) -> None:
        echoes = "\n".join(f"echo '{line}'" for line in lines)
        command(folder, "squeue", f'echo "$*" >> {tmp_path}/calls\n{echoes}')
        command(folder, "sinfo", "echo 'gpu|up|7/1/0/8|infinite|gpu:a100:4|gpu*'")
        command(folder, "scontrol", 'echo "PrivateData = jobs,usage"')

    return answers


def frozen(root: Path, name: str, urgency: int, nodes: int) -> tuple[RunDirectory, PriorityWatch]:
    job = make_job(root / name, cluster=ClusterConfig(kind="slurm", nodes=nodes, gpus_per_node=4), gpus=4)
    job.config.elastic.priority = urgency
    job.config.elastic.min_nodes = 1
    freeze(job.config, job.run)
    job.run.claim_attempt()
    (job.run.attempts / "000.json").write_text(f'{{"attempt": 0, "nodes": {nodes}}}')
    return job.run, PriorityWatch(job.run, job.config, {"a": "1", "b": "2", "c": "9"}[name])


def test_agents_share_an_answer_and_each_shrinks_its_run(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    runs = [frozen(root, "a", 0, 2), frozen(root, "b", 1, 4)]
    urgent, _ = frozen(root, "c", 5, 3)
    running = [f"{number}|RUNNING|None|gpu|4|(null)|gres/gpu:a100:4|hpc_train:{root}" for number in (1, 2)]
    slurm([*running, "8|PENDING|Resources|gpu|9|(null)|N/A|other", SQUEUE.format(urgent=urgent.path)])
    monkeypatch.setattr(priority, "ASK_EVERY_S", 0.5)
    for _ in range(2):  # in the second round each has described its run before it decides
        for _, watch in runs:
            watch._look()
        time.sleep(0.6)
    requests = [resize_requested(run) for run, _ in runs]
    assert [request and request.nodes for request in requests] == [1, 3], "one node is idle"
    assert requests[0] is not None and requests[0].reason == (
        "job 9 waits for 3 nodes, and its priority 5 is above 0 (elastic.priority)"
    )
    asked = (tmp_path / "calls").read_text().splitlines()
    assert len(asked) <= 3 and all("--me" in call for call in asked)
    for _, watch in runs:
        watch._look()
    assert [resize_requested(run) for run, _ in runs] == requests, "not again within elastic.shrink_interval_s"


def test_the_jobs_of_others_count_where_the_site_limits_the_priority(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("limits:\n  elastic.priority: {max: 3}\n")
    monkeypatch.setenv(SITE, str(site))
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "lab")
    _, watch = frozen(tmp_path / "runs", "a", 0, 4)
    urgent, _ = frozen(tmp_path / "runs", "c", 50, 3)
    text = SQUEUE.format(urgent=urgent.path)
    joiner = "10|PENDING|Resources|gpu|3|(null)|N/A|hpc_train-joiner:/runs/a:1:4"
    assert [job.priority for job in Queue.read(f"{text}\n{joiner}", "", NOW, 3).waiting] == [3]
    slurm([])
    monkeypatch.setattr(priority, "ASK_EVERY_S", 0.0)
    watch._look()
    watch._look()
    assert capsys.readouterr().err.count("the controller hides those of others (PrivateData)") == 1
    command(tmp_path / "bin", "scontrol", 'echo "PrivateData = none"')
    watch._look()
    assert "--me" in (calls := (tmp_path / "calls").read_text().splitlines())[0] and "--account=lab" in calls[-1]
