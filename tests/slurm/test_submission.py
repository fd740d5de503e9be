"""What reaches a real cluster and what is refused before it does."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import IN_LONG_FORM
from tests.doors.command import TINY
from tests.slurm.cluster import Cluster
from tests.slurm.runs import status
from tests.warm_parents.sitecustomize import SOCKET

WORKERS = ["cluster.cpu_workers=2", "batch.global_size=24"]
HYBRID = ["+strategy=hybrid", *TINY, *WORKERS]
# The variables with which the agents of a job get a warm parent from the tests, if the job has no others.
FOR_WARM_PARENTS = (SOCKET, "PYTHONPATH", "OMP_WAIT_POLICY")
REFUSED = [
    (["cluster.partition=gpuu"], "did you mean gpu?"),
    (["cluster.nodes=5"], "partition cpu has 4"),
    (["cluster.partition=debug", "cluster.nodes=3"], "partition debug allows 2"),
    (["cluster.partition=debug", "cluster.time=02:00:00"], "cluster.time=00:30:00"),
    (["cluster.account=nobody"], "one of research, root"),
    (["cluster.qos=gold"], "one of normal"),
    (["cluster.partition=gpu", "cluster.gpus_per_node=8"], "cluster.gpus_per_node=4"),
    (["cluster.partition=gpu", "cluster.gpus_per_node=2", "cluster.gpu_type=h200"], "of type h200"),
    (["cluster.mem=64G"], "cluster.mem=4000M or less"),
    (["cluster.constraint=nowhere"], "Invalid feature specification"),
    (["cluster.partition=gpu", "cluster.gpus_per_node=4", "cluster.time=08:00:00"], "launch.yes=true"),
]


@pytest.mark.parametrize(
    ("arguments", "named"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
@pytest.mark.long_form(
    4,
    cases=[
        "cluster.partition=debug cluster.nodes=3",
        "cluster.partition=debug cluster.time=02:00:00",
        "cluster.qos=gold",
        "cluster.partition=gpu cluster.gpus_per_node=8",
        "cluster.mem=64G",
    ],
)  # tests/launch/test_limits.py
def test_a_job_that_cannot_be_is_refused_with_the_fix(
    arguments: list[str], named: str, cluster: Cluster, tmp_path: Path
) -> None:
    done = cluster.hpc_train("+strategy=dp", *TINY, *WORKERS, *arguments, "-m", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert done.stderr.count("fix:") == 1
    assert not list(tmp_path.iterdir())


def test_a_job_may_wait_for_a_node_that_is_drained(cluster: Cluster, tmp_path: Path) -> None:
    """sbatch takes it, though with --test-only it would not."""
    node = ["scontrol", "update", "nodename=n4", "reason=test"]
    assert cluster.call(*node, "state=drain").returncode == 0
    try:
        asked = ["cluster.nodes=4", "cluster.cpu_workers=1", "launch.dry_run=true", "-m"]
        done = cluster.hpc_train("+strategy=dp", *TINY, *asked, cwd=tmp_path)
    finally:
        cluster.call(*node[:3], "state=resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "down or drained now: n4" in done.stdout + done.stderr


@pytest.fixture
def limit_queue(cluster: Cluster) -> Iterator[Callable[[int], None]]:
    """Sets how many jobs the account ``limited`` may have in the queue; other tests submit on another account."""
    cluster.call("sacctmgr", "-iQ", "add", "account", "limited", "Cluster=devcluster")
    cluster.call("sacctmgr", "-iQ", "add", "user", getpass.getuser(), "account=limited")

    def limit(jobs: int) -> None:
        changed = ["sacctmgr", "-iQ", "modify", "account", "limited", "set", f"MaxSubmitJobs={jobs}"]
        assert cluster.call(*changed).returncode == 0

    yield limit
    limit(-1)


@pytest.mark.long_form(8)  # the full queue, and tests/launch/test_limits.py
def test_more_jobs_than_the_user_may_have_are_refused(
    cluster: Cluster, limit_queue: Callable[[int], None], tmp_path: Path
) -> None:
    limit_queue(3)
    done = cluster.hpc_train(*HYBRID, "cluster.account=limited", "train.seed=1,2,3,4", "-m", cwd=tmp_path)
    assert done.returncode == 2
    assert "allows 3 in the queue" in done.stderr


def test_training_on_the_login_node_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.hpc_train(*HYBRID, cwd=tmp_path)
    assert done.returncode == 2
    assert "login node" in done.stderr
    assert "cluster=local" in done.stderr


@pytest.mark.beside
def test_a_sweep_of_two_shapes_is_two_arrays_and_its_losses_are_those_of_this_machine(
    cluster: Cluster, tmp_path: Path, local_losses: list[float]
) -> None:
    """The strategies ask for their own nodes; inherited variables do not reach the jobs; export=NONE does no harm."""
    (tmp_path / "experiment").mkdir()
    for name, nodes in (("wide", 2), ("narrow", 1)):
        text = f"# @package _global_\ncluster: {{nodes: {nodes}, cpu_workers: 2}}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    environment = cluster.environment | {"SBATCH_PARTITION": "nowhere", "SBATCH_NODES": "4", "SBATCH_TIMELIMIT": "1"}
    shared = ["strategy=hybrid", "cluster=slurm", "cluster.partition=cpu", "+cluster.extra.export=NONE", *TINY]
    shared += [f"+cluster.env.{name}={environment[name]}" for name in FOR_WARM_PARENTS if name in environment]
    sweep = ["-cd", str(tmp_path), "+experiment=wide,narrow", "train.seed=0,1", "run.name=sweep", "-m"]
    here = Cluster(environment)
    done = here.hpc_train(*shared, *sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [RunDirectory(tmp_path / "outputs" / "sweep" / str(number)) for number in range(4)]
    ids = [run.record()["submissions"][-1]["job_id"] for run in runs]
    arrays = [job_id.split("_")[0] for job_id in ids]
    assert arrays[0] == arrays[1] != arrays[2] == arrays[3]
    worlds = [event["world_size"] for run in runs for event in run.read_events() if event["event"] == "started"]
    assert sorted(worlds) == [2, 2, 4, 4]
    assert [line["loss"] for line in runs[0].read_metrics()] == pytest.approx(local_losses, rel=1e-5)
    for run in runs:
        assert "srun" in (run.path / "job.sbatch").read_text()
    lines = (tmp_path / "outputs" / ".queue-estimates.jsonl").read_text().splitlines()
    estimates = [json.loads(line) for line in lines]
    assert [(each["cluster"], each["partition"], each["job_id"]) for each in estimates] == [
        ("devcluster", "cpu", ids[0]),
        ("devcluster", "cpu", ids[2]),
    ]
    assert all(each["expected"] > each["submitted"] - 60 for each in estimates)


@pytest.mark.long_form(8)  # tests/schedulers/test_queue_estimate.py
def test_a_plan_shows_when_slurm_would_start_each_shape(cluster: Cluster, tmp_path: Path) -> None:
    here = Cluster(cluster.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    asked = ["cluster=slurm", "cluster.partition=gpu", "strategy.tp=1", "batch.global_size=64", "train.steps=1000"]
    options = ["--gpus", "4,64", "--machine", "a100-40", "--rows", "2", "--json"]
    done = here.hpc_train("plan", *TINY, *asked, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    fits, refused = json.loads(done.stdout)
    assert (fits["gpus"], refused["gpus"]) == (4, 64), "what is done first is first"
    assert fits["done"] == pytest.approx(fits["starts"] + fits["seconds"])
    assert refused["starts"] is None and "Slurm refuses 64 GPUs" in refused["queue"][0]


@IN_LONG_FORM  # the sweep below compares losses, too
def test_four_nodes_give_the_losses_of_this_machine(
    cluster: Cluster, tmp_path: Path, local_losses: list[float]
) -> None:
    wanted = ["cluster=slurm", "cluster.nodes=4", "cluster.cpu_workers=2", "run.name=wide", "-m"]
    done = cluster.hpc_train("+strategy=hybrid", *TINY, *wanted, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(tmp_path / "outputs" / "wide")
    meeting = json.loads((run.attempts / "000.json").read_text())
    assert (meeting["nodes"], meeting["layout"]["pp"], meeting["layout"]["dp"]) == (4, 2, 4)
    assert [line["loss"] for line in run.read_metrics()] == pytest.approx(local_losses, rel=1e-5)


@pytest.mark.long_form(12)  # tests/launch/test_slurm.py
def test_a_sweep_larger_than_an_array_may_be_becomes_several(plain: Cluster, tmp_path: Path) -> None:
    conf = Path(plain.environment["SLURM_CONF"])
    as_it_was = conf.read_text()
    conf.write_text(f"{as_it_was}\nMaxArraySize=2\n")
    try:
        plain.call("scontrol", "reconfigure")
        options = ["cluster.begin=now+1hour", "launch.detach=true", "launch.array_parallelism=2", "run.name=sweep"]
        done = plain.hpc_train(*HYBRID, *options, "train.seed=1,2,3,4,5", "-m", cwd=tmp_path)
    finally:
        conf.write_text(as_it_was)
        plain.call("scontrol", "reconfigure")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [RunDirectory(tmp_path / "outputs" / "sweep" / str(number)) for number in range(5)]
    ids = [run.record()["submissions"][-1]["job_id"] for run in runs]
    arrays = list(dict.fromkeys(job_id.partition("_")[0] for job_id in ids))
    assert ids == [f"{arrays[0]}_0", f"{arrays[0]}_1", f"{arrays[1]}_0", f"{arrays[1]}_1", arrays[2]]
    facts = [plain.call("scontrol", "show", "job", "--oneliner", array).stdout for array in arrays]
    assert ["ArrayTaskThrottle=1 " in fact for fact in facts] == [True, True, False], facts
    assert f"Dependency=afterany:{arrays[0]}" in facts[2], "two arrays run one job at a time, and the third waits"
    plain.call("scancel", *arrays)
    assert {row["state"] for row in status(plain, tmp_path, "sweep")} == {"cancelled"}, "though none of them began"


PLUGIN = """
function slurm_job_submit(job, partitions, user)
  if job.features == "rack3" then
    slurm.log_user("Jobs on rack3 need a project code: use --wckey=PROJECT")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end
return slurm.SUCCESS
"""


def test_the_words_of_the_site_reach_the_user(plain: Cluster, tmp_path: Path) -> None:
    """Those of a submit plugin and, where munge is down, those of sbatch."""
    conf = Path(plain.environment["SLURM_CONF"])
    if not (plugins := list(Path("/usr/lib").glob("*/slurm-wlm/job_submit_lua.so"))):
        pytest.skip("Slurm has no job_submit/lua here")
    as_it_was = conf.read_text()
    conf.with_name("job_submit.lua").write_text(PLUGIN)
    conf.write_text(f"{as_it_was}\nJobSubmitPlugins=lua\n")
    try:
        assert plain.call("scontrol", "reconfigure").returncode == 0, plugins
        asked = [*HYBRID, "cluster=slurm", "cluster.nodes=1"]
        refused = plain.hpc_train(*asked, "cluster.constraint=rack3", "-m", cwd=tmp_path)
    finally:
        conf.write_text(as_it_was)
        plain.call("scontrol", "reconfigure")
    assert refused.returncode == 2, refused.stdout
    assert "Jobs on rack3 need a project code: use --wckey=PROJECT" in refused.stderr
    assert "set in: cluster.wckey\n" in refused.stderr
    own = tmp_path / "etc"
    own.mkdir()
    for path in conf.parent.glob("*.conf"):
        (own / path.name).write_text(path.read_text().replace("/munge.socket", "/no.socket"))
    without = Cluster(plain.environment | {"SLURM_CONF": str(own / "slurm.conf")})
    refused = without.hpc_train(*asked, "-m", cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout
    assert "Munge encode failed: Failed to access" in refused.stderr
    assert "set in: munge on this machine\n" in refused.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_full_queue_is_refused_and_leaves_nothing(
    cluster: Cluster, limit_queue: Callable[[int], None], tmp_path: Path
) -> None:
    """Others of the user's jobs fill it: only sbatch itself knows."""
    limit_queue(1)
    waiting = cluster.call("sbatch", "--account=limited", "--begin=now+1hour", "--wrap=true", cwd=tmp_path)
    assert waiting.returncode == 0, waiting.stderr
    done = cluster.hpc_train(*HYBRID, "cluster.account=limited", "run.name=full", "-m", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "limit" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.beside
def test_a_script_of_its_own_trains_the_same_run(cluster: Cluster, tmp_path: Path) -> None:
    asked = [*HYBRID, "cluster=slurm", "cluster.nodes=1-2", "run.name=alone", "+cluster.env.MARK=a b"]
    asked += ["cluster.teardown=['echo \"$MARK\" > teardown']"]
    script = cluster.hpc_train("script", *asked, cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    (tmp_path / "job.sbatch").write_text(script.stdout)
    submitted = cluster.call("sbatch", "--parsable", "job.sbatch", cwd=tmp_path)
    job_id = submitted.stdout.strip()
    ended = cluster.wait_for_state(job_id, "COMPLETED", "FAILED", "CANCELLED", seconds=240)
    assert ended == "COMPLETED", "".join(path.read_text() for path in tmp_path.glob("*.out"))
    (job,) = RunDirectory(tmp_path / "outputs" / "alone").record()["submissions"]
    assert job["job_id"] == job_id
    assert (tmp_path / "teardown").read_text() == "a b\n"


@pytest.mark.beside
def test_inside_an_allocation_jobs_run_in_it(cluster: Cluster, tmp_path: Path) -> None:
    python = [sys.executable, "-m", "hpc_train"]
    run = [*HYBRID, "cluster.nodes=2", "run.name=inside", "-m"]
    done = cluster.call("salloc", "--nodes=2", "--cpus-per-task=2", *python, *run, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inside the allocation" in done.stdout
    attempts = (tmp_path / "outputs" / "inside" / "attempts").glob("[0-9]*.json")
    assert [json.loads(path.read_text())["nodes"] for path in attempts] == [2]


@pytest.mark.beside
@pytest.mark.long_form(25)  # inside an allocation above
def test_inside_a_step_jobs_share_its_resources(cluster: Cluster, tmp_path: Path) -> None:
    """Without this, srun would wait for the end of the step that it is called in, such as ``srun --pty bash``."""
    python = [sys.executable, "-m", "hpc_train"]
    run = ["+strategy=dp", *TINY, "cluster.cpu_workers=2", "run.name=inside", "-m"]
    done = cluster.call("srun", "--nodes=1", "--ntasks=1", "--exclusive", *python, *run, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inside the allocation" in done.stdout
    assert RunDirectory(tmp_path / "outputs" / "inside").record()["result"]["steps"] == 6


def test_a_dry_run_shows_the_script_and_asks_the_site(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.hpc_train(*HYBRID, "cluster.nodes=2-4", "launch.dry_run=true", "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("--nodes=2-4", "#!/bin/bash", "account research, partition cpu, 2-4 nodes", "at most 0 GPU-hours"):
        assert part in done.stdout
    assert not list(tmp_path.iterdir())
    assert done.stdout.count("verdict: ") == done.stdout.count("verdict: can be submitted") == 1
    few = ["cluster.partition=debug", "cluster.nodes=3"]
    refused = cluster.hpc_train(*HYBRID, *few, "launch.dry_run=true", "-m", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stdout.count("verdict: ") == refused.stdout.count("verdict: refused") == 1, refused.stdout
    assert "partition debug allows 2" in refused.stdout
