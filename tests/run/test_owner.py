"""A run of another user is executed only if the caller trusts its owner, at every door."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train import api, cli
from hpc_train.bench import measuring
from hpc_train.commands import COMMANDS, agent, submitted
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch import launcher, submission
from hpc_train.launch.executors.local import RunAgent
from hpc_train.launch.script import Script, one_run, render
from hpc_train.opening import tell_once
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.file_lock import LockOwner, acquire
from hpc_train.run.freeze import freeze, load
from hpc_train.run.lease import add_submission
from hpc_train.run.owner import ACCESS, Access, check_owner, deciding_files, warn_if_open
from hpc_train.runs.lookup import find_runs
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm.jobs import SlurmJobs
from tests.config.composing import config_of
from tests.launch.jobs import make_job
from tests.other_user import OTHER, as_other, common, needs_root

__all__ = ["common"]
pytestmark = needs_root
TRUST = "--trust-owner"


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the caller says whom he trusts; it does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path / "outputs"))
    tell_once.cache_clear()
    file = tmp_path / "xdg" / "hpc_train" / "user.yaml"
    file.parent.mkdir(parents=True)
    return file


@pytest.fixture
def run(common: Path) -> RunDirectory:
    """A run of this user, with a copy of the code and a checkpoint."""
    run = RunDirectory(common / "one")
    code = run.code / "0123"
    code.mkdir(parents=True)
    freeze(
        config_of(f"run.root={common}", "run.name=one"), run, code=FrozenCode("/", str(code), (str(code),), None, None)
    )
    (run.checkpoints / "step-00000002").mkdir()
    (run.checkpoints / "step-00000002" / "manifest.json").write_text("{}")
    for path in run.path.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    run.path.chmod(0o777)
    return run


def touched(path: Path) -> list[Path]:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return [path]


def shard_of_a_group(run: RunDirectory) -> list[Path]:
    """In a directory that a group can write."""
    step = run.checkpoints / "step-00000002"
    step.chmod(0o770)
    os.chown(step, 0, OTHER)
    return [step / "manifest.json"]


def event(run: RunDirectory) -> list[Path]:
    """From which a lost record is rebuilt."""
    (run.path / "run.json").unlink()
    (run.path / "run.copy.json").unlink(missing_ok=True)
    return touched(run.events / "agent-node-000.jsonl")


def link(run: RunDirectory) -> list[Path]:
    elsewhere = run.path.parent / "elsewhere"
    run.checkpoints.rename(elsewhere)
    run.checkpoints.symlink_to(elsewhere)
    return [elsewhere]


def everything(run: RunDirectory) -> list[Path]:
    return [run.path, *run.path.rglob("*")]


WHAT: dict[str, Callable[[RunDirectory], list[Path]]] = {
    "directory": lambda run: [run.path],
    "config": lambda run: [run.config],
    "record": lambda run: [run.path / "run.json"],
    "snapshot": lambda run: [run.code / "0123"],
    "module": lambda run: touched(run.code / "0123" / "psutil.py"),
    "checkpoint": lambda run: [run.checkpoints / "step-00000002"],
    "shard": lambda run: [run.checkpoints / "step-00000002" / "manifest.json"],
    "shard of a group": shard_of_a_group,
    "event": event,
    "compiled": lambda run: touched(run.compiled / "artifact"),
    "link": link,
    "everything": everything,
}


def say(settings: Path, text: str) -> None:
    settings.write_text(text)
    settings.chmod(0o600)


def give(paths: list[Path]) -> None:
    for path in paths:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


@pytest.mark.parametrize("what", WHAT)
def test_a_run_with_files_of_another_user_is_not_executed(
    run: RunDirectory, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not check_owner(deciding_files(run), run.path)
    paths = WHAT[what](run)
    give(paths)
    name = run.checkpoints if what == "link" else paths[0]
    with pytest.raises(UserError, match=rf"^{name} belongs to nobody, and .* as root\n") as refused:
        check_owner(deciding_files(run), run.path)
    assert TRUST in refused.value.fix and "user.yaml" in refused.value.fix
    assert check_owner(deciding_files(run), run.path, trust_owner=True)
    assert check_owner(deciding_files(run), run.path, trust_owner=True)
    note = f"note: code and weights of nobody in {run.path} run as you, trusted by {TRUST}\n"
    assert capsys.readouterr().err == note


def test_each_command_that_takes_a_run_is_in_the_table() -> None:
    named = {name.partition(" ")[0] for name in ACCESS}
    assert named <= COMMANDS.keys()
    # the others open no run
    assert COMMANDS.keys() - named == {"init", "exec", "script", "plan", "prepare", "doctor", "bench", "help"}
    assert {name.split()[1] for name in ACCESS if name.startswith("checkpoint ")} == set(COMMANDS["checkpoint"].actions)


OPTIONS = {
    "retry": ["--failed"],
    "checkpoint export": ["--to", "exported.pt"],
    "checkpoint release": ["--to", "released"],
    "checkpoint import": ["--to", "imported"],
    "checkpoint verify --submit": ["--submit"],
    "compare --baseline": ["--baseline"],
    "generate": ["a text"],
    "sync": ["--to", "tensorboard"],
    "stacks": ["--wait", "0"],
    "debug": ["--rank", "0"],
}


def words_of(name: str, run: RunDirectory) -> list[str]:
    """Returns the command line of a command of the table for ``run``."""
    if name in ("train", "freeze"):
        return [name, "cluster=local", f"run.root={run.path.parent}", f"run.name={run.path.name}", "+strategy=dp"]
    words = [word for word in name.split() if not word.startswith("--")]
    options = OPTIONS.get(name, [])
    if name in ("retry", "compare --baseline"):
        return [*words, *options, str(run.path), *([str(run.path)] if name.startswith("compare") else [])]
    return [*words, str(run.path), *options]


@pytest.mark.parametrize("name", ACCESS)
def test_every_command_obeys_the_table(
    name: str,
    run: RunDirectory,
    settings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command that executes is refused before it does anything; one that reads writes nothing there."""
    monkeypatch.chdir(tmp_path)
    give(everything(run))
    before = {path: path.lstat() for path in everything(run)}
    try:
        code = cli.run(words_of(name, run))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    refused = "belongs to nobody, and this command executes code or loads weights" in said
    assert refused == (ACCESS[name] is Access.EXECUTES), said
    if refused:
        assert code == 2 and TRUST in said and str(settings) in said
    after = {path: path.lstat() for path in everything(run)}
    assert before.keys() == after.keys()
    assert {path: (stat.st_ino, stat.st_size, stat.st_uid) for path, stat in before.items()} == {
        path: (stat.st_ino, stat.st_size, stat.st_uid) for path, stat in after.items()
    }


def test_trust_passes_through_the_doors_to_the_agents(
    run: RunDirectory,
    tmp_path: Path,
    settings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done: list[str] = []
    jobs: list[Any] = []
    monkeypatch.setattr(agent, "reexec_from_snapshot", lambda run: None)
    monkeypatch.setattr(agent, "run_agent", lambda run, *_, **__: done.append("agent") or 0)
    monkeypatch.setattr(submission, "JobQueue", lambda found, *_: jobs.extend(found) or sys.exit(0))
    monkeypatch.setattr(submission, "notes_on_changed_code", lambda runs: [])
    monkeypatch.setattr(submission, "warn_if_open", lambda run, config: None)
    monkeypatch.setattr(launcher, "freeze_all", lambda runs, code: jobs.extend(runs) or sys.exit(0))
    give([run.path, run.config])
    train = ["cluster=local", f"run.root={run.path.parent}", "run.name=one", "run.snapshot=false", "+strategy=dp"]
    train += ["cluster.cpu_workers=1"]
    assert cli.run(["agent", TRUST, str(run.path)]) == 0
    with pytest.raises(SystemExit):
        cli.run(["resume", TRUST, str(run.path)])
    with pytest.raises(SystemExit):
        cli.run([*train, "-m", TRUST])
    with pytest.raises(SystemExit):
        api.submit(train, trust_owner=True)
    (resumed, frozen, submitted_job) = jobs
    assert resumed.trust_owner and resumed.agent_options == (TRUST,)
    assert frozen[-1] is True and submitted_job[-1] is True
    say(settings, "trust: {groups: [nogroup]}\n")
    assert cli.run(["agent", str(run.path)]) == 0
    assert done == ["agent"] * 2
    assert f"trusted by {settings}" in capsys.readouterr().err


def test_the_group_of_the_run_is_no_consent(run: RunDirectory, common: Path) -> None:
    shutil.rmtree(run.path)
    freeze(config_of(f"run.root={common}", "run.name=one", "run.group=root"), run)
    for path in everything(run):
        os.chown(path, OTHER, 0)
    with pytest.raises(UserError, match="belongs to nobody"):
        find_runs(str(run.path), "resume")


@pytest.mark.parametrize(
    ("text", "trusted"),
    [
        ("trust: {owners: [nobody]}", True),
        (f"trust: {{owners: [{OTHER}]}}", True),
        ("trust: {groups: [nogroup]}", True),
        ("trust: {owners: [root], groups: [root, 0]}", False),
        ("trust:", False),
        ("", False),
        ("trust: {owners: nobody}", "needs a list of names or ids as trust.owners"),
        ("trust: {owners: [true]}", "needs a list of names or ids as trust.owners"),
        ("trust: {groups: [no-such-group]}", "names 'no-such-group' in trust.groups"),
        ("trust: {users: [nobody]}", "may only have the keys owners and groups below trust"),
        ("owners: [nobody]", "has the unknown key owners"),
        ("- trust", "must be a table with the keys defaults"),
        ("trust: {", "is not YAML"),
        ("a: &a [x]\nb: [*a" + ", *a" * 10, "is not YAML"),
    ],
)
def test_whom_the_caller_trusts(text: str, trusted: bool | str, run: RunDirectory, settings: Path) -> None:
    say(settings, text)
    give([run.path])
    if trusted is True:
        assert check_owner(deciding_files(run), run.path)
        return
    wrong = "belongs to nobody" if trusted is False else trusted
    with pytest.raises(UserError, match=wrong) as refused:
        check_owner(deciding_files(run), run.path)
    assert trusted is False or refused.value.where.endswith(str(settings))


def test_the_file_with_the_trusted_users_is_the_callers_own(
    run: RunDirectory, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give([run.path])
    say(settings, "trust: {owners: [nobody]}")
    os.chown(settings, OTHER, OTHER)
    with pytest.raises(UserError, match=r"user\.yaml belongs to another user, whose settings are not used"):
        check_owner(deciding_files(run), run.path)
    os.chown(settings, 0, 0)
    settings.chmod(0o664)
    with pytest.raises(UserError, match="can be written by other users"):
        check_owner(deciding_files(run), run.path)
    settings.unlink()
    os.mkfifo(settings)
    with pytest.raises(UserError, match="is not a regular file"):
        check_owner(deciding_files(run), run.path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(settings.parents[1] / "home"))
    with pytest.raises(UserError, match=r"home/\.config/hpc_train/user\.yaml"):
        check_owner(deciding_files(run), run.path)


def test_files_of_root_are_trusted(run: RunDirectory) -> None:
    as_other(lambda: check_owner(deciding_files(run), run.path))


def test_a_file_server_that_shows_one_owner_for_all_is_no_reason(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(everything(run))
    monkeypatch.setattr("hpc_train.run.owner._owner_of_new_files", lambda directory: {OTHER})
    assert not check_owner(deciding_files(run), run.path)


def test_a_directory_made_in_advance_is_refused_at_each_door(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a run, of the nodes of a step, of a job on this machine, and of the run to fork."""
    made = RunDirectory(common / "made")
    made.create()
    (made.checkpoints / "step-00000002").mkdir()
    give(everything(made))
    config = config_of(f"run.root={common}", "run.name=made")
    with pytest.raises(UserError, match="belongs to nobody"):
        freeze(config, made)
    assert not made.config.exists()
    with pytest.raises(UserError, match="belongs to nobody"):
        RunAgent(str(made.path))()
    freeze(config_of(f"run.root={common}", "run.name=old"), RunDirectory(common / "old"))
    (common / "old" / "checkpoints" / "step-00000002").mkdir()
    give([common / "old" / "checkpoints" / "step-00000002"])
    fork = config_of(f"run.root={common}", "run.name=old", "run.fork=new")
    with pytest.raises(UserError, match="step-00000002 belongs to nobody"):
        freeze(fork, RunDirectory(common / "new"))
    assert not (common / "new").exists()
    freeze(fork, RunDirectory(common / "new"), trust_owner=True)
    with pytest.raises(UserError, match="step-00000002 belongs to nobody"):
        find_runs(str(common / "new"), "agent")
    monkeypatch.setattr(measuring, "current_allocation", lambda: SimpleNamespace(node_rank=1, launch_id="7", nodes=2))
    monkeypatch.setattr(measuring, "_wait_for", lambda path, seconds: None)
    (common / f"{measuring.BENCH}7").mkdir()
    give([common / f"{measuring.BENCH}7"])
    with pytest.raises(UserError, match="belongs to nobody"):
        measuring.run_benchmark(Config(), None, "a:b", common)  # type: ignore[arg-type]


def test_what_is_written_about_runs_of_others_is_the_callers(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.metrics / "attempt-000.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 2.0, "attempt": 0}\n')
    (tmp_path / "bashrc").write_text("own")
    (run.path / "report.html").symlink_to(tmp_path / "bashrc")
    (run.path / "tensorboard").symlink_to(tmp_path)
    give(everything(run))
    before = sorted(run.path.rglob("*"))
    assert cli.run(["report", str(run.path)]) == 0
    assert cli.run(["sync", str(run.path), "--to", "tensorboard"]) == 0
    assert cli.run(["wait", str(run.path)]) is not None
    said = capsys.readouterr()
    (folder,) = (tmp_path / "outputs" / ".others").iterdir()
    assert folder.name.startswith("one-") and f"report: {folder}/report.html" in said.out
    assert f"files are written to {folder}" in said.err
    assert sorted(path.name for path in folder.iterdir()) == [".locks", "report.html", "tensorboard", "tracking"]
    assert sorted(run.path.rglob("*")) == before and (tmp_path / "bashrc").read_text() == "own"
    assert cli.run(["report", str(run.path), "--machine", "h100"]) == 2
    shutil.rmtree(folder.parent)
    folder.parent.symlink_to(run.path)
    assert cli.run(["report", str(run.path)]) == 2
    assert "belongs to another user, so nothing about" in capsys.readouterr().err


def test_cancel_and_stacks_act_only_on_what_is_proved(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of another user's run names a process and a job of the caller, which do not belong to it."""
    sleeper = subprocess.Popen(["sleep", "600"], cwd=run.path, env={"PWD": str(run.path)})
    try:
        add_submission(run, "this machine", pid=sleeper.pid)
        folder = lease_folder(run.path)
        folder.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / "00000001")
        give(everything(run))
        assert cli.run(["cancel", str(run.path)]) == 2
        assert f"names process {sleeper.pid}, which is not proved to be yours" in capsys.readouterr().err
        assert cli.run(["stacks", str(run.path), "--wait", "0"]) == 2
        assert "none of your processes works on it" in capsys.readouterr().err
        (folder / "00000001").unlink()
        forged = acquire(folder, LockOwner.of_this_process())
        give([forged.path])
        assert cli.run(["cancel", str(run.path)]) == 2
        assert sleeper.poll() is None
        forged.path.unlink()
    finally:
        sleeper.kill()
        sleeper.wait()
    add_submission(run, "Slurm", job_id="12")
    give(everything(run))
    asked: dict[str, JobStatus] = {}
    cancelled: list[str] = []
    monkeypatch.setattr(submitted, "ask", lambda selection: asked)
    monkeypatch.setattr(submitted, "statuses_of", lambda found, slurm: asked)
    monkeypatch.setattr(submitted.JobStatuses, "of", lambda self, ids, jobs: asked)
    monkeypatch.setattr(SlurmJobs, "cancel", lambda self, ids, **_: cancelled.extend(ids))
    asked["12"] = JobStatus("RUNNING", comment=f"hpc_train:{run.path}x")
    assert cli.run(["cancel", str(run.path)]) == 2
    assert "names Slurm job 12" in capsys.readouterr().err and cancelled == []
    asked["12"] = JobStatus("RUNNING", comment=f"hpc_train:{run.path} mine")
    assert cli.run(["cancel", str(run.path)]) == 0
    assert cancelled == ["12"]


def test_the_scheduler_that_a_run_of_another_user_names_is_not_loaded(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('it was executed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    add_submission(run, "trap", job_id="a-1", scheduler="trap:SCHEDULER")
    give(everything(run))
    assert cli.run(["status", str(run.path)]) == 0
    assert "the scheduler that it names is not loaded" in capsys.readouterr().err
    assert "trap" not in sys.modules


def test_a_process_with_the_lease_is_proved(run: RunDirectory) -> None:
    lock = acquire(lease_folder(run.path), LockOwner.of_this_process())
    assert submitted._works_on(os.getpid(), run)
    os.link(lock.path, run.path / "linked")  # as a file of another run of the caller
    assert not submitted._works_on(os.getpid(), run)


def test_a_pid_of_the_record_is_a_positive_number(run: RunDirectory) -> None:
    add_submission(run, "this machine")
    for pid in (0, -1, "self", "1/../2", True, None, 2.5):
        run.update_record(submissions=[{"pid": pid, "host": os.uname().nodename, "pid_started": None}])
        (item,) = find_runs(str(run.path), "cancel")
        assert item.pid is None, pid


def test_the_agents_of_a_submitted_job_know(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep")
    assert job.agent_options == ()
    text = render(Script("t", job.config.cluster, one_run(tmp_path), (), agent_options=(TRUST,)))
    assert '-m hpc_train agent --trust-owner "$RUN" &' in text


def test_directories_that_everybody_can_write_are_told_in_one_line(
    common: Path, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """``common`` has the sticky bit, so nobody can replace what is in it; the run itself is open."""
    config = load(run)
    warn_if_open(run, config)
    (line,) = capsys.readouterr().err.splitlines()
    opened = f"{run.path}, {run.checkpoints}, {run.code}"
    assert line.startswith("warning: every user") and f"because {opened} are writable by all" in line
    assert f"run `chmod o-w {opened.replace(',', '')}`" in line
    for path in (run.path, run.checkpoints, run.code):
        path.chmod(0o755)
    warn_if_open(run, config)
    assert capsys.readouterr().err == ""
    common.chmod(0o777)
    warn_if_open(run, config)
    assert f"because {common} is writable by all" in capsys.readouterr().err


def test_the_owner_of_an_open_root_is_asked(common: Path, run: RunDirectory) -> None:
    common.chmod(0o777)
    os.chown(common, 4242, -1)
    for path in (run.path, run.checkpoints, run.code):
        path.chmod(0o755)
    config = load(run)

    def tell() -> None:
        with redirect_stderr(io.StringIO()) as said:
            warn_if_open(run, config)
        assert "ask user 4242 to do so" in said.getvalue(), said.getvalue()

    as_other(tell)
