"""Slurm jobs against commands that only write down how they were called."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.config.values import parse_first
from hpc_train.errors import UserError
from hpc_train.launch.executors import cost
from hpc_train.launch.executors.allocation import _core_options
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.executors.slurm import SlurmJobExecutor, check_architecture
from hpc_train.launch.joiner import submit_joiner
from hpc_train.launch.request import _check_alternatives
from hpc_train.run.freeze import freeze
from hpc_train.run.lease import add_submission, first_file
from hpc_train.runs.job_status import JobStatuses, folded
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.jobs import SlurmJobs
from hpc_train.schedulers.slurm.site import Partition, Site
from tests.launch.jobs import make_job
from tests.schedulers.test_variables import command

SITE = ClusterConfig(kind="slurm", nodes=2, gpus_per_node=4, partition="gpu", account="lab", time="02:00:00")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol", "sinfo", "sacctmgr"):
        command(folder, name, "true")
    command(folder, "sbatch", f'echo "$@" >> {tmp_path}/calls; echo Submitted batch job 41')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_resources_stand_on_the_command_line(slurm: Path, tmp_path: Path) -> None:
    executor = select_executor(SITE)
    assert isinstance(executor, SlurmJobExecutor)
    job = make_job(tmp_path / "sweep", cluster=SITE, gpus=4)
    shape = executor.shape(job.config)
    assert (shape.nodes, shape.gpus, shape.workers) == (2, 4, 4)
    assert executor.submit([job], tmp_path / "sweep", 1) == ["41"]
    (call,) = calls(tmp_path)
    for option in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "partition=gpu", "account=lab", "time=02:00:00"):
        assert f"--{option} " in call
    assert f"--comment=hpc_train:{job.run.path} " in call
    script = (job.run.path / "job.sbatch").read_text()
    assert "#SBATCH" not in script
    assert f"RUN={job.run.path}\n" in script


@pytest.mark.parametrize("version", ["slurm 25.11.0", "slurm 26.05.1", "slurm-wlm 25.05.4", ""])
def test_an_expedited_requeue_is_sent_to_a_slurm_that_has_it(slurm: Path, tmp_path: Path, version: str) -> None:
    command(slurm, "scontrol", f'[ "$1" != version ] || echo "{version}"')
    job = make_job(tmp_path / "sweep", cluster=replace(SITE, requeue="expedite"), gpus=4)
    if "25.05" in version or not version:
        with pytest.raises(UserError, match=rf"needs Slurm 25.11 or newer, .* prints {version or 'nothing'}"):
            SlurmJobExecutor().check([job])
        assert not (tmp_path / "calls").exists(), "the refused option is not sent"
        return
    assert SlurmJobExecutor().submit([job], tmp_path / "sweep", 1) == ["41"]
    (call,) = calls(tmp_path)
    assert " --requeue=expedite " in call
    assert "scancel --state=RUNNING" in (job.run.path / "job.sbatch").read_text()


def test_a_segment_keeps_each_shard_group_in_one_block(slurm: Path, tmp_path: Path) -> None:
    plugin, blocks = "TopologyPlugin = topology/block", "BlockName=b1 BlockIndex=0 Nodes=g[1-18] BlockSize=18"
    command(slurm, "scontrol", f'case "$*" in *config*) echo "{plugin}";; *topology*) echo "{blocks}";; esac')

    def proposed(nodes: int | str, shard: int, **extra: str) -> list[str]:
        job = make_job(tmp_path / "sweep", cluster=replace(SITE, nodes=nodes, gpus_per_node=1, extra=extra), gpus=1)
        job = replace(job, layout=replace(job.layout, shard=shard))
        return [line for line in SlurmJobExecutor().check([job]) if "extra.segment" in line]

    (line,) = proposed(32, 16)
    assert "a block of this cluster has 18 nodes, and the job needs 32: +cluster.extra.segment=16 keeps the 16" in line
    assert proposed(16, 8) == [], "the job fits into one block"
    assert proposed(32, 32) == [], "a group is larger than a block"
    assert proposed(32, 16, segment="16") == proposed("16-32", 16) == []


def test_jobs_of_one_shape_are_one_array_and_keep_their_order(slurm: Path, tmp_path: Path) -> None:
    clusters = [SITE, ClusterConfig(kind="slurm", nodes=1, gpus_per_node=4), SITE]
    jobs = [make_job(tmp_path / "sweep", n, cluster=cluster, gpus=4, cap=1) for n, cluster in enumerate(clusters)]
    ids = SlurmJobExecutor().submit(jobs, tmp_path / "sweep", 3)
    assert ids == ["41_0", "41", "41_1"]
    assert [call.count("--array=0-1%1") for call in calls(tmp_path)] == [1, 0]
    listed = next((tmp_path / "sweep" / "slurm").glob("runs-00000-*")).read_text().split()
    assert listed == [str(jobs[0].run.path), str(jobs[2].run.path)]
    assert (tmp_path / "sweep" / "slurm" / "41.sbatch").is_file() and (jobs[1].run.path / "job.sbatch").is_file()
    assert not list(tmp_path.rglob("*submission*")), "submitit's copies"


@pytest.mark.parametrize(("cap", "limit"), [("auto", ""), (2, "%2")])
def test_an_array_ends_where_the_site_ends_it(slurm: Path, tmp_path: Path, cap: int | str, limit: str) -> None:
    command(slurm, "scontrol", "echo MaxArraySize = 2")
    jobs = [make_job(tmp_path / "sweep", number, cluster=SITE, gpus=4, cap=cap) for number in range(5)]
    assert SlurmJobExecutor().submit(jobs, tmp_path / "sweep", 5) == ["41_0", "41_1", "41_0", "41_1", "41"]
    assert [re.findall(r"--(array|dependency)=(\S+)", call) for call in calls(tmp_path)] == [
        [("array", f"0-1{limit}")], [("array", f"0-1{limit}")], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("0", ["--cpus-per-task=32", "--overlap"]),  # srun --pty bash
        ("4294967290", []),  # the shell of salloc, whose resources srun may use
        (None, []),
    ],
)
def test_a_run_inside_a_step_has_the_cores_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str | None, options: list[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "64(x2),32")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    assert _core_options(make_job(tmp_path / "run", 0)) == options


def test_a_refused_submission_takes_back_those_before_it(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run has recorded them yet, so no command would find them."""
    command(slurm, "scontrol", "echo MaxArraySize = 2")
    refuse = 'echo "sbatch: error: AssocMaxSubmitJobLimit" >&2; exit 1'
    answer = f"echo Submitted batch job $((40 + $(wc -l < {tmp_path}/calls)))"
    command(
        slurm,
        "sbatch",
        f'echo "$@" >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) -lt 3 ] || {{ {refuse}; }}; {answer}',
    )
    command(slurm, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    jobs = [make_job(tmp_path / "sweep", number, cluster=SITE, gpus=4) for number in range(5)]
    with pytest.raises(UserError, match="AssocMaxSubmitJobLimit"):
        SlurmJobExecutor().submit(jobs, tmp_path / "sweep", 5)
    assert "41 42" in (tmp_path / "cancelled").read_text()
    assert "cancelling the jobs that were submitted before: 41, 42" in capsys.readouterr().err


REFUSALS = [  # what sbatch prints, and what the user must read, set in and fix
    (["invalid partition specified: gpu", "Batch job submission failed: Invalid partition name specified"],
     "cluster.partition", "sinfo -s"),
    (["Jobs with constraint rack1 need a project code: use --wckey=PROJECT",
      "Batch job submission failed: Unspecified error"], "cluster.extra.wckey", "+cluster.extra.wckey=VALUE"),
    (["Ask the help desk for a budget", "Batch job submission failed: Unspecified error"],
     "cluster.partition, cluster.account", "explains the refusal in the lines above"),
    (["Batch job submission failed: Requested node configuration is not available"], "cluster.mem", "sinfo -o"),
    (["If munged is up, restart with --num-threads=10", "Munge encode failed: Failed to access socket",
      "Batch job submission failed: Protocol authentication error"], "munge", "report it"),
    (["Batch job submission failed: Unable to contact slurm controller (connect failure)"], "cluster.kind",
     "cluster=local"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "where", "fix"), REFUSALS, ids=lambda value: value if type(value) is str else "")
def test_a_refusal_shows_every_line_and_a_fix_that_fits(
    lines: list[str], where: str, fix: str, slurm: Path, tmp_path: Path
) -> None:
    said = "".join(f"sbatch: error: {line}\n" for line in lines)
    (tmp_path / "said").write_text(said)
    command(slurm, "sbatch", f"cat {tmp_path}/said >&2; exit 1")
    job = make_job(tmp_path / "sweep", cluster=SITE, gpus=4)
    ways = [lambda: SlurmJobExecutor().submit([job], tmp_path / "sweep", 1)]
    ways += [] if "Unable to contact" in said else [lambda: SlurmJobExecutor().check([job])]
    for way in ways:
        with pytest.raises(UserError) as error:
            way()
        assert all(line in error.value.what for line in lines)
        assert where in error.value.where
        assert fix in error.value.fix


def test_what_a_submit_plugin_says_of_a_job_that_it_takes_is_shown(slurm: Path, tmp_path: Path) -> None:
    estimate = "sbatch: Job 7 to start at 2026-01-31T12:00:00 using 4 processors on nodes n1 in partition gpu"
    command(slurm, "sbatch", f"echo 'sbatch: lua: moved to the partition long' >&2; echo '{estimate}' >&2")
    found = SlurmJobExecutor().check([make_job(tmp_path / "sweep", cluster=SITE, gpus=4)])
    assert "sbatch: lua: moved to the partition long" in found
    assert not any("to start at" in line for line in found)


@pytest.mark.parametrize(
    ("squeue", "expected"),
    [
        ("echo '41_0|RUNNING|N/A||None'; echo '42|PENDING|N/A||Priority'", {"41_0", "42"}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", set()),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", {"41_0", "41_1", "42"}),
    ],
)
def test_which_jobs_are_present(slurm: Path, squeue: str, expected: set[str]) -> None:
    command(slurm, "squeue", squeue)
    executor = SlurmJobExecutor()
    assert set(executor.statuses(["41_0", "41_1", "42"])) == expected
    assert set(executor.statuses(["41_0", "41_1", "42", "43"])) == {*expected, "43"}  # without another squeue


RECORDED = r"""printf 'CLUSTER: one\n'
printf '51447052|PENDING|N/A|(null)|(ReqNodeNotAvail, UnavailableNodes:cs[100,101,102])\n'
printf '18804|PENDING|NONE|caf\351 | 2|Priority\n'
printf '42953390_320|RUNNING|2025-03-06T21:01:21|hpc_train:/run|None\n'
printf '18806|PENDING|N/A\n'
printf '7|REVOKED|2025-03-06T21:01:21||None\n'
"""


def test_what_squeue_prints_on_other_clusters_and_versions(slurm: Path, tmp_path: Path) -> None:
    """Titles of clusters, comments in Latin-1, NONE for N/A, lines that lack fields, jobs that a sibling runs."""
    command(slurm, "squeue", f'echo "$@" >> {tmp_path}/squeue\n{RECORDED}'.replace("\\n", "\n", 1))
    found = JobStatuses().of(["51447052", "18804", "42953390_320", "18806", "7"], SlurmJobs("one,two"))
    assert found["51447052"].words == "pending ((ReqNodeNotAvail, UnavailableNodes:cs[100,101,102]))"
    assert (found["18804"].comment, found["18804"].starts) == ("caf\ufffd | 2", "")
    assert found["42953390_320"].comment == "hpc_train:/run"
    assert "18806" not in found
    assert found["7"].present
    words = (tmp_path / "squeue").read_text().split()
    assert {"--jobs=18804,18806,42953390,51447052,7", "--clusters=one,two", "--me"} <= {*words}


def test_jobs_on_another_cluster_are_asked_for_and_ended_there(slurm: Path, tmp_path: Path) -> None:
    command(slurm, "scancel", f'echo "$@" >> {tmp_path}/scancel')
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm", clusters="one"))
    place = SlurmJobExecutor()
    assert place.submit([job], tmp_path / "sweep", 1) == ["41"]
    assert place.identity("41")["clusters"] == "one"
    place.cancel(["41"])
    assert (tmp_path / "scancel").read_text() == "--clusters=one 41\n"
    place.cancel(["41"], save=True)
    assert (tmp_path / "scancel").read_text().endswith("--clusters=one --signal=USR1 41\n")


def test_slurm_is_asked_rarely(slurm: Path, tmp_path: Path) -> None:
    command(slurm, "squeue", f"echo asked >> {tmp_path}/squeue; echo '41|RUNNING|N/A||None'")
    executor = SlurmJobExecutor()
    for _ in range(10):
        assert set(executor.statuses(["41"])) == {"41"}
    assert (tmp_path / "squeue").read_text().split() == ["asked"]


@pytest.mark.parametrize(("chain", "jobs"), [(1, 1), (1, 3), (3, 1), ("first", 1)])
def test_a_submission_whose_answer_is_lost_is_adopted(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: int | str, jobs: int
) -> None:
    """A single job, an array, a chain, and cluster.first: the last answer is lost, and its job is in the queue."""
    first = [{"account": "b"}, {"account": "c"}] if chain == "first" else []
    submissions = 3 if chain == "first" else int(chain)
    monkeypatch.setattr(client, "REPEAT_AFTER_S", 0.01)
    count = f"$(wc -l < {tmp_path}/calls)"
    lost = "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"
    command(
        slurm,
        "sbatch",
        f'echo "$@" >> {tmp_path}/calls; [ {count} -lt {submissions} ] || {{ {lost}; }}; echo $((40 + {count}))',
    )
    cluster = replace(SITE, first=first)
    made = [make_job(tmp_path / "sweep", number, cluster=cluster, gpus=4) for number in range(jobs)]
    for job in made:
        job.config.launch.chain = submissions if isinstance(chain, int) else 1
    comment = f"hpc_train:{made[0].run.path if jobs == 1 else tmp_path / 'sweep'}"
    suffix = "_[0-2]" if jobs > 1 else ""
    rows = [f"{40 + number}{suffix}|PENDING|N/A|{comment}|None" for number in range(1, submissions + 1)]
    command(slurm, "squeue", "\n".join(f"echo '{row}'" for row in rows))
    executor = SlurmJobExecutor()
    ids = executor.submit(made, tmp_path / "sweep", jobs)
    assert ids == ([f"41_{number}" for number in range(jobs)] if jobs > 1 else ["41"])
    assert executor.identity(ids[0]).get("chain", []) == ([] if submissions == 1 else ["41", "42", "43"])


NUMBERED = 'n=$(($(cat {0}/n 2>/dev/null) + 1)); echo $n > {0}/n; echo "$@" >> {0}/calls; '


def executor(folder: Path, tmp_path: Path, then: str) -> SlurmJobExecutor:
    command(folder, "sbatch", NUMBERED.format(tmp_path) + then)
    command(folder, "scancel", f'echo "scancel $@" >> {tmp_path}/calls')
    return SlurmJobExecutor()


def test_each_job_waits_for_the_one_before(slurm: Path, tmp_path: Path) -> None:
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
    place.cancel(["44"], save=True)
    assert (tmp_path / "scancel").read_text() == "--signal=USR1 44 45 46\n"


def test_each_job_of_first_has_its_resources_and_the_run_knows_all(slurm: Path, tmp_path: Path) -> None:
    place = executor(slurm, tmp_path, "echo Submitted batch job $((40 + n))")
    first = [{"account": "other", "extra": {"reservation": "today"}}, {"nodes": 1, "gpus_per_node": 8, "time": "30"}]
    job = make_job(tmp_path / "sweep", cluster=replace(SITE, first=first), gpus=4)
    assert "3 jobs are submitted" in place.check([job])[-1]
    assert len(place.plan([job], tmp_path / "sweep")) == 3
    (tmp_path / "calls").unlink()
    (tmp_path / "n").unlink()
    assert place.submit([job], tmp_path / "sweep", 1) == ["41"]
    base, account, nodes = calls(tmp_path)
    assert "--account=lab " in base and "--nodes=2 " in base and "--time=02:00:00 " in base
    assert "--account=other " in account and "--reservation=today " in account and "--nodes=2 " in account
    assert "--nodes=1 " in nodes and "--gpus-per-node=8 " in nodes and "--time=30 " in nodes
    file = job.run.attempts / "first-000"
    for number, name in enumerate(("job.sbatch", "job-1.sbatch", "job-2.sbatch")):
        text = (job.run.path / name).read_text()
        assert f"FIRST={file}\n" in text and f'agent --alternative={number} "$RUN"' in text
    ids = file.with_name(f"{file.name}.jobs").read_text().split()
    assert ids == place.identity("41")["chain"] == ["41", "42", "43"]
    command(slurm, "squeue", "echo '41|COMPLETED|||None'; echo '42|RUNNING|||None'; echo '43|CANCELLED|||None'")
    file.write_text("42\n")
    assert place.statuses(["41"])["41"].words == "job 42, running"
    place.cancel(["41"])
    assert calls(tmp_path)[-1] == "scancel 41 42 43"


def test_a_job_of_first_that_starts_before_the_last_is_submitted(slurm: Path, tmp_path: Path) -> None:
    """Then the submitter cancels the others, since the job did not know them."""
    started = f"[ $n -lt 3 ] || echo 42 > {tmp_path}/sweep/0/attempts/first-000"
    place = executor(slurm, tmp_path, f"{started}; echo Submitted batch job $((40 + n))")
    job = make_job(tmp_path / "sweep", cluster=replace(SITE, first=[{"account": "b"}, {"account": "c"}]), gpus=4)
    place.submit([job], tmp_path / "sweep", 1)
    assert calls(tmp_path)[-1] == "scancel 41 43"


def test_a_joiner_has_the_resources_of_the_job_of_first_that_has_started(slurm: Path, tmp_path: Path) -> None:
    command(slurm, "sbatch", f'echo "$@" >> {tmp_path}/calls; cat > {tmp_path}/script; echo 43')
    job = make_job(tmp_path / "sweep", cluster=replace(SITE, first=[{"account": "other"}]), gpus=4)
    freeze(job.config, job.run)
    add_submission(job.run, "Slurm", job_id="41", chain=["41", "42"])
    comment = f"hpc_train-joiner:{job.run.path}"
    lines = ((7, "PENDING", f"{comment}:41.0.1:2"), (8, "PENDING", f"{comment}:41.0.0:2"), (9, "PENDING", "mine"))
    command(slurm, "squeue", "\n".join(f"echo '{id_}|{state}||{words}|None'" for id_, state, words in lines))
    command(slurm, "scancel", f'echo "scancel $@" >> {tmp_path}/calls')
    for number, started, account in ((0, "41", "lab"), (1, "42", "other")):
        first_file(job.run, 0).write_text(f"{started}\n")
        assert submit_joiner(job.run, "2", "41.0.0:2", "", "n1,n2", "0") == "43"
        assert f"--account={account} " in calls(tmp_path)[-1]
        assert calls(tmp_path)[-2] == "scancel 7", "it waits for an earlier start of the job"
        script = (tmp_path / "script").read_text()
        assert f'agent --alternative={number} --join=41.0.0:2 "$RUN"' in script
        assert "for step in 1; do" in script, "its agents record no end, and a step that they leave is over"
    command(slurm, "scontrol", '[ "$3" != partition ] || echo "PartitionName=gpu MaxNodes=4 TotalNodes=8"')
    for most, requested in ((3, 3), (7, 4)):
        submit_joiner(job.run, f"1-{most}", "41.0.0:2", "", "n1,n2", "0")
        assert f"--nodes=1-{requested} " in calls(tmp_path)[-1], "at most MaxNodes"


def test_the_cost_is_that_of_the_most_expensive_job_of_first(slurm: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=replace(SITE, first=[{"nodes": 4}, {"nodes": 1}]), gpus=4)
    job.config.elastic.max_requeues = 0
    assert "4 nodes" in (line := SlurmJobExecutor().check([job])[0]) and "at most 32 GPU-hours" in line


def test_jobs_of_first_that_differ_in_their_partition_are_one_job() -> None:
    """Slurm itself starts a job in the first of several partitions that has room."""

    def parsed(partition: str | None, *first: dict[str, object]) -> ClusterConfig:
        return parse_first(ClusterConfig(kind="slurm", partition=partition, first=[*first]))

    cluster = parsed("a", {"partition": "b"}, {"qos": "long", "partition": "c"}, {"partition": "d,b"}, {"qos": "long"})
    assert (cluster.partition, cluster.first) == ("a,b,d", [{"partition": "c,a", "qos": "long"}])
    cluster = parsed(None, {"partition": "b"})
    assert (cluster.partition, cluster.first) == (None, [{"partition": "b"}]), "the default partition is not known here"
    assert parse_first(cluster) == cluster
    assert parsed("a", {"account": 7, "nodes": "2-4"}).first == [{"partition": "a", "account": "7", "nodes": "2-4"}]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({}, "must be a table of keys"),
        ("account", "must be a table of keys"),
        ({"setup": ["true"]}, r"cluster.first\[0\] sets setup, which must be the same for all jobs of a run"),
        ({"exclusive": "perhaps"}, r"cluster.first\[0\]: .*perhaps"),
    ],
)
def test_a_wrong_entry_of_first_is_refused(entry: object, what: str) -> None:
    with pytest.raises(UserError, match=what) as raised:
        parse_first(ClusterConfig(kind="slurm", first=[entry]))
    assert raised.value.fix and raised.value.where == "cluster.first"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"cluster.first": [{"nodes": 3}, {"account": "b"}]}, "job 1 of cluster.first: .*global_size"),
        ({"strategy.name": "auto", "cluster.first": [{"gpu_type": "a100"}]}, "strategy=auto chooses one layout"),
        ({"cluster.kind": "hpc_train.schedulers.kubernetes.scheduler:SCHEDULER"}, "cluster.first needs Slurm"),
    ],
)
def test_a_job_of_first_that_cannot_train_the_run_is_refused(
    slurm: Path, tmp_path: Path, keys: dict[str, Any], what: str
) -> None:
    config = make_job(tmp_path / "sweep", cluster=replace(SITE, first=[{"account": "b"}]), gpus=4).config
    config.batch.global_size = 8
    for key, value in keys.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    with pytest.raises(UserError, match=what):
        _check_alternatives(config, config.strategy.name == "auto")


def test_a_chain_that_is_refused_in_the_middle_leaves_nothing(slurm: Path, tmp_path: Path) -> None:
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


def test_nodes_of_another_architecture_need_a_python_of_their_own() -> None:
    gh200 = Partition("gh", default=True, architectures=frozenset({"aarch64"}))
    site = Site("eagle", partitions={"gh": gh200, "unknown": Partition("unknown")})
    words = "the partition gh are aarch64, and this Python is built for x86_64"
    for cluster in (ClusterConfig(kind="slurm", partition="gh"), ClusterConfig(kind="slurm")):
        with pytest.raises(UserError, match=words) as raised:
            check_architecture(cluster, site, "x86_64")
        assert raised.value.fix.startswith("cluster.python=PATH")
    check_architecture(ClusterConfig(kind="slurm", partition="gh"), site, "aarch64")
    check_architecture(ClusterConfig(kind="slurm", partition="gh", python="/lustre/arm/bin/python"), site, "x86_64")
    check_architecture(ClusterConfig(kind="slurm", partition="unknown"), site, "x86_64")
