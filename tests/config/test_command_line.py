"""The command line as Hydra's users know it, and what it does not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.config.values import refuse_other_encodings
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from tests.doors.command import environment, hpc_train

Called = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A user's own config directory."""
    folder = tmp_path / "site"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text("defaults: [gpt_tiny, _self_]\nn_layers: 6\n")
    return folder


def test_config_is_printed_with_either_form_of_strategy(called: Called) -> None:
    shown = [
        called(form, "experiment=hybrid_8gpu", "--cfg", "job", "--package", "strategy")
        for form in ("strategy=zero2", "+strategy=zero2")
    ]
    assert [done.returncode for done in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout
    assert "data_parallel: zero2" in shown[0].stdout


def test_directories_of_the_user_are_searched(site: Path, called: Called) -> None:
    chosen = ("model=mine", "strategy=dp")
    for where in (["-cd", str(site)], [f"hydra.searchpath=[file://{site}]"]):
        shown = called(*chosen, *where, "--cfg", "job")
        assert "n_layers: 6" in shown.stdout, shown.stderr
        frozen = called("freeze", *chosen, *where, "run.name=x")
        assert "n_layers: 6" in (Path(frozen.stdout.strip()) / "config.yaml").read_text()


def test_help_and_info_and_completion(tmp_path: Path) -> None:
    assert "strategy: auto, cp, dp, hsdp, hybrid" in hpc_train("--help", cwd=tmp_path).stdout
    assert "conf" in hpc_train("--info", "searchpath", cwd=tmp_path).stdout
    typed = environment(COMP_LINE="hpc-train +strategy=hyb")
    assert "+strategy=hybrid3d" in hpc_train("-sc", "query=bash", cwd=tmp_path, env=typed).stdout
    assert list(tmp_path.iterdir()) == []


def test_freeze_makes_one_run_and_finds_it_again(called: Called, tmp_path: Path) -> None:
    calls = [called("freeze", "+strategy=hybrid", "run.name=x") for _ in range(2)]
    assert [done.returncode for done in calls] == [0, 0]
    assert [done.stdout for done in calls] == [f"{tmp_path}/outputs/x\n"] * 2


def test_a_restarted_batch_script_finds_the_frozen_config(site: Path, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1"}
    command = ["freeze", "model=mine", "-cd", str(site)]
    first = hpc_train(*command, cwd=tmp_path, env=environment(**job))
    assert first.stdout == f"{tmp_path}/outputs/slurm-17\n", first.stderr
    before = (tmp_path / "outputs" / "slurm-17" / "config.yaml").read_bytes()
    (site / "model" / "mine.yaml").write_text("defaults: [gpt_tiny, _self_]\nn_layers: 8\n")
    again = hpc_train(*command, cwd=tmp_path, env=environment(**job, SLURM_RESTART_COUNT="1"))
    assert again.stdout == first.stdout, again.stderr
    assert (tmp_path / "outputs" / "slurm-17" / "config.yaml").read_bytes() == before


def imported(cwd: Path, *statements: str) -> list[set[str]]:
    """Returns the packages among these that a process has imported after each of ``statements``."""
    packages = {"torch", "wandb", "hydra", "submitit", "omegaconf", "rich", "torch._dynamo"}
    packages |= {"hpc_train.elastic.agent_loop"}
    script = "import sys\n"
    for statement in statements:
        script += f"{statement}\nprint('imported:', *({packages!r} & set(sys.modules)), file=sys.stderr)\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    return [set(line.split()[1:]) for line in lines if line.startswith("imported:")]


def test_commands_import_only_what_they_need(tmp_path: Path) -> None:
    cli, agent, status, train, frozen, planned = imported(
        tmp_path,
        "import hpc_train.cli",
        "import hpc_train.commands.agent",
        "import hpc_train.commands.status",
        "import hpc_train.commands.train",
        "assert hpc_train.cli.run(['freeze', 'run.name=x']) == 0",
        "assert hpc_train.cli.run(['+strategy=hybrid', 'launch.dry_run=true']) == 0",
    )
    assert cli == set()
    assert agent == set(), "the agent imports the rest while its warm parent imports torch"
    assert status == {"rich"}
    assert train == {"hydra", "omegaconf", "rich"}
    assert not {"torch", "wandb"} & (frozen | planned)


@pytest.mark.long_form(5)  # imports torch; benchmarks/startup.py measures it
def test_the_first_lines_of_a_worker_need_no_compiler(tmp_path: Path) -> None:
    assert imported(tmp_path, "import hpc_train.train.worker") == [{"torch"}]


def test_a_working_directory_that_has_been_removed_is_one_message(tmp_path: Path) -> None:
    here = tmp_path / "here"
    script = f"mkdir {here} && cd {here} && rmdir {here} && exec {sys.executable} -m hpc_train status"
    done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("the working directory has been removed") and "Traceback" not in done.stderr


@pytest.mark.parametrize("key", ["run.root", "data.path", "cluster.comment", "run.name"])
def test_a_value_that_is_not_utf8_is_refused(key: str, called: Called, tmp_path: Path) -> None:
    done = called("+strategy=dp", "cluster=local", f"{key}=caf\udce9")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{key} is caf\\udce9, which is not UTF-8\n")
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_refused_run_leaves_an_empty_root_that_existed(called: Called, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    assert called("+strategy=dp", "cluster=local", "cluster.nodes=2", f"run.root={root}").returncode == 2
    assert root.is_dir() and not list(root.iterdir())


def test_a_working_directory_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"the working directory is .*/caf.udce9, which is not UTF-8"):
        refuse_other_encodings({})
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(UserError, match=r"in the encoding ascii of this shell(?s:.*)export LC_ALL=C.UTF-8"):
        refuse_other_encodings({})


def test_ctrl_c_while_a_run_starts(called: Called, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_train.launch.executors.allocation.run_in_foreground", interrupted)
    assert called("+strategy=dp", "cluster=local", "run.name=run").returncode == 130
    started = RunDirectory(tmp_path / "outputs" / "run")
    started.update_record(claimed_by=started.record()["claimed_by"] | {"pid_started": "before"})  # this process lives
    (run,) = (json.loads(line) for line in called("status", "--json", "run").stdout.splitlines())
    assert run["state"] == "cancelled"
    assert "stopped before the first step (Ctrl-C)" in called("why", "run").stdout
