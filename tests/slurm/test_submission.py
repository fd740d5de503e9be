"""What reaches a real cluster and what is refused before it does."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands.train import _check_foreground
from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors import slurm
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.script import ENVIRONMENT
from hpc_train.run.directory import RunDirectory
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.site import begin_site
from tests.doors.command import TINY
from tests.launch.jobs import make_job
from tests.slurm.cluster import Cluster, reconfigured, wait_for
from tests.slurm.runs import status
from tests.warm_parents.sitecustomize import SOCKET

WORKERS = ["cluster.cpu_workers=2", "batch.global_size=24"]
HYBRID = ["+strategy=hybrid", *TINY, *WORKERS]
# The variables with which the agents of a job get a warm parent from the tests, if the job has no others.
FOR_WARM_PARENTS = (SOCKET, "PYTHONPATH", "OMP_WAIT_POLICY")


@pytest.fixture
def shell(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process the environment of ``cluster``."""
    for name in {*os.environ} - {*cluster.environment}:
        monkeypatch.delenv(name)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)


def check(sweep: Path, count: int = 1, **keys: Any) -> list[str]:
    """Checks ``count`` jobs as ``-m`` does before it submits them, and returns the notes."""
    config = ClusterConfig(kind="slurm", cpu_workers=2, **keys)
    gpus = int(config.gpus_per_node) if "gpus_per_node" in keys else 0
    return SlurmJobExecutor().check([make_job(sweep, number, cluster=config, gpus=gpus) for number in range(count)])


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"partition": "gpuu"}, "did you mean gpu?"),
        ({"nodes": 8}, "partition cpu has 4"),
        ({"partition": "debug", "nodes": 4}, "partition debug allows 2"),
        ({"partition": "debug", "time": "02:00:00"}, "cluster.time=00:30:00"),
        ({"account": "nobody"}, "one of research, root"),
        ({"qos": "gold"}, "one of normal"),
        ({"partition": "gpu", "gpus_per_node": 8}, "cluster.gpus_per_node=4"),
        ({"partition": "gpu", "gpus_per_node": 2, "gpu_type": "h200"}, "of type h200"),
        ({"mem": "64G"}, "cluster.mem=4000M or less"),
        ({"constraint": "nowhere"}, "Invalid feature specification"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("shell")
def test_a_job_that_cannot_be_is_refused_with_the_fix(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        check(tmp_path / "sweep", **keys)
    assert named in refused.value.what + refused.value.fix
    assert refused.value.fix


@pytest.mark.usefixtures("shell")
def test_a_job_may_wait_for_a_node_that_is_drained(cluster: Cluster, tmp_path: Path) -> None:
    """sbatch takes it, though with --test-only it would not."""
    node = ["scontrol", "update", "nodename=n4", "reason=test"]
    assert cluster.call(*node, "state=drain").returncode == 0
    try:
        notes = check(tmp_path / "sweep", nodes=4)
    finally:
        cluster.call(*node[:3], "state=resume")
    assert "down or drained now: n4" in "\n".join(notes)


@pytest.mark.usefixtures("shell")
def test_a_full_queue_is_refused(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the user's jobs may fill it, which only sbatch knows."""
    for words in (["account", "limited", "Cluster=devcluster"], ["user", getpass.getuser(), "account=limited"]):
        cluster.call("sacctmgr", "-iQ", "add", *words)
    limit = ["sacctmgr", "-iQ", "modify", "account", "limited", "set"]
    assert cluster.call(*limit, "MaxSubmitJobs=1").returncode == 0
    monkeypatch.setattr(slurm, "begun_site", begin_site)  # the cached site was read before the limit was set
    try:
        with pytest.raises(UserError, match="allows 1 in the queue"):
            check(tmp_path / "sweep", 2, account="limited")
        waiting = cluster.call("sbatch", "--account=limited", "--begin=now+1hour", "--wrap=true", cwd=tmp_path)
        assert waiting.returncode == 0, waiting.stderr
        with pytest.raises(UserError, match="limit"):
            check(tmp_path / "one", account="limited")
    finally:
        cluster.call(*limit, "MaxSubmitJobs=-1")


@pytest.mark.usefixtures("shell")
def test_training_on_the_login_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="login node") as refused:
        _check_foreground(make_job(tmp_path / "run", cluster=ClusterConfig()).config)
    assert "cluster=local" in refused.value.fix


def test_a_dry_run_shows_the_script_and_asks_the_site(
    call: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    dry_run = ["launch.dry_run=true", "-m"]
    done = call(*HYBRID, "cluster.nodes=2-4", *dry_run)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("--nodes=2-4", "#!/bin/bash", "account research, partition cpu, 2-4 nodes", "at most 0 GPU-hours"):
        assert part in done.stdout
    assert done.stdout.count("verdict: ") == done.stdout.count("verdict: can be submitted") == 1
    refused = call(*HYBRID, "cluster.partition=debug", "cluster.nodes=3", *dry_run)
    assert refused.returncode == 2
    assert refused.stdout.count("verdict: ") == refused.stdout.count("verdict: refused") == 1, refused.stdout
    assert "partition debug allows 2" in refused.stdout
    assert not list(tmp_path.iterdir())


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


@pytest.mark.long_form(12)  # tests/launch/test_slurm.py
def test_a_sweep_larger_than_an_array_may_be_becomes_several(plain: Cluster, tmp_path: Path) -> None:
    with reconfigured(plain, lambda conf: f"{conf}\nMaxArraySize=2\n"):
        options = ["+cluster.extra.begin=now+1hour", "launch.detach=true", "launch.array_parallelism=2"]
        done = plain.hpc_train(*HYBRID, *options, "run.name=sweep", "train.seed=1,2,3,4,5", "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [RunDirectory(tmp_path / "outputs" / "sweep" / str(number)) for number in range(5)]
    ids = [run.record()["submissions"][-1]["job_id"] for run in runs]
    arrays = list(dict.fromkeys(job_id.partition("_")[0] for job_id in ids))
    assert ids == [f"{arrays[0]}_0", f"{arrays[0]}_1", f"{arrays[1]}_0", f"{arrays[1]}_1", arrays[2]]
    facts = [plain.call("scontrol", "show", "job", "--oneliner", array).stdout for array in arrays]
    assert ["ArrayTaskThrottle=2 " in fact for fact in facts] == [True, True, False], "the limit is that of an array"
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


@pytest.mark.long_form(12)  # tests/launch/test_slurm.py has such answers of sbatch
def test_the_words_of_the_site_reach_the_user(plain: Cluster, tmp_path: Path) -> None:
    """Those of a submit plugin and, where munge is down, those of sbatch."""
    conf = Path(plain.environment["SLURM_CONF"])
    if not list(Path("/usr/lib").glob("*/slurm-wlm/job_submit_lua.so")):
        pytest.skip("Slurm has no job_submit/lua here")
    conf.with_name("job_submit.lua").write_text(PLUGIN)
    asked = [*HYBRID, "cluster=slurm", "cluster.nodes=1"]
    with reconfigured(plain, lambda conf: f"{conf}\nJobSubmitPlugins=lua\n"):
        refused = plain.hpc_train(*asked, "cluster.constraint=rack3", "-m", cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout
    assert "Jobs on rack3 need a project code: use --wckey=PROJECT" in refused.stderr
    assert "set in: cluster.extra.wckey\n" in refused.stderr
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


@pytest.mark.long_form(25)  # tests/launch/test_script.py has its text, test_jobs.py a batch script of slurm/
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


@pytest.mark.long_form(20)  # tests/launch/test_executor.py
def test_inside_an_allocation_jobs_run_in_it(cluster: Cluster, tmp_path: Path) -> None:
    python = [sys.executable, "-m", "hpc_train"]
    run = [*HYBRID, "cluster.nodes=2", "run.name=inside", "-m"]
    done = cluster.call("salloc", "--nodes=2", "--cpus-per-task=2", *python, *run, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inside the allocation" in done.stdout
    attempts = (tmp_path / "outputs" / "inside" / "attempts").glob("[0-9]*.json")
    assert [json.loads(path.read_text())["nodes"] for path in attempts] == [2]


@pytest.mark.long_form(25)  # inside an allocation above
def test_inside_a_step_jobs_share_its_resources(cluster: Cluster, tmp_path: Path) -> None:
    """Without this, srun would wait for the end of the step that it is called in, such as ``srun --pty bash``."""
    python = [sys.executable, "-m", "hpc_train"]
    run = ["+strategy=dp", *TINY, "cluster.cpu_workers=2", "run.name=inside", "-m"]
    done = cluster.call("srun", "--nodes=1", "--ntasks=1", "--exclusive", *python, *run, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inside the allocation" in done.stdout
    assert RunDirectory(tmp_path / "outputs" / "inside").record()["result"]["steps"] == 6


LEFT_OVER = {
    "SBATCH_ARRAY_INX": "0-1",  # two tasks of one run
    "SBATCH_WAIT": "1",  # sbatch waits for the end
    "SBATCH_GPUS_PER_TASK": "1",  # refused
    "SLURM_HINT": "x",  # refused
    "SLURM_MEM_PER_NODE": "9999999",  # refused by srun
    "SLURM_MEM_PER_CPU": "100",
}
OF_SRUN = {
    "SLURM_CPU_BIND": "map_cpu:0",  # all ranks on one core
    "SLURM_TRES_PER_TASK": "cpu=1",
    "SLURM_TIMELIMIT": "0",
    "SLURM_STDOUTMODE": "none",
    "SRUN_CONTAINER": "/nowhere",
    "SQUEUE_PARTITION": "gpu",  # hides the job
    "SQUEUE_STATES": "PENDING",
    "SCANCEL_INTERACTIVE": "1",  # asks
}
SCRIPT = f"""#!/bin/bash
{ENVIRONMENT}
squeue --noheader --jobs="$SLURM_JOB_ID" --format='state %T'
srun --ntasks=1 bash -c 'echo cores $(nproc); env | grep ^SLURM_CPU_BIND= || true'
"""


def test_a_dirty_shell_changes_no_job_and_a_lost_answer_loses_none(
    cluster: Cluster, shell: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    asked = ["--partition=cpu", "--cpus-per-task=2", "--time=2"]
    by_hand = client.run(
        ["sbatch", "--parsable", *asked, "--output=by_hand.out", str(script)],
        environment={**os.environ, **OF_SRUN},
    ).strip()
    for name, value in {**LEFT_OVER, **OF_SRUN}.items():
        monkeypatch.setenv(name, value)
    ours = client.submit([*asked, "--output=ours.out"], SCRIPT, f"hpc_train-job:{tmp_path}/ours")
    tools = tmp_path / "bin"
    tools.mkdir()
    wrapper = tools / "sbatch"
    wrapper.write_text(
        f'#!/bin/sh\n{shutil.which("sbatch")} "$@" > /dev/null\n'
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    lost = client.submit([*asked, "--array=0-1", "--hold"], SCRIPT, f"hpc_train-job:{tmp_path}/lost")
    state = client.job_state(f"{lost}_1")
    assert state is not None and state.is_alive
    client.cancel([lost])
    for job_id in (by_hand, ours):
        assert cluster.wait_for_state(job_id, "COMPLETED", "FAILED") == "COMPLETED"
    for name in ("by_hand", "ours"):
        wait_for(f"{name}.out", (tmp_path / f"{name}.out").exists, 20)
        lines = (tmp_path / f"{name}.out").read_text().splitlines()
        assert lines[:2] == ["state RUNNING", "cores 2"], name
        assert "SLURM_CPU_BIND=quiet,map_cpu:0" not in lines, name
