"""The doors lead to the same worker: foreground, ``-m`` and a batch script's freeze + agent."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train import cli
from hpc_train.commands import why
from hpc_train.run.directory import PAGE, RunDirectory
from hpc_train.run.exits import RESPONSES, Failure
from hpc_train.search_path import safe_path
from tests.doors.command import TINY, environment, hpc_train, start
from tests.doors.recorded import recorded_run

FAULTY = [
    "model=custom",
    "model._target_=tests.doors.faulty.Faulty",
    "data=synthetic",
    "data.sequence_length=16",
    "data.validation_samples=8",
    "batch.global_size=8",
    "train.steps=6",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "cluster.cpu_workers=2",
]


def entries(folder: Path) -> int:
    """Returns the number of files and directories, which count against quotas, as ``find FOLDER | wc -l`` does."""
    return 1 + sum(1 for _ in folder.rglob("*"))


def test_a_run_has_few_files(tmp_path: Path) -> None:
    """Two attempts of two submissions; docs/howto/site.md has the numbers of one attempt."""
    run = recorded_run(tmp_path / "run").path
    shutil.rmtree(run / "checkpoints")
    names = {str(path.relative_to(run)).replace(socket.gethostname(), "NODE") for path in run.rglob("*")}
    names = {re.sub(r"submitter-NODE-\d+", "submitter-NODE-PID", name) for name in names}
    assert names == {
        *("config.yaml", "config-000.yaml", "run.json", "report.html"),
        *("attempts", "attempts/000.json", "attempts/001.json"),
        *("events", "events/submitter-NODE-PID-001.jsonl"),
        *("events/agent-NODE-000.jsonl", "events/rank-0000-000.jsonl"),
        *("events/agent-NODE-001.jsonl", "events/rank-0000-001.jsonl"),
        *("logs", "logs/NODE-000.log", "logs/NODE-001.log"),
        *("metrics", "metrics/attempt-000.jsonl", "metrics/attempt-001.jsonl"),
    }


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in RunDirectory(run).read_metrics()]


@pytest.mark.long_form(30)  # test_readme.py trains in two ways, tests/parallel compares losses
def test_foreground_multirun_and_agent_give_identical_losses(tmp_path: Path) -> None:
    overrides = ["+strategy=hybrid", *TINY, "cluster.cpu_workers=2"]
    foreground = hpc_train(*overrides, "cluster=local", "run.name=foreground", "--json", cwd=tmp_path)
    assert foreground.returncode == 0, foreground.stdout + foreground.stderr
    multirun = hpc_train(*overrides, "run.name=multirun", "-m", "--json", cwd=tmp_path)
    assert multirun.returncode == 0, multirun.stdout + multirun.stderr
    frozen = hpc_train("freeze", *overrides, "run.name=script", cwd=tmp_path)
    assert frozen.returncode == 0, frozen.stdout + frozen.stderr
    agent = hpc_train("agent", str(tmp_path / "outputs" / "script"), "--json", cwd=tmp_path)
    assert agent.returncode == 0, agent.stdout + agent.stderr
    for name, door in (("foreground", foreground), ("multirun", multirun), ("script", agent)):
        run = RunDirectory(tmp_path / "outputs" / name)
        ended = {"run": str(run.path), "job_ids": [], "state": "done", "exit_code": 0}
        assert json.loads(door.stdout) == ended | {"result": run.record()["result"]}, name
    assert "done: 6 steps" in foreground.stderr and "done: 6 steps" in multirun.stderr
    assert [entries(tmp_path / "outputs" / name) for name in ("foreground", "multirun", "script")] == [19, 20, 21]
    expected = losses(tmp_path / "outputs" / "foreground")
    assert len(expected) == 6
    assert losses(tmp_path / "outputs" / "multirun") == expected
    assert losses(tmp_path / "outputs" / "script") == expected
    for name in ("foreground", "multirun", "script"):
        ends = [event for event in RunDirectory(tmp_path / "outputs" / name).read_events() if "ledger" in event]
        assert [end["event"] for end in ends] == ["training_finished"]
        spent = ends[0]["ledger"]
        assert min(spent["start_up_s"], spent["steps_s"], spent["evaluation_s"], spent["checkpoint_s"]) > 0
        assert spent["rank_s"] == pytest.approx(2 * spent["held_s"], abs=0.01)


@pytest.mark.long_form(10)  # the sweep with a failing job
def test_sweep_runs_every_job_and_exits_zero(tmp_path: Path) -> None:
    axes = ["+strategy=single,dp", "optim.lr=1e-3,3e-4", "cluster.cpu_workers=2"]
    done = hpc_train(*axes, *TINY, "run.name=sweep", "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(path.parent for path in (tmp_path / "outputs" / "sweep").glob("*/config.yaml"))
    assert len(runs) == 4
    assert all(len(losses(run)) == 6 for run in runs)
    assert [entries(run) for run in runs] == [19, 19, 20, 20], "one file more of a second rank"
    assert {path.name for path in runs[0].parent.iterdir()} - set("0123") == {"multirun.yaml", PAGE, ".slots"}
    assert f"report: {runs[0].parent / PAGE}" in done.stdout
    assert "4 done" in (runs[0].parent / PAGE).read_text()
    assert ": done; nothing failed" in (runs[0] / PAGE).read_text(), "that of each run is its agent's"
    assert RunDirectory(runs[0]).record()["overrides"][:2] == ["+strategy=single", "optim.lr=0.001"]
    assert "+strategy=single,dp" in (tmp_path / "outputs" / "sweep" / "multirun.yaml").read_text()


@pytest.mark.parametrize(("how", "code", "attempts"), [("kill", 93, 4), ("exit", 93, 4)])
@pytest.mark.long_form(40)  # one that raises is in the sweep below
def test_a_failing_rank_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, code: int, attempts: int
) -> None:
    """It fails at step 3 of every attempt, and no checkpoint is there: only the first attempt makes new steps."""
    done = hpc_train("+strategy=dp", *FAULTY, f"+model.args.how={how}", "run.name=run", "-m", cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert_named(tmp_path / "outputs" / "run", attempts, done.stdout + done.stderr, capsys)


def assert_named(run: Path, attempts: int, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The console, the events, ``why`` and the page name rank 1."""
    assert "rank 1" in output
    failed = [event for event in RunDirectory(run).read_events() if event["event"] == "worker_failed"]
    assert [event["rank"] for event in failed] == [1] * attempts
    assert why.main([str(run)]) == 0
    page = capsys.readouterr().out
    assert f"failure\n  {failed[-1]['class']}, rank 1 on " in page
    assert RESPONSES[failed[-1]["class"]].advice in page
    assert f"{failed[-1]['class']}, rank 1 on " in (run / PAGE).read_text()


@pytest.mark.long_form(30)  # tests/launch/test_submission.py has the exit code
def test_a_sweep_with_one_failing_job_exits_non_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its failing rank is named with its own traceback, and the batches after that of the failed job are run."""
    sweep = ["+model.args.call=3,99", "hydra.sweeper.max_batch_size=1", "run.name=sweep", "-m"]
    done = hpc_train("+strategy=dp", *FAULTY, *sweep, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    failed, good = (tmp_path / "outputs" / "sweep" / number for number in "01")
    assert len(losses(good)) == 6
    assert "ArithmeticError: the model of the test fails on purpose" in output
    assert "Connection closed by peer" not in output
    assert_named(failed, 2, output, capsys)
    assert ": done; nothing failed" in (good / PAGE).read_text(), "that of each run is its agent's"


@pytest.mark.long_form(10)
def test_a_run_that_diverges_has_failed_and_so_has_its_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = ["optim=sgd", "optim.clip_norm=0", "train.steps=20", "optim.lr=1e-3,1e8", "run.name=sweep", "-m"]
    fast += ["cluster.cpu_workers=2"]
    done = hpc_train("+strategy=dp", *[value for value in TINY if "steps" not in value], *fast, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert re.search(r"^job 0 · dp · optim\.lr=0\.001 · done", done.stdout, re.MULTILINE), output
    assert re.search(r"^1 +dp +100000000\.0 +failed ", done.stdout, re.MULTILINE), output
    assert "2 jobs: " in done.stdout and "retry --failed outputs/sweep   submits" in done.stdout, output
    assert re.search(r"rank 0 on \S+ failed \(nan\):\nthe run has diverged: ", output), output
    assert "Traceback" not in output
    run = tmp_path / "outputs" / "sweep" / "1"
    (failed,) = (event for event in RunDirectory(run).read_events() if event["event"] == "failed")
    assert (failed["class"], failed["exit_code"], failed["rank"]) == ("nan", 1, 0)
    assert why.main([str(run)]) == 0
    page = capsys.readouterr().out
    assert "failure\n  nan, rank 0 on " in page
    assert "the last logged step with a finite loss and gradient is step" in page
    assert RESPONSES[Failure.NAN].advice in page


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        if any(line["step"] >= step for line in RunDirectory(run).read_metrics()):
            return
        time.sleep(0.1)
    raise TimeoutError(f"step {step} was not reached")


@pytest.mark.long_form(20)  # tests/elastic/test_agent.py has the signals, tests/runs/test_watch.py the command
def test_interrupt_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    slow = [argument for argument in FAULTY if "_target_" not in argument and "steps" not in argument]
    command = ["+strategy=dp", *slow, "model._target_=tests.doors.faulty.Slow", "train.steps=20", "run.name=run"]
    run = tmp_path / "outputs" / "run"
    process = start(*command, "cluster=local", cwd=tmp_path)
    wait_for_step(run, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "run.name=run" in output
    stopped_at = losses(run)[-1][0]
    assert 3 <= stopped_at < 20
    resumed = hpc_train(*command, "+model.args.seconds=0", "cluster=local", cwd=tmp_path)
    assert resumed.returncode == 2, "the model is part of a run's identity"
    resumed = hpc_train(*command, "cluster=local", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [step for step, _ in losses(run)] == list(range(losses(run)[0][0], losses(run)[0][0] + 20))


def test_a_dry_run_writes_nothing(tmp_path: Path, called: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = called("+strategy=hybrid,dp", "launch.dry_run=true", "-m", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pp 2" in done.stdout
    assert "memory: a rank needs about" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long_form(40)  # tests/checkpoint/test_purged.py has the refusal
def test_every_door_refuses_a_run_whose_checkpoints_are_gone(tmp_path: Path) -> None:
    command = ["+strategy=dp", *TINY, "train.steps=2", "cluster=local", "cluster.cpu_workers=2", "run.name=run"]
    done = hpc_train(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "run"
    shutil.rmtree(run / "checkpoints")
    for door in (command, ["resume", "run"], ["agent", str(run)]):
        refused = hpc_train(*door, cwd=tmp_path)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        gone = "this run had saved a checkpoint of step 2, but none of its checkpoints is left"
        assert refused.stderr.count(gone) == 1
        assert "Traceback" not in refused.stdout + refused.stderr
        if door is command:
            assert "done: 2 steps" not in refused.stdout, "the summary is of a run that went well"
    assert [step for step, _ in losses(run)] == [1, 2], "nothing was trained again"
    shutil.rmtree(run)  # as the message says
    again = hpc_train(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [step for step, _ in losses(run)] == [1, 2]


@pytest.mark.long_form(15)  # tests/checkpoint/test_purged.py has the refusal
def test_a_restart_within_a_job_refuses_when_the_checkpoints_have_gone_meanwhile(tmp_path: Path) -> None:
    purging = ["+model.args.how=purge", "checkpoint.every=2", "cluster=local", "run.name=run"]
    done = hpc_train("+strategy=dp", *FAULTY, *purging, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "this run had saved a checkpoint of step 2, but none of its checkpoints is left" in done.stderr
    run = RunDirectory(tmp_path / "outputs" / "run")
    assert [event["attempt"] for event in run.read_events() if event["event"] == "started"] == [0, 1]
    assert [line["attempt"] for line in run.read_metrics()] == [0, 0], "the second attempt has trained nothing"


CONSOLE_SCRIPT = "import sys; sys.path[0] = '/opt/env/bin'; from hpc_train.cli import main; main()"  # as pip writes it


@pytest.mark.long_form(8, cases=["status", "run"])
@pytest.mark.parametrize("command", ["status", "dry run", "run"])
def test_the_console_script_finds_modules_of_the_working_directory_and_lets_none_replace_others(
    command: str, tmp_path: Path
) -> None:
    """A colleague's directory with files that run when they are imported, and with a model of the user."""
    evil = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nraise SystemExit('evil')\n"
    (tmp_path / "hydra_plugins").mkdir()
    for name in ("psutil", "yaml", "torch", "rich", "socket", "hydra_plugins/evil"):
        (tmp_path / f"{name}.py").write_text(evil)
    (tmp_path / "own_model.py").write_text("from tests.doors.faulty import Faulty\n\nclass Model(Faulty): ...\n")
    of_user = ["model._target_=own_model.Model", "train.steps=2", "telemetry.tensorboard=true"]
    training = ["+strategy=dp", *FAULTY, *of_user, "cluster=local", "cluster.cpu_workers=1", "run.name=run"]
    arguments = {"status": ["status"], "dry run": [*training, "launch.dry_run=true"], "run": training}[command]
    done = subprocess.run(
        [sys.executable, "-c", CONSOLE_SCRIPT, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.rglob("*.ran")] == []
    if command == "run":
        assert len(RunDirectory(tmp_path / "outputs" / "run").read_metrics()) == 2


def test_the_working_directory_is_searched_last_and_not_for_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    monkeypatch.setattr(sys, "path", ["/opt/env/bin", *(entry for entry in sys.path if entry)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run", lambda arguments: 0)
    for missing in (False, True):
        monkeypatch.setitem(sys.modules, "hydra_plugins", None)
        monkeypatch.delitem(sys.modules, "hydra_plugins")
        if missing:
            monkeypatch.setattr(sys, "path", ["/opt/env/bin"])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        assert sys.path[-1] == str(tmp_path) and sys.path[0] == "/opt/env/bin"
        assert str(tmp_path / "hydra_plugins") not in importlib.import_module("hydra_plugins").__path__
        assert safe_path() == {"PYTHONSAFEPATH": "1"}
    for first in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [first])
        assert safe_path() == {}


def test_help_and_config_printing_behave_as_in_hydra(
    tmp_path: Path, called: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    config = called("+strategy=zero2", "--cfg", "job")
    assert config.returncode == 0
    assert re.search(r"data_parallel: zero2", config.stdout)
    for command in ([], ["freeze"], ["script"]):
        shown = called(*command, "--help")
        assert shown.returncode == 0 and "#SBATCH" not in shown.stdout
    assert list(tmp_path.iterdir()) == []
