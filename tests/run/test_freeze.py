"""Freezing: written once, the same again, and refused where it would spoil a run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.config.run_path import job_directory
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run import file_lock, lease, processes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import VERSION_S, check_freeze, config_hash, freeze, freeze_all, load, project_version
from tests.config.composing import config_of


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "outputs" / "run")


def config(run: RunDirectory, *arguments: str) -> Config:
    return config_of(f"run.root={run.path.parent}", "run.name=run", *arguments)


def test_what_is_loaded_is_what_was_frozen(run: RunDirectory) -> None:
    frozen = config(run, "strategy=hybrid", "data.pattern='odd $\\{x\\} ü.py'", "strategy.pp_split=[1,3]")
    freeze(frozen, run)
    assert load(run) == frozen


def test_freezing_again_changes_nothing(run: RunDirectory) -> None:
    freeze(config(run), run)
    before, record = run.config.read_bytes(), run.record()
    freeze(config(run), run)
    assert run.config.read_bytes() == before
    assert run.record() == record
    assert not list(run.path.glob("config-*.yaml"))


def test_the_record_says_which_code_and_config(run: RunDirectory) -> None:
    freeze(config(run), run)
    record = run.record()
    assert record["config_hash"] == config_hash(run)
    assert len(record["run_id"]) == 8
    assert record["versions"]["torch"]


def test_the_record_names_the_commit_of_the_users_project(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / "train.py").write_text("")
    subprocess.run(["git", "-C", str(project), "add", "."], check=True)
    subprocess.run(["git", "-C", str(project), *identity, "commit", "-qm", "first"], check=True)
    commit = subprocess.check_output(["git", "-C", str(project), "rev-parse", "HEAD"], text=True).strip()
    monkeypatch.chdir(project)
    freeze(config(run), run)
    code = run.record()["code"]
    assert code == {"commit": commit, "dirty": False, "work_tree": os.path.realpath(project)}
    assert commit[:8] not in run.record()["versions"]["hpc_train"]


def test_a_project_outside_of_git_has_no_commit(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    freeze(config(run), run)
    assert run.record()["code"] == {"commit": None, "dirty": None, "work_tree": None}


def test_a_run_does_not_wait_long_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 30\n", encoding="utf-8")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert VERSION_S == 10.0
    monkeypatch.setattr("hpc_train.run.freeze.VERSION_S", 0.1)
    assert project_version(None, tmp_path) == {"commit": None, "dirty": None, "work_tree": None}


def test_free_keys_may_change_and_the_config_before_is_kept(run: RunDirectory) -> None:
    freeze(config(run, "strategy=dp"), run)
    assert run.claim_attempt() == 0
    first, run_id = run.config.read_text(), run.record()["run_id"]
    freeze(config(run, "strategy=zero2", "train.steps=9"), run)
    assert (run.path / "config-000.yaml").read_text() == first
    assert load(run).strategy.data_parallel == "zero2"
    assert run.record()["run_id"] == run_id
    (warning,) = run.read_events()
    assert warning["attempt"] == 1  # the one that follows: the time between the two counts for neither
    assert "strategy.name: dp -> zero2" in warning["message"]


@pytest.mark.parametrize(
    "change", ["model.dim=64", "data.sequence_length=64", "optim.lr=1", "batch.global_size=8", "train.seed=1"]
)
def test_identity_keys_may_not_change(run: RunDirectory, change: str) -> None:
    freeze(config(run), run)
    run.metrics_file(0).write_text('{"step": 1}\n')
    before = run.config.read_bytes()
    with pytest.raises(UserError, match=change.split("=", maxsplit=1)[0]) as refused:
        freeze(config(run, change), run)
    assert "run.fork=" in refused.value.fix
    assert run.config.read_bytes() == before


def test_a_run_that_never_took_a_step_accepts_another_config(run: RunDirectory) -> None:
    freeze(config(run, "model.dim=32"), run)
    first, run_id = run.config.read_text(), run.record()["run_id"]
    (run.path / "pp_split.json").write_text("{}")
    with lease.hold_lease(run), pytest.raises(UserError, match="live"):
        freeze(config(run, "model.dim=64"), run)
    assert run.config.read_text() == first
    check_freeze(config(run, "model.dim=64"), run)
    freeze(config(run, "model.dim=64"), run)
    assert load(run).model.dim == 64  # type: ignore[union-attr]
    assert (run.path / "config-000.yaml").read_text() == first
    assert run.record()["run_id"] == run_id and not (run.path / "pp_split.json").exists()
    run.checkpoints.rmdir()
    run.checkpoints.touch()
    with pytest.raises(UserError, match=f"cannot create {run.checkpoints}"):
        freeze(config(run, "model.dim=64"), run)
    run.checkpoints.unlink()
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    with pytest.raises(UserError, match="different configuration"):
        freeze(config(run, "model.dim=32"), run)


def test_a_plan_is_written_only_if_the_rest_is_known(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise UserError("the version is unknown", where="git", fix="another directory")

    monkeypatch.setattr("hpc_train.run.freeze.project_version", refused)
    with pytest.raises(UserError):
        freeze(config(run), run, plan="{}")
    assert not run.plan.exists()


def test_a_fork_starts_from_the_newest_checkpoint_under_its_own_name(run: RunDirectory) -> None:
    freeze(config(run), run)
    forked = config(run, "optim.lr=1", "run.fork=other")
    other = RunDirectory(run.path.parent / "other")
    with pytest.raises(UserError, match="no checkpoint"):
        freeze(forked, other)
    (run.checkpoints / "step-00000010").mkdir()
    freeze(forked, other)
    assert other.record()["forked_from"] == str(run.path)
    assert (load(other).run.name, load(other).run.fork) == ("other", None)
    assert other.record()["run_id"] != run.record()["run_id"]
    freeze(config_of(f"run.root={run.path.parent}", "run.name=other", "optim.lr=1"), other)
    assert other.record()["forked_from"] == str(run.path)


def test_a_fork_does_not_take_over_another_run(run: RunDirectory) -> None:
    freeze(config(run), run)
    (run.checkpoints / "step-00000010").mkdir()
    other = RunDirectory(run.path.parent / "other")
    freeze(config_of(f"run.root={run.path.parent}", "run.name=other"), other)
    with pytest.raises(UserError, match="was not forked"):
        freeze(config(run, "run.fork=other"), other)


def test_a_run_whose_process_lives_is_refused_until_it_ends(run: RunDirectory) -> None:
    freeze(config(run), run)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lease.add_submission(run, "this machine", pid=process.pid)
    with pytest.raises(UserError, match=f"live: process {process.pid}"):
        freeze(config(run), run)
    process.communicate(b"\n")
    freeze(config(run), run)


def test_a_process_id_that_was_used_again_is_no_live_run(run: RunDirectory) -> None:
    freeze(config(run), run)
    lease.add_submission(run, "this machine", pid=1)
    entry = run.record()["submissions"][0]
    run.update_record(submissions=[entry | {"pid_started": "another boot:17"}])
    freeze(config(run), run)


def test_a_run_whose_agent_works_is_refused(run: RunDirectory) -> None:
    freeze(config(run), run)
    with lease.hold_lease(run), pytest.raises(UserError, match="live"):
        freeze(config(run), run)


def test_slurm_is_asked_about_its_jobs(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    squeue = tools / "squeue"
    squeue.write_text('#!/bin/sh\ncase "$*" in *17*) echo PENDING;; *) echo "Invalid job id" >&2; exit 1;; esac\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    freeze(config(run), run)
    run.update_record(claimed_by=processes.process(os.getppid()))  # which waits for the job that it submits
    lease.add_submission(run, "Slurm", job_id="16")
    freeze(config(run), run)
    lease.add_submission(run, "Slurm", job_id="17")
    with pytest.raises(UserError, match="Slurm job 17 is PENDING"):
        freeze(config(run), run)
    monkeypatch.setenv("SLURM_JOB_ID", "17")  # the job itself, started again
    freeze(config(run), run)


def test_a_dry_run_in_a_file_is_not_frozen(run: RunDirectory) -> None:
    asked = config(run)
    with pytest.raises(UserError, match="dry_run"):
        freeze(replace(asked, launch=replace(asked.launch, dry_run=True)), run)
    assert not run.path.exists()


@pytest.mark.parametrize("text", ["", "[1, 2]", "model: {", "model: {kind: gtp}\n", "model: 3\n"])
def test_a_damaged_frozen_config_is_a_clear_refusal(run: RunDirectory, text: str) -> None:
    run.create()
    run.config.write_text(text)
    with pytest.raises(UserError):
        load(run)


def test_loading_what_is_no_run_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        load(RunDirectory(tmp_path))


def test_a_single_job_has_the_directory_and_a_sweep_numbers() -> None:
    assert job_directory(Path("sweep"), 0, 1) == Path("sweep")
    assert job_directory(Path("sweep"), 3, 12) == Path("sweep/3")


def test_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = config_of("data.path=texts", "run.root=here")
    assert found.data.path == str(tmp_path / "texts")
    assert found.run.root == str(tmp_path / "here")


@pytest.mark.parametrize(
    "argument", ["data.pattern=${oc.env:SERVICE_API_KEY}", "data.pattern=x-${oc.env:SERVICE_API_KEY,none}-y"]
)
def test_a_secret_of_the_environment_is_not_frozen(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "s3cr3t-s3cr3t")
    with pytest.raises(UserError) as refused:
        config_of(argument)
    assert "s3cr3t-s3cr3t" not in str(refused.value)


def test_a_secret_is_found_by_its_value_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "s3cr3t-s3cr3t")
    monkeypatch.setenv("INNOCENT", "s3cr3t-s3cr3t")
    for argument in ("data.pattern=s3cr3t-s3cr3t", "data.pattern=${oc.env:INNOCENT}"):
        with pytest.raises(UserError, match="SERVICE_TOKEN") as refused:
            config_of(argument)
        assert "s3cr3t-s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("written", [1, 4, 7])
def test_a_sweep_whose_submission_is_killed_leaves_whole_runs_or_none(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """After ``written`` files the machine crashes: what was not flushed to the disk is lost, too."""
    monkeypatch.setattr(file_lock, "STALE_S", 0.3)  # the owner of a lock may not be written yet
    frozen = config(run)
    runs = [RunDirectory(run.path / str(number)) for number in range(3)]
    child = os.fork()
    if child == 0:
        _die_after(written)
        list(freeze_all([(frozen, each, (), (), None, False) for each in runs], None))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    for each in runs:
        if (copy := each.path / "run.copy.json").exists():
            copy.write_text("")
        if each.config.exists():
            assert load(each) == frozen
        check_freeze(frozen, each)
        freeze(frozen, each)
        assert load(each) == frozen


def _die_after(written: int) -> None:
    replace_file, left = Path.replace, iter(range(written))

    def replacing(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            os._exit(9)
        return replace_file(path, target)

    Path.replace = replacing  # type: ignore[method-assign, assignment]
